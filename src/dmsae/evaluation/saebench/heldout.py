"""The held-out text of a store as a data set that SAEBench can read."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from dmsae.activations.base_model import ModelConfig, load_tokenizer
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.config import Json
from dmsae.disk.files import canonical_hash, write_bytes
from dmsae.errors import StoreError
from dmsae.text.tokens import PAD


class HeldoutText(NamedTuple):
    """Text on disk: a directory that `datasets` loads, with one document a line in the column `text`."""

    directory: Path
    n_tokens: int

    def fitted(self, settings: Json) -> Json:
        """Return settings of the core eval that read this text, and none of it twice."""
        per_batch = settings["eval_batch_size_prompts"] * settings["context_size"]
        most = max(1, self.n_tokens // per_batch)
        batches = ("n_eval_reconstruction_batches", "n_eval_sparsity_variance_batches")
        limited = {name: min(settings[name], most) for name in batches}
        return {**settings, **limited, "dataset": str(self.directory.absolute())}


def heldout_text(store: Store, cache: Path) -> HeldoutText:
    """Return the held-out text of a store, written below `cache` unless it is there."""
    tokens = store.tokens(Split.HELDOUT)  # refuses a store without text
    tokens_NL, starts_NL = tokens["tokens"], tokens["starts"]
    if not len(tokens_NL):
        raise StoreError(f"The store {store.key} holds no held-out text. Harvest with heldout_tokens > 0.")
    tokenizer = load_tokenizer(ModelConfig(name=store.model.name, revision=store.model.revision))
    directory = cache / f"heldout-{canonical_hash([store.key])[:12]}"
    file = directory / "heldout.jsonl"
    if not file.is_file():
        lines = (
            json.dumps({"text": text}) + "\n"
            for ids, starts in zip(tokens_NL.tolist(), starts_NL.tolist(), strict=True)
            for text in _documents(ids, starts, tokenizer)
        )
        write_bytes(file, "".join(lines).encode())
    return HeldoutText(directory, int((tokens_NL != PAD).sum()))


def _documents(ids: list[int], starts: list[bool], tokenizer: Any) -> list[str]:
    """Return the parts of documents in a context; a part in which nothing is written is left out."""
    bounds = [0, *(i for i, start in enumerate(starts) if start and i), len(ids)]
    parts = ([token for token in ids[a:b] if token != PAD] for a, b in pairwise(bounds))
    texts = (tokenizer.decode(part, skip_special_tokens=True) for part in parts)
    return [text for text in texts if text.strip()]
