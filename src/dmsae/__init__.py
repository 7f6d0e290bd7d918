"""Distilled Matryoshka Sparse Autoencoders.

The folders follow the data, as the paper's Figure 1 does, and imports point one way along it:

    disk/          names and formats of everything that is written
    text/          text becomes packed contexts of tokens
    activations/   a language model's activations and loss gradients, harvested once, read as one stream
    sae/           the sparse autoencoder, its objective and its gradients
    training/      one or several SAEs trained on one stream
    cores/         attribution, selection, cores with lineage, controls
    evaluation/    what an SAE is worth on held-out text
    formats/       SAEs in the formats of other packages and on the Hub, both ways
    interventions/ an SAE inside a model: latents read on a text, or changed
    distillation/  Algorithm 1 (distill) and Algorithm 3 (transfer)
    commands/      the command line, which only parses, calls the above, and prints

Names of tensors end in their shape; each letter means one thing in the whole package:

    B tokens in a batch      D model width         K dictionary width     C core latents
    P candidate pool         G prefixes            S selected entries     A dead latents
    N contexts               L positions           R latents ablated or read, rows of a block
    V vocabulary             F planted features    E features read        Y classes

The names below are the public surface. They are imported on first use, so `import dmsae` is fast.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmsae.activations.base_model import BaseModel, ModelConfig
    from dmsae.activations.harvest import harvest
    from dmsae.activations.importing import import_store
    from dmsae.activations.request import HarvestConfig
    from dmsae.activations.store import Store, open_store
    from dmsae.cores.attribution import Attribution, AttributionConfig, attribute
    from dmsae.cores.controls import random_core
    from dmsae.cores.core import Core
    from dmsae.cores.selection import select_core
    from dmsae.distillation.distill import DistillConfig, distill
    from dmsae.distillation.transfer import TransferConfig, transfer
    from dmsae.errors import DmsaeError
    from dmsae.evaluation.evaluate import EvaluateConfig, evaluate
    from dmsae.evaluation.fidelity import fidelity
    from dmsae.evaluation.stability import stability
    from dmsae.formats.exchange import export_sae, import_sae
    from dmsae.formats.hub import from_pretrained, push_to_hub
    from dmsae.interventions.hooks import splice_into
    from dmsae.interventions.intervention import Intervention
    from dmsae.interventions.reading import read
    from dmsae.interventions.steering import steer
    from dmsae.sae.config import DenseCore, DetectorCore, SAEConfig, SparseCore
    from dmsae.sae.sae import SAE
    from dmsae.training.config import TrainConfig
    from dmsae.training.trainer import train

__version__ = version("dmsae")

_HOMES = {
    "activations.base_model": ("BaseModel", "ModelConfig"),
    "activations.harvest": ("harvest",),
    "activations.importing": ("import_store",),
    "activations.request": ("HarvestConfig",),
    "activations.store": ("Store", "open_store"),
    "cores.attribution": ("Attribution", "AttributionConfig", "attribute"),
    "cores.controls": ("random_core",),
    "cores.core": ("Core",),
    "cores.selection": ("select_core",),
    "distillation.distill": ("DistillConfig", "distill"),
    "distillation.transfer": ("TransferConfig", "transfer"),
    "errors": ("DmsaeError",),
    "evaluation.evaluate": ("EvaluateConfig", "evaluate"),
    "evaluation.fidelity": ("fidelity",),
    "evaluation.stability": ("stability",),
    "formats.exchange": ("export_sae", "import_sae"),
    "formats.hub": ("from_pretrained", "push_to_hub"),
    "interventions.hooks": ("splice_into",),
    "interventions.intervention": ("Intervention",),
    "interventions.reading": ("read",),
    "interventions.steering": ("steer",),
    "sae.config": ("DenseCore", "DetectorCore", "SAEConfig", "SparseCore"),
    "sae.sae": ("SAE",),
    "training.config": ("TrainConfig",),
    "training.trainer": ("train",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "SAE",
    "Attribution",
    "AttributionConfig",
    "BaseModel",
    "Core",
    "DenseCore",
    "DetectorCore",
    "DistillConfig",
    "DmsaeError",
    "EvaluateConfig",
    "HarvestConfig",
    "Intervention",
    "ModelConfig",
    "SAEConfig",
    "SparseCore",
    "Store",
    "TrainConfig",
    "TransferConfig",
    "__version__",
    "attribute",
    "distill",
    "evaluate",
    "export_sae",
    "fidelity",
    "from_pretrained",
    "harvest",
    "import_sae",
    "import_store",
    "open_store",
    "push_to_hub",
    "random_core",
    "read",
    "select_core",
    "splice_into",
    "stability",
    "steer",
    "train",
    "transfer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'dmsae' has no attribute {name!r}")
    value = getattr(import_module(f"dmsae.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
