"""A recipe as a user would write it, for a tiny real model on a tiny text: everything trains in seconds."""

from pathlib import Path


def write_recipe(path: Path, model: Path, text: Path) -> Path:
    """Write the recipe to a file, and return where it is."""
    path.write_text(
        f"""
        [harvest]
        train_tokens = 3000
        heldout_tokens = 300
        pair_tokens = 400
        shard_tokens = 512
        [harvest.model]
        name = "{model}"
        hook = 0
        device = "cpu"
        [harvest.text]
        source = "{text}"
        txt_documents = "line"
        heldout_fraction = 0.2
        [harvest.tokens]
        context_length = 16
        [train]
        tokens = 6400
        batch_size = 128
        lr = 3e-3
        [distill]
        width = 64
        k = 4
        nesting = [16, 64]
        cycles = 2
        [distill.train]
        tokens = 6400
        batch_size = 128
        lr = 3e-3
        [distill.attribution]
        batch_size = 128
        [transfer]
        width = 96
        k = [3, 6]
        core_modes = ["dense", "sparse"]
        baselines = ["msae"]
        [transfer.train]
        tokens = 6400
        batch_size = 128
        lr = 3e-3
        """,
        encoding="utf8",
    )
    return path
