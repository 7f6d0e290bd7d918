"""What ends a harvest: text, values, disks and devices that cannot make the store asked for."""

import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import build_model
from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.activations.harvest import Harvest, harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.shards import to_stored_dtypes
from dmsae.activations.splits import Split
from dmsae.errors import CorpusError, DiskSpaceError, ModelError, StoreError

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., HarvestConfig]


def test_too_small_a_corpus_is_an_error_before_the_model_is_loaded(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseModel, "load", lambda *_: pytest.fail("the model was loaded"))
    for run in (Harvest.run, Harvest.dry_run):
        with pytest.raises(
            CorpusError, match=r"too small .*pairs: 200 of 200, .*train: [\d,]+ of 10,000,000"
        ) as caught:
            run(Harvest(tiny_config(train_tokens=10_000_000), tmp_path))
        assert "The model has not been run" in str(caught.value)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_values_that_do_not_fit_are_an_error(tiny_config: MakeConfig, tmp_path: Path) -> None:
    shard = {"x": torch.tensor([[1e5, 1.0]]), "g": torch.tensor([[1e30, 1.0]]), "context": torch.tensor([3])}
    with pytest.raises(StoreError, match=r"x does not fit into float16: its largest value is 1e\+05\. Set dtype to"):
        to_stored_dtypes(shard, tiny_config(dtype="float16"))
    assert to_stored_dtypes(shard, tiny_config(dtype="bfloat16"))["x"].dtype == torch.bfloat16
    with pytest.raises(StoreError, match=r"g does not fit into float16.*Set gradient_dtype to"):
        to_stored_dtypes(shard, tiny_config(gradient_dtype="float16", dtype="float32"))


def test_fp16_overflow_ends_the_harvest(tiny_config: MakeConfig, tmp_path: Path) -> None:
    model = build_model()
    model.model.embed_tokens.weight.data *= 1e6
    path = tmp_path / "loud"
    model.save_pretrained(path)
    shutil.copy(Path(tiny_config().model.name) / "tokenizer.json", path)
    shutil.copy(Path(tiny_config().model.name) / "tokenizer_config.json", path)
    config = tiny_config(model=ModelConfig(name=str(path), hook=0, device="cpu"), dtype="float16", pair_tokens=0)
    with pytest.raises(StoreError, match="x does not fit into float16"):
        harvest(config, tmp_path / "stores")
    assert not list((tmp_path / "stores").rglob("store.json"))
    assert harvest(replace(config, dtype="float32"), tmp_path / "stores").n_rows(Split.TRAIN) == 2000


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_activations_that_are_no_numbers_are_never_dropped_as_outliers(
    bad: float, tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = BaseModel.activations

    def spoiled(self: BaseModel, tokens_NL: torch.Tensor) -> torch.Tensor:
        x_NLD = really(self, tokens_NL)
        x_NLD[0, 1, 0] = bad
        return x_NLD

    monkeypatch.setattr(BaseModel, "activations", spoiled)
    with pytest.raises(ModelError, match=r"activations at 'model\.layers\.0' are not finite"):
        harvest(tiny_config(pair_tokens=0), tmp_path)


def test_disk_too_small_is_refused_before_activations_are_written(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - (64 << 20) - 1000, (64 << 20) + 1000))
    for run in (Harvest.run, Harvest.dry_run):
        with pytest.raises(DiskSpaceError, match=r"The store [0-9a-f]{16} needs .* kB and .* only 67\.1 MB are free"):
            run(Harvest(tiny_config(), tmp_path))
    assert not list(tmp_path.rglob("0*.safetensors"))
    monkeypatch.undo()
    assert harvest(tiny_config(), tmp_path).n_rows(Split.TRAIN) == 2000


def test_a_missing_device_is_an_error_before_text_is_read(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config()
    monkeypatch.setattr(Harvest, "contexts", lambda _: pytest.fail("text was tokenised"))
    for run in (Harvest.run, Harvest.dry_run):
        with pytest.raises(ModelError, match=r"device = 'cuda:99' cannot be used"):
            run(Harvest(replace(config, model=replace(config.model, device="cuda:99")), tmp_path))
    assert not list(tmp_path.iterdir())
