"""Algorithm 3: new SAEs from a fixed core, at many sparsities, beside controls and baselines on the same data.

All SAEs of a transfer share one stream of activations and one seed: they differ only in what their names say.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple

from dmsae.activations.sources import ActivationSource, StoreSource
from dmsae.activations.store import Store
from dmsae.config import require, take_choice
from dmsae.cores.controls import RandomKind, random_core, random_detectors
from dmsae.cores.core import Core
from dmsae.cores.norms import CoreNorm, require_norm, with_norm
from dmsae.cores.statistics import sample_activations
from dmsae.devices import training_device
from dmsae.disk.run import claimed, read_settings
from dmsae.distillation.carrier import carrier
from dmsae.distillation.matching import require_matching
from dmsae.errors import ConfigError
from dmsae.evaluation.fidelity import kept_fidelity
from dmsae.progress import SILENT, Progress
from dmsae.ranks import settled
from dmsae.sae.comms import ALONE, Comms
from dmsae.sae.config import CoreConfig, CoreMode, SAEConfig, core_first, matryoshka_nesting
from dmsae.sae.detectors import detect
from dmsae.training.config import TrainConfig
from dmsae.training.crew import share, train_on
from dmsae.training.learner import SAESpec
from dmsae.training.result import TrainResult

Baseline = Literal["msae", "batchtopk", "unconstrained"]


class Budget(StrEnum):
    """What the target sparsity k is a budget for, beside a core that does not compete."""

    NONCORE = "noncore"
    """The non-core latents, in proportion: round(k·(K−c)/K) of them, as in the paper. The core comes on top."""
    TOTAL = "total"
    """All latents: the non-core ones get what the core leaves, so that the measured L0 is k."""


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Which SAEs to train from a core, and which controls and baselines beside them.

    >>> dmsae.TransferConfig(k=(20, 40)).k
    (20, 40)
    """

    k: tuple[int, ...] = (20, 40, 80)
    """Target sparsities. A dense core leaves round(k·(K−c)/K) to the others, as in the paper."""
    width: int = 4096
    """Dictionary width K, the core included; need not be that of the distillation."""
    nesting: tuple[int, ...] = ()
    """Cumulative prefix sizes without a core, ending in `width`. Empty: groups of 1/32, 1/16, 1/8, 1/4 and the rest."""
    core_modes: tuple[CoreMode, ...] = (CoreMode.DENSE,)
    """dense: the core fires freely. sparse: it competes in one BatchTopK of k over all latents. detector: its
    activations are frozen too, not only its encoder rows."""
    budget: Budget = Budget.NONCORE
    """Whether k counts the non-core latents beside a dense or detector core (the paper), or all."""
    random_cores: tuple[RandomKind, ...] = ()
    """Controls beside each of them: cores of equal size in random directions, whose norms are 1, or those of the core,
    or whose covariance is that of the activations. A detector core has one control of its own, whatever is named here:
    random detectors of the same firing rates and mean activations."""
    baselines: tuple[Baseline, ...] = ()
    """Also train, at each k: msae, a Matryoshka SAE without a core; batchtopk, an SAE with one prefix and no core;
    unconstrained, Matryoshka SAEs without a core whose first prefix has the size of core + prefix-0, at two or more k
    around the L0 of the others: what keeping the core costs is read from them."""
    core_norm: CoreNorm = "found"
    """Norm of the core's encoder rows: as found, unit, or as found times this factor."""
    center_input: bool = True
    """Whether the encoder sees x − b_dec."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How all of them train."""

    def __post_init__(self) -> None:
        take_choice(self, "core_modes", CoreMode)
        take_choice(self, "random_cores", RandomKind)
        take_choice(self, "budget", Budget)
        for name in ("k", "core_modes", "random_cores", "baselines"):
            values = list(getattr(self, name))
            require(len(set(values)) == len(values), name, values, "name nothing twice")
        if not self.k or not (self.core_modes or self.baselines):
            raise ConfigError("Nothing to train: give at least one k, and a core mode or a baseline.")
        require_norm(self.core_norm)

    def sae(self, d_model: int, k: int, core: CoreConfig | None) -> SAEConfig:
        """Return one SAE of the transfer; without a core it is a Matryoshka SAE."""
        nesting = self.nesting or matryoshka_nesting(self.width)
        prefixes = core_first(nesting, core.n) if core else nesting
        return SAEConfig(d_model, self.width, k, prefixes, core, self.center_input)


