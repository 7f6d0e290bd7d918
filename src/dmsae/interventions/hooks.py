"""An SAE inside a model: at every position that counts, x is what the SAE makes of it, as long as a `with` block lasts.

As everywhere, the first position of a context, special tokens and padding stay as they are. So do norm outliers, if a
limit is given as in a harvest: the median is then that of the text itself.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dmsae.activations.base_model import BaseModel, hidden_states, resolve_hook, with_hidden_states
from dmsae.activations.shards import norm_limit
from dmsae.errors import ConfigError, ModelError
from dmsae.evaluation.subject import Dictionary
from dmsae.interventions.intervention import Intervention, require_fitting
from dmsae.sae.sae import SAE
from dmsae.text.tokens import KeepMask

_unspliced: ContextVar[bool] = ContextVar("unspliced", default=False)
"""Set while a model runs as it is although SAEs are spliced into it: another one is being checked against it."""


@contextmanager
def splice_into(
    model: BaseModel | nn.Module,
    sae: Dictionary,
    interventions: Sequence[Intervention] = (),
    keep_error: bool = False,
    hook: int | str | None = None,
    tokenizer: Any = None,
    max_norm_ratio: float | None = None,
) -> Iterator[None]:
    """Run a Hugging Face causal language model with an SAE in it: x becomes its reconstruction, latents changed or not.

    With `keep_error`, x stays and only what the interventions change is added: x + decode(f′) − decode(f). A
    `BaseModel` has a hook and a tokenizer of its own; any other model needs `hook`, a layer number or module path, and
    without `tokenizer` its special tokens count like all others. Positions whose norm is above `max_norm_ratio` × the
    median stay as they are. `generate` works too, with cache and padding. An SAE that holds a token sample is first
    checked against the model, which is an error when it is not the one that the SAE was made from.

    >>> model = dmsae.BaseModel.load(dmsae.ModelConfig(name=str(tiny_model), hook=0))
    >>> sae, tokens = dmsae.SAE.load(run / "cycle-0"), torch.tensor([[5, 6, 7, 8]])
    >>> clean = model.logits(tokens)
    >>> with dmsae.splice_into(model, sae):
    ...     spliced = model.logits(tokens)
    >>> spliced.shape, torch.equal(spliced, clean), torch.equal(model.logits(tokens), clean)
    (torch.Size([1, 4, 63]), False, True)
    """
    require_fitting(interventions, sae.config)
    if isinstance(model, BaseModel):
        whole, path, mask = model.model, model.identity.hook, model.keep_mask
    else:
        whole, path, mask = model, "", KeepMask(())
    if hook is not None:
        path = resolve_hook(whole, hook)
    if not path:
        raise ConfigError("hook = None; a model that is no BaseModel needs a layer number or a dotted module path.")
    if tokenizer is not None:
        mask = KeepMask.of(tokenizer)
    require_own_model(sae, model, path)
    splice = _Splice(sae, interventions, keep_error, mask, path, max_norm_ratio)
    with ExitStack() as stack:
        stack.callback(whole.register_forward_pre_hook(splice.look, with_kwargs=True).remove)
        stack.callback(whole.get_submodule(path).register_forward_hook(splice.replace).remove)
        yield


def require_own_model(sae: Dictionary, model: BaseModel | nn.Module, hook: str) -> None:
    """Raise unless a model gives the activations that an SAE expects at a hook; one without a sample goes unchecked."""
    if isinstance(sae, SAE) and sae.sample is not None:
        without = _unspliced.set(True)
        try:
            sae.sample.require_model(model, hook)
        finally:
            _unspliced.reset(without)


def require_width(sae: Dictionary, x: Tensor, hook: str) -> None:
    """Raise unless activations are as wide as those that an SAE takes."""
    if x.shape[-1] != sae.config.d_model:
        raise ConfigError(
            f"The activations at {hook} have width {x.shape[-1]}; the SAE takes {sae.config.d_model}. Choose the model "
            "and the hook that it was made from."
        )


class _Splice:
    """The hooks of one splice: what the model is given says which positions count when the hooked module has run."""

    def __init__(
        self,
        sae: Dictionary,
        interventions: Sequence[Intervention],
        keep_error: bool,
        mask: KeepMask,
        path: str,
        max_norm_ratio: float | None,
    ) -> None:
        self._sae, self._interventions, self._keep_error = sae, interventions, keep_error
        self._latents = [one.latent for one in interventions]
        self._mask, self._path, self._max_norm_ratio = mask, path, max_norm_ratio
        self._tokens_NL: Tensor | None = None
        self._follows_NL = self._kept_NL = torch.empty(0)
        self._norm_limit = math.inf

    def look(self, _model: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Remember the tokens of a forward pass, and which of their positions count."""
        if _unspliced.get():
            return
        tokens_NL = named.get("input_ids", inputs[0] if inputs else None)
        if not isinstance(tokens_NL, Tensor):
            raise ModelError("Which positions the SAE is applied to depends on their tokens. Call it with input_ids.")
        self._tokens_NL = tokens_NL
        # A column before the others, because the mask drops the first, which in a cached step is not a context's first.
        counts_NL = self._mask(pad(tokens_NL, (1, 0)))[:, 1:]
        self._follows_NL = _follows(tokens_NL, named)
        self._kept_NL = counts_NL & self._follows_NL

    def replace(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Return the hooked module's output with other hidden states at the positions that count."""
        if _unspliced.get():
            return output
        if self._tokens_NL is None:
            raise ModelError(f"{self._path!r} ran without its model, or twice in one pass. Choose another hook.")
        x_NLD = hidden_states(output, self._tokens_NL)
        self._tokens_NL = None
        require_width(self._sae, x_NLD, self._path)
        kept_NL, norms_NL = self._kept_NL.to(x_NLD.device), x_NLD.float().norm(dim=-1)
        if not self._follows_NL.all():  # contexts begin here: a cached step has too few positions for a median
            self._norm_limit = norm_limit(norms_NL[kept_NL], self._max_norm_ratio)
        kept_NL = kept_NL & (norms_NL <= self._norm_limit)
        return with_hidden_states(output, torch.where(kept_NL[..., None], self._edited(x_NLD).to(x_NLD), x_NLD))

    def _edited(self, x: Tensor) -> Tensor:
        x = x.to(self._sae.W_dec)
        f = self._sae.encode(x)
        before = f[..., self._latents]
        after = before.clone()
        for i, one in enumerate(self._interventions):
            after[..., i] = one.apply(before[..., i])
        if self._keep_error:
            return x + (after - before) @ self._sae.W_dec[self._latents]
        return self._sae.decode(f.index_copy(-1, torch.tensor(self._latents, device=f.device).long(), after))


def _follows(tokens_NL: Tensor, named: Mapping[str, Any]) -> Tensor:
    """Return where in the input there is a token that another one of its context precedes, be it in the cache."""
    length, attention = tokens_NL.shape[1], named.get("attention_mask")
    if isinstance(attention, Tensor) and attention.ndim == 2:  # padding may be on either side
        recent_NL = slice(-length, None)
        return (attention.cumsum(-1)[:, recent_NL] > 1) & attention[:, recent_NL].bool()
    cache = named.get("past_key_values")
    n_before = cache.get_seq_length() if cache is not None else 0
    return (torch.arange(length, device=tokens_NL.device) + n_before > 0).expand_as(tokens_NL)
