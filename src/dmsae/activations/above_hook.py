"""The part of a model above its hook, run on activations that are given.

What many SAEs put in place of the same activations differs only from the hook on, so the blocks below need to run only
once. They are left out by letting them pass on what they are given; whether a model allows that is tried on the first
input. Where the hook is no block, or the model's blocks depend on each other in other ways, the whole model runs.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dmsae.activations.base_model import BaseModel

_TOLERANCE = 1e-3
"""How far logits may differ with the blocks below left out, as a share of the largest: they are nearly always equal."""


class AboveHook:
    """A base model from its hook onward."""

    def __init__(self, model: BaseModel) -> None:
        self._model = model
        self._below = _blocks_up_to(model.model, model.identity.hook)
        self._tried = not self._below

    @torch.no_grad()
    def logits(self, tokens_NL: Tensor, x_NLD: Tensor) -> Tensor:
        """Return the logits [N, L, V] when the hooked module's output is x."""
        if self._tried:
            return self._run(tokens_NL, x_NLD, self._below)
        self._tried = True
        with _single_outputs(self._below) as single:
            logits_NLV = self._run(tokens_NL, x_NLD, [])
        if all(single) and len(single) == len(self._below):
            shortened_NLV = self._run(tokens_NL, x_NLD, self._below)
            if (shortened_NLV - logits_NLV).abs().max() <= _TOLERANCE * logits_NLV.abs().max():
                return logits_NLV
        self._below = []
        return logits_NLV

    @torch.no_grad()
    def losses(self, tokens_NL: Tensor, x_NLD: Tensor, counted_NL: Tensor | None = None) -> Tensor:
        """Return the losses [N, L] of `BaseModel.losses` when the hooked module's output is x."""
        if not self._tried:
            self.logits(tokens_NL[:1], x_NLD[:1])
        with _all_passing_on(self._below):
            return self._model.losses(tokens_NL, lambda x: x_NLD.to(x), counted_NL)

    @property
    def is_short(self) -> bool:
        """Whether the blocks below the hook are left out, as far as was tried."""
        return bool(self._below)

    def _run(self, tokens_NL: Tensor, x_NLD: Tensor, left_out: Sequence[nn.Module]) -> Tensor:
        with _all_passing_on(left_out):
            return self._model.logits(tokens_NL, lambda x: x_NLD.to(x))


def _blocks_up_to(model: nn.Module, hook: str) -> list[nn.Module]:
    """Return the blocks from the first to the hooked one; none when the hook is not a block of a stack."""
    parent, _, name = hook.rpartition(".")
    stack = model.get_submodule(parent)
    return list(stack)[: int(name) + 1] if isinstance(stack, nn.ModuleList) and name.isdigit() else []


@contextmanager
def _single_outputs(blocks: Sequence[nn.Module]) -> Iterator[list[bool]]:
    """Collect, for each run of a block, whether hidden states are all that it returns."""
    single: list[bool] = []

    def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
        single.append(isinstance(output, Tensor))

    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.register_forward_hook(look).remove)
        yield single


@contextmanager
def _all_passing_on(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Let blocks return the hidden states that they are given, as long as this lasts."""
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(_passing_on(block))
        yield


@contextmanager
def _passing_on(block: nn.Module) -> Iterator[None]:
    """Let a block return the hidden states that it is given, as long as this lasts."""

    def pass_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    own = vars(block).get("forward")
    block.forward = pass_on
    try:
        yield
    finally:
        if own is None:
            del block.forward
        else:
            block.forward = own
