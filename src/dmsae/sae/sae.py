"""The sparse autoencoder: a frozen core, then Matryoshka prefixes, with per-latent thresholds for inference.

`f(x) = ReLU(W_enc (x − b_dec) + b_enc)`, `x̂_m = b_dec + Σ_{j<m} f_j W_dec[j]`. The core's latents come
first, so every prefix holds them. Without a core it is a Matryoshka SAE; with one prefix as well, a BatchTopK SAE.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from dmsae.activations.token_sample import TokenSample
from dmsae.config import Json, from_dict, to_dict
from dmsae.disk import layout
from dmsae.disk.artifact import Bound, read_artifact, read_facts, write_artifact
from dmsae.disk.tensor_stream import TensorStream
from dmsae.errors import CheckpointError, ConfigError
from dmsae.ranks import Axis
from dmsae.sae.batch_topk import select_top
from dmsae.sae.comms import ALONE, Comms
from dmsae.sae.config import SAEConfig
from dmsae.sae.detectors import Detectors, detect, fire_
from dmsae.sae.sample import Sample, remove_sample
from dmsae.sae.sparse import Active


class TrainCodes(NamedTuple):
    """The activations of a batch under the training-time mask."""

    input_BD: Tensor
    """What the encoder of all latents but detectors sees."""
    active: Active
    """What BatchTopK keeps."""
    core_BC: Tensor | None
    """The activations of a core that does not compete."""


class SAE(nn.Module):
    """A sparse autoencoder whose core encoder rows are a buffer, and so out of reach of any optimiser.

    >>> sae = dmsae.SAE.load(run / "cycle-0" / "sae")
    >>> codes = sae.encode(torch.from_numpy(x))  # [..., D] → [..., K], above each latent's threshold
    >>> codes.shape
    torch.Size([4096, 64])
    >>> sae.decode(codes, prefix=0).shape  # the smallest nested reconstruction
    torch.Size([4096, 16])
    """

    W_enc_core: Tensor
    offset: Tensor
    threshold: Tensor

    def __init__(self, config: SAEConfig) -> None:
        """Allocate zero weights; `init` and `load` give them values."""
        super().__init__()
        self.config = config
        self.sample: Sample | None = None
        self.register_buffer("W_enc_core", torch.zeros(config.n_core, config.d_model))
        self.W_enc_noncore = nn.Parameter(torch.zeros(config.n_noncore, config.d_model))
        self.b_enc = nn.Parameter(torch.zeros(config.width - config.n_detectors))
        self.register_buffer("offset", torch.zeros(config.n_detectors))
        self.W_dec = nn.Parameter(torch.zeros(config.width, config.d_model))
        self.b_dec = nn.Parameter(torch.zeros(config.d_model))
        self.register_buffer("threshold", torch.zeros(config.width))

    @classmethod
    @torch.no_grad()
    def init(
        cls,
        config: SAEConfig,
        generator: torch.Generator,
        core_rows: Tensor | None = None,
        detectors: Detectors | None = None,
    ) -> Self:
        """Return a fresh SAE: random unit decoder rows, new encoder rows equal to them, biases 0."""
        config.require_core_rows(core_rows)
        config.require_detectors(detectors)
        sae = cls(config)
        sae.W_dec.normal_(generator=generator)
        sae.renormalise_()
        sae.W_enc_noncore.copy_(sae.W_dec[config.n_core :])
        if core_rows is not None:
            sae.W_enc_core.copy_(core_rows)
        if detectors is not None:
            sae.set_detectors_(detectors)
        return sae

    @property
    def W_enc(self) -> Tensor:
        """All encoder rows [K, D], the core's first."""
        return torch.cat([self.W_enc_core, self.W_enc_noncore]) if self.config.n_core else self.W_enc_noncore

    @property
    def encoder_bias(self) -> Tensor:
        """All encoder biases [K]; that of a detector is the one which, with b_dec, amounts to its offset."""
        if not self.config.n_detectors:
            return self.b_enc
        shift = self.W_enc_core @ self.b_dec if self.config.center_input else 0.0
        return torch.cat([self.offset + shift, self.b_enc])

    @property
    def detectors(self) -> Detectors:
        """The offsets and thresholds of the core's detectors; empty when it has none."""
        return Detectors(self.offset, self.threshold[: self.config.n_detectors])

    def encoder_input(self, x: Tensor) -> Tensor:
        """Return what the encoder of all latents but detectors sees."""
        return x - self.b_dec if self.config.center_input else x

    def pre_activations(self, x: Tensor) -> Tensor:
        """Return `W_enc (x − b_dec) + b_enc`, [..., K], before any mask."""
        return nn.functional.linear(self.encoder_input(x), self.W_enc, self.encoder_bias)

    def train_codes(self, x_BD: Tensor, warm_start: float | None = None, comms: Comms = ALONE) -> TrainCodes:
        """Return the activations under the training-time mask; all competing latents compete, whatever their prefix.

        On a mesh these are a rank's own latents on its own tokens, and they compete with those of all ranks.
        """
        n_dense, n_detectors = self.config.n_dense, self.config.n_detectors
        input_BD = self.encoder_input(x_BD)
        encoders = (self.W_enc_noncore,) if n_dense else (self.W_enc_core, self.W_enc_noncore)
        n_keep = self.config.k_selected * len(x_BD) * comms.data.size
        bias = self.b_enc[n_dense - n_detectors :]
        active = select_top(input_BD, encoders, bias, n_keep, warm_start, n_dense, comms)
        core_BC = None
        if n_detectors:
            core_BC = fire_(torch.addmm(self.offset, x_BD, self.W_enc_core.T), self.detectors.thresholds_C)
        elif n_dense:
            core_BC = torch.addmm(self.b_enc[:n_dense], input_BD, self.W_enc_core.T).relu_()
        return TrainCodes(input_BD, active, core_BC)

    def encode(self, x: Tensor) -> Tensor:
        """Return the activations [..., K] at inference: those above their latent's threshold."""
        n_detectors = self.config.n_detectors
        rows = self.W_enc_noncore if n_detectors else self.W_enc
        f = nn.functional.linear(self.encoder_input(x), rows, self.b_enc)
        f = f.masked_fill_(f <= self.threshold[n_detectors:].clamp(min=0), 0)  # in place: f is large
        return torch.cat([detect(x, self.W_enc_core, self.detectors), f], dim=-1) if n_detectors else f

    def decode(self, f: Tensor, prefix: int | None = None) -> Tensor:
        """Return the reconstruction [..., D] from one prefix (an index into `prefixes`) or all latents."""
        size = self.config.width if prefix is None else self.config.prefixes[prefix]
        return f[..., :size] @ self.W_dec[:size] + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        """Return the full reconstruction of x at inference thresholds."""
        return self.decode(self.encode(x))

    @torch.no_grad()
    def set_threshold_(self, theta: float) -> None:
        """Give every competing latent the inference threshold θ; a dense core keeps 0, a detector its own."""
        self.threshold[self.config.n_dense :] = theta

    @torch.no_grad()
    def set_detectors_(self, detectors: Detectors, scale: float = 1.0) -> None:
        """Take over frozen offsets and thresholds, for activations that are divided by `scale`."""
        self.offset.copy_(detectors.offsets_C).div_(scale)
        self.threshold[: self.config.n_detectors] = detectors.thresholds_C / scale

    @torch.no_grad()
    def renormalise_(self) -> None:
        """Scale every decoder row to unit norm."""
        # In blocks, so that the second pass over a block finds it in cache. The floor keeps a zero row zero.
        for rows in torch.split(self.W_dec, 1024):
            norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            rows.div_(norms.clamp_min_(torch.finfo(rows.dtype).tiny))

    @torch.no_grad()
    def fold_scale_(self, scale: float) -> None:
        """Turn an SAE trained on x / scale into the same SAE on x; no encoder or decoder row changes."""
        for tensor in (self.b_enc, self.offset, self.b_dec, self.threshold):
            tensor.mul_(scale)

    @torch.no_grad()
    def keep_sample_(self, tokens: TokenSample | None, latents: Axis = ALONE.latents) -> None:
        """Keep a token sample with the codes of this SAE, unless they are not finite: nobody will use such an SAE.

        On a mesh this is a rank's part, and the codes are those of all parts, in the order of the whole SAE's latents.
        """
        if tokens is None:
            self.sample = None
            return
        parts = latents.gather(self.encode(tokens.x_RD.to(self.W_dec)).T.contiguous())
        f_RK = torch.stack(parts, dim=1).flatten(0, 1).T
        self.sample = Sample.of(tokens, f_RK) if f_RK.isfinite().all() else None

    def save(
        self,
        directory: Path,
        made_from: Json | None = None,
        bound_to: Bound | None = None,
        training: Json | None = None,
    ) -> None:
        """Write the SAE as `sae.safetensors` and `sae.json`, and its token sample, if it has one, beside it.

        Recorded are what it was made from and how it was trained; it can be bound to files of its run.
        """
        tensors = {name: getattr(self, name) for name in file_shapes(self.config)} | {"b_enc": self.encoder_bias}
        write_sae(directory, self.config, tensors, self.sample, made_from, bound_to, training)

    @classmethod
    def load(cls, directory: Path | str) -> Self:
        """Return the SAE saved in a directory, or in the `sae` folder of a training run, ready for use.

        Its parameters are frozen, so codes carry no graph; `sae.requires_grad_()` makes them trainable. Anything that
        is not as it was written is a `CheckpointError`.
        """
        directory = _with_sae(Path(directory))
        tensors, facts = read_artifact(directory, layout.SAE)
        _require_own_folder(directory, facts)
        try:
            config = from_dict(SAEConfig, facts["config"])
        except (KeyError, ConfigError) as error:
            raise CheckpointError(f"{directory / layout.SAE}.json does not describe a saved SAE: {error}") from error
        expected = file_shapes(config)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != expected:
            raise CheckpointError(
                f"{directory / layout.SAE}.safetensors holds {shapes}; its config asks for {expected}."
            )
        if dtypes := [tensor.dtype for tensor in tensors.values() if not tensor.is_floating_point()]:
            raise CheckpointError(f"{directory / layout.SAE}.safetensors holds {dtypes[0]}; expected floating point.")
        sae = cls(config).to(tensors["W_dec"].dtype)
        W_enc = tensors.pop("W_enc")
        tensors["W_enc_core"], tensors["W_enc_noncore"] = W_enc[: config.n_core], W_enc[config.n_core :]
        tensors["b_enc"] = tensors.pop("b_enc")[config.n_detectors :]
        tensors.setdefault("offset", torch.zeros(0))
        sae.load_state_dict(tensors)
        sae.sample = Sample.load(directory, config.d_model, config.width)
        if sae.sample is None and facts.get("sample"):
            raise CheckpointError(
                f"{directory / layout.SAMPLE}.json is missing: the SAE was saved with a token sample, which tells a "
                "wrong model from the right one. Restore or copy it, and the .safetensors file of the same name."
            )
        return sae.requires_grad_(False)


