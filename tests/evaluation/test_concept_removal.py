"""SCR and TPP by their formulas, and on planted concepts."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from conftest import WORDS
from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.errors import ConfigError, CorpusError
from dmsae.evaluation.concept_removal import (
    ConceptRemovalConfig,
    ablate,
    latent_effects,
    measure,
    score_scr,
    score_tpp,
    scr,
    scr_probes,
    strongest,
    tpp_probes,
)
from dmsae.evaluation.concepts import (
    Classes,
    ConceptsConfig,
    Pooled,
    TwoLabels,
    read_exclusive_classes,
    read_two_labels,
)
from dmsae.evaluation.prompts import TokenActivations
from dmsae.evaluation.subject import Subject
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE

C = 100.0


def sae_of(rows_KD: Tensor) -> SAE:
    """An SAE whose encoder rows, scaled to unit norm, are its decoder rows too."""
    width, d_model = rows_KD.shape
    sae = SAE(SAEConfig(d_model=d_model, width=width, k=1, prefixes=(width,)))
    with torch.no_grad():
        sae.W_enc_noncore.copy_(torch.nn.functional.normalize(rows_KD, dim=1))
        sae.W_dec.copy_(sae.W_enc_noncore)
    return sae


def texts_of(mean_x: Tensor, generator: torch.Generator) -> Pooled:
    """Texts of three tokens each that have these means, but for noise."""
    x = mean_x.repeat_interleave(3, 0)
    x = x + 0.05 * torch.randn(x.shape, generator=generator)
    return Pooled(TokenActivations(x, torch.arange(len(mean_x)).repeat_interleave(3)), len(mean_x))


@pytest.fixture
def two_labels() -> TwoLabels:
    """Label 0 is the sign of dimension 0, label 1 that of dimension 1, which is the stronger one."""
    draw = torch.Generator().manual_seed(0)
    rows = [(a, b, part) for part in range(3) for a in (0, 1) for b in (0, 1) for _ in range(30)]
    labels = torch.tensor([(a, b) for a, b, _ in rows]).T
    part = torch.tensor([part for *_, part in rows])
    x = torch.zeros(len(rows), 6)
    x[:, 0], x[:, 1] = labels[0] - 0.5, 3.0 * labels[1] - 1.5
    agree = labels[0] == labels[1]
    return TwoLabels(("weak", "strong"), texts_of(x, draw), labels, part == 0, (part == 1) & agree, part == 2)


@pytest.fixture
def classes() -> Classes:
    """Four classes, each a dimension of its own."""
    draw = torch.Generator().manual_seed(0)
    of_text = torch.arange(4).repeat_interleave(60)
    x = 2 * torch.nn.functional.one_hot(of_text, 6).float()
    is_test = torch.arange(len(of_text)) % 60 >= 40
    return Classes(("a", "b", "c", "d"), texts_of(x, draw), of_text, is_test)


def test_removing_the_stronger_label_frees_the_probe_for_the_weaker(two_labels: TwoLabels) -> None:
    probes = scr_probes(two_labels, C)
    score = score_scr(sae_of(torch.cat([torch.eye(6), -torch.eye(6)])), two_labels, probes, [2, 4])
    assert (score.kept, score.removed) == ("weak", "strong")
    assert score.before == pytest.approx(0.5, abs=0.1)  # the biased probe reads the strong label
    assert score.clean == 1
    assert score.after[2] == pytest.approx(1, abs=0.02)
    assert score.score[2] == pytest.approx((score.after[2] - score.before) / (1 - score.before))


def test_a_latent_that_mixes_both_labels_frees_nothing(two_labels: TwoLabels) -> None:
    mixed = torch.zeros(2, 6)
    mixed[:, :2] = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    score = score_scr(sae_of(mixed), two_labels, scr_probes(two_labels, C), [2])
    assert score.score[2] < 0.3


def test_scr_by_hand() -> None:
    assert scr(after=0.8, before=0.6, clean=0.9) == pytest.approx(2 / 3)
    assert scr(after=0.5, before=0.6, clean=0.9) == pytest.approx(-1 / 3)
    assert scr(after=0.9, before=0.6, clean=0.6005) == 0


def test_a_latent_for_each_class_perturbs_its_probe_alone(classes: Classes) -> None:
    """A probe that loses its class says no to everything: its accuracy falls from 1 to ½."""
    probes = tpp_probes(classes, 0, C)
    for score in score_tpp(sae_of(torch.eye(6)), classes, probes, [1]):
        assert score.clean == 1
        assert score.intended[1] == pytest.approx(0.5)
        assert score.unintended[1] == pytest.approx(0, abs=0.05)


def test_a_latent_for_all_classes_perturbs_none_in_particular(classes: Classes) -> None:
    probes = tpp_probes(classes, 0, C)
    together = torch.zeros(1, 6)
    together[0, :4] = 1
    for score in score_tpp(sae_of(together), classes, probes, [1]):
        assert score.intended[1] - score.unintended[1] < 0.2


def test_each_probe_is_tested_on_as_many_texts_of_the_class_as_of_all_others_evenly(classes: Classes) -> None:
    for i, index in enumerate(tpp_probes(classes, 0, C).test):
        counts = torch.bincount(classes.of_text[index], minlength=4).tolist()
        assert counts[i] == 20
        assert sorted(counts[:i] + counts[i + 1 :]) == [6, 7, 7]
        assert classes.is_test[index].all()


def test_effects_by_hand() -> None:
    """Differences of means 2, −1, 0; the probe along the decoder rows 0.5, −1, 1."""
    sae = sae_of(torch.eye(3))
    f = torch.tensor([[3.0, 0, 1], [1, 0, 1], [0, 1, 1], [0, 1, 1]])
    y, probe = torch.tensor([1, 1, 0, 0]), torch.tensor([0.5, -1, 1], dtype=torch.float64)
    assert latent_effects(f, y, probe, sae).tolist() == [1, 1, 0]
    assert latent_effects(f, y, probe, sae, only_gains=True).tolist() == [1, 0, 0]


def test_only_latents_with_an_effect_are_ablated() -> None:
    effects = torch.tensor([0.0, 3, -2, 1])
    assert strongest(effects, 1).tolist() == [1]
    assert strongest(effects, 10).tolist() == [1, 3]


def test_ablating_means_is_the_mean_of_ablated_tokens_with_the_error_kept() -> None:
    draw = torch.Generator().manual_seed(0)
    sae = SAE.init(SAEConfig(5, 12, 3, (12,)), draw)
    x, text = torch.randn(8, 5, generator=draw), torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    latents = torch.tensor([2, 7])
    with torch.no_grad():
        f = sae.encode(x)
        ablated = f.clone()
        ablated[:, latents] = 0
        by_token = sae.decode(ablated) + (x - sae.decode(f))
    expected = torch.stack([by_token[text == i].mean(0) for i in (0, 1)]).double()
    pooled = Pooled(TokenActivations(x, text), 2)
    torch.testing.assert_close(
        ablate(pooled.mean_x(), pooled.mean_codes(sae), sae, latents), expected, rtol=1e-4, atol=1e-5
    )


def write_table(path: Path, first: str, second: str) -> str:
    """A table of 48 texts of two words whose last word tells the class."""
    rows = [f"{word} {other} {first},1" for word in WORDS[20:28] for other in WORDS[30:33]]
    rows += [f"{word} {other} {second},0" for word in WORDS[20:28] for other in WORDS[30:33]]
    path.write_text("prompt,target\n" + "\n".join(rows) + "\n", encoding="utf8")
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> ConceptRemovalConfig:
    pair = write_table(tmp_path / "one.csv", "w1", "w2"), write_table(tmp_path / "two.csv", "w3", "w4")
    tables = tuple(write_table(tmp_path / f"class{i}.csv", f"w{5 + i}", "w9") for i in range(3))
    return ConceptRemovalConfig(ConceptsConfig(pairs=(pair,), classes=tables, n_train=4, n_test=4), n_ablated=(1, 4))


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> BaseModel:
    return BaseModel.load(ModelConfig(name=str(tiny_model), hook=0, device="cpu"))


def test_texts_with_two_labels_come_in_all_combinations(config: ConceptRemovalConfig, model: BaseModel) -> None:
    pair = read_two_labels(model, config.concepts.pairs[0], config.concepts)

    def combinations(part: Tensor) -> list[int]:
        return torch.bincount(2 * pair.labels[0, part] + pair.labels[1, part], minlength=4).tolist()

    assert combinations(pair.is_balanced) == combinations(pair.is_test) == [4, 4, 4, 4]
    assert combinations(pair.is_biased) == [8, 0, 0, 8]
    assert not (pair.is_test & (pair.is_balanced | pair.is_biased)).any()
    assert pair.names == ("one", "two")


def test_classes_share_no_text(tmp_path: Path, model: BaseModel) -> None:
    tables = tuple(write_table(tmp_path / f"{i}.csv", "w5", "w9") for i in range(2))
    with pytest.raises(CorpusError, match="has 0 usable texts"):
        read_exclusive_classes(model, ConceptsConfig(classes=tables, n_train=4, n_test=4))


def test_measure_is_the_same_with_and_without_a_cache(
    config: ConceptRemovalConfig, model: BaseModel, tmp_path: Path
) -> None:
    subjects = [
        Subject(f"seed {seed}", SAE.init(SAEConfig(16, 32, 4, (32,)), torch.Generator().manual_seed(seed)))
        for seed in (0, 1)
    ]
    without = measure(subjects, model, config)
    cold = measure(subjects, model, config, tmp_path / "cache")
    warm = measure(subjects, model, config, tmp_path / "cache")
    assert without == cold == warm
    assert "unreliable" in without[0].caveat
    assert set(without[0].scr) == set(without[0].tpp) == {1, 4}
    first, second = without[0].pairs[0], without[1].pairs[0]
    assert (first.before, first.clean) == (second.before, second.clean)  # these depend on no SAE
    (alone,) = measure(subjects[1:], model, config)
    assert alone == without[1]


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="at least two tables"):
        ConceptsConfig(classes=("one",))
    with pytest.raises(ConfigError, match="each table once"):
        ConceptsConfig(classes=("one", "one"))
    with pytest.raises(ConfigError, match=r"n_ablated = 0"):
        ConceptRemovalConfig(n_ablated=(0,))
