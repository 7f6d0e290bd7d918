"""How much of a model's next-token prediction survives when activations are replaced by their reconstruction.

The reconstruction is spliced in at the hook, at every position that counts; the first of a context, special tokens,
padding and norm outliers stay as they are, as everywhere. What is measured is the loss and the distance of the
predictions from those of the clean model, beside the same with zeros and with the mean activation in its place.

Activations at the hook, and the losses without an SAE, are kept in the cache. The clean model's predictions are not:
KL reads all of them, and tokens × vocabulary is too much to keep (4,096 × 50k take 0.8 GB in float32). So the blocks
above the hook run on the clean activations once for every group of SAEs, beside once for each SAE.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from dmsae.activations.above_hook import AboveHook
from dmsae.activations.base_model import BaseModel
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.config import require_whole, to_dict
from dmsae.disk.files import canonical_hash
from dmsae.errors import StoreError
from dmsae.evaluation.shared import kept_tensors
from dmsae.evaluation.subject import Dictionary, Subject, require_heldout
from dmsae.progress import SILENT, Progress
from dmsae.seeds import generator

_VERSION = 1
_ROWS = 256
"""Positions whose predictions are compared at a time: each is a distribution over the vocabulary."""

Edit = Callable[[Tensor], Tensor] | None
"""What is put in place of activations [B, D]; None: they stay."""


@dataclass(frozen=True, slots=True)
class SpliceConfig:
    """On how much text predictions are compared."""

    tokens: int = 4096
    """Positions with a reconstruction, roughly: whole contexts of the held-out text are taken, spread at random."""
    batch_contexts: int = 4
    """Contexts per forward pass. Does not change the figures, beyond rounding."""
    seed: int = 0
    """Decides which contexts are taken."""

    def __post_init__(self) -> None:
        require_whole("tokens", self.tokens, 1)
        require_whole("batch_contexts", self.batch_contexts, 1)


class SpliceResult(NamedTuple):
    """Next-token prediction with the reconstruction spliced in: cross-entropy and KL in nats, means over positions."""

    n_tokens: int
    """Positions with a reconstruction whose next token counts."""
    ce: float
    kl: float
    """From the clean model's predictions to those with the reconstruction."""
    loss_recovered_zero: float
    """(CE of zero ablation − CE) / (CE of zero ablation − clean CE): 1 for a perfect reconstruction, 0 for zeros."""
    loss_recovered_mean: float
    """The same against mean ablation."""
    ce_clean: float
    ce_zero: float
    ce_mean: float
    kl_zero: float
    kl_mean: float


class _Loss(NamedTuple):
    """Cross-entropy and KL, summed over positions."""

    ce: float
    kl: float


class _Text(NamedTuple):
    """The contexts that are looked at."""

    tokens_NL: Tensor
    keep_NL: Tensor
    """Where activations are replaced."""
    counted_NL: Tensor
    """Where predictions are compared."""

    def split(self, size: int) -> Iterator["_Text"]:
        """Yield the contexts a few at a time."""
        for parts in zip(*(tensor.split(size) for tensor in self), strict=True):
            yield _Text(*parts)


