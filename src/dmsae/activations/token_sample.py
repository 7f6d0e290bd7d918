"""A few short contexts with the activations that a model gave on them: enough to notice another model in its place.

An SAE keeps such a sample. Before it is put into a model, the model runs the sample once; activations that are not
those expected are an error that says what differs. All but positions that count in training are left out.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dmsae.activations.base_model import hidden_states
from dmsae.activations.identity import ModelIdentity
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.errors import ModelError, WrongModelError, first_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dmsae.activations.harvest import Harvest

_CONTEXTS, _TOKENS, _ROWS = 2, 32, 8
"""Contexts, tokens of each from its beginning, and rows of each that are kept."""
_TOLERANCE, _TOLERANCE_16_BITS = 0.01, 0.05
"""How far activations may be off, as a fraction of their norm. Neighbouring blocks are off by far more."""
_SAME_DIRECTION = 0.999
"""Cosine above which activations differ only in scale."""


class _Reached(Exception):
    """Raised by a hook to end a forward pass once all that was asked for is known."""


class TokenSample(NamedTuple):
    """Tokens, and the activations expected at some of their positions."""

    model: ModelIdentity
    """The model that gave them, and its hook."""
    tokens_NL: Tensor
    """Contexts from their beginning, int32."""
    context_R: Tensor
    """The context of each row, int32."""
    position_R: Tensor
    """Its position there, int32."""
    x_RD: Tensor
    """Its activation, float32."""

    def require_model(self, model: nn.Module, hook: str, identity: ModelIdentity | None = None) -> None:
        """Raise `WrongModelError` unless a model gives the expected activations at a hook.

        `identity` is what is known of the model, to be named in the message.
        """
        blocks = _siblings(model, hook)
        with torch.no_grad(), _evaluating(model):
            if self._exceeds_vocabulary(model):
                raise self._error("model", f"it has no token {int(self.tokens_NL.max())}", hook, identity)
            x_RD = self._run(model, [hook])[hook]
            if x_RD.shape != self.x_RD.shape:
                raise self._error("width", f"activations are {x_RD.shape[1]} wide", hook, identity)
            tolerance = _tolerance(model, self.model)
            if (off := self._off(x_RD)) <= tolerance:
                return
            others = {path: other for path, other in self._run(model, blocks).items() if path != hook}
        fitting = [path for path, other in others.items() if self._off(other) <= tolerance]
        what = f"activations are {off:.1%} off (up to {tolerance:.0%} is rounding)"
        if fitting:
            raise self._error("hook", f"{what}; at {fitting[0]} they agree", hook, identity)
        if same := _normalisation(x_RD, self.x_RD, tolerance):
            raise self._error("normalisation", f"{what}: {same}", hook, identity)
        raise self._error("model", what, hook, identity)

    def _exceeds_vocabulary(self, model: nn.Module) -> bool:
        of_model: Any = getattr(model, "get_input_embeddings", lambda: None)
        n_tokens = getattr(of_model(), "num_embeddings", None)
        return n_tokens is not None and int(self.tokens_NL.max()) >= n_tokens

    def _run(self, model: nn.Module, paths: Sequence[str]) -> dict[str, Tensor]:
        """Return the rows of the sample at some modules, in float32."""
        taken: dict[str, Tensor] = {}
        rows = self.context_R.long(), self.position_R.long()
        tokens_NL = self.tokens_NL.to(next(model.parameters()).device, torch.int64).clamp(min=0)

        def take(path: str) -> Any:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                taken[path] = hidden_states(output, tokens_NL).detach().float().cpu()[rows]
                if len(taken) == len(paths):
                    raise _Reached

            return hook

        handles = [model.get_submodule(path).register_forward_hook(take(path)) for path in paths]
        try:
            model(input_ids=tokens_NL, use_cache=False)
        except _Reached:
            return taken
        except (IndexError, TypeError, ValueError) as error:
            raise ModelError(f"The model cannot run the token sample of the SAE: {first_line(error)}.") from error
        finally:
            for handle in handles:
                handle.remove()
        missing = sorted(set(paths) - set(taken))
        raise ModelError(f"The forward pass never reached {missing[0]!r}. Choose another hook.")

    def _off(self, x_RD: Tensor) -> float:
        """Return how far activations are from those expected, as a fraction of their norm; the median row counts."""
        if x_RD.shape != self.x_RD.shape:
            return float("inf")
        return float(((x_RD - self.x_RD).norm(dim=1) / self.x_RD.norm(dim=1).clamp(min=1e-30)).median())

    def _error(self, differs: str, measured: str, hook: str, given: ModelIdentity | None) -> WrongModelError:
        ours, named = self.model, given is not None and given.weights_sha256
        theirs = f"{given.name} (weights_sha256 {given.weights_sha256[:12]}…)" if given and named else "this model"
        remedies = {
            "width": "Choose the model and the hook that it was made from.",
            "hook": f"Give the hook {ours.hook}.",
            "normalisation": "Give it activations as the model puts them out: nothing scaled, centred or normalised.",
            "model": "Load the model that it was made from.",
        }
        return WrongModelError(
            f"The SAE was not made from what it is put into: the {differs} differs. On {len(self.x_RD)} positions of "
            f"its token sample, at {hook} of {theirs}, {measured}. Expected: {ours.name}"
            f"{' at revision ' + ours.revision if ours.revision else ''} (weights_sha256 {ours.weights_sha256[:12]}…) "
            f"at {ours.hook}, activations {self.x_RD.shape[1]} wide. {remedies[differs]}",
            differs,
        )


def sample_of_store(store: Store) -> TokenSample | None:
    """Return a sample of a store's held-out text, else of its pairs; None when it holds no text of either."""
    if not store.has_text:
        return None
    for split in (Split.HELDOUT, Split.PAIRS):
        shards = store.shards(split)
        rows = store.read(shards[0]) if shards else {}
        if {"context", "position"} <= set(rows) and (sample := _of_rows(store, split, rows)):
            return sample
    return None


