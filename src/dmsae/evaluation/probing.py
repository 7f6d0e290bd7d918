"""k-sparse probing: how well does a handful of latents tell two classes of text apart?

As in sae-probes (Kantamneni et al., 2025) and SAEBench (Karvonen et al., 2025): the k latents whose mean activations
differ most between the classes of the training part feed a logistic regression; its accuracy and AUC on the test part
are the score. A regression on the raw activations is the ceiling, the majority class the floor.
The strength of the ℓ₂ penalty is chosen as sae-probes chooses it: ten values of C from 10⁵ down to 10⁻⁵, by the AUC on
the last fifth of the training part, at most 100 texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.config import require, require_whole
from dmsae.evaluation import logistic
from dmsae.evaluation.cached import cached, tensor_key
from dmsae.evaluation.labelled import LabelledConfig, TableActivations, table_activations
from dmsae.evaluation.subject import Dictionary, Subject
from dmsae.progress import SILENT, Progress

_STRENGTHS = torch.logspace(5, -5, 10, dtype=torch.float64)
"""Values of C, the weakest penalty first: of equally good ones the first is taken."""
_MAX_VALIDATION = 100


@dataclass(frozen=True, slots=True)
class ProbingConfig:
    """Which texts are probed, and with how many latents."""

    labelled: LabelledConfig = field(default_factory=LabelledConfig)
    k: tuple[int, ...] = (1, 2, 5, 20)
    """How many latents a probe may read."""
    divide_by_mean: bool = True
    """Divide each latent by the mean of its non-zero activations before the classes are compared, as sae-probes does.
    SAEBench's own sparse probing does not."""

    def __post_init__(self) -> None:
        require(len(self.k) > 0, "probing.k", self.k, "hold at least one number")
        for k in self.k:
            require_whole("probing.k", k, 1)


class ProbeScore(NamedTuple):
    """How a probe does on texts that it was not trained on."""

    accuracy: float
    auc: float


class TableScore(NamedTuple):
    """All probes of one table."""

    table: str
    sparse: dict[int, ProbeScore]
    """By number of latents."""
    latents: list[int]
    """The latents that probes read, the first k of them for each k."""
    dense: ProbeScore
    """The probe on raw activations."""
    majority: float
    """Accuracy of always naming the more frequent class."""


class ProbingResult(NamedTuple):
    """Mean scores over all tables, and those of each table."""

    accuracy: dict[int, float]
    """Test accuracy by number of latents."""
    auc: dict[int, float]
    """Area under the ROC curve by number of latents."""
    dense_accuracy: float
    """The ceiling: a probe on raw activations."""
    dense_auc: float
    majority: float
    """The floor: always naming the more frequent class."""
    tables: list[TableScore]


def measure(
    subjects: Sequence[Subject],
    model: BaseModel,
    config: ProbingConfig,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> list[ProbingResult]:
    """Return the probing scores of each subject."""
    tables = table_activations(model, config.labelled, cache, progress)
    dense = [_dense_score(table, cache) for table in tables]
    results = []
    with progress.bar("probing", len(subjects) * len(tables), "table") as bar:
        for subject in subjects:
            scores = []
            for table, ceiling in zip(tables, dense, strict=True):
                scores.append(score_table(subject.dictionary, table, ceiling, config))
                bar.advance(1, subject.name)
            results.append(_mean(scores))
    return results


@torch.no_grad()
def score_table(
    dictionary: Dictionary, table: TableActivations, dense: ProbeScore, config: ProbingConfig
) -> TableScore:
    """Return the sparse probes' scores on one table, beside the ceiling and the floor."""
    f_train, f_test = (dictionary.encode(x.to(dictionary.W_dec)).cpu() for x in (table.x_train, table.x_test))
    latents = telling_latents(f_train, table.y_train, max(config.k), config.divide_by_mean)
    sparse = {k: probe(f_train[:, latents[:k]], table.y_train, f_test[:, latents[:k]], table.y_test) for k in config.k}
    share = float(table.y_test.double().mean())
    return TableScore(table.name, sparse, latents.tolist(), dense, max(share, 1 - share))


def telling_latents(f_BK: Tensor, y_B: Tensor, n: int, divide_by_mean: bool) -> Tensor:
    """Return the n latents whose mean activations differ most between the classes, the most different first."""
    difference_K = (f_BK[y_B == 1].mean(0) - f_BK[y_B == 0].mean(0)).abs()
    if divide_by_mean:
        mean_K = f_BK.abs().sum(0) / ((f_BK != 0).sum(0) + 1e-6)
        difference_K = difference_K / (mean_K + 1e-6)
    return difference_K.sort(descending=True, stable=True).indices[:n]


def probe(x_train: Tensor, y_train: Tensor, x_test: Tensor, y_test: Tensor) -> ProbeScore:
    """Return the test score of a logistic regression whose penalty was chosen on the end of the training part."""
    n_validation = min(len(x_train) // 5, _MAX_VALIDATION)
    x_fit, x_validate = x_train[:-n_validation], x_train[-n_validation:]
    candidates = logistic.fit(x_fit, y_train[:-n_validation], _STRENGTHS)
    aucs = [logistic.auc(logits, y_train[-n_validation:]) for logits in candidates.logits(x_validate)]
    best = max(range(len(aucs)), key=aucs.__getitem__)
    logits = logistic.fit(x_train, y_train, float(_STRENGTHS[best])).logits(x_test)
    return ProbeScore(logistic.accuracy(logits, y_test), logistic.auc(logits, y_test))


def _dense_score(table: TableActivations, cache: Path | None) -> ProbeScore:
    """Return the score of the probe on raw activations, which no SAE changes."""
    tensors = (table.x_train, table.y_train, table.x_test, table.y_test)

    def make() -> dict[str, Tensor]:
        return {"score": torch.tensor(probe(*tensors), dtype=torch.float64)}

    made_of = {"version": 1, "table": [tensor_key(tensor) for tensor in tensors]}
    return ProbeScore(*cached(cache, "dense-probe", made_of, make)["score"].tolist())


def _mean(tables: list[TableScore]) -> ProbingResult:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    ks = tables[0].sparse
    return ProbingResult(
        accuracy={k: mean([table.sparse[k].accuracy for table in tables]) for k in ks},
        auc={k: mean([table.sparse[k].auc for table in tables]) for k in ks},
        dense_accuracy=mean([table.dense.accuracy for table in tables]),
        dense_auc=mean([table.dense.auc for table in tables]),
        majority=mean([table.majority for table in tables]),
        tables=tables,
    )
