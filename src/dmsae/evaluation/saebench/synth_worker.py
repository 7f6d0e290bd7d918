"""SynthSAEBench in SAEBench's environment: the synthetic model, SAEs trained on it, their scores."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmsae.activations.importing import import_store
from dmsae.activations.store import Store
from dmsae.config import Json, from_dict, to_dict
from dmsae.cores.attribution import Attribution, CandidateCodes
from dmsae.cores.controls import core_by_rule, random_detectors
from dmsae.cores.core import Core, Provenance
from dmsae.disk import layout
from dmsae.disk.files import exclusive_lock
from dmsae.errors import DmsaeError
from dmsae.evaluation.nulls import NullKind, NullMaker
from dmsae.evaluation.saebench.job import Event
from dmsae.evaluation.saebench.synth import UNTRAINED, Synth, SynthConfig, SynthJob, SynthScore, model_key
from dmsae.evaluation.saebench.worker import Events, take_standard_output
from dmsae.evaluation.subject import Dictionary
from dmsae.progress import Bar
from dmsae.sae.config import DenseCore, DetectorCore, SAEConfig, core_first, matryoshka_nesting
from dmsae.sae.detectors import detect
from dmsae.sae.sae import SAE
from dmsae.seeds import derive_seed
from dmsae.training.config import TrainConfig
from dmsae.training.learner import SAESpec
from dmsae.training.trainer import train_together

_BLOCK_ROWS = 16_384
_SAMPLE_ROWS = 32_768
"""Samples on which candidates are ranked, detectors matched and nulls made."""
MSAE, BATCHTOPK, DETECTORS, RANDOM, DENSE = "msae", "batchtopk", "detector-core", "random-detectors", "dense-core"


class SyntheticSource:
    """Endless samples of a synthetic model: an epoch is one block, and no two blocks are alike."""

    def __init__(self, model: Any, config: SynthConfig) -> None:
        self._model, self._config = model, config

    @property
    def d_model(self) -> int:
        """Width of the activations."""
        return self._config.d_model

    @property
    def facts(self) -> Json:
        """What the activations are made from."""
        return {"synthetic": to_dict(self._config)}

    def block(self, epoch: int, index: int, seed: int) -> Tensor | None:
        """Return the samples of a block; they depend on its number and the seed alone."""
        return None if index else self.sample(_BLOCK_ROWS, derive_seed(seed, "synthetic", epoch))

    def sample(self, n: int, seed: int) -> Tensor:
        """Return n samples."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            rows: Tensor = self._model.sample(n).detach()
        return rows


class Saying:
    """A `Progress` that tells the process which started this one."""

    def __init__(self, events: Events) -> None:
        self._events = events

    @contextmanager
    def bar(self, what: str, total: int, unit: str) -> Iterator[Bar]:
        yield _Counted(self._events, what, total, unit)

    def note(self, message: str) -> None:
        self._events.say(Event("progress", text=message))

    def warn(self, message: str) -> None:
        self._events.say(Event("progress", text=message))


class _Counted:
    def __init__(self, events: Events, what: str, total: int, unit: str) -> None:
        self._events, self._what, self._total, self._unit, self._done = events, what, total, unit, 0

    def advance(self, count: int, note: str = "") -> None:
        self._done += count
        self._events.now_and_then(f"{self._what} {self._done}/{self._total} {self._unit} {note}")

    def skip(self, count: int) -> None:
        self._done += count