def write_sae(
    directory: Path,
    config: SAEConfig,
    tensors: Mapping[str, Tensor] | TensorStream,
    sample: Sample | None,
    made_from: Json | None = None,
    bound_to: Bound | None = None,
    training: Json | None = None,
) -> None:
    """Write an SAE, given by its tensors, as `SAE.save` does."""
    facts: Json = {"format": layout.FORMAT, "config": to_dict(config), "made_from": made_from or {}}
    facts |= {"training": training} if training else {}
    facts |= {"sample": True} if sample is not None else {}
    facts |= {"folder": directory.name} if bound_to else {}
    write_artifact(directory, layout.SAE, tensors, facts, bound_to)
    if sample is None:
        remove_sample(directory)
    else:
        sample.save(directory)


def read_made_from(directory: Path) -> Json:
    """Return what a saved SAE was made from, without reading its weights."""
    directory = _with_sae(directory)
    made_from: Json = read_facts(directory, layout.SAE).get("made_from", {})
    if not isinstance(made_from, dict):
        raise CheckpointError(f"{directory / layout.SAE}.json does not say what the SAE was made from. Restore it.")
    return made_from


def _require_own_folder(directory: Path, facts: Json) -> None:
    """Raise when the SAE in a folder of a run is another one of the same run."""
    folder = facts.get("folder", directory.name)
    if folder != directory.resolve().name and (directory.parent / layout.SETTINGS).is_file():
        raise CheckpointError(
            f"{directory / layout.SAE}.json belongs to {folder!r}, another SAE of this run. Restore the one that was "
            "here before."
        )


def _with_sae(directory: Path) -> Path:
    """Return the directory that holds the SAE: the one given, or the folder of that name inside a training run."""
    inside = directory / layout.SAE
    nested = layout.has_artifact(inside, layout.SAE) and not layout.has_artifact(directory, layout.SAE)
    return inside if nested else directory


def file_shapes(config: SAEConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a saved SAE with their shapes."""
    return {
        "W_enc": (config.width, config.d_model),
        "b_enc": (config.width,),
        "W_dec": (config.width, config.d_model),
        "b_dec": (config.d_model,),
        "threshold": (config.width,),
    } | ({"offset": (config.n_detectors,)} if config.n_detectors else {})
