"""What must hold before a training begins."""

from collections.abc import Sequence
from pathlib import Path

from dmsae.activations.stream import ActivationStream
from dmsae.disk import layout
from dmsae.errors import ConfigError, MeshError
from dmsae.training.config import TrainConfig
from dmsae.training.learner import SAESpec


def require_shared(directory: Path) -> None:
    """Raise unless a rank sees the directory in which the first one has begun a run."""
    if not (directory / layout.SETTINGS).is_file():
        raise MeshError(
            f"{directory / layout.SETTINGS} cannot be seen, which rank 0 has just written. The results of a mesh must "
            "go to a file system that all of its ranks share."
        )


def require_trainable(specs: Sequence[SAESpec], config: TrainConfig, stream: ActivationStream) -> None:
    """Raise unless these SAEs can be trained on this stream."""
    names = [spec.name for spec in specs]
    taken = (layout.SETTINGS, layout.CHECKPOINT, layout.MESH_CHECKPOINT)
    if not names or len(set(names)) != len(names) or any(not _is_plain(name) or name in taken for name in names):
        raise ConfigError(
            f"Each SAE needs a name of its own, for its directory: not empty, without '/', not beginning with a dot, "
            f"and not {' or '.join(taken)}; got {names}."
        )
    for spec in specs:
        if spec.sae.d_model != stream.d_model:
            raise ConfigError(
                f"{spec.name}: d_model = {spec.sae.d_model}, but the activations have width {stream.d_model}."
            )
    if stream.batch_size != config.batch_size:
        raise ConfigError(f"batch_size = {config.batch_size}, but the stream gives {stream.batch_size} at a time.")


def _is_plain(name: str) -> bool:
    return bool(name) and Path(name).name == name and not name.startswith(".")
