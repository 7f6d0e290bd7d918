"""Where the jobs of a sweep run: the flags `--cluster.…` and the table `[cluster]` of a recipe. No torch here."""

from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum

from dmsae.config import from_dict, read_recipe, require, require_whole
from dmsae.errors import ConfigError


class EngineKind(StrEnum):
    """What starts jobs."""

    LOCAL = "local"
    SLURM = "slurm"
    RAY = "ray"


@dataclass(frozen=True)
class ClusterConfig:
    """Where jobs run, and what each of them gets."""

    engine: EngineKind = EngineKind.LOCAL
    """local: processes of this machine. slurm: a Slurm cluster, through submitit. ray: a Ray cluster."""
    cpus: int = 4
    """CPU cores of a job, and its threads."""
    gpus: int = 0
    """GPUs of a job."""
    memory_gb: float = 0.0
    """Main memory of a job. 0: what the cluster gives."""
    hours: float = 24.0
    """Slurm: time limit of a job. One that needs longer is put into the queue again, and resumes."""
    partition: str = ""
    """Slurm: the partition. Empty: the cluster's default."""
    directives: dict[str, str] = field(default_factory=dict)
    """Slurm: more directives of sbatch by name, such as account; an empty value makes a flag of the name."""
    setup: tuple[str, ...] = ()
    """Slurm: lines of shell that run before a job, such as `module load …`."""
    address: str = ""
    """Ray: the address of the cluster. Empty: one that is started on this machine, for as long as the command runs."""

    def __post_init__(self) -> None:
        require_whole("cluster.cpus", self.cpus, 1)
        require_whole("cluster.gpus", self.gpus, 0)
        require(self.memory_gb >= 0, "cluster.memory_gb", self.memory_gb, "not be negative")
        require(self.hours > 0, "cluster.hours", self.hours, "be positive")
        if self.engine is EngineKind.LOCAL and (given := _changed(self)):
            raise ConfigError(
                f"cluster.{given[0]} is for jobs on a cluster, and these run on this machine: add --cluster.engine "
                "slurm (or ray), or leave it out."
            )


def read_cluster(recipe: str) -> ClusterConfig:
    """Return what a recipe, by name or path, says in its table `[cluster]`: with one, jobs go to Slurm by default."""
    table = (read_recipe(recipe) if recipe else {}).get("cluster")
    if table is None:
        return ClusterConfig()
    if not isinstance(table, dict):
        raise ConfigError(f"Recipe {recipe}: cluster = {table!r} is not a table of settings.")
    try:
        return from_dict(ClusterConfig, {"engine": EngineKind.SLURM.value, **table}, "cluster.")
    except ConfigError as error:
        raise ConfigError(f"Recipe {recipe}: {error}") from error


def _changed(config: ClusterConfig) -> list[str]:
    """Return the settings, besides the engine, that are not the default ones."""
    defaults = {
        one.name: one.default if one.default_factory is MISSING else one.default_factory() for one in fields(config)
    }
    return [name for name, value in defaults.items() if name != "engine" and getattr(config, name) != value]
