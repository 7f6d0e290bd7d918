"""The store holds what the model computes, and takes what was estimated."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from conftest import Recorder
from dmsae.activations.base_model import BaseModel
from dmsae.activations.contexts import split_of
from dmsae.activations.harvest import Harvest, harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.text.corpus import TextConfig

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., HarvestConfig]


def test_store_holds_what_the_model_computes(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config()
    store = harvest(config, tmp_path)
    model = BaseModel.load(config.model)
    assert [store.n_rows(split) for split in Split] == [200, 300, 2000]
    for split in (Split.PAIRS, Split.HELDOUT):
        tokens_NL = store.tokens(split)["tokens"]
        expected = model.gradients(tokens_NL, store.counted_losses(split, model.keep_mask))
        seen = set()
        for rows in store.batches(split, 64):
            where = rows["context"].long(), rows["position"].long()
            torch.testing.assert_close(rows["x"], expected.x_NLD[where], atol=1e-5, rtol=1e-5)
            if split is Split.PAIRS:
                torch.testing.assert_close(rows["g"], expected.g_NLD[where], atol=1e-5, rtol=1e-4)
            assert model.keep_mask(tokens_NL)[where].all()
            seen |= set(zip(*(index.tolist() for index in where), strict=True))
        assert len(seen) == store.n_rows(split)
    # Training rows carry no place: compare as sets, sorted by their first coordinate.
    tokens_NL = store.tokens(Split.TRAIN)["tokens"]
    x_NLD, keep_NL = model.activations(tokens_NL), model.keep_mask(tokens_NL)
    expected_rows = x_NLD[keep_NL][:2000]
    stored = torch.cat([rows["x"] for rows in store.batches(Split.TRAIN, 100)])
    torch.testing.assert_close(
        stored[stored[:, 0].argsort()], expected_rows[expected_rows[:, 0].argsort()], atol=1e-5, rtol=1e-5
    )
    assert not torch.allclose(stored, expected_rows, atol=1e-3), "training rows are not shuffled"


@pytest.mark.parametrize("skip", [True, False])
def test_a_store_knows_which_losses_made_its_gradients(skip: bool, tiny_config: MakeConfig, tmp_path: Path) -> None:
    store = harvest(tiny_config(skip_boundary_targets=skip), tmp_path)
    mask = BaseModel.load(tiny_config().model).keep_mask
    tokens = store.tokens(Split.PAIRS)
    counted = store.counted_losses(Split.PAIRS, mask)
    assert counted[:, :-1][tokens["starts"][:, 1:]].any() == (not skip)
    assert counted[:, :-1][tokens["tokens"][:, 1:] == 1].any() == (not skip)


def test_splits_share_no_document(tiny_config: MakeConfig, tmp_path: Path) -> None:
    job = Harvest(tiny_config(), tmp_path)
    home = {document.text: split_of(document, job.config.text) for document in job.corpus.documents(0)}
    assert set(home.values()) == set(Split)
    store = job.run()
    for split in Split:
        tokens = store.tokens(split)
        ids, starts = tokens["tokens"].flatten().tolist(), tokens["starts"].flatten().nonzero()[:, 0].tolist()
        texts = [job.tokenizer.decode(ids[a:b]).removesuffix("</s>").strip() for a, b in pairwise(starts)]
        assert len(texts) > 5
        assert all(home[text] is split for text in texts)
        assert store.n_documents(split) == len(texts) + 1


def test_rows_and_drops_account_for_every_position(tiny_config: MakeConfig, tmp_path: Path) -> None:
    store = harvest(tiny_config(max_norm_ratio=1.2), tmp_path)
    for split in Split:
        positions = store.tokens(split)["tokens"].numel()
        assert store.n_rows(split) + sum(store.dropped(split).values()) == positions
    assert store.dropped(Split.TRAIN)["norm_outlier"] > 0
    assert store.dropped(Split.PAIRS)["no_loss_after"] > 0


def test_estimate_is_what_the_store_takes(tiny_config: MakeConfig, tmp_path: Path) -> None:
    job = Harvest(tiny_config(), tmp_path)
    estimate = job.dry_run()
    assert not list(tmp_path.iterdir())
    store = job.run()
    assert {split: store.n_rows(split) for split in Split} == estimate.rows
    assert {split: store.n_documents(split) for split in Split} == estimate.documents
    assert estimate.d_model == store.d_model == 16
    shards = sum(path.stat().st_size for path in store.path.rglob("*.safetensors"))
    assert sum(estimate.size_bytes.values()) == pytest.approx(shards, rel=0.05)
    assert all(seconds > 0 for seconds in estimate.seconds.values())


def test_splits_that_are_not_wanted_cost_nothing(tiny_config: MakeConfig, tmp_path: Path) -> None:
    store = harvest(tiny_config(pair_tokens=0, heldout_tokens=0), tmp_path)
    assert [store.n_rows(split) for split in Split] == [0, 0, 2000]
    assert len(store.tokens(Split.PAIRS)["tokens"]) == 0


def test_pairs_come_in_smaller_files_because_each_costs_more(tiny_config: MakeConfig, tmp_path: Path) -> None:
    store = harvest(tiny_config(), tmp_path)
    most = {split: max(record.rows for record in store.shards(split)) for split in Split}
    assert most[Split.PAIRS] <= 256 // 8 < most[Split.HELDOUT] <= 256
    assert len(store.shards(Split.PAIRS)) >= 200 / 32


def test_a_dry_run_says_that_it_measures(tiny_config: MakeConfig, tmp_path: Path) -> None:
    recorder = Recorder()
    Harvest(tiny_config(), tmp_path, recorder).dry_run()
    assert any("Measuring" in note for note in recorder.notes)


def test_the_library_prints_nothing(tiny_config: MakeConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    harvest(tiny_config(), tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.real
def test_real_model_and_corpus(tmp_path: Path) -> None:
    config = HarvestConfig(
        text=TextConfig(exclude=("1[0-9]*", "[2-9][0-9]_*")), train_tokens=300, heldout_tokens=100, pair_tokens=50
    )
    store = harvest(config, tmp_path)
    assert [store.n_rows(split) for split in Split] == [50, 100, 300]
    assert store.d_model == 576
    norms = torch.cat([rows["x"] for rows in store.batches(Split.TRAIN, 100)]).norm(dim=1)
    # Position 0 has norms in the thousands; it must not be there.
    assert norms.max() < 10 * norms.median()
    assert Store.open(store.path).model.name == "smollm2-135m"
