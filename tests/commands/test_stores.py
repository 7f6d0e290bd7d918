"""What `store show` and the end of a harvest print about a store."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dmsae.activations.harvest import harvest
from dmsae.activations.importing import import_store
from dmsae.activations.request import HarvestConfig
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.commands.stores import show_store, store_remove
from dmsae.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_documents_are_shown_for_each_split(
    tiny_config: Callable[..., HarvestConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = harvest(tiny_config(), tmp_path)
    show_store(store)
    lines = capsys.readouterr().out.splitlines()
    for split in Split:
        (line,) = (line for line in lines if line.startswith(split))
        assert line.split()[1] == str(store.n_documents(split))


def test_imported_activations_have_no_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_store(import_store("mine", torch.randn(8, 4), root=tmp_path))
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["train", "–", "8"]


def test_the_bundled_model_is_shown_for_what_it_is(
    tiny_config: Callable[..., HarvestConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = harvest(tiny_config(), tmp_path)
    bundled = replace(store.request, model=replace(store.model, name="smollm2-135m"))
    show_store(Store(store.path, bundled, store.d_model, store.records))
    shown = capsys.readouterr().out
    assert "SmolLM2-135M-Instruct" in shown
    assert "4 bits" in shown


@pytest.mark.parametrize("key", ["", "a", "abc"])
def test_few_letters_remove_nothing_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    path = Path(import_store("mine", torch.randn(8, 4), root=tmp_path).path.rename(tmp_path / "abcdef"))
    with pytest.raises(ConfigError, match=r"at least 4 letters .* Give abcdef, or --yes"):
        store_remove(key, tmp_path)
    assert path.exists()
    shown = capsys.readouterr().out
    assert f"{path}: complete, " in shown
    assert "8 train" in shown
    store_remove(key, tmp_path, yes=True)
    assert not path.exists()