def build_model(config: SynthConfig, cache: Path) -> Any:
    """Return the synthetic model in the published proportions, built once and kept."""
    from sae_lens import synthetic

    place = cache / model_key(config)
    if (place / synthetic.SYNTHETIC_MODEL_CONFIG_FILENAME).is_file():
        return synthetic.SyntheticModel.load_from_disk(place)
    model = synthetic.SyntheticModel(
        synthetic.SyntheticModelConfig(
            num_features=config.n_features,
            hidden_dim=config.d_model,
            firing_probability=synthetic.ZipfianFiringProbabilityConfig(exponent=0.5, max_prob=0.4, min_prob=5e-4),
            hierarchy=synthetic.HierarchyConfig(
                total_root_nodes=config.n_roots,
                branching_factor=4,
                max_depth=3,
                mutually_exclusive_portion=1.0,
                mutually_exclusive_min_depth=0,
                compensate_probabilities=True,
                scale_children_by_parent=True,
            ),
            orthogonalization=synthetic.OrthogonalizationConfig(num_steps=100, lr=3e-4),
            correlation=synthetic.LowRankCorrelationConfig(rank=25, correlation_scale=0.1),
            mean_firing_magnitudes=synthetic.LinearMagnitudeConfig(start=5.0, end=4.0),
            std_firing_magnitudes=synthetic.FoldedNormalMagnitudeConfig(mean=0.5, std=0.5),
            bias=0.5,
            seed=config.seed,
        )
    )
    unfinished = place.with_name(f"{place.name}-unfinished")
    model.save(unfinished)
    unfinished.rename(place)
    return model


