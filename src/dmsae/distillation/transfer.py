"""Algorithm 3: new SAEs from a fixed core, at many sparsities, beside controls and baselines on the same data.

All SAEs of a transfer share one stream of activations and one seed: what differs between them is what their names say.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dmsae.activations.base_model import training_device
from dmsae.activations.store import Store
from dmsae.activations.stream import ActivationStream, LiveGroups, StoreGroups, live_facts
from dmsae.cores.core import Core, RandomKind, random_core
from dmsae.errors import ConfigError
from dmsae.sae.sae import CoreMode, SAEConfig, core_first, matryoshka_prefixes
from dmsae.training.learner import Member
from dmsae.training.schedule import TrainConfig
from dmsae.training.trainer import Outcome, Trainer

Baseline = Literal["msae", "batchtopk"]


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Which SAEs to train from a core, and what beside them."""

    k: tuple[int, ...] = (20, 40, 80)
    """Target sparsities. A dense core leaves round(k·(K−c)/K) to the others, as in the paper."""
    width: int = 4096
    """Dictionary width K, the core included; need not be that of the distillation."""
    prefixes: tuple[int, ...] = ()
    """Cumulative prefix sizes without a core, ending in `width`. Empty: groups of 1/32, 1/16, 1/8, 1/4 and the rest."""
    core_modes: tuple[CoreMode, ...] = (CoreMode.DENSE,)
    """dense: the core fires freely. sparse: it competes in one BatchTopK of k over all latents."""
    random_cores: tuple[RandomKind, ...] = ()
    """Controls beside each of them: cores of equal size in random directions, of unit norm or matched norms."""
    baselines: tuple[Baseline, ...] = ()
    """Also train, at each k: msae, a Matryoshka SAE without a core; batchtopk, an SAE with one prefix and no core."""
    center_input: bool = True
    """Whether the encoder sees x − b_dec."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How all of them train."""

    def __post_init__(self) -> None:
        for name in ("k", "core_modes", "random_cores", "baselines"):
            if len(set(values := getattr(self, name))) != len(values):
                raise ConfigError(f"{name} = {list(values)} names something twice.")
        if not self.k or not (self.core_modes or self.baselines):
            raise ConfigError("Nothing to train: give at least one k, and a core mode or a baseline.")

    def nesting(self) -> tuple[int, ...]:
        """Return the cumulative prefix sizes without a core."""
        return self.prefixes or matryoshka_prefixes(self.width)


def k_noncore(k: int, width: int, n_core: int) -> int:
    """Return the non-core share of a target sparsity, round(k·(K−c)/K), halves up."""
    return math.floor(k * (width - n_core) / width + 0.5)


def members(config: TransferConfig, core: Core) -> list[Member]:
    """Return the SAEs of a transfer, in the order in which they are reported."""
    require_latents(core)
    d_model = core.encoder_CD.shape[1]
    sources = {"": core} | {
        f"random-{kind}-": random_core(core, kind, config.train.seed) for kind in config.random_cores
    }
    found = []
    for k in config.k:
        for mode in config.core_modes:
            for prefix, source in sources.items():
                sae = _with_core(config, d_model, k, mode, len(core))
                found.append(Member(f"{prefix}{mode}-k{k}", sae, source.encoder_CD))
        for baseline in config.baselines:
            prefixes = config.nesting() if baseline == "msae" else (config.width,)
            sae = SAEConfig(d_model, config.width, k, prefixes, center_input=config.center_input)
            found.append(Member(f"{baseline}-k{k}", sae))
    return found


def transfer(
    config: TransferConfig, core: Core, store: Store, directory: Path, live: LiveGroups | None = None
) -> list[Outcome]:
    """Train the SAEs of a transfer, on the store or on `live` activations, and return how each fared."""
    require_same_model(core, store)
    trained = members(config, core)
    train = config.train
    source = live or StoreGroups(store, train.seed)
    stream = ActivationStream(source, train.batch_size, train.seed, training_device(train.device))
    made_from = {"store": store.key, "model": store.model, "transferred": core.digest(), **live_facts(live)}
    try:
        return Trainer(trained, train, stream, directory, made_from).run()
    finally:
        stream.close()


def require_latents(core: Core) -> None:
    """Raise unless there is anything in a core to build on."""
    if not len(core):
        raise ConfigError(
            "The core is empty: no latent was selected in both of the last two cycles. Distil with a larger k, more "
            "tokens per cycle, or a higher coverage."
        )


def require_same_model(core: Core, store: Store) -> None:
    """Raise unless a core and a store come from the same place in the same model."""
    for name in ("weights_sha256", "hook"):
        was, now = core.provenance.model.get(name), store.model[name]
        if was != now:
            raise ConfigError(
                f"The core was distilled from {core.provenance.model.get('name')} with {name} {was}, but the store "
                f"{store.key} holds activations of {store.model['name']} with {name} {now}. Choose a "
                "store of that model and hook: elsewhere the core's directions mean nothing."
            )


def _with_core(config: TransferConfig, d_model: int, k: int, mode: CoreMode, n_core: int) -> SAEConfig:
    kept = k_noncore(k, config.width, n_core) if mode is CoreMode.DENSE else k
    return SAEConfig(
        d_model, config.width, kept, core_first(config.nesting(), n_core), n_core, mode, config.center_input
    )
