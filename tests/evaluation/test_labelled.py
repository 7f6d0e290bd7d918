"""Labelled texts and their activations."""

from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

from conftest import WORDS, Recorder
from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.disk.files import sha256_of
from dmsae.errors import AssetError, ConfigError, CorpusError, ModelError
from dmsae.evaluation.concept_removal import ConceptRemovalConfig
from dmsae.evaluation.concepts import ConceptsConfig
from dmsae.evaluation.labelled import LabelledConfig, read_classes, read_table, table_activations
from dmsae.evaluation.measures import MEASURES
from dmsae.evaluation.probing import ProbingConfig
from dmsae.evaluation.prompts import last_token_activations, token_activations
from dmsae.text import assets


def write_table(path: Path, rows: list[tuple[str, str]]) -> str:
    path.write_text("prompt,target\n" + "\n".join(f'"{text}",{label}' for text, label in rows) + "\n", encoding="utf8")
    return str(path)


@pytest.fixture
def animals(tmp_path: Path) -> str:
    rows = [(f"w{i % 20} w{i // 20} w7", "cat") for i in range(40)]
    rows += [(f"w{20 + i % 20} w{i // 20} w8", "ant") for i in range(40)]
    return write_table(tmp_path / "animals.csv", rows)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> BaseModel:
    return BaseModel.load(ModelConfig(name=str(tiny_model), hook=0, device="cpu"))


def test_classes_are_distinct_texts_of_several_words_and_the_last_label_is_positive(tmp_path: Path) -> None:
    rows = [("a b", "yes"), ("a b", "yes"), ("alone", "yes"), ("c d", "no"), ("e f", "no"), ("e f", "yes")]
    assert read_classes(write_table(tmp_path / "t.csv", rows)) == (["c d"], ["a b"])


def test_a_table_is_split_into_balanced_parts_without_a_text_in_both(animals: str) -> None:
    config = LabelledConfig(tables=(animals,), n_train=40, n_test=20)
    table = read_table(animals, config)
    assert (len(table.train_texts), len(table.test_texts)) == (40, 20)
    assert table.train_labels.sum() == 20
    assert table.test_labels.sum() == 10
    assert not set(table.train_texts) & set(table.test_texts)
    positive = {text for text, label in zip(table.train_texts, table.train_labels.tolist(), strict=True) if label}
    assert all(text.endswith("w7") for text in positive)  # "cat" sorts after "ant"


def test_the_split_depends_on_the_seed_alone(animals: str) -> None:
    def texts(seed: int) -> list[str]:
        return read_table(animals, LabelledConfig(tables=(animals,), n_train=20, n_test=4, seed=seed)).train_texts

    assert texts(0) == texts(0)
    assert texts(0) != texts(1)


def test_too_few_texts_and_too_many_labels_are_errors_with_numbers(animals: str, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"has 40 usable texts, but 60 are asked for"):
        read_table(animals, LabelledConfig(tables=(animals,), n_train=100, n_test=20))
    three = write_table(tmp_path / "three.csv", [("a b", "x"), ("c d", "y"), ("e f", "z")])
    with pytest.raises(CorpusError, match=r"has 3 labels \(x, y, z\); expected two"):
        read_classes(three)
    with pytest.raises(ConfigError, match=r"n_train = 21; it must be even"):
        LabelledConfig(n_train=21)


def test_bundled_tables_are_looked_up_in_the_asset() -> None:
    with pytest.raises(AssetError, match="probes"):
        read_classes("96_spam_is")


def test_default_tables_are_reserved_so_never_trained_on() -> None:
    reserved = assets.find("probes").reserved
    for name in LabelledConfig().tables:
        assert any(fnmatch(f"{name}.csv.zst", pattern) for pattern in reserved), name


def test_last_token_activations_are_those_of_each_text_alone(model: BaseModel) -> None:
    texts = ["w1 w2", "w3 w4 w5 w6", "w7 w8 w9"]
    x = last_token_activations(model, texts, max_tokens=8)
    for text, row in zip(texts, x, strict=True):
        alone = model.activations(torch.tensor([model.tokenizer(text).input_ids]))[0, -1]
        torch.testing.assert_close(row, alone)


def test_prompts_begin_as_they_are_asked_to(model: BaseModel, tmp_path: Path) -> None:
    bos, texts = model.tokenizer.bos_token_id, ["w1 w2", "w3 w4"]
    for wanted in (None, True, False):
        x = last_token_activations(model.reading(wanted), texts, max_tokens=8, cache=tmp_path)
        ids = model.tokenizer(texts[0], add_special_tokens=False).input_ids
        alone = model.activations(torch.tensor([[bos, *ids] if wanted else ids]))[0, -1]
        torch.testing.assert_close(x[0], alone)
    assert model.prepend_bos is None


