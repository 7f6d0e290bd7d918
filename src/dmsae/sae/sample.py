"""The token sample of an SAE: what its model gave on a few contexts, and what the SAE makes of it.

It is saved beside the SAE as `sample.safetensors` and `sample.json`. The activations tell whether a model and hook are
those that the SAE was made from; the codes tell whether another program computes what this one does.
"""

from pathlib import Path
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dmsae.activations.base_model import BaseModel
from dmsae.activations.identity import ModelIdentity
from dmsae.activations.token_sample import TokenSample
from dmsae.config import from_dict, to_dict
from dmsae.disk import layout
from dmsae.disk.artifact import bound, read_artifact, write_artifact
from dmsae.errors import CheckpointError, ConfigError

_passed: "WeakKeyDictionary[nn.Module, set[tuple[str, int]]]" = WeakKeyDictionary()
"""What has been checked of each model: the hook, and the activations that were expected there."""


class Sample(NamedTuple):
    """A token sample with the codes of the SAE that holds it, all that are not 0."""

    tokens: TokenSample
    row_S: Tensor
    """The row of the sample that each code belongs to, int32."""
    latent_S: Tensor
    """Its latent, int32."""
    code_S: Tensor
    """Its value, float32."""

    @classmethod
    def of(cls, tokens: TokenSample, f_RK: Tensor) -> Self:
        """Return a sample with the codes that an SAE gives on its activations."""
        f_RK = f_RK.detach().float().cpu()
        row_S, latent_S = f_RK.nonzero(as_tuple=True)
        return cls(tokens, row_S.to(torch.int32), latent_S.to(torch.int32), f_RK[row_S, latent_S])

    def codes(self, width: int) -> Tensor:
        """Return the codes as a matrix [R, K]."""
        f_RK = torch.zeros(len(self.tokens.x_RD), width)
        f_RK[self.row_S.long(), self.latent_S.long()] = self.code_S
        return f_RK

    def require_model(self, model: BaseModel | nn.Module, hook: str) -> None:
        """Raise `WrongModelError` unless a model gives the expected activations; it runs once for each model."""
        whole, identity = (model.model, model.identity) if isinstance(model, BaseModel) else (model, None)
        key = hook, hash(self.tokens.x_RD.numpy().tobytes())
        if key not in (passed := _passed.setdefault(whole, set())):
            self.tokens.require_model(whole, hook, identity)
            passed.add(key)

    def save(self, directory: Path) -> None:
        """Write the sample, bound to the SAE that is there."""
        tokens = self.tokens
        tensors = {"tokens": tokens.tokens_NL, "context": tokens.context_R, "position": tokens.position_R}
        tensors |= {"x": tokens.x_RD, "row": self.row_S, "latent": self.latent_S, "code": self.code_S}
        facts = {"format": layout.FORMAT, "model": to_dict(tokens.model)}
        write_artifact(directory, layout.SAMPLE, tensors, facts, bound(directory, directory / f"{layout.SAE}.json"))

    @classmethod
    def load(cls, directory: Path, d_model: int, width: int) -> Self | None:
        """Return the sample beside an SAE of a given shape; None when there is none, as in those made earlier."""
        if not layout.has_artifact(directory, layout.SAMPLE):
            return None
        tensors, facts = read_artifact(directory, layout.SAMPLE)
        path = directory / layout.SAMPLE
        try:
            model = from_dict(ModelIdentity, facts["model"])
            tokens = TokenSample(model, tensors["tokens"], tensors["context"], tensors["position"], tensors["x"])
            sample = cls(tokens, tensors["row"], tensors["latent"], tensors["code"])
        except (KeyError, TypeError, ConfigError) as error:
            raise CheckpointError(f"{path}.json does not describe a token sample: {error}. Restore it.") from error
        if problem := _problem(sample, d_model, width):
            raise CheckpointError(f"{path}.safetensors is not the token sample of this SAE: {problem}. Restore it.")
        return sample


def remove_sample(directory: Path) -> None:
    """Remove the sample of an SAE that was in a directory before."""
    for suffix in ("json", "safetensors"):
        (directory / f"{layout.SAMPLE}.{suffix}").unlink(missing_ok=True)


def _problem(sample: Sample, d_model: int, width: int) -> str:
    """Return what is wrong with the tensors of a sample; empty when nothing is."""
    tokens = sample.tokens
    whole = {"tokens": tokens.tokens_NL, "context": tokens.context_R, "position": tokens.position_R}
    whole |= {"row": sample.row_S, "latent": sample.latent_S}
    for name, tensor in whole.items():
        if tensor.dtype != torch.int32 or tensor.ndim != (2 if name == "tokens" else 1):
            return f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
    n_rows, n_codes = len(tokens.context_R), len(sample.row_S)
    if tokens.x_RD.shape != (n_rows, d_model) or tokens.x_RD.dtype != torch.float32 or not n_rows:
        return f"x has shape {tuple(tokens.x_RD.shape)} and dtype {tokens.x_RD.dtype}; expected [{n_rows}, {d_model}]"
    if sample.code_S.shape != (n_codes,) or sample.code_S.dtype != torch.float32 or len(sample.latent_S) != n_codes:
        return f"there are {n_codes} rows of codes, {len(sample.latent_S)} latents and {len(sample.code_S)} values"
    if len(tokens.position_R) != n_rows:
        return f"there are {n_rows} contexts and {len(tokens.position_R)} positions"
    limits = {"context": tokens.tokens_NL.shape[0], "position": tokens.tokens_NL.shape[1]}
    limits |= {"row": n_rows, "latent": width}
    for name, limit in limits.items():
        if len(whole[name]) and not 0 <= int(whole[name].min()) <= int(whole[name].max()) < limit:
            return f"{name} is not always from 0 to {limit - 1}"
    if not (tokens.x_RD.isfinite().all() and sample.code_S.isfinite().all()):
        return "its numbers are not all finite"
    return ""
