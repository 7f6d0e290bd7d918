"""Which latents fire on which tokens of a text."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.activations.shards import norm_limit
from dmsae.config import require_whole
from dmsae.evaluation.subject import Dictionary
from dmsae.interventions.hooks import require_own_model, require_width
from dmsae.interventions.prompt import prompt_of


class Reading(NamedTuple):
    """The activations of some latents on the tokens of a text."""

    tokens: tuple[str, ...]
    """Each token as text, the BOS token included if there is one."""
    activations_LR: Tensor
    """[tokens, latents], at inference thresholds; 0 also where the SAE is not applied."""
    kept_L: Tensor
    """Where the SAE is applied: not at the first position, special tokens and norm outliers."""
    latents: tuple[int, ...]
    """Indices in the SAE."""

    def strongest(self, n: int) -> "Reading":
        """Return the n latents with the largest activations; those that fire nowhere are left out."""
        require_whole("n", n, 1)
        peaks_R = self.activations_LR.amax(0)
        order = peaks_R.sort(descending=True, stable=True).indices
        chosen = order[peaks_R[order] > 0][:n]
        return self._replace(
            activations_LR=self.activations_LR[:, chosen], latents=tuple(self.latents[i] for i in chosen.tolist())
        )


@torch.no_grad()
def read(
    sae: Dictionary,
    model: BaseModel,
    text: str,
    latents: Sequence[int] | None = None,
    *,
    prepend_bos: bool | None = None,
    max_norm_ratio: float | None = None,
) -> Reading:
    """Return how strongly latents fire on each token of a text: those given, those of the core, or all that fire.

    Without `latents` they are the SAE's core; of an SAE without one, all that fire, the strongest first. `prepend_bos`
    and `max_norm_ratio` are as in a harvest: by default the tokenizer decides, and no norm is too large.

    >>> model = dmsae.BaseModel.load(dmsae.ModelConfig(name=str(tiny_model), hook=0))
    >>> sae = dmsae.SAE.load(run / "cycle-1")
    >>> reading = dmsae.read(sae, model, "w7 w23 w9", latents=[5, 40])
    >>> reading.tokens, reading.activations_LR.shape
    (('w7', 'w23', 'w9'), torch.Size([3, 2]))
    >>> len(dmsae.read(sae, model, "w7 w23 w9").latents) == sae.config.n_core
    True
    """
    sae.config.require_latents(latents or ())
    prompt = prompt_of(model, text, prepend_bos)
    x_LD = model.activations(prompt.tokens_NL)[0]
    require_width(sae, x_LD, model.identity.hook)
    require_own_model(sae, model, model.identity.hook)
    norms_L = x_LD.float().norm(dim=-1).cpu()
    kept_L = prompt.kept_L & (norms_L <= norm_limit(norms_L[prompt.kept_L], max_norm_ratio))
    f_LK = sae.encode(x_LD.to(sae.W_dec)).float().cpu() * kept_L[:, None]
    chosen = range(sae.config.n_core or sae.config.width) if latents is None else latents
    reading = Reading(prompt.texts, f_LK[:, list(chosen)], kept_L, tuple(chosen))
    return reading if latents is not None or sae.config.n_core else reading.strongest(sae.config.width)
