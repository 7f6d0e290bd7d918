"""SynthSAEBench: SAEs on activations whose features are known (Chanin and Garriga-Alonso, 2026, arXiv:2602.14687).

A synthetic model of the `sae-lens` package, built here and not fetched, gives activations made of features that fire by
Zipf's law, correlated, in a hierarchy. Scores are the package's own: each latent as a classifier of its nearest feature
(F1), decoder rows against features (MCC). There is no loss, and so no attribution: the core is chosen by a rule.

This module is for our environment; `synth_worker` does the work in SAEBench's.
"""

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from dmsae.config import Json, from_dict, require, require_whole, take_choice, to_dict
from dmsae.cores.controls import Rule
from dmsae.disk import layout
from dmsae.disk.files import canonical_hash, exclusive_lock, write_json
from dmsae.errors import BenchmarkError, ConfigError
from dmsae.evaluation.beside import part_of_the_way
from dmsae.evaluation.saebench.environment import find_python, started
from dmsae.evaluation.saebench.job import Event
from dmsae.progress import SILENT, Progress

_WORKER = "dmsae.evaluation.saebench.synth_worker"
_RULES = (Rule.FIRING_RATE, Rule.MEAN_ACTIVATION, Rule.RANDOM_SUBSET)
_FEATURES_PER_ROOT = 128


@dataclass(frozen=True, slots=True)
class SynthConfig:
    """What is generated and trained. The defaults are a small version of the published benchmark, for two CPU cores."""

    n_features: int = 2048
    """Features of the synthetic model; published: 16,384."""
    d_model: int = 256
    """Width of its activations; published: 768."""
    width: int = 512
    """Latents of each SAE; published: 4096. Fewer than there are features, as in a language model."""
    k: int | None = None
    """Active latents per sample, the core included. None: as many as there are active features among the `width` most
    frequent ones, which is 25 in the published benchmark."""
    samples: int = 2_000_000
    """Samples that each SAE is trained on, all different; published: 200 million."""
    batch_size: int = 1024
    lr: float = 3e-4
    n_core: int = 8
    """Latents of the core: chosen from the first prefix of the Matryoshka SAE, and kept as detectors."""
    rule: Rule = Rule.MEAN_ACTIVATION
    """How the core is chosen: firing_rate, mean_activation or random_subset. There is no loss gradient here."""
    eval_samples: int = 50_000
    """Samples that scores are measured on; published: 500,000."""
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("n_features", "d_model", "samples", "batch_size", "n_core", "eval_samples"):
            require_whole(name, getattr(self, name), 1)
        if self.k is not None:
            require_whole("k", self.k, 1)
        require_whole("width", self.width, 32)
        require(
            self.n_features >= _FEATURES_PER_ROOT, "n_features", self.n_features, f"be at least {_FEATURES_PER_ROOT}"
        )
        take_choice(self, "rule", Rule)
        require(self.rule in _RULES, "rule", self.rule, f"be one of {', '.join(_RULES)}")
        first = self.width // 32
        require(self.n_core < first, "n_core", self.n_core, f"be below {first}, the size of the first prefix")

    @property
    def n_roots(self) -> int:
        """Trees in the hierarchy of features; published: 128 for 16,384 features."""
        return self.n_features // _FEATURES_PER_ROOT

    @classmethod
    def published(cls) -> Self:
        """Return the settings of the published results."""
        return cls(16_384, 768, 4096, 25, 200_000_000, n_core=64, eval_samples=500_000)


UNTRAINED = "untrained"
"""The name of the null among the SAEs."""


class SynthParts(NamedTuple):
    """The part of the way from the untrained SAE to the ceiling of each score, which is 1."""

    name: str
    f1: float | None
    precision: float | None
    recall: float | None
    mcc: float | None
    uniqueness: float | None
    fve: float | None


class SynthScore(NamedTuple):
    """What the package says of one SAE, and of its core alone."""

    name: str
    l0: float
    f1: float
    precision: float
    recall: float
    mcc: float
    """Mean absolute cosine of decoder rows and features, matched one to one."""
    uniqueness: float
    fve: float
    dead: int
    f1_core: float | None = None
    """F1 of the latents of the core, or of the same latents in the SAE that they were chosen from."""
    mcc_core: float | None = None


@dataclass(frozen=True, slots=True)
class SynthJob:
    """What the worker is given."""

    config: SynthConfig
    out: Path
    cache: Path
    """Where the synthetic model is kept: to build it takes a while."""

    def result(self) -> Path:
        """Return where the scores go."""
        return self.out / layout.SYNTH

    def log(self) -> Path:
        """Return where everything else goes that is printed."""
        return self.out / layout.LOGS / "synth.log"


@dataclass(frozen=True, slots=True)
class Synth:
    """Scores of all SAEs, as `synth.json` holds them."""

    config: SynthConfig
    k: int
    """Active latents that each SAE was asked for."""
    true_l0: float
    """Features that are active per sample."""
    scores: list[SynthScore] = field(default_factory=list)

    def parts(self) -> list[SynthParts]:
        """Return the part of the way of every SAE but the untrained one; nothing if that has no scores."""
        null = next((score for score in self.scores if score.name == UNTRAINED), None)
        return [_parts(score, null) for score in self.scores if null and score is not null]

    def save(self, path: Path) -> None:
        """Write the scores."""
        scores, parts = ([one._asdict() for one in of] for of in (self.scores, self.parts()))
        write_json(path, {**to_dict(self), "scores": scores, "parts": parts})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return scores that were written."""
        try:
            values: Json = json.loads(path.read_text(encoding="utf8"))
            scores = [SynthScore(**score) for score in values["scores"]]
            return cls(from_dict(SynthConfig, values["config"]), values["k"], values["true_l0"], scores)
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
            raise BenchmarkError(f"{path} does not hold scores of SynthSAEBench: {error}.") from error


def _parts(score: SynthScore, null: SynthScore) -> SynthParts:
    figures = SynthParts._fields[1:]
    return SynthParts(score.name, *(part_of_the_way(getattr(score, one), getattr(null, one), 1.0) for one in figures))


def run_synth(config: SynthConfig, out: Path, environment: Path | None = None, progress: Progress = SILENT) -> Synth:
    """Train SAEs on synthetic activations and return their scores; what is finished is kept, and resumes."""
    python = find_python(environment)
    out = out.absolute()
    cache = layout.saebench_cache().absolute() / "synthetic"
    job = SynthJob(config, out, cache)
    if job.result().is_file() and Synth.load(job.result()).config == config:
        return Synth.load(job.result())
    with exclusive_lock(out / layout.LOCK, f"The results in {out}"), tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "job.json"
        write_json(file, to_dict(job))
        with (
            progress.bar("SynthSAEBench", 1, "runs") as bar,
            started(python, _WORKER, file, job.log()) as process,
        ):
            assert process.stdout is not None, "it was asked for"
            for line in process.stdout:
                event = Event.of(line)
                if event.kind == "refused":
                    raise BenchmarkError(event.text)
                bar.advance(0, event.text)
            if process.wait():
                said = job.log().read_text(encoding="utf8", errors="replace").strip().splitlines()[-4:]
                raise BenchmarkError(f"SynthSAEBench ended with status {process.returncode}. {' / '.join(said)}")
    return Synth.load(job.result())


def model_key(config: SynthConfig) -> str:
    """Return a hash of all that the synthetic model depends on."""
    return canonical_hash([config.n_features, config.d_model, config.n_roots, config.seed])[:16]
