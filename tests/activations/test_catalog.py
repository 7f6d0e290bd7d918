"""Stores are listed whatever their state, found by their first letters, and removed so that nothing half remains."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dmsae.activations.catalog import find_store, is_complete, list_stores, remove_store, store_lock
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.disk.files import canonical_hash
from dmsae.disk.layout import shard_file
from dmsae.errors import BusyError, StoreError
from planted import REQUEST


def make(path: Path) -> Store:
    writer = StoreWriter(path, REQUEST)
    for index in range(2):
        writer.add(shard_file(Split.TRAIN, index), {"x": torch.zeros(3, 2)}, {})
    return writer.finish(d_model=2)


def test_damaged_stores_are_listed_found_and_removed_beside_others(tmp_path: Path) -> None:
    make(tmp_path / "aa11")
    StoreWriter(tmp_path / "ab22", REQUEST)
    for key, file, content in (
        ("bb33", "shards.jsonl", "nonsense\n"),
        ("cc44", "request.json", "nonsense"),
        ("dd55", "store.json", "{}"),
    ):
        make(tmp_path / key)
        (tmp_path / key / file).write_text(content)
    facts = json.loads((make(tmp_path / "ee66").path / "store.json").read_text()) | {"format": 2}
    del facts["facts_sha256"]
    (tmp_path / "ee66" / "store.json").write_text(json.dumps(facts | {"facts_sha256": canonical_hash(facts)}))
    states = {summary.key: summary.state for summary in list_stores(tmp_path)}
    damaged = dict.fromkeys(("bb33", "cc44", "dd55"), "damaged")
    assert states == {"aa11": "complete", "ab22": "unfinished", "ee66": "old format"} | damaged
    assert list_stores(tmp_path)[-1].rows[Split.TRAIN] == 6
    assert list_stores(tmp_path)[0].rows[Split.TRAIN] == 6
    assert find_store("b", tmp_path) == tmp_path / "bb33"
    with pytest.raises(StoreError, match="'a' could be aa11 or ab22"):
        find_store("a", tmp_path)
    with pytest.raises(
        StoreError, match=r"No store under .* begins with 'zz'\. Known: aa11, ab22, bb33, cc44, dd55, ee66"
    ):
        find_store("zz", tmp_path)
    for key in states:
        remove_store(tmp_path / key)
    assert not list(tmp_path.iterdir())


def test_a_store_that_is_being_written_is_not_removed(tmp_path: Path) -> None:
    make(tmp_path / "key")
    with store_lock(tmp_path / "key"), pytest.raises(BusyError, match="The store key is in use"):
        remove_store(tmp_path / "key")
    assert Store.open(tmp_path / "key").n_rows(Split.TRAIN) == 6


def test_half_a_removal_leaves_nothing_that_counts_as_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "key")

    def killed(path: Path) -> None:
        (path / shard_file(Split.TRAIN, 0)).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_store(tmp_path / "key")
    assert not is_complete(tmp_path / "key")
    assert not StoreWriter(tmp_path / "key", REQUEST).records


def test_the_default_root_is_in_the_cache(tmp_path: Path) -> None:
    assert list_stores() == []
    path = tmp_path / "cache" / "stores" / "aa11"
    make(path)
    assert [summary.key for summary in list_stores()] == ["aa11"]
    assert find_store("a") == path


def test_listing_stores_imports_nothing_heavy() -> None:
    code = (
        "import sys\nimport dmsae.commands.assets, dmsae.commands.stores\n"
        "from dmsae.activations.catalog import list_stores\nlist_stores()\n"
        "heavy = {'torch', 'numpy', 'transformers', 'pyarrow', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_a_store_is_removed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "request.json").write_text("{}")
    with pytest.raises(StoreError, match="not known to be a store"):
        remove_store(mine)
    (make(tmp_path / "store").path / "thesis.tex").write_text("all of it")
    with pytest.raises(StoreError, match=r"holds what no store has: .*thesis\.tex"):
        remove_store(tmp_path / "store")
    (tmp_path / "link").symlink_to(make(tmp_path / "other").path)
    with pytest.raises(StoreError, match="not a directory of its own"):
        remove_store(tmp_path / "link")
    assert (mine / "request.json").exists()
    assert (tmp_path / "store" / "store.json").exists()
    assert Store.open(tmp_path / "other").n_rows(Split.TRAIN) == 6


def test_a_missing_request_is_named(tmp_path: Path) -> None:
    path = make(tmp_path / "key").path
    (path / "request.json").unlink()
    with pytest.raises(StoreError, match=r"request\.json is missing"):
        Store.open(path)