@torch.no_grad()
def splice(
    subjects: Sequence[Subject],
    model: BaseModel,
    store: Store,
    config: SpliceConfig,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> list[SpliceResult]:
    """Return how well the model predicts held-out text with each subject's reconstruction in place of x.

    The blocks below the hook run once for all subjects, and with a cache once for all calls; so do the ablations.
    """
    require_heldout(store, subjects)
    text = _text(store, model, config)
    n_tokens = int(text.counted_NL.sum())
    if not n_tokens:
        raise StoreError(f"The store {store.key} holds no held-out position whose next token counts. Harvest more.")
    made_from = [_VERSION, store.key, to_dict(model.identity), config.tokens, config.seed]
    file = cache / f"splice-{canonical_hash(made_from)[:16]}.safetensors" if cache else None
    known = kept_tensors(file, lambda: _ablations(model, text, config, progress))
    losses = _losses(model, text, known["x"], [_reconstruction(s.dictionary) for s in subjects], config, progress)
    clean, zero, mean = (_Loss(*row) for row in (known["losses"] / n_tokens).tolist())
    return [_result(n_tokens, _Loss(*(value / n_tokens for value in one)), clean, zero, mean) for one in losses]


def _result(n_tokens: int, loss: _Loss, clean: _Loss, zero: _Loss, mean: _Loss) -> SpliceResult:
    return SpliceResult(
        n_tokens,
        loss.ce,
        loss.kl,
        _recovered(loss.ce, zero.ce, clean.ce),
        _recovered(loss.ce, mean.ce, clean.ce),
        clean.ce,
        zero.ce,
        mean.ce,
        zero.kl,
        mean.kl,
    )


def _recovered(ce: float, ablated: float, clean: float) -> float:
    return (ablated - ce) / (ablated - clean) if ablated != clean else float("nan")


def _text(store: Store, model: BaseModel, config: SpliceConfig) -> _Text:
    """Return contexts of the held-out text, and where the store holds their activations."""
    tokens_NL = store.tokens(Split.HELDOUT)["tokens"]
    keep_NL = torch.zeros_like(tokens_NL, dtype=torch.bool)
    for batch in store.batches(Split.HELDOUT, 65_536):
        keep_NL[batch["context"].long(), batch["position"].long()] = True
    order = torch.randperm(len(tokens_NL), generator=generator(config.seed, "splice"))
    so_far = keep_NL[order].sum(1).cumsum(0)
    chosen = order[: int((so_far < config.tokens).sum()) + 1].sort().values
    counted_NL = store.counted_losses(Split.HELDOUT, model.keep_mask)[chosen]
    return _Text(tokens_NL[chosen], keep_NL[chosen], keep_NL[chosen] & counted_NL)


def _ablations(model: BaseModel, text: _Text, config: SpliceConfig, progress: Progress) -> dict[str, Tensor]:
    """Return x [N, L, D], and the losses of the clean model, of zero and of mean ablation, [3, 2]."""
    parts = []
    with progress.bar("activations", len(text.tokens_NL), "ctx") as bar:
        for some in text.split(config.batch_contexts):
            parts.append(model.activations(some.tokens_NL).float().cpu())
            bar.advance(len(some.tokens_NL))
    x_NLD = torch.cat(parts)
    mean_D = x_NLD[text.keep_NL].mean(0, dtype=torch.float64).float()
    edits: list[Edit] = [None, torch.zeros_like, lambda x: mean_D.to(x).expand_as(x)]
    losses = _losses(model, text, x_NLD, edits, config, progress)
    return {"x": x_NLD, "losses": torch.tensor(losses, dtype=torch.float64)}


def _reconstruction(dictionary: Dictionary) -> Edit:
    def reconstruct(x_BD: Tensor) -> Tensor:
        return dictionary.decode(dictionary.encode(x_BD.to(dictionary.W_dec)))

    return reconstruct


def _losses(
    model: BaseModel, text: _Text, x_NLD: Tensor, edits: Sequence[Edit], config: SpliceConfig, progress: Progress
) -> list[_Loss]:
    """Return the summed losses under each edit."""
    totals = torch.zeros(len(edits), 2, dtype=torch.float64)
    above = AboveHook(model)
    batches = zip(text.split(config.batch_contexts), x_NLD.split(config.batch_contexts), strict=True)
    with progress.bar("splice", len(text.tokens_NL) * (1 + len(edits)), "ctx") as bar:
        for some, x in batches:
            counted = some.counted_NL.to(model.device)
            targets_B = some.tokens_NL.roll(-1, 1)[some.counted_NL].to(model.device, torch.int64)
            log_p_BV = log_softmax(above.logits(some.tokens_NL, x)[counted].float(), -1)
            bar.advance(len(x))
            for total, edit in zip(totals, edits, strict=True):
                edited_BV = log_p_BV
                if edit is not None:
                    edited = x.clone()
                    edited[some.keep_NL] = edit(x[some.keep_NL]).to(edited)
                    edited_BV = above.logits(some.tokens_NL, edited)[counted]
                total += _compared(log_p_BV, edited_BV, targets_B)
                bar.advance(len(x))
    return [_Loss(*row) for row in totals.tolist()]


def _compared(log_p_BV: Tensor, edited_BV: Tensor, targets_B: Tensor) -> Tensor:
    """Return the summed cross-entropy of edited logits and the summed KL from clean predictions to them, [2]."""
    sums = torch.zeros(2, dtype=torch.float64)
    for log_p, edited, targets in zip(*(t.split(_ROWS) for t in (log_p_BV, edited_BV, targets_B)), strict=True):
        log_q = log_softmax(edited.float(), -1)
        sums[0] -= log_q.gather(1, targets[:, None]).sum(dtype=torch.float64).cpu()
        sums[1] += torch.linalg.vecdot(log_p.exp(), log_p - log_q).sum(dtype=torch.float64).cpu()
    return sums