def test_outliers_are_left_out_of_all_tokens(model: BaseModel, tmp_path: Path) -> None:
    texts = ["w1 w2 w3 w4", "w5 w6 w7"]
    everything = token_activations(model, texts, max_tokens=8, cache=tmp_path)
    norms = everything.x_BD.norm(dim=1)
    ratio = float(norms.sort().values[-2] / norms.median()) * 1.0001
    usual = token_activations(model.reading(None, ratio), texts, max_tokens=8, cache=tmp_path)
    kept = norms < norms.max()
    assert int((~kept).sum()) == 1
    assert torch.equal(usual.x_BD, everything.x_BD[kept])
    assert torch.equal(usual.text_B, everything.text_B[kept])


def test_long_texts_keep_their_last_tokens(model: BaseModel) -> None:
    cut, whole = (last_token_activations(model, [text], max_tokens=3) for text in ("w1 w2 w3 w4 w5", "w3 w4 w5"))
    assert torch.equal(cut, whole)


def test_all_tokens_but_the_first_belong_to_their_text(model: BaseModel) -> None:
    texts = ["w1 w2 w3", "w4 w5", "w6 </s> w7"]
    activations = token_activations(model, texts, max_tokens=8)
    assert activations.text_B.tolist() == [0, 0, 1, 2]  # a special token does not count
    expected = model.activations(torch.tensor([model.tokenizer("w1 w2 w3").input_ids]))[0, 1:]
    torch.testing.assert_close(activations.x_BD[:2], expected)


def test_a_text_of_one_token_is_an_error(model: BaseModel) -> None:
    with pytest.raises(ModelError, match=r"1 of 2 texts have fewer than two tokens, among them 'w3'"):
        last_token_activations(model, ["w1 w2", "w3"], max_tokens=8)


def test_the_cache_changes_no_number_and_spares_the_model(
    animals: str, model: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LabelledConfig(tables=(animals,), n_train=20, n_test=10)
    (without,) = table_activations(model, config)
    (cold,) = table_activations(model, config, tmp_path / "cache")
    monkeypatch.setattr(BaseModel, "activations", None)
    (warm,) = table_activations(model, config, tmp_path / "cache")
    for name in ("x_train", "y_train", "x_test", "y_test"):
        assert torch.equal(getattr(without, name), getattr(cold, name))
        assert torch.equal(getattr(without, name), getattr(warm, name))


def test_other_texts_and_other_hooks_have_other_cache_files(model: BaseModel, tiny_model: Path, tmp_path: Path) -> None:
    other = BaseModel.load(ModelConfig(name=str(tiny_model), hook=1, device="cpu"))
    made = [
        last_token_activations(which, [" ".join(WORDS[start : start + 3])], 8, tmp_path)
        for which in (model, other)
        for start in (0, 1)
    ]
    assert len({tuple(x.flatten().tolist()) for x in made}) == 4
    assert len(list(tmp_path.glob("*.safetensors"))) == 4


def test_a_damaged_cache_file_is_made_again(model: BaseModel, tmp_path: Path) -> None:
    first = last_token_activations(model, ["w1 w2"], 8, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(b"damaged")
    assert torch.equal(last_token_activations(model, ["w1 w2"], 8, tmp_path), first)
    assert file.stat().st_size > 7


def test_measures_name_the_user_s_tables_and_what_they_hold(animals: str, tmp_path: Path) -> None:
    birds = write_table(tmp_path / "birds.csv", [("a b", "x")])
    probing = ProbingConfig(LabelledConfig((animals, "96_spam_is")))
    concepts = ConceptsConfig(pairs=(("96_spam_is", birds),), classes=(animals, "59_wikidata_occupation_isjournalist"))
    assert MEASURES["probing"].files(probing) == {animals: sha256_of(Path(animals))}
    assert MEASURES["concept_removal"].files(ConceptRemovalConfig(concepts)) == {
        name: sha256_of(Path(name)) for name in (birds, animals)
    }


def test_another_asset_takes_another_version_of_the_measures_that_read_it() -> None:
    """Kept results are known by the version of their measure, not by that of the asset."""
    versions = {name: MEASURES[name].version for name in ("probing", "concept_removal", "disentanglement")}
    read = {name: assets.find(name).wheel_sha256[:8] for name in ("probes", "cities")}
    assert (versions, read) == (
        {"probing": 2, "concept_removal": 3, "disentanglement": 2},
        {"probes": "245700c8", "cities": "efa1dd28"},
    )


@pytest.mark.real
def test_a_table_that_was_trained_on_is_worth_a_warning() -> None:
    recorder = Recorder()
    read_classes("96_spam_is", recorder)
    assert not recorder.warnings
    read_classes("100_news_fake", recorder)
    assert "part of the bundled training text" in recorder.warnings[0]
