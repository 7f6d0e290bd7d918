"""Do independent distillations find the same latents? Two of them, which share nothing but the text, are compared.

What each finds is matched one to one with what the other finds, by encoder and decoder rows together. A latent is found
again when both its encoder and its decoder cosine exceed 0.7. Beside it stand the prefix-0 of the two SAEs, a
consensus, and for each core as many random rows with the covariance of the activations. Each seed is a pair of its own,
and so independent.

Then SAEs with different seeds are trained from each core of one run, from random ones and from none: does what is not
frozen agree more beside a core that they share?
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dmsae.config import Json
from dmsae.cores.controls import RandomKind, random_core, random_detectors
from dmsae.cores.core import Core
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.distill import Distillation
from dmsae.distillation.transfer import Budget, TransferConfig
from dmsae.errors import AttributionError, TrainingError
from dmsae.evaluation.assignment import match_rows
from dmsae.experiments.grid import FRESH, Grid
from dmsae.experiments.lab import Lab
from dmsae.experiments.parts.consensus import agreed
from dmsae.experiments.pricing import detectors, fitting
from dmsae.sae.config import CoreMode
from dmsae.sae.sae import SAE
from dmsae.seeds import derive_seed
from dmsae.training.config import TrainConfig

_SAME = 0.7
"""Encoder and decoder cosine from which on a latent counts as found again."""


class Latents(NamedTuple):
    """Some latents of an SAE."""

    encoder_CD: Tensor
    decoder_CD: Tensor
    fires_BC: Tensor | None
    """Where each fires on held-out activations; random rows are in no SAE and fire nowhere."""


def run(lab: Lab, grid: Grid, seed: int) -> Json:
    """Return how much two independent distillations agree on, after each length of training; and how much the rest of
    SAEs does that share a core."""
    pairs: list[Json] = []
    left_out: Json = {}
    for factor in grid.token_factors:
        base = replace(lab.base, train=replace(lab.base.train, tokens=round(lab.base.train.tokens * factor)))
        one, other = (
            _at_first(lab, grid, config) | _later(lab, grid, config)
            for config in (replace(base, seed=seed), replace(base, seed=seed + FRESH))
        )
        alike = {name: compare(one[name], other[name]) for name in one if name in other}
        if factor == grid.token_factors[0]:
            rest, left_out = _rest(lab, grid, replace(base, seed=seed))
            alike |= rest
        pairs += [{"what": name, "tokens": base.train.tokens, **figures} for name, figures in alike.items()]
    return {"rows": [], "pairs": pairs, "left_out": left_out}


def _at_first(lab: Lab, grid: Grid, config: DistillConfig) -> dict[str, Latents]:
    """Return what cycle 0 finds, by name, and random rows in the place of its first core."""
    start = lab.start(config)
    first = lab.first_core(replace(config, max_rate=grid.max_rate))
    return {
        "prefix-0": latents(lab, start.sae, torch.arange(start.sae.config.prefixes[0])),
        "first core, capped": latents(lab, start.sae, first.slots_C),
        "random rows": _random_rows(lab, first, config.seed),
    }


def _later(lab: Lab, grid: Grid, config: DistillConfig) -> dict[str, Latents]:
    """Return what distillations and a consensus find, by name, and random rows in the place of each."""
    start, capped = lab.start(config), replace(config, max_rate=grid.max_rate)
    found = {}
    for mode, asked in ((CoreMode.DENSE, config), (CoreMode.DETECTOR, capped)):
        if done := _distilled(lab, asked, mode):
            found[f"distilled, {mode}"] = latents(lab, done.last_sae, done.distilled.slots_C)
            found[f"random rows for distilled, {mode}"] = _random_rows(lab, done.distilled, config.seed)
    with suppress(AttributionError):  # they may agree on nothing
        consensus = agreed(lab, grid, capped)
        found["consensus"] = latents(lab, start.sae, consensus.slots_C)
        found["random rows for consensus"] = _random_rows(lab, consensus, config.seed)
    return found


def _random_rows(lab: Lab, like: Core, seed: int) -> Latents:
    """Return as many random rows with the covariance of the activations as a core has latents."""
    rows_CD = random_core(like, RandomKind.COVARIANCE_MATCHED, seed, lab.store).encoder_CD
    return Latents(rows_CD, rows_CD, None)


def _distilled(lab: Lab, config: DistillConfig, mode: CoreMode) -> Distillation | None:
    """Return a distillation, unless it failed or found nothing that lasts; the part on cycles tells why."""
    try:
        done = lab.distill(replace(config, core_mode=mode))
    except TrainingError:
        return None
    return done if len(done.distilled) else None


@torch.no_grad()
def latents(lab: Lab, sae: SAE, slots: Tensor) -> Latents:
    """Return some latents of an SAE, and where they fire on the store's held-out activations."""
    sae = sae.cpu()
    fires = torch.cat([sae.encode(x_BD.float())[:, slots] > 0 for x_BD in lab.store.heldout().split(2048)])
    return Latents(sae.W_enc[slots].detach(), sae.W_dec[slots].detach(), fires)


