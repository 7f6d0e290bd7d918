"""k-sparse probing finds planted features, and says so beside its ceiling and floor."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conftest import WORDS
from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.errors import ConfigError
from dmsae.evaluation.labelled import LabelledConfig, TableActivations
from dmsae.evaluation.probing import ProbeScore, ProbingConfig, measure, probe, score_table, telling_latents
from dmsae.evaluation.subject import Subject
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE

CEILING = ProbeScore(1.0, 1.0)


def sae_of(rows_KD: Tensor) -> SAE:
    """An SAE that encodes with these rows and no bias."""
    width, d_model = rows_KD.shape
    sae = SAE(SAEConfig(d_model=d_model, width=width, k=1, prefixes=(width,)))
    with torch.no_grad():
        sae.W_enc_noncore.copy_(rows_KD)
        sae.W_dec.copy_(torch.nn.functional.normalize(rows_KD, dim=1))
    return sae


@pytest.fixture
def planted() -> TableActivations:
    """Dimension 3 is on in the positive class alone; all others are noise."""
    draw = torch.Generator().manual_seed(0)

    def part(n: int) -> tuple[Tensor, Tensor]:
        y = torch.arange(n) % 2
        x = torch.randn(n, 8, generator=draw)
        x[:, 3] = y * (1 + torch.rand(n, generator=draw)) - (1 - y)
        return x, y

    return TableActivations("planted", *part(200), *part(100))


def test_a_planted_feature_gives_accuracy_1_at_k_1(planted: TableActivations) -> None:
    score = score_table(sae_of(torch.eye(8)), planted, CEILING, ProbingConfig())
    assert score.latents[0] == 3
    assert score.sparse[1] == ProbeScore(1.0, 1.0)
    assert score.majority == 0.5


def test_a_dictionary_without_the_feature_stays_near_the_floor(planted: TableActivations) -> None:
    blind = torch.eye(8)
    blind[3] = 0
    score = score_table(sae_of(blind), planted, CEILING, ProbingConfig())
    assert score.sparse[1].accuracy < 0.65


def test_a_feature_split_into_two_needs_two_latents() -> None:
    """Each of two latents covers half of the positive class."""
    y = torch.arange(400) % 2
    x = torch.zeros(400, 4)
    x[(y == 1) & (torch.arange(400) % 4 == 1), 0] = 1
    x[(y == 1) & (torch.arange(400) % 4 == 3), 1] = 1
    table = TableActivations("split", x[:300], y[:300], x[300:], y[300:])
    score = score_table(sae_of(torch.eye(4)), table, CEILING, ProbingConfig(k=(1, 2)))
    assert score.sparse[1].accuracy == 0.75
    assert score.sparse[2].accuracy == 1


def test_latents_are_ranked_by_the_difference_of_class_means() -> None:
    """By hand: means of the classes (2, 0, 3) and (0, 1, 5); divided by mean activation 2, 1, 4: 1, 1, ½."""
    f = torch.tensor([[2.0, 0, 2], [2, 0, 4], [0, 1, 6], [0, 1, 4]])
    y = torch.tensor([1, 1, 0, 0])
    assert telling_latents(f, y, 3, divide_by_mean=False).tolist() == [0, 2, 1]
    assert telling_latents(f, y, 3, divide_by_mean=True).tolist()[2] == 2
    assert telling_latents(f, y, 1, divide_by_mean=False).tolist() == [0]


def test_latents_that_never_fire_come_last() -> None:
    f = torch.tensor([[0.0, 1.0], [0, 0]])
    assert telling_latents(f, torch.tensor([1, 0]), 2, divide_by_mean=True).tolist() == [1, 0]


def test_the_chosen_penalty_finds_one_feature_among_forty_on_sixty_texts() -> None:
    draw = torch.Generator().manual_seed(1)
    y = torch.arange(120) % 2
    x = torch.randn(120, 40, generator=draw)
    x[:, 0] += 2.5 * (2 * y - 1)
    score = probe(x[:60], y[:60], x[60:], y[60:])
    assert score.accuracy > 0.9
    assert score.auc > 0.97


@pytest.fixture
def tables(tmp_path: Path) -> Callable[[], tuple[str, ...]]:
    """Two tables whose classes end in other words."""

    def write() -> tuple[str, ...]:
        paths = []
        for number, (one, other) in enumerate((("w7", "w8"), ("w9", "w10"))):
            rows = [f"{a} {b} {one},1" for a in WORDS[20:26] for b in WORDS[30:36]]
            rows += [f"{a} {b} {other},0" for a in WORDS[20:26] for b in WORDS[30:36]]
            path = tmp_path / f"table{number}.csv"
            path.write_text("prompt,target\n" + "\n".join(rows) + "\n", encoding="utf8")
            paths.append(str(path))
        return tuple(paths)

    return write


def test_measure_scores_each_subject_alike_with_and_without_a_cache(
    tables: Callable[[], tuple[str, ...]], tiny_model: Path, tmp_path: Path
) -> None:
    model = BaseModel.load(ModelConfig(name=str(tiny_model), hook=0, device="cpu"))
    config = ProbingConfig(labelled=LabelledConfig(tables=tables(), n_train=40, n_test=20))
    subjects = [
        Subject(f"seed {seed}", SAE.init(SAEConfig(16, 32, 4, (32,)), torch.Generator().manual_seed(seed)))
        for seed in (0, 1)
    ]
    without = measure(subjects, model, config)
    cold = measure(subjects, model, config, tmp_path / "cache")
    warm = measure(subjects, model, config, tmp_path / "cache")
    assert without == cold == warm
    assert len(without) == 2
    for result in without:
        assert result.dense_auc == 1  # the last word alone tells the classes apart
        assert result.majority == 0.5
        assert 0.5 <= result.accuracy[20] <= 1
        assert [table.table for table in result.tables] == ["table0", "table1"]
        assert result.accuracy[1] == sum(table.sparse[1].accuracy for table in result.tables) / 2
    (alone,) = measure(subjects[1:], model, config)
    assert alone == without[1]


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"probing\.k = 0"):
        ProbingConfig(k=(0,))
    with pytest.raises(ConfigError, match="at least one number"):
        ProbingConfig(k=())
