"""An evaluation measures what is missing, keeps what is finished, and holds every score against its nulls."""

import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from conftest import Recorder
from dictionaries import random_sae
from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.activations.harvest import harvest
from dmsae.activations.importing import import_store
from dmsae.activations.request import HarvestConfig
from dmsae.activations.store import Store
from dmsae.config import to_dict
from dmsae.disk import layout
from dmsae.disk.artifact import write_sealed
from dmsae.disk.files import canonical_hash
from dmsae.errors import BusyError, CheckpointError, ConfigError, StoreError
from dmsae.evaluation.evaluate import EvaluateConfig, digest_of, evaluate, load_model
from dmsae.evaluation.labelled import LabelledConfig, own_tables
from dmsae.evaluation.measures import MEASURES, Measure, Score
from dmsae.evaluation.nulls import NullConfig, NullKind, NullMaker
from dmsae.evaluation.probing import ProbingConfig
from dmsae.evaluation.redundancy import RedundancyConfig
from dmsae.evaluation.scores import Evaluation
from dmsae.evaluation.subject import Subject
from dmsae.progress import SILENT, Progress
from dmsae.sae.config import SAEConfig, SparseCore
from dmsae.sae.sae import SAE
from planted import planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = SAEConfig(32, 64, 4, (16, 64))


@dataclass(frozen=True)
class ToyConfig:
    plus: float = 0.0


