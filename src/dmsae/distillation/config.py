"""What a distillation is: the SAE of each cycle, how many cycles, how each is trained and scored."""

from dataclasses import dataclass, field
from enum import StrEnum

from dmsae.config import Json, require, require_whole, take_choice, to_dict
from dmsae.cores.attribution import AttributionConfig
from dmsae.cores.consensus import ConsensusConfig
from dmsae.cores.controls import RandomKind
from dmsae.cores.norms import CoreNorm, require_norm
from dmsae.cores.selection import require_coverage
from dmsae.sae.config import CoreMode, SAEConfig, core_first, matryoshka_nesting
from dmsae.training.config import TrainConfig


class DistillRule(StrEnum):
    """How a distillation finds latents that last."""

    CYCLES = "cycles"
    """As in the paper: select by attribution, restart with only what was selected, intersect the last two cores."""
    CONSENSUS = "consensus"
    """In one pass: train several SAEs that start from other weights, and keep what they agree on."""


@dataclass(frozen=True, slots=True)
class Cycle0:
    """The SAE that a distillation starts from. Its width, k and prefixes need not be those of the later cycles."""

    source: str = ""
    """Directory of a Matryoshka SAE without a core (dictionary_learning / SAEBench, SAELens, or one of ours), or
    hub:owner/name/folder. Empty: train cycle 0 from nothing, like the others."""
    k: int | None = None
    """Its k, only when the checkpoint does not say it."""
    nesting: tuple[int, ...] = ()
    """Its cumulative prefix sizes, ending in its width, only when the checkpoint does not say them."""

    def __post_init__(self) -> None:
        if self.k is not None:
            require_whole("cycle0.k", self.k, 1)
        for name in ("k", "nesting"):
            given = getattr(self, name)
            remedy = "A cycle 0 that is trained here takes it from the run."
            require(
                bool(self.source) or not given, f"cycle0.{name}", given, "be left out without cycle0.source", remedy
            )


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """One distillation.

    >>> dmsae.DistillConfig(width=4096, k=40).sae(d_model=576, n_core=50).prefixes
    (178, 434, 946, 1970, 4096)
    """

    width: int = 4096
    """Dictionary width K of every cycle that is trained here."""
    k: int = 40
    """Target sparsity. Beside a core that does not compete, so many of the other latents are active per token."""
    nesting: tuple[int, ...] = ()
    """Cumulative prefix sizes without a core, ending in `width`. Empty: groups of 1/32, 1/16, 1/8, 1/4 and the rest."""
    cycles: int = 4
    """Train-and-select cycles T after cycle 0. More of them continue a run that has ended."""
    coverage: float = 0.9
    """Share τ of the attribution that a core has to hold; under a `max_rate`, of what the eligible latents have."""
    core_mode: CoreMode = CoreMode.DENSE
    """What of a core each cycle freezes, and how it competes: dense as in the paper, sparse, or detector."""
    max_rate: float | None = None
    """Keep latents out of the core that fire on a larger share of positions. None: as in the paper."""
    core_norm: CoreNorm = "found"
    """Norm of a latent's encoder row from its first selection on: as found, unit, or as found times this factor."""
    random_start: RandomKind | None = None
    """A control: replace the first core by a random one of equal size, and see what persists then. Detectors are
    replaced by random detectors, whatever the kind."""
    rule: DistillRule = DistillRule.CYCLES
    """cycles: as in the paper. consensus: the core is what several SAEs of cycle 0 agree on; there are no more."""
    members: int = 4
    """SAEs that a consensus is sought among; they differ in their initial weights and share every batch."""
    consensus: ConsensusConfig = field(default_factory=ConsensusConfig)
    cycle0: Cycle0 = field(default_factory=Cycle0)
    center_input: bool = True
    """Whether the encoder sees x − b_dec, as the published checkpoints do."""
    attribution: AttributionConfig = field(default_factory=AttributionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    """How each cycle trains; its seed is derived from this run's `seed` and the cycle."""
    seed: int = 0
    """Determines every cycle's initial weights and order of activations."""

    def __post_init__(self) -> None:
        require_whole("cycles", self.cycles, 1)
        require_coverage(self.coverage)
        take_choice(self, "core_mode", CoreMode)
        if self.max_rate is not None:
            require(0 < self.max_rate <= 1, "max_rate", self.max_rate, "be above 0 and at most 1, or left out")
        require_norm(self.core_norm)
        if self.random_start is not None:
            take_choice(self, "random_start", RandomKind)
        take_choice(self, "rule", DistillRule)
        require_whole("members", self.members, 2)
        if self.rule is DistillRule.CONSENSUS:
            alone = not self.cycle0.source and self.random_start is None
            require(alone, "rule", str(self.rule), "be cycles with cycle0.source or random_start")
        remedy = "Set seed instead: each cycle's follows from it."
        require(self.train.seed == 0, "train.seed", self.train.seed, "be left out", remedy)

    def sae(self, d_model: int, n_core: int) -> SAEConfig:
        """Return what the SAE of a cycle is: the core first, then the same non-core groups in every cycle."""
        prefixes = core_first(self.nesting or matryoshka_nesting(self.width), n_core)
        core = self.core_mode.core(n_core, k_noncore=self.k) if n_core else None
        return SAEConfig(d_model, self.width, self.k, prefixes, core, self.center_input)

    @property
    def n_cycles(self) -> int:
        """Cycles after cycle 0: none when the core is a consensus."""
        return self.cycles if self.rule is DistillRule.CYCLES else 0

    def result_settings(self) -> Json:
        """Return the settings that determine each cycle; not how many there are, nor how often to log and to save."""
        train = {name: value for name, value in self.train.result_settings().items() if name != "seed"}
        return {name: value for name, value in to_dict(self).items() if name != "cycles"} | {"train": train}
