"""`dmsae hub`: SAEs and cores on the Hugging Face Hub."""

import shutil
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dmsae.commands.output import out

Name = Annotated[str, tyro.conf.Positional]
Place = Annotated[Path, tyro.conf.Positional]


def hub_push(
    place: Place,
    repo: Name,
    folder: str = "",
    evaluation: Path | None = None,
    private: bool = False,
    licence: str = "",
) -> None:
    """Push an SAE or a core to the Hub, with a model card and an export for SAELens.

    Needs a token that may write: 'hf auth login', or HF_TOKEN. All is one commit.

    Args:
        place: A distillation (its core, and the SAE that it was selected from), or a directory with an SAE or a core.
        repo: The repository, owner/name. It is made if it is not there.
        folder: A folder in it, for repositories that hold several.
        evaluation: The --out directory of a 'dmsae evaluate' of this SAE, for the card.
        private: Make a new repository private.
        licence: Of the weights, by the name that the Hub has for it, such as mit.
    """
    from dmsae.distillation.inspection import find_sae, has_core
    from dmsae.errors import CheckpointError
    from dmsae.formats.hub import push_to_hub

    directory, core = place, place if has_core(place) else None
    try:
        directory = find_sae(place).directory
    except CheckpointError as error:
        if core is None:
            raise
        core = None  # it is what is in the place
        out.print(f"Only the core is pushed. {error}")
    pushed = push_to_hub(
        directory, repo, core=core, folder=folder, evaluation=evaluation, private=private, licence=licence
    )
    out.print(f"{len(pushed.files)} files: {', '.join(pushed.files)}")
    out.print(pushed.url)


def hub_pull(
    repo: Name, out_: Annotated[Path, tyro.conf.arg(name="out")], folder: str = "", kind: Literal["sae", "core"] = "sae"
) -> None:
    """Download an SAE or a core that dmsae has pushed, check it, and put it into a directory.

    Args:
        repo: The repository, owner/name.
        out_: Where to put it: a new directory.
        folder: The folder in the repository.
        kind: What to take from there.
    """
    from dmsae.cores.core import Core
    from dmsae.formats.exchange import new_directory
    from dmsae.formats.hub import pull
    from dmsae.sae.sae import SAE

    directory = new_directory(out_)
    source = pull(repo, folder, kind)
    what = SAE.load(source).config.width if kind == "sae" else len(Core.load(source))
    names = ("sae", "sample") if kind == "sae" else ("core",)
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        for suffix in ("safetensors", "json"):
            if (file := source / f"{name}.{suffix}").is_file():
                shutil.copyfile(file, directory / file.name)
    out.print(f"{kind} of {what:,} latents in {directory}")


COMMANDS = {"push": hub_push, "pull": hub_pull}