def k_noncore(k: int, width: int, n_core: int) -> int:
    """Return the non-core share of a target sparsity, round(k·(K−c)/K), halves up."""
    return math.floor(k * (width - n_core) / width + 0.5)


def sae_specs(
    config: TransferConfig, core: Core, store: Store | None = None, beside: Mapping[str, Core] | None = None
) -> list[SAESpec]:
    """Return the SAEs of a transfer, in the order in which they are reported.

    Controls and budgets that depend on the activations need a store of them. `beside` are other cores to train like
    this one, by name.
    """
    require_latents(core)
    core = with_norm(core, config.core_norm)
    others = {f"{name}-": with_norm(other, config.core_norm) for name, other in (beside or {}).items()}
    carriers = [
        _Carrier(prefix, mode, source, _detector_l0(config, mode, source, store))
        for mode in config.core_modes
        for prefix, source in ({"": core} | _controls(config, core, mode, store) | others).items()
    ]
    d_model, specs = core.encoder_CD.shape[1], []
    for k in config.k:
        specs += [_carrying(config, k, d_model, one) for one in carriers]
        for baseline in config.baselines:
            specs += _baseline(config, k, d_model, baseline, len(core))
    return specs


class _Carrier(NamedTuple):
    """A core and how the SAEs that carry it hold it."""

    prefix: str
    mode: CoreMode
    core: Core
    detector_l0: float | None


def _carrying(config: TransferConfig, k: int, d_model: int, one: _Carrier) -> SAESpec:
    k_other = _k_noncore(config, k, one.core, one.detector_l0)
    sae = config.sae(d_model, k, one.mode.core(len(one.core), k_other))
    follows = config.budget is Budget.TOTAL and one.mode is CoreMode.DENSE
    return carrier(f"{one.prefix}{one.mode}-k{k}", sae, one.core, follows)


def _baseline(config: TransferConfig, k: int, d_model: int, baseline: Baseline, n_core: int) -> list[SAESpec]:
    """Return the SAEs without a core that are to stand beside those with one."""
    sae = config.sae(d_model, k, None)
    if baseline == "msae":
        return [SAESpec(f"msae-k{k}", sae)]
    if baseline == "batchtopk":
        return [SAESpec(f"batchtopk-k{k}", replace(sae, prefixes=(config.width,)))]
    prefixes = core_first(sae.prefixes, n_core)
    ks = enumerate(unconstrained_ks(k, n_core, config.budget), start=1)
    return [SAESpec(f"unconstrained-{i}-k{k}", replace(sae, k=one, prefixes=prefixes)) for i, one in ks]


def unconstrained_ks(k: int, n_core: int, budget: Budget) -> list[int]:
    """Return sparsities around the L0 of SAEs with a core: about k, or between k and all of the core above it."""
    return [below(k), above(k)] if budget is Budget.TOTAL else [k, k + math.ceil(n_core / 2), k + n_core]


def below(l0: float) -> int:
    """Return a k whose measured L0 is certainly below one that is given, and not by far."""
    return math.floor(0.9 * l0) or 1


def above(l0: float) -> int:
    """Return a k whose measured L0 is certainly above one that is given, and not by far."""
    return math.ceil(1.15 * l0) + 1


def _controls(config: TransferConfig, core: Core, mode: CoreMode, store: Store | None) -> dict[str, Core]:
    """Return the random cores to train beside a core, by the prefix of their names."""
    seed = config.train.seed
    if mode is CoreMode.DETECTOR:
        return {"random-": random_detectors(core, _required(store), seed)} if config.random_cores else {}
    return {f"random-{kind}-": random_core(core, kind, seed, store) for kind in config.random_cores}