def compare(one: Latents, other: Latents) -> Json:
    """Return how alike two sets of latents are, matched one to one."""
    matching = match_rows(_joined(one), _joined(other))
    mine = matching.matched.nonzero().squeeze(1)
    theirs = matching.partners_K[mine]
    cosines = [
        torch.cosine_similarity(a[mine].double(), b[theirs].double())
        for a, b in ((one.encoder_CD, other.encoder_CD), (one.decoder_CD, other.decoder_CD))
    ]
    same = (cosines[0] > _SAME) & (cosines[1] > _SAME)
    figures = {
        "sizes": [len(one.encoder_CD), len(other.encoder_CD)],
        "encoder_cosine": float(cosines[0].mean()),
        "decoder_cosine": float(cosines[1].mean()),
        "share_found": float(same.sum() / max(len(one.encoder_CD), len(other.encoder_CD))),
    }
    if one.fires_BC is None or other.fires_BC is None:
        return figures
    return figures | _overlap(one.fires_BC[:, mine], other.fires_BC[:, theirs])


def _overlap(one_BC: Tensor, other_BC: Tensor) -> Json:
    """Return the Jaccard index of where partners fire, and its value if both fired independently; means over them."""
    jaccard_C = (one_BC & other_BC).sum(0).double() / (one_BC | other_BC).sum(0).clamp(min=1)
    rates_C = one_BC.double().mean(0), other_BC.double().mean(0)
    both_C = rates_C[0] * rates_C[1]
    chance_C = both_C / (rates_C[0] + rates_C[1] - both_C).clamp(min=1e-12)
    return {"jaccard": float(jaccard_C.mean()), "jaccard_chance": float(chance_C.mean())}


def _joined(some: Latents) -> Tensor:
    """Return rows whose cosine is the mean of encoder and decoder cosine."""
    return torch.cat([normalize(rows.float()) for rows in (some.encoder_CD, some.decoder_CD)], dim=1)


def _rest(lab: Lab, grid: Grid, config: DistillConfig) -> tuple[dict[str, Json], Json]:
    """Return how much the unfrozen prefix-0 of SAEs agrees, when they share a core and when they do not, as the mean
    over all pairs of them; and which cores did not fit the budget."""
    shared, left_out = _shared(lab, grid, config)
    found: dict[str, list[Latents]] = {}
    for repeat in range(grid.repeats):
        train = replace(config.train, seed=derive_seed(config.seed, "consistency", repeat))
        for name, some in _prefix0(lab, shared, train):
            found.setdefault(name, []).append(some)
    return {name: _mean([compare(*pair) for pair in combinations(some, 2)]) for name, some in found.items()}, left_out


def _mean(compared: Sequence[Json]) -> Json:
    """Return the mean of each figure over pairs of equal sizes."""
    figures = {name: fmean(one[name] for one in compared) for name in compared[0] if name != "sizes"}
    return {"sizes": compared[0]["sizes"], **figures}


class _Shared(NamedTuple):
    """SAEs that share cores, and what is said of the latents beside each, by the beginning of the SAE's name."""

    chosen: TransferConfig
    core: Core
    beside: dict[str, Core]
    names: dict[str, str]


def _shared(lab: Lab, grid: Grid, config: DistillConfig) -> tuple[list[_Shared], Json]:
    """Return the transfers of the cores that a run finds, as detectors beside random ones and none, and dense beside
    random ones; and which cores did not fit the budget."""
    capped = replace(config, max_rate=grid.max_rate)
    chosen = replace(detectors(lab, config, "consistency"), random_cores=(), baselines=("msae",))
    cores = {"detectors of the first core": lab.first_core(capped)}
    if done := _distilled(lab, capped, CoreMode.DETECTOR):
        cores["distilled detectors"] = done.distilled
        # One random core for all SAEs: they share it as they share the others.
        cores["random detectors"] = random_detectors(done.distilled, lab.store, chosen.train.seed)
    with suppress(AttributionError):  # SAEs may agree on nothing
        cores["a consensus"] = agreed(lab, grid, capped)
    fits, left_out = fitting(lab, chosen, cores)
    shared = []
    if fits:
        first, *others = fits
        names = {"detector-": _beside(first), "msae-": "the same without a core"}
        names |= {f"{i}-": _beside(name) for i, name in enumerate(others)}
        shared.append(_Shared(chosen, fits[first], {str(i): fits[name] for i, name in enumerate(others)}, names))
    if done := _distilled(lab, config, CoreMode.DENSE):
        dense = replace(chosen, core_modes=(CoreMode.DENSE,), budget=Budget.NONCORE, baselines=())
        control = random_core(done.distilled, RandomKind.NORM_MATCHED, chosen.train.seed)
        names = {"dense-": _beside("a distilled dense core"), "0-": _beside("random directions")}
        shared.append(_Shared(dense, done.distilled, {"0": control}, names))
    return shared, left_out


def _beside(core: str) -> str:
    return f"the rest beside {core}"


def _prefix0(lab: Lab, shared: Sequence[_Shared], train: TrainConfig) -> Iterator[tuple[str, Latents]]:
    """Yield the non-core latents of prefix-0 of each SAE, trained in one way, and what is said of them."""
    for one in shared:
        for result in lab.transfer(replace(one.chosen, train=train), one.core, one.beside):
            sae = SAE.load(result.directory)
            name = next(name for beginning, name in one.names.items() if result.name.startswith(beginning))
            yield name, latents(lab, sae, torch.arange(sae.config.n_core, sae.config.prefixes[0]))
