"""What is attacked: a tiny model, a text, a store, a distillation from it, and a transfer."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conftest import build_documents, build_model, build_tokenizer
from dmsae.activations.base_model import ModelConfig
from dmsae.activations.harvest import Harvest, harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.sources import LiveSource
from dmsae.activations.store import Store
from dmsae.cores.attribution import AttributionConfig
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.distill import distill
from dmsae.distillation.transfer import TransferConfig, transfer
from dmsae.progress import SILENT, Progress
from dmsae.text.corpus import TextConfig
from dmsae.text.tokens import TokenConfig
from dmsae.training.config import TrainConfig

_TRAIN = TrainConfig(tokens=40 * 64, batch_size=64, lr=3e-3, log_every=5, checkpoint_seconds=0.0, device="cpu")
_SCORES = AttributionConfig(quantile=0.95, batch_size=64, n_bootstrap=5)
DISTILL = DistillConfig(width=64, k=4, nesting=(16, 64), cycles=2, train=_TRAIN, attribution=_SCORES)
TRANSFER = TransferConfig(k=(3,), width=96, nesting=(24, 96), baselines=("msae",), train=_TRAIN)

Job = Callable[[Path], None]
"""Work that is done in a directory, or resumed there."""


@dataclass(frozen=True)
class Scene:
    """A finished store and run, and the work that made them."""

    root: Path
    config: HarvestConfig
    store: Store
    run: Path

    def harvest(self, place: Path, progress: Progress = SILENT) -> None:
        """Make the store, or finish it."""
        harvest(self.config, place, progress)

    def distill(self, place: Path, progress: Progress = SILENT) -> None:
        """Distill, or resume."""
        distill(DISTILL, self.store, place, progress=progress)

    def live(self, place: Path) -> None:
        """Distill on activations that are made as they are needed."""
        distill(DISTILL, self.store, place, source=LiveSource(Harvest(self.config, self.store.root)))

    def transfer(self, place: Path) -> None:
        """Train SAEs from the distilled core, or resume."""
        transfer(TRANSFER, Core.load(self.run), self.store, place)

    def jobs(self) -> dict[str, Job]:
        """Return all kinds of work by name."""
        return {"harvest": self.harvest, "distill": self.distill, "live": self.live, "transfer": self.transfer}


def build(root: Path) -> Scene:
    """Make everything that is attacked below a directory."""
    model, text = root / "model", root / "text.txt"
    build_model().save_pretrained(model)
    build_tokenizer().save_pretrained(model)
    text.write_text("\n".join(build_documents(300)), encoding="utf8")
    config = HarvestConfig(
        model=ModelConfig(name=str(model), hook=0, device="cpu"),
        text=TextConfig(source=str(text), txt_documents="line", heldout_fraction=0.2, pairs_fraction=0.2),
        tokens=TokenConfig(context_length=16),
        train_tokens=1500,
        heldout_tokens=200,
        pair_tokens=200,
        shard_tokens=256,
        dtype="float32",
    )
    store = harvest(config, root / "stores")
    scene = Scene(root, config, store, root / "run")
    scene.distill(scene.run)
    return scene


def contents(directory: Path) -> dict[str, bytes]:
    """Return every file of a directory that its result consists of."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in (layout.LOCK, layout.TIMING)
    }


def copied(directory: Path, target: Path) -> Path:
    """Return a fresh copy of a directory."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(directory, target))
