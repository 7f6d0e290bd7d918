"""How much an experiment varies: the grids of the presets."""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from dmsae.cores.consensus import ConsensusConfig
from dmsae.cores.controls import RandomKind, Rule
from dmsae.cores.norms import CoreNorm
from dmsae.sae.config import CoreMode


class Preset(StrEnum):
    """How large an experiment is."""

    SMOKE = "smoke"
    """To see that it runs: minutes for all of them together."""
    SMALL = "small"
    """Every experiment in 45 minutes at most on two CPU cores with bfloat16 instructions, with three seeds."""
    MEDIUM = "medium"
    """The grids of `small` at the size of the default recipe."""
    PAPER = "paper"
    """The paper's model and sizes. The authors of dmsae have not run it."""


RECIPES = {Preset.SMOKE: "smoke", Preset.SMALL: "demo", Preset.MEDIUM: "default", Preset.PAPER: "gemma-2-2b"}
"""Which recipe gives the sizes of a preset."""

FRESH = 1000
"""Added to a seed where a part needs another run, or one that took no part in a choice. Seeds given are below it."""

SEEDS = {preset: (0,) if preset is Preset.SMOKE else (0, 1, 2) for preset in Preset}
"""Seeds of a preset, unless others are asked for."""


@dataclass(frozen=True, slots=True)
class Regime:
    """Settings under which distilled cores are tried; factors are of what the recipe says."""

    name: str
    width_factor: float = 1.0
    prefix0_factor: float = 1.0
    """Of the prefix-0 of the recipe, whatever the width."""
    k_factor: float = 1.0
    coverage: float = 0.9
    token_factor: float = 1.0
    over: str = "all"
    """Positions over which scores take their quantile: all, or active."""
    core_mode: CoreMode = CoreMode.DETECTOR


_SEARCHED = partial(Regime, prefix0_factor=4, token_factor=2 / 3)
"""A regime of the search: a wide prefix-0, and training that is short, because there are many SAEs to train."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What the parts vary. Multiples are of what the recipe says."""

    max_rate: float = 0.2
    """Cap on the firing rate of latents in a core of detectors."""
    rules: tuple[Rule, ...] = (
        Rule.FIRING_RATE,
        Rule.MEAN_ACTIVATION,
        Rule.RANDOM_SUBSET,
        Rule.PRINCIPAL_COMPONENTS,
    )
    """Other rules that choose a core of equal size."""
    random_cores: tuple[RandomKind, ...] = (RandomKind.NORM_MATCHED, RandomKind.COVARIANCE_MATCHED)
    """Random directions beside a dense core."""
    members: int = 4
    """SAEs among which a consensus is sought."""
    consensus: ConsensusConfig = field(default_factory=ConsensusConfig)
    cycles: int = 4
    """Cycles of the distillations whose cores are followed from cycle to cycle."""
    priced_cycles: tuple[int, ...] = (2, 4)
    """Numbers of cycles, from 1 up to `cycles`, after which cores are priced, in the part `prices`; the part
    `every-cycle` has the others."""
    coverages: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
    """τ, in the part `tau`."""
    k_factors: tuple[float, ...] = (0.125, 0.5, 1.0, 2.0, 4.0)
    """Sparsities of the part `sparsity`."""
    sparsity_cycles: int = 4
    """Cycles at each of them."""
    norms: tuple[CoreNorm, ...] = ("unit", "found", 2.0)
    """Norms of frozen rows, in the part `random-core`."""
    random_k_factors: tuple[float, ...] = (1.0, 5.0)
    """Sparsities of the part `random-core`: all norms at the first, rows as they were found at the others."""
    random_token_factors: tuple[float, ...] = (1.0, 2.0)
    """Lengths of training in the part `random-core`: all of it with the first, rows as they were found, at the first
    sparsity, with the others."""
    benchmark_k_factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Sparsities of the part `benchmark`."""
    measures: tuple[str, ...] = (
        "fidelity",
        "activity",
        "splice",
        "probing",
        "absorption",
        "disentanglement",
        "concept_removal",
        "redundancy",
        "lexical_predictability",
    )
    """What SAEs are evaluated by, in the parts `benchmark` and `worth`."""
    token_factors: tuple[float, ...] = (1.0, 2.0)
    """Lengths of training in the part `consistency`; SAEs that share a core train for the first of them."""
    repeats: int = 3
    """SAEs that are trained from each core with different seeds, in the part `consistency`."""
    regimes: tuple[Regime, ...] = (
        _SEARCHED("wide prefix-0", coverage=0.5),
        _SEARCHED("smaller core, active positions", coverage=0.25, over="active"),
        _SEARCHED("widest prefix-0, active positions", coverage=0.25, over="active", prefix0_factor=8),
        _SEARCHED("wider and sparser", coverage=0.25, width_factor=1.5, k_factor=0.5),
        _SEARCHED("dense", coverage=0.25, core_mode=CoreMode.DENSE),
        _SEARCHED("in sparse mode", coverage=0.5, core_mode=CoreMode.SPARSE),
    )
    """What the part `regime` tries: a wide prefix-0, so that there is something to select, and some changes. What the
    recipe itself gives is in the part `prices`."""
    ablated: int = 32
    """Latents that are ablated, in the part `selection`."""
    ablation_contexts: int = 64
    """Contexts in which each is."""


GRIDS = {
    Preset.SMOKE: Grid(
        rules=(Rule.FIRING_RATE,),
        random_cores=(RandomKind.NORM_MATCHED,),
        members=2,
        consensus=ConsensusConfig(min_similarity=0.05),
        max_rate=0.5,
        cycles=2,
        priced_cycles=(2,),
        coverages=(0.5, 0.9),
        k_factors=(1.0, 2.0),
        sparsity_cycles=2,
        norms=("found", 2.0),
        random_k_factors=(1.0,),
        random_token_factors=(1.0,),
        benchmark_k_factors=(1.0,),
        measures=("fidelity", "activity"),
        token_factors=(1.0,),
        repeats=2,
        regimes=(Regime("as the recipe"), Regime("half", coverage=0.5)),
        ablated=4,
        ablation_contexts=4,
    ),
    Preset.SMALL: Grid(),
    Preset.MEDIUM: Grid(),
    Preset.PAPER: Grid(
        coverages=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        cycles=7,
        priced_cycles=(4, 7),
        k_factors=(0.0625, 0.125, 0.25, 0.5, 1.0, 2.0),
        benchmark_k_factors=(0.0625, 0.125, 0.25, 0.5, 1.0, 2.0),
        random_k_factors=(1.0,),
        random_token_factors=(1.0,),
        token_factors=(1.0,),
    ),
}


def scaled(k: int, factor: float) -> int:
    """Return a sparsity that is a multiple of another, at least 1."""
    return max(1, round(k * factor))
