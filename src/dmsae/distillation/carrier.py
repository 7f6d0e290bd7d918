"""An SAE that is to carry a core: which of the core's tensors its training freezes."""

from dmsae.cores.core import Core
from dmsae.sae.config import DetectorCore, SAEConfig
from dmsae.training.learner import SAESpec


def carrier(name: str, sae: SAEConfig, core: Core | None, total_budget: bool = False) -> SAESpec:
    """Return the SAE to train: with the core's encoder rows frozen and, for detectors, its offsets and thresholds."""
    rows = core.encoder_CD if core else None
    detectors = core.detectors if core and isinstance(sae.core, DetectorCore) else None
    return SAESpec(name, sae, rows, detectors, total_budget)