class Toy(NamedTuple):
    size: float
    best: float


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return planted_store(tmp_path / "store", n_rows=512).store


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Two toy measures, and the names of the subjects that the first was called with each time."""
    calls: list[list[str]] = []

    def toy(subjects: Sequence[Subject], store: Store, config: ToyConfig, progress: Progress = SILENT) -> list[Toy]:
        calls.append([subject.name for subject in subjects])
        values = {"": 5.0, "untrained": 1.0, "random_encoder": 3.0, "permuted_decoder": -4.0, "random_firing": 0.0}
        return [Toy(values[subject.null_kind] + config.plus, 9.0) for subject in subjects]

    def broken(subjects: Sequence[Subject], config: ToyConfig, progress: Progress = SILENT) -> list[Toy]:
        raise StoreError("The toy is broken. Mend it.")

    scores = (Score("size", "", ceiling="best"), Score("best", ""))
    monkeypatch.setitem(MEASURES, "toy", Measure("a toy", toy, ToyConfig, ("store",), scores))
    monkeypatch.setitem(MEASURES, "broken", Measure("a broken toy", broken, ToyConfig, (), scores))
    return calls


def run(
    store: Store, out: Path, names: Sequence[str] = ("a",), progress: Progress = SILENT, **config: Any
) -> Evaluation:
    saes = {name: random_sae(CONFIG, seed, 0.2) for seed, name in enumerate(names)}
    return evaluate(saes, store, out, EvaluateConfig(**{"measures": ("toy",)} | config), progress=progress)


def test_one_sae_under_two_names_is_measured_once(store: Store, asked: list[list[str]], tmp_path: Path) -> None:
    sae = random_sae(CONFIG, 0, 0.2)
    done = evaluate({"a": sae, "b": sae}, store, tmp_path, EvaluateConfig(("toy",), nulls=()))
    assert [len(names) for names in asked] == [1]
    assert done.measures["toy"]["results"] == {"a": {"size": 5.0, "best": 9.0}, "b": {"size": 5.0, "best": 9.0}}


def test_every_score_stands_beside_its_nulls(asked: list[list[str]], store: Store, tmp_path: Path) -> None:
    evaluation = run(store, tmp_path / "out", ("a", "b"))
    assert len(asked[0]) == 6, "both are of one shape and fire as often: they share the nulls of the first"
    rows = evaluation.rows()
    assert [(row.sae, row.figure) for row in rows] == [("a", "size"), ("b", "size"), ("a", "best"), ("b", "best")]
    size = rows[0]
    assert size.nulls == {"untrained": 1.0, "random_encoder": 3.0, "permuted_decoder": -4.0, "random_firing": 0.0}
    assert (size.score, size.null, size.ceiling) == (5.0, 3.0, 9.0), "the null to beat is the nearest to the ceiling"
    assert size.part == pytest.approx((5 - 3) / (9 - 3))
    assert (rows[2].null, rows[2].part) == (None, None), "without a ceiling there is no way to it"


def test_saes_alike_in_size_and_firing_share_nulls(asked: list[list[str]], store: Store, tmp_path: Path) -> None:
    one, rare = random_sae(CONFIG, 0, 0.2), random_sae(CONFIG, 1, 1.0)
    alike = SAE(CONFIG)
    alike.load_state_dict(one.state_dict())
    alike.W_dec.data[0] *= -1
    other_shape = random_sae(SAEConfig(32, 64, 4, (32, 64)), 0, 0.2)
    saes = {"one": one, "rare": rare, "alike": alike, "other shape": other_shape}
    nulls = (NullKind.UNTRAINED, NullKind.RANDOM_FIRING)
    evaluation = evaluate(saes, store, tmp_path / "shared", EvaluateConfig(("toy",), nulls))
    owners = Counter(subject["null_of"] for subject in evaluation.subjects.values() if subject["null_of"])
    assert owners == {"one": 2, "rare": 2, "other shape": 2}
    rows = {row.sae: row.nulls for row in evaluation.rows() if row.figure == "size"}
    assert set(rows["alike"]) == {"untrained", "random_firing"}, "it is compared with those of the first"
    assert Evaluation.load(tmp_path / "shared").rows() == evaluation.rows()
    assert len(asked[-1]) == 4 + 6
    evaluate(saes, store, tmp_path / "own", EvaluateConfig(("toy",), nulls, share_nulls=0.0))
    assert len(asked[-1]) == 4 + 8
    with pytest.raises(ConfigError, match="share_nulls"):
        EvaluateConfig(share_nulls=-1.0)


def test_cores_of_nearly_the_same_size_share_nulls(store: Store) -> None:
    sizes = {"20": 20, "21": 21, "24": 24, "none": 0}
    makers = {}
    for name, n_core in sizes.items():
        core = SparseCore(n_core) if n_core else None
        sae = random_sae(SAEConfig(32, 64, 4, (n_core + 20, 64), core), 0, 0.2)
        makers[name] = NullMaker(sae, store)
    assert makers["20"].may_stand_for(makers["21"], 0.2)
    assert not makers["20"].may_stand_for(makers["21"], 0.01), "a latent more is more than that"
    assert not makers["20"].may_stand_for(makers["24"], 0.15), "a fifth more is more than that"
    assert not makers["20"].may_stand_for(makers["none"], 0.5), "without a core there is no null of one"


def test_a_null_that_is_the_sae_in_what_a_measure_reads_is_left_out(
    asked: list[list[str]], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = frozenset({NullKind.RANDOM_ENCODER})
    monkeypatch.setitem(MEASURES, "toy", MEASURES["toy"]._replace(same_nulls=same))
    size = run(store, tmp_path / "out").rows()[0]
    assert asked == [["a", "a / untrained", "a / permuted_decoder", "a / random_firing"]]
    assert size.null == 1.0
    assert size.part == pytest.approx((5 - 1) / (9 - 1))


@pytest.mark.parametrize("kind", NullKind)
def test_what_measures_leave_out_is_the_sae_in_what_they_read(kind: NullKind, store: Store) -> None:
    sae = random_sae(CONFIG, 0, 0.2)
    null, x = NullMaker(sae, store).make(kind), store.heldout()[:64]
    rows = (one.W_dec[one.W_dec.sum(1).argsort()] for one in (sae, null))
    assert torch.equal(null.encode(x), sae.encode(x)) == (kind in MEASURES["probing"].same_nulls)
    assert torch.equal(*rows) == (kind in MEASURES["redundancy"].same_nulls)


def test_the_null_of_a_figure_itself_is_one_to_beat(
    asked: list[list[str]], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = (
        Score("size", "", 9.0, null="best"),
        Score("size", "", null="best", better="lower"),
        Score("size", "", better="higher"),
    )
    monkeypatch.setitem(MEASURES, "toy", MEASURES["toy"]._replace(scores=scores))
    near, low, high = run(store, tmp_path / "out").rows()
    assert near.nulls["own"] == 9.0
    assert (near.null, low.null, high.null) == (9.0, -4.0, 3.0)


def test_what_is_kept_is_not_measured_again(asked: list[list[str]], store: Store, tmp_path: Path) -> None:
    first = run(store, tmp_path / "out")
    again = run(store, tmp_path / "out")
    assert len(asked) == 1
    assert again == first
    run(store, tmp_path / "out", ("a", "b"))
    assert asked[1] == ["b"], "only what is new: it shares the nulls of the first"
    run(store, tmp_path / "out", ("a", "b"), share_nulls=0.0)
    assert [name.split(" / ")[0] for name in asked[2]] == ["b"] * 4, "its own nulls"
    run(store, tmp_path / "out", settings={"toy": ToyConfig(plus=1.0)})
    assert len(asked[3]) == 5, "other settings"
    run(store, tmp_path / "out", null=NullConfig(seed=1))
    assert len(asked[4]) == 4, "other nulls of the same SAE"
    run(store, tmp_path / "out", nulls=())
    assert len(asked) == 5


def test_a_new_version_of_a_measure_measures_again(
    asked: list[list[str]], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store, tmp_path / "out", nulls=())
    monkeypatch.setitem(MEASURES, "toy", MEASURES["toy"]._replace(version=2))
    run(store, tmp_path / "out", nulls=())
    assert len(asked) == 2


def test_results_depend_on_what_the_user_s_files_hold(
    asked: list[list[str]], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.csv"
    monkeypatch.setitem(MEASURES, "toy", MEASURES["toy"]._replace(files=lambda config: own_tables([str(table)])))
    bundled = run(store, tmp_path / "out", nulls=())
    assert "files" not in bundled.measures["toy"], "there is no such file, so the name is that of a bundled table"
    facts = ["toy", 1, to_dict(ToyConfig()), bundled.subjects["a"]["digest"], store.key]
    assert (tmp_path / "out" / layout.RESULTS / f"toy-{canonical_hash(facts)[:16]}.json").is_file()
    for n_measured, text in enumerate(("prompt,target", "prompt,target\na b,1"), 2):
        table.write_text(text)
        for _ in range(2):
            found = run(store, tmp_path / "out", nulls=())
            assert len(asked) == n_measured
        assert found.measures["toy"]["files"] == {str(table): hashlib.sha256(text.encode()).hexdigest()}


def test_a_table_that_cannot_be_read_leaves_the_other_measures(
    asked: list[list[str]], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "table.csv").touch()
    monkeypatch.setattr("dmsae.evaluation.labelled.sha256_of", unreadable)
    settings = {"probing": ProbingConfig(LabelledConfig((str(tmp_path / "table.csv"),)))}
    evaluation = run(store, tmp_path / "out", measures=("probing", "toy"), nulls=(), settings=settings)
    assert "table cannot be read: [Errno 13] Permission denied" in evaluation.not_run["probing"]


def test_subjects_come_a_few_at_a_time_and_an_interruption_keeps_those_before(
    asked: list[list[str]], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmsae.evaluation.evaluate._AT_ONCE", 2)
    function = MEASURES["toy"].function

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if len(asked) == 2:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    monkeypatch.setitem(MEASURES, "toy", MEASURES["toy"]._replace(function=interrupted))
    with pytest.raises(KeyboardInterrupt):
        run(store, tmp_path / "out")
    assert [len(call) for call in asked] == [2, 2]
    monkeypatch.setitem(MEASURES, "toy", MEASURES["toy"]._replace(function=function))
    run(store, tmp_path / "out")
    assert [len(call) for call in asked] == [2, 2, 1]


def test_a_measure_that_cannot_run_leaves_the_others(asked: list[list[str]], store: Store, tmp_path: Path) -> None:
    recorder = Recorder()
    evaluation = run(store, tmp_path / "out", progress=recorder, measures=("broken", "toy"))
    assert evaluation.not_run == {"broken": "The toy is broken. Mend it."}
    assert list(evaluation.measures) == ["toy"]
    assert recorder.warnings == ["broken has not run. The toy is broken. Mend it."]
    with pytest.raises(ConfigError, match="None of the measures could run: The toy is broken"):
        run(store, tmp_path / "out", measures=("broken",))


def test_an_evaluation_can_be_read_again(asked: list[list[str]], store: Store, tmp_path: Path) -> None:
    evaluation = run(store, tmp_path / "out", ("a", "b"))
    read = Evaluation.load(tmp_path / "out")
    assert read == evaluation
    assert read.saes() == ["a", "b"]
    written = json.loads((tmp_path / "out" / layout.EVALUATION).read_text())
    assert written["scores"][0]["part"] == pytest.approx(1 / 3)
    assert written["store"] == store.key
    with pytest.raises(CheckpointError, match="holds no evaluation"):
        Evaluation.load(tmp_path)
    path = tmp_path / "out" / layout.EVALUATION
    path.write_text(path.read_text().replace('"size": 5.0', '"size": 6.0'))
    with pytest.raises(CheckpointError, match="Run 'dmsae evaluate' again"):
        Evaluation.load(tmp_path / "out")
    write_sealed(path, {"store": "abc"})
    with pytest.raises(CheckpointError, match="is not an evaluation: Evaluation needs model"):
        Evaluation.load(tmp_path / "out")


def test_a_damaged_result_is_measured_again(asked: list[list[str]], store: Store, tmp_path: Path) -> None:
    first = run(store, tmp_path / "out", nulls=())
    (kept,) = (tmp_path / "out" / layout.RESULTS).iterdir()
    for damaged in ("", "[]", '{"result": 1}'):
        kept.write_text(damaged)
        assert run(store, tmp_path / "out", nulls=()).measures["toy"]["results"] == first.measures["toy"]["results"]
    assert len(asked) == 4


def test_two_processes_do_not_share_a_directory(asked: list[list[str]], store: Store, tmp_path: Path) -> None:
    from dmsae.disk.files import exclusive_lock

    with exclusive_lock(tmp_path / "out" / layout.LOCK, "it"), pytest.raises(BusyError, match="in use"):
        run(store, tmp_path / "out")


def test_unknown_measures_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'fidelity'"):
        EvaluateConfig(measures=("fidelty",))
    with pytest.raises(ConfigError, match="at least one measure"):
        EvaluateConfig(measures=())


def test_without_text_what_needs_a_model_is_left_out(store: Store, tmp_path: Path) -> None:
    """The real measures, on activations that came without their text."""
    names = ("fidelity", "activity", "splice", "redundancy", "lexical_predictability")
    quick = {"redundancy": RedundancyConfig(meta_steps=20)}
    bare = import_store("bare", store.heldout(), heldout=store.heldout(), root=tmp_path, dtype="float32")
    evaluation = run(bare, tmp_path / "out", measures=names, nulls=(NullKind.UNTRAINED,), settings=quick)
    assert list(evaluation.measures) == ["fidelity", "activity", "redundancy"]
    for name in ("splice", "lexical_predictability"):
        assert "without their text" in evaluation.not_run[name]
    parts = {row.figure: row.part for row in evaluation.rows() if row.measure == "fidelity"}
    assert set(parts) == {"fve", "fve_prefixes.0", "cosine", "l0"}
    l0 = evaluation.measures["fidelity"]["results"]
    assert l0["a / untrained"]["l0"] == pytest.approx(l0["a"]["l0"], rel=0.05)


def test_the_store_s_model_is_loaded(
    tiny_config: Callable[..., HarvestConfig], tiny_model: Path, tmp_path: Path
) -> None:
    store = harvest(tiny_config(), tmp_path / "stores")
    sae = random_sae(SAEConfig(store.d_model, 32, 4, (32,)), 0, 0.3)
    config = EvaluateConfig(measures=("splice",), nulls=(NullKind.RANDOM_FIRING,))
    evaluation = evaluate({"sae": sae}, store, tmp_path / "out", config)
    assert len(evaluation.rows()) == 3
    assert list((layout.evaluation_cache()).glob("splice-*.safetensors"))
    loaded: list[BaseModel] = []
    (tmp_path / "out" / layout.RESULTS).rename(tmp_path / "elsewhere")

    def load() -> BaseModel:
        loaded.append(load_model(store, str(tiny_model), "cpu"))
        return loaded[-1]

    for _ in range(2):
        assert evaluate({"sae": sae}, store, tmp_path / "out", config, load).rows() == evaluation.rows()
    assert len(loaded) == 1, "it is loaded when it is needed"
    moved = load_model(store, str(tiny_model), "cpu")
    assert moved.identity.hook == store.model.hook
    other = BaseModel.load(ModelConfig(name=str(tiny_model), hook=1, device="cpu"))
    with pytest.raises(ConfigError, match="The models differ"):
        evaluate({"sae": sae}, store, tmp_path / "other", config, other)


def test_an_sae_is_known_by_all_of_its_weights() -> None:
    sae = random_sae(CONFIG, 0)
    digest = digest_of(sae)
    assert digest == digest_of(random_sae(CONFIG, 0))
    sae.threshold[3] = 0.1
    assert digest != digest_of(sae)
    assert digest != digest_of(random_sae(SAEConfig(32, 64, 5, (16, 64)), 0)), "k is part of it"
    assert digest_of(sae.bfloat16()) != digest


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_is_called_by_what_it_takes(name: str) -> None:
    measure = MEASURES[name]
    parameters = inspect.signature(measure.function).parameters
    assert next(iter(parameters)) == "subjects"
    assert {*measure.takes, "config", "progress"} <= set(parameters)
    assert is_dataclass(measure.config)
    assert measure.config() == measure.config(), "its settings have defaults"
    assert all(field.name.islower() for field in fields(measure.config))
    assert measure.scores