def sample_of_harvest(harvest: "Harvest") -> TokenSample | None:
    """Return a sample of the text of a harvest whose model runs as training does; None when it is empty."""
    contexts = []
    for assigned in harvest.assigned_contexts():
        contexts.append(torch.from_numpy(assigned.context.tokens_L[:_TOKENS]))
        if len(contexts) == _CONTEXTS:
            break
    if not contexts:
        return None
    tokens_NL = torch.stack(contexts)
    context_R, position_R = harvest.model.keep_mask(tokens_NL).nonzero(as_tuple=True)
    x_RD = harvest.model.activations(tokens_NL).float().cpu()[context_R, position_R]
    return _thinned(harvest.identity, tokens_NL, context_R, position_R, x_RD)


def _of_rows(store: Store, split: Split, rows: dict[str, Tensor]) -> TokenSample | None:
    early = rows["position"] < _TOKENS
    contexts = rows["context"][early].unique()[:_CONTEXTS]
    chosen = (early & torch.isin(rows["context"], contexts)).nonzero().flatten()
    context_R, position_R = rows["context"][chosen], rows["position"][chosen]
    order = (context_R.long() * _TOKENS + position_R).argsort()  # pairs are shuffled
    tokens_NL = store.tokens(split)["tokens"][contexts.long(), :_TOKENS]
    local_R = torch.searchsorted(contexts, context_R[order])
    return _thinned(store.model, tokens_NL, local_R, position_R[order], rows["x"][chosen[order]].float())


def _thinned(
    model: ModelIdentity, tokens_NL: Tensor, context_R: Tensor, position_R: Tensor, x_RD: Tensor
) -> TokenSample | None:
    """Return a sample with a few of the rows of each context, evenly spread."""
    kept: list[int] = []
    for context in range(len(tokens_NL)):
        rows = (context_R == context).nonzero().flatten().tolist()
        kept += [rows[i * len(rows) // _ROWS] for i in range(_ROWS)] if len(rows) > _ROWS else rows
    if not kept:
        return None
    return TokenSample(
        model, tokens_NL.to(torch.int32), context_R[kept].to(torch.int32), position_R[kept].to(torch.int32), x_RD[kept]
    )


def _siblings(model: nn.Module, hook: str) -> list[str]:
    """Return the paths of all blocks of the stack that a hook is in, or of those at the same place in each."""
    parts = hook.split(".")
    for at, part in reversed(list(enumerate(parts))):
        stack = model.get_submodule(".".join(parts[:at])) if at else model
        if part.isdigit() and isinstance(stack, nn.ModuleList):
            paths = [".".join([*parts[:at], str(i), *parts[at + 1 :]]) for i in range(len(stack))]
            known = {name for name, _ in model.named_modules()}
            return [path for path in paths if path in known]
    return [hook]


def _normalisation(x_RD: Tensor, expected_RD: Tensor, tolerance: float) -> str:
    """Return how activations that agree up to a normalisation were normalised; empty when they do not agree."""
    if float(torch.cosine_similarity(x_RD, expected_RD).median()) > _SAME_DIRECTION:
        ratios = x_RD.norm(dim=1) / expected_RD.norm(dim=1)
        low, high = float(ratios.min()), float(ratios.max())
        return f"they have {low:.3g} to {high:.3g} times the norm expected, in the same directions"
    centred_RD = expected_RD - expected_RD.mean(1, keepdim=True)
    if float(((x_RD - centred_RD).norm(dim=1) / centred_RD.norm(dim=1)).median()) <= tolerance:
        return "the mean over the width has been subtracted from each"
    return ""


def _tolerance(model: nn.Module, recorded: ModelIdentity) -> float:
    whole = next(model.parameters()).dtype == torch.float32 and recorded.dtype == "float32"
    return _TOLERANCE if whole else _TOLERANCE_16_BITS


@contextmanager
def _evaluating(model: nn.Module) -> "Iterator[None]":
    """Keep dropout out of what is compared."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