def _detector_l0(config: TransferConfig, mode: CoreMode, core: Core, store: Store | None) -> float | None:
    """Return how many detectors fire per token, when the budget has to make room for them."""
    if mode is not CoreMode.DETECTOR or config.budget is Budget.NONCORE:
        return None
    if core.detectors is None:
        raise ConfigError("The core has no offsets and thresholds to make detectors of. Distill it again.")
    fires = detect(sample_activations(_required(store)), core.encoder_CD, core.detectors) > 0
    return float(fires.sum(1).float().mean())


def _required(store: Store | None) -> Store:
    if store is None:
        raise ConfigError("Random detectors and total budgets depend on the activations: give a store of them.")
    return store


def _k_noncore(config: TransferConfig, k: int, core: Core, detector_l0: float | None) -> int:
    """Return how many non-core latents BatchTopK keeps beside a core."""
    if detector_l0 is None:
        kept, most = k_noncore(k, config.width, len(core)), config.width - len(core)
        require(kept <= most, "k", k, f"leave at most the {most} non-core latents to BatchTopK, and this is {kept}")
        return kept
    left = round(k - detector_l0)
    remedy = "Ask for a larger k, or select the core with a cap on firing rates (max_rate)."
    must = f"exceed the {detector_l0:.1f} detectors that fire on the average token by at least 1"
    require(left >= 1, "k", k, must, remedy)
    return left


def transfer(
    config: TransferConfig,
    core: Core,
    store: Store,
    directory: Path | str,
    *,
    beside: Mapping[str, Core] | None = None,
    source: ActivationSource | None = None,
    progress: Progress = SILENT,
    comms: Comms = ALONE,
) -> list[TrainResult]:
    """Train the SAEs of a transfer in a directory, or what is left of them, and return how each ended.

    `beside` are other cores to train in the same way, by name, such as controls. All train on the store's activations,
    or on those of `source`, which must be of the same model, hook and split. Their figures on the store's held-out
    activations are kept beside each.

    >>> recipe = dmsae.TrainConfig(tokens=25_600, batch_size=128, lr=3e-3)
    >>> config = dmsae.TransferConfig(k=(2, 4), width=64, nesting=(16, 64), baselines=("msae",), train=recipe)
    >>> results = dmsae.transfer(config, dmsae.Core.load(run), store, "runs/transfer")
    >>> [result.name for result in results]
    ['dense-k2', 'msae-k2', 'dense-k4', 'msae-k4']
    """
    core.provenance.model.require_same(store.model, "the core", f"the store {store.key}")
    directory, made_from = Path(directory), {"transferred": core.digest()}
    if source is not None:
        require_matching(source, store)
        made_from |= {"heldout_store": store.key}
    specs = sae_specs(config, core, store, beside)
    results = train_on(comms, specs, source or StoreSource(store), directory, config.train, made_from, progress)
    keep_fidelity(directory, results, store, config.train.device, progress, comms)
    return results


def keep_fidelity(
    run: Path, results: list[TrainResult], store: Store, device: str, progress: Progress, comms: Comms = ALONE
) -> None:
    """Measure the held-out figures of each SAE of a run, unless that has been done, and keep them beside it.

    The ranks of a mesh whose first one calls this share the SAEs among them.
    """
    saes = [result.directory.absolute() if comms.both.size > 1 else result.directory for result in results]
    with claimed(run, read_settings(run)):
        share(comms, _Measurement(saes, store, device), progress)


class _Measurement(NamedTuple):
    """The held-out figures of SAEs, as a job for all ranks."""

    saes: list[Path]
    store: Store
    device: str

    def run(self, progress: Progress, comms: Comms) -> None:
        with settled(comms.both):
            for directory in self.saes[comms.both.rank :: comms.both.size]:
                kept_fidelity(directory, self.store, training_device(self.device), progress)


def require_latents(core: Core) -> None:
    """Raise when a core is empty."""
    if not len(core):
        raise ConfigError(
            "The core is empty: no latent was selected in both of the last two cycles. Distill with a larger k, more "
            "tokens per cycle, or a higher coverage."
        )