class Benchmark:
    """Everything that is trained and scored on one synthetic model."""

    def __init__(self, job: SynthJob, events: Events) -> None:
        self.job, self.config, self._progress = job, job.config, Saying(events)
        self._progress.note("building the synthetic model")
        self.model = build_model(job.config, job.cache)
        self.source = SyntheticSource(self.model, job.config)
        rates_F = self._feature_rates()
        self.true_l0 = float(rates_F.sum())
        most_frequent = rates_F.sort(descending=True).values[: job.config.width]
        self.k = job.config.k or max(1, round(float(most_frequent.sum())))

    def run(self) -> Synth:
        """Train, score, and return the scores."""
        config, store = self.config, self._store()
        saes = self._train("baselines", [self._spec(MSAE), self._spec(BATCHTOPK)])
        core = choose_core(saes[MSAE], store, config)
        control = random_detectors(core, store, config.seed)
        specs = [self._spec(DETECTORS, core), self._spec(RANDOM, control), self._spec(DENSE, core)]
        saes |= self._train("cores", specs)
        untrained = NullMaker(saes[MSAE], store).make(NullKind.UNTRAINED)
        scores = [self._score(name, sae, core) for name, sae in saes.items()]
        scores.append(self._score(UNTRAINED, untrained, core))
        return Synth(config, self.k, self.true_l0, scores)

    def _store(self) -> Store:
        """Return a store of samples, for what asks for one."""
        x, heldout = (
            self.source.sample(_SAMPLE_ROWS, derive_seed(self.config.seed, name)) for name in ("x", "heldout")
        )
        name = f"synthetic-{model_key(self.config)}"
        return import_store(name, x, heldout=heldout, root=self.job.out / "stores", dtype="float32")

    def _train(self, stage: str, specs: list[SAESpec]) -> dict[str, SAE]:
        config = self.config
        recipe = TrainConfig(tokens=config.samples, batch_size=config.batch_size, lr=config.lr, seed=config.seed)
        results = train_together(specs, self.source, self.job.out / stage, recipe, progress=self._progress)
        return {result.name: SAE.load(result.directory) for result in results}

    def _spec(self, name: str, core: Core | None = None) -> SAESpec:
        """Return an SAE to train; a core of detectors counts towards the budget, a dense one follows it."""
        config = self.config
        if core is None:
            nesting = (config.width,) if name == BATCHTOPK else matryoshka_nesting(config.width)
            return SAESpec(name, SAEConfig(config.d_model, config.width, self.k, nesting))
        prefixes = core_first(matryoshka_nesting(config.width), len(core))
        if name == DENSE:
            dense = DenseCore(len(core), self.k)
            sae = SAEConfig(config.d_model, config.width, self.k, prefixes, dense)
            return SAESpec(name, sae, core.encoder_CD, total_budget=True)
        assert core.detectors is not None, "it was chosen from an SAE"
        x_BD = self.source.sample(_SAMPLE_ROWS, derive_seed(config.seed, "x"))
        l0_core = float((detect(x_BD, core.encoder_CD, core.detectors) > 0).float().sum(1).mean())
        kept = DetectorCore(len(core), max(1, round(self.k - l0_core)))
        sae = SAEConfig(config.d_model, config.width, self.k, prefixes, kept)
        return SAESpec(name, sae, core.encoder_CD, core.detectors)

    def _score(self, name: str, sae: Dictionary, core: Core) -> SynthScore:
        """Return the package's scores of an SAE, and of the latents that are its core or were chosen as one."""
        whole = self._evaluate(sae)
        latents = core.slots_C if name == MSAE else torch.arange(sae.config.n_core)
        part = self._evaluate(_Part(sae, latents)) if len(latents) else None
        return SynthScore(
            name,
            l0=whole.sae_l0,
            f1=whole.classification.f1_score,
            precision=whole.classification.precision,
            recall=whole.classification.recall,
            mcc=whole.mcc,
            uniqueness=whole.uniqueness,
            fve=whole.explained_variance,
            dead=whole.dead_latents,
            f1_core=part.classification.f1_score if part else None,
            mcc_core=part.mcc if part else None,
        )

    def _evaluate(self, sae: Any) -> Any:
        from sae_lens import synthetic

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.config.seed, "scores"))  # the same samples for all
            return synthetic.eval_sae_on_synthetic_data(
                _Scored(sae),
                self.model.feature_dict,
                self.model.activation_generator,
                num_samples=self.config.eval_samples,
                batch_size=4096,
            )

    def _feature_rates(self) -> Tensor:
        """Return the share of samples in which each feature is active, [n_features]."""
        n_active, n_batches = torch.zeros(self.config.n_features), 8
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            for _ in range(n_batches):
                _, f_BF = self.model.sample_with_features(_SAMPLE_ROWS // n_batches)
                n_active += (f_BF > 0).sum(0)
        return n_active / _SAMPLE_ROWS


class _Scored(nn.Module):
    """A dictionary as the package's scoring asks for one."""

    def __init__(self, dictionary: Any) -> None:
        super().__init__()
        self.W_dec, self.encode, self.decode = dictionary.W_dec.detach(), dictionary.encode, dictionary.decode


class _Part:
    """Some latents of a dictionary, as if there were no others."""

    def __init__(self, whole: Dictionary, latents: Tensor) -> None:
        self.W_dec, self._whole, self._latents = whole.W_dec[latents], whole, latents

    def encode(self, x: Tensor) -> Tensor:
        return self._whole.encode(x)[:, self._latents]

    def decode(self, f: Tensor) -> Tensor:
        return f @ self.W_dec + self._whole.b_dec


@torch.no_grad()
def choose_core(sae: SAE, store: Store, config: SynthConfig) -> Core:
    """Return the core that the rule takes from an SAE's first prefix, ranked on a sample."""
    codes = CandidateCodes(sae)
    fired_P, sum_P = torch.zeros(2, sae.config.prefixes[0], dtype=torch.float64)
    n = 0
    for x_BD in store.heldout().split(config.batch_size):
        f_PB = codes(x_BD)
        fired_P += (f_PB > 0).sum(1)
        sum_P += f_PB.sum(1, dtype=torch.float64)
        n += len(x_BD)
    ranked = Attribution(
        latents_P=torch.arange(sae.config.prefixes[0]),
        scores_P=sum_P / n,
        firing_rates_P=fired_P / n,
        n_positions=n,
        facts={"method": "mean activation; there is no loss", "store": store.key},
        mean_activations_P=sum_P / fired_P.clamp(min=1),
    )
    provenance = Provenance.of(store, to_dict(config))
    return core_by_rule(config.rule, sae, ranked, config.n_core, store, provenance, config.seed)


def main(arguments: list[str]) -> int:
    """Run the job in a file, and return the exit status."""
    events = take_standard_output()
    try:
        values: Mapping[str, Any] = json.loads(Path(arguments[0]).read_text(encoding="utf8"))
        job = from_dict(SynthJob, values)
        with exclusive_lock(job.cache / layout.LOCK, "The place of synthetic models"):
            benchmark = Benchmark(job, events)
        benchmark.run().save(job.result())
    except DmsaeError as error:
        events.say(Event("refused", text=str(error)))
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
