"""One cycle of training: a stream of activations through one or several SAEs, in the published recipe.

Several SAEs share every batch, so a sweep reads its data once. A run can be stopped at any moment and resumes from its
last checkpoint to the same numbers; logging and checkpointing change nothing.

Inputs are divided by √mean‖x‖² for training and the scale is folded back into biases and thresholds when an SAE is
saved: encoder rows live in raw space and transfer verbatim.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from dmsae.activations.arrays import Array
from dmsae.activations.sources import ActivationSource, StoreSource, as_source
from dmsae.activations.store import Store
from dmsae.activations.stream import ActivationStream
from dmsae.config import Json
from dmsae.devices import training_device
from dmsae.disk import layout
from dmsae.disk.files import canonical_hash
from dmsae.disk.run import claimed
from dmsae.errors import CheckpointError
from dmsae.progress import SILENT, Progress
from dmsae.ranks import settled
from dmsae.sae.comms import ALONE, Comms
from dmsae.sae.config import SAEConfig
from dmsae.sae.detectors import Detectors
from dmsae.training.checkpoints import Checkpoints
from dmsae.training.config import TrainConfig
from dmsae.training.learner import SAESpec, sharded_names
from dmsae.training.memory import fitting_together
from dmsae.training.mesh import require_fits, require_same, shape_of
from dmsae.training.metrics import require_sinks
from dmsae.training.passes import Pass
from dmsae.training.requirements import require_trainable
from dmsae.training.result import TrainResult, read_result, require_one_usable

_USABLE = 0.9
"""Share of a GPU's free memory that SAEs may fill: allocators need room of their own."""


def train(
    sae: SAEConfig,
    data: ActivationSource | Store | Array,
    directory: Path | str,
    config: TrainConfig | None = None,
    core_rows: Tensor | None = None,
    detectors: Detectors | None = None,
    progress: Progress = SILENT,
) -> TrainResult:
    """Train one SAE in a directory, or resume it there, and return how it ended; `SAE.load(directory)` opens it.

    `data` is a store, an array or tensor of activations [n, D], or any other source. `core_rows` are the encoder rows
    to freeze, as many as `sae.core` says; a core of detectors needs their offsets and thresholds too.

    >>> config = dmsae.SAEConfig(d_model=16, width=64, k=4, prefixes=(16, 64))
    >>> recipe = dmsae.TrainConfig(tokens=25_600, batch_size=128, lr=3e-3)
    >>> dmsae.train(config, x, "runs/sae", recipe).state.value
    'finished'
    >>> sae = dmsae.SAE.load("runs/sae")
    """
    spec = SAESpec(layout.SAE, sae, core_rows, detectors)
    (result,) = train_together([spec], as_source(data), Path(directory), config, progress=progress)
    return result


def train_together(
    specs: Sequence[SAESpec],
    source: ActivationSource,
    directory: Path,
    config: TrainConfig | None = None,
    made_from: Json | None = None,
    progress: Progress = SILENT,
    comms: Comms = ALONE,
) -> list[TrainResult]:
    """Train several SAEs on one stream of activations, each in a folder of its name, and return how each ended.

    `made_from` is recorded in every SAE beside what the source says of itself. On a mesh all ranks call this together.
    """
    config = config or TrainConfig()
    n_shards = source.n_shards if isinstance(source, StoreSource) else None
    require_fits(shape_of(comms), config.batch_size, {spec.name: spec.sae.width for spec in specs}, n_shards)
    with ExitStack() as opened:
        with settled(comms.both):
            device = training_device(config.device)
            stream = ActivationStream(source, config.batch_size, config.seed, device, comms.data, comms.both)
            opened.callback(stream.close)
            trainer = Trainer(specs, config, stream, directory, source.facts | (made_from or {}), progress, comms)
        return trainer.run()


class Trainer:
    """A run: SAEs, the stream they share, and the directory in which it can be resumed, in as many passes as it takes.

    On a mesh every rank has one, and all of them do the same; only the first writes and reports.
    """

    def __init__(
        self,
        specs: Sequence[SAESpec],
        config: TrainConfig,
        stream: ActivationStream,
        directory: Path,
        made_from: Json,
        progress: Progress = SILENT,
        comms: Comms = ALONE,
    ) -> None:
        require_trainable(specs, config, stream)
        require_sinks(config.log_to if comms.is_first else ())
        self._specs, self._config, self._stream, self._directory = specs, config, stream, directory
        self._progress, self._comms = progress if comms.is_first else SILENT, comms
        self._checkpoints = Checkpoints(directory, sharded_names(specs), comms)
        self._settings: Json = {
            "kind": "train",
            "made_from": made_from,
            "train": config.result_settings(),
            "schedule": config.schedule()._asdict(),
            "saes": {spec.name: spec.settings() for spec in specs},
        }

    def run(self) -> list[TrainResult]:
        """Train to the end, from the beginning or from the last checkpoint, and return how each SAE ended."""
        first, everyone = self._comms.is_first, self._comms.both
        require_same(self._settings, everyone)
        with ExitStack() as held:
            with settled(everyone):
                if first:
                    held.enter_context(claimed(self._directory, self._settings))
            while names := self._next_pass():
                specs = [spec for spec in self._specs if spec.name in names]
                common = (self._settings, self._config, self._stream, self._directory)
                Pass(specs, *common, self._checkpoints, self._progress, self._comms).run()
            with settled(everyone):
                if first:
                    self._checkpoints.remove()
                results = [read_result(self._where(spec.name)) for spec in self._specs] if first else []
            return require_one_usable(everyone.of_first(results))

    def _next_pass(self) -> list[str]:
        """Return the SAEs to train together next: those of the checkpoint, else as many as fit; none at the end."""
        names: list[str] = []
        with settled(self._comms.both):
            if self._comms.is_first:
                left = [spec for spec in self._specs if not (self._where(spec.name) / layout.STATUS).is_file()]
                begun = self._begun() if left else []
                names = [spec.name for spec in left if spec.name in begun]
                if left and not names:
                    self._checkpoints.remove()  # of a pass that was finished
                    names = [spec.name for spec in left[: self._at_once(left)]]
                if len(names) < len(left):
                    self._progress.note(f"{len(names)} of the {len(left)} SAEs that are left train first.")
        return self._comms.both.of_first(names)

    def _begun(self) -> list[str]:
        """Return the SAEs that the checkpoint holds; none when there is no checkpoint."""
        state = self._checkpoints.state()
        if state is None:
            return []
        if state.get("settings") != canonical_hash(self._settings):
            path = self._checkpoints.newest()
            raise CheckpointError(f"{path} belongs to another run. Restore the one of this run, or remove it.")
        try:
            return list(state["learners"])
        except (KeyError, TypeError) as error:
            raise self._checkpoints.unusable(error) from error

    def _at_once(self, specs: Sequence[SAESpec]) -> int:
        """Return how many SAEs may train together."""
        device = self._stream.device
        if self._config.saes_at_once is not None or device.type != "cuda":
            return self._config.saes_at_once or len(specs)
        available = round(_USABLE * torch.cuda.mem_get_info(device)[0])
        saes = [spec.sae for spec in specs]
        return fitting_together(saes, self._config.batch_size, shape_of(self._comms), available)

    def _where(self, name: str) -> Path:
        return self._directory / name
