"""SAEs of every kind on activations, and jobs for SAEBench on a tiny model: for the tests in its environment."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmsae.activations.base_model import ModelConfig, identify
from dmsae.evaluation.evaluate import digest_of
from dmsae.evaluation.saebench.job import How, Job, JobModel, JobSAE
from dmsae.sae.config import CoreMode, SAEConfig
from dmsae.sae.detectors import Detectors
from dmsae.sae.sae import SAE

KINDS = ("batch_topk", "msae", "dense", "sparse", "detector", "uncentred")
SKIP = "runs in SAEBench's environment: make saebench-env, make test-saebench"


def sae_of_kind(kind: str, x_BD: Tensor, width: int = 64, seed: int = 0) -> SAE:
    """An untrained SAE with biases, thresholds and a decoder bias that suit some activations; about a tenth fires."""
    generator = torch.Generator().manual_seed(seed)
    d_model, n_core = x_BD.shape[1], 8
    prefixes = (width,) if kind == "batch_topk" else (width // 4, width)
    core = CoreMode(kind).core(n_core, 4) if kind in ("dense", "sparse", "detector") else None
    config = SAEConfig(d_model, width, 6, prefixes, core, center_input=kind != "uncentred")
    rows = torch.randn(config.n_core, d_model, generator=generator) / d_model**0.5
    spread = float((x_BD - x_BD.mean(0)).norm(dim=1).mean()) / d_model**0.5
    detectors = Detectors(-(rows @ x_BD.mean(0)), torch.full((n_core,), 0.5 * spread)) if kind == "detector" else None
    sae = SAE.init(config, generator, rows if config.n_core else None, detectors)
    with torch.no_grad():
        sae.b_dec.copy_(x_BD.mean(0))
        sae.b_enc.copy_(0.1 * spread * torch.randn(sae.b_enc.shape, generator=generator))
        sae.W_enc_noncore.mul_(0.5 + torch.rand(config.n_noncore, 1, generator=generator))
        if kind == "uncentred":
            sae.b_enc.sub_(sae.W_enc_noncore @ x_BD.mean(0))
        # Thresholds that differ from latent to latent: nothing may replace them by one number.
        theta = spread * (0.5 + torch.rand(config.n_competing, generator=generator))
        sae.threshold[config.n_dense :] = theta
    return sae.requires_grad_(False)


def save(sae: SAE, directory: Path) -> JobSAE:
    """Save an SAE, and return it as a job wants it."""
    sae.save(directory)
    return JobSAE(directory.name, directory, digest_of(sae))


def job_of(eval_name: str, saes: list[JobSAE], model: Path, layer: int, out: Path, **settings: Any) -> Job:
    """A job on a model in a directory, in float32 on the CPU."""
    identity = identify(ModelConfig(str(model), hook=layer, device="cpu"))
    entry = JobModel(str(model), model, identity.weights_sha256, layer)
    how = How(data=settings.pop("data", None), device="cpu")
    return Job(eval_name, tuple(saes), entry, settings, out, out / "cache", how)
