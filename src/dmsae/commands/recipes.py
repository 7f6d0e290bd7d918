"""What a recipe sets: one config for each of its tables."""

from typing import NamedTuple

from dmsae.activations.request import HarvestConfig
from dmsae.config import from_dict, read_recipe
from dmsae.distillation.distill import DistillConfig
from dmsae.distillation.transfer import TransferConfig
from dmsae.errors import ConfigError, nearest
from dmsae.progress import Progress
from dmsae.sweeps.cluster import ClusterConfig, read_cluster
from dmsae.training.config import TrainConfig


class Sections(NamedTuple):
    """The configs that a recipe describes; defaults where it is silent."""

    harvest: HarvestConfig
    train: TrainConfig
    distill: DistillConfig
    transfer: TransferConfig
    cluster: ClusterConfig


def read_sections(recipe: str) -> Sections:
    """Return the configs of a recipe, given by name or path; all defaults for an empty name."""
    settings = read_recipe(recipe) if recipe else {}
    if unknown := [section for section in settings if section not in Sections._fields]:
        hint = nearest(unknown[0], Sections._fields)
        raise ConfigError(f"Recipe {recipe} has an unknown section {unknown[0]!r}. {hint}")
    cluster = read_cluster(recipe)
    try:
        return Sections(
            harvest=from_dict(HarvestConfig, settings.get("harvest", {}), "harvest."),
            train=from_dict(TrainConfig, settings.get("train", {}), "train."),
            distill=from_dict(DistillConfig, settings.get("distill", {}), "distill."),
            transfer=from_dict(TransferConfig, settings.get("transfer", {}), "transfer."),
            cluster=cluster,
        )
    except ConfigError as error:
        raise ConfigError(f"Recipe {recipe}: {error}") from error


def warn_of_train_table(recipe: str, section: str, progress: Progress) -> None:
    """Warn when a recipe's [train] table looks as if it were meant for another command."""
    settings = read_recipe(recipe) if recipe else {}
    if "train" in settings and "train" not in settings.get(section, {}):
        progress.warn(f"[train] is for 'dmsae train'; this command reads [{section}.train].")
