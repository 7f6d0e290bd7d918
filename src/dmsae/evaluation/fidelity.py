"""How well an SAE reconstructs text it has never seen, as it is used: with its thresholds, on held-out activations.

The figures of a trained SAE are measured once, over the whole held-out split, and kept beside it in `fidelity.json`.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.config import Json
from dmsae.disk import layout
from dmsae.disk.files import write_json
from dmsae.errors import CheckpointError
from dmsae.progress import SILENT, Progress
from dmsae.sae.sae import SAE
from dmsae.sae.variance import VarianceExplained

_BATCH = 1024


class Fidelity(NamedTuple):
    """Held-out figures of one SAE."""

    n_tokens: int
    fve: float
    """Fraction of the variance explained by the full reconstruction."""
    fve_prefixes: list[float]
    """The same for each prefix, the smallest first; the last is `fve`."""
    l0_core: float
    """Core latents that fire per token."""
    l0_noncore: float
    """Other latents that fire per token."""


@torch.no_grad()
def fidelity(sae: SAE, store: Store, progress: Progress = SILENT) -> Fidelity | None:
    """Return the figures over all held-out activations of a store, or None when it holds none.

    >>> figures = dmsae.fidelity(dmsae.SAE.load(run / "cycle-0" / "sae"), store)
    >>> 0 < figures.fve_prefixes[0] < figures.fve < 1
    True
    """
    explained = VarianceExplained(sae.config.d_model, len(sae.config.prefixes))
    fired_core = fired = 0
    with progress.bar("held-out", store.n_rows(Split.HELDOUT), "tok") as bar:
        for batch in store.batches(Split.HELDOUT, _BATCH):
            x_BD = batch["x"].to(sae.W_dec)
            f_BK = sae.encode(x_BD)
            explained.add(x_BD, *_nested(sae, f_BK))
            fired += int((f_BK > 0).sum())
            fired_core += int((f_BK[:, : sae.config.n_core] > 0).sum())
            bar.advance(len(x_BD))
    n = explained.n_tokens
    if not n:
        return None
    fractions = explained.fractions()
    return Fidelity(n, fractions[-1], fractions, fired_core / n, (fired - fired_core) / n)


def _nested(sae: SAE, f_BK: Tensor) -> list[Tensor]:
    """Return the reconstructions of all prefixes, each from the one before it: together they cost one decoding."""
    reconstructions, start = [sae.b_dec.expand(len(f_BK), -1)], 0
    for size in sae.config.prefixes:
        reconstructions.append(torch.addmm(reconstructions[-1], f_BK[:, start:size], sae.W_dec[start:size]))
        start = size
    return reconstructions[1:]


def kept_fidelity(
    directory: Path, store: Store, device: torch.device | str = "cpu", progress: Progress = SILENT
) -> Fidelity | None:
    """Return the held-out figures of the SAE in a directory: those kept beside it, or measured now and kept.

    None when the store holds no held-out activations, or the SAE is no longer finite.
    """
    path = directory / layout.FIDELITY
    kept = _read(path)
    if kept.get("store") != store.key:
        figures = fidelity(SAE.load(directory).to(device), store, progress)
        usable = figures is not None and math.isfinite(figures.fve)
        kept = {"store": store.key, "root": str(store.path.parent.resolve())}
        kept |= {"figures": figures._asdict() if figures and usable else None}
        write_json(path, kept)
    return Fidelity(**kept["figures"]) if kept["figures"] else None


def _read(path: Path) -> Json:
    """Return what is kept, or nothing when nothing is."""
    try:
        kept: Json = json.loads(path.read_text(encoding="utf8")) if path.is_file() else {}
    except ValueError as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}. Remove it: it will be measured again.") from error
    return kept if set(kept) == {"store", "root", "figures"} else {}
