"""Activations from elsewhere become a store that holds exactly these rows, whatever they came in."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from conftest import Recorder
from dmsae.activations import importing
from dmsae.activations.catalog import list_stores
from dmsae.activations.identity import ModelIdentity
from dmsae.activations.importing import import_store
from dmsae.activations.request import ImportRequest
from dmsae.activations.sources import StoreSource
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.activations.stream import ActivationStream
from dmsae.cli import main
from dmsae.errors import BusyError, ConfigError, DmsaeError, StoreError

pytestmark = pytest.mark.usefixtures("one_thread")
Rows = npt.NDArray[np.float32]


def rows(n: int, width: int = 3, seed: int = 0) -> Rows:
    """Rows that float16 holds exactly, told apart by their first column."""
    x = np.random.default_rng(seed).integers(-100, 100, (n, width)).astype(np.float32)
    x[:, 0] = np.arange(n)
    return x


def read(store: Store, split: Split, name: str = "x") -> Tensor:
    return torch.cat([batch[name] for batch in store.batches(split, 7)])


def in_order(x: Tensor) -> Tensor:
    return x[x[:, 0].argsort()]


@settings(max_examples=25)  # each writes and syncs many files
@given(st.integers(1, 30), st.integers(1, 40), st.lists(st.integers(0, 50), max_size=4), st.integers(0, 3))
def test_rows_come_back_whatever_the_chunks_and_shards(
    tmp_path_factory: pytest.TempPathFactory, n_rows: int, shard_rows: int, cuts: list[int], seed: int
) -> None:
    root = tmp_path_factory.mktemp("stores")
    x, heldout, g = rows(n_rows), rows(n_rows, seed=1), rows(n_rows, seed=2)
    chunks = np.split(x, sorted(cut for cut in cuts if cut <= n_rows))
    store = import_store(
        "mine", iter(chunks), heldout=iter(chunks), pairs=(heldout, g), root=root, seed=seed, shard_rows=shard_rows
    )
    assert torch.equal(in_order(read(store, Split.TRAIN)), torch.from_numpy(x))
    assert torch.equal(read(store, Split.HELDOUT), torch.from_numpy(x)), "held-out rows keep their order"
    assert torch.equal(read(store, Split.PAIRS), torch.from_numpy(heldout))
    assert torch.equal(read(store, Split.PAIRS, "g"), torch.from_numpy(g))
    assert all(record.rows == shard_rows for record in store.shards(Split.TRAIN)[:-1])
    whole = import_store("mine", x, heldout=x, pairs=(heldout, g), root=root, seed=seed, shard_rows=shard_rows)
    assert whole.path == store.path, "the same rows in other chunks are the same store"
    shutil.rmtree(root)


def test_a_store_holds_what_it_was_given_and_no_text(tmp_path: Path) -> None:
    x, g = rows(100), rows(20, seed=2) * 1e-8
    store = import_store("cells", x, heldout=rows(10), pairs=(rows(20), g), root=tmp_path, shard_rows=32)
    assert (store.d_model, [store.n_rows(split) for split in Split]) == (3, [20, 10, 100])
    assert store.model == ModelIdentity.imported("cells")
    assert isinstance(store.request, ImportRequest)
    assert store.request.key == store.key
    train = read(store, Split.TRAIN)
    assert torch.equal(in_order(train), torch.from_numpy(x))
    assert not torch.equal(train, torch.from_numpy(x)), "training rows are not shuffled"
    names = {split: set(store.read(store.shards(split)[0])) for split in Split}
    assert names == {Split.PAIRS: {"x", "g"}, Split.HELDOUT: {"x"}, Split.TRAIN: {"x"}}
    pairs = store.read(store.shards(Split.PAIRS)[0])
    assert (pairs["x"].dtype, pairs["g"].dtype) == (torch.float16, torch.float32)
    assert not store.has_text
    with pytest.raises(StoreError, match="without their text"):
        store.tokens(Split.HELDOUT)
    assert [problem for _, problem in store.verify() if problem] == []
    (summary,) = list_stores(tmp_path)
    assert (summary.state, summary.model, summary.hook, summary.source) == ("complete", "cells", "imported", "arrays")


def test_a_stream_over_it_yields_all_rows(tmp_path: Path) -> None:
    x = rows(90)
    stream = ActivationStream(StoreSource(import_store("mine", x, root=tmp_path, shard_rows=16)), 10, seed=3)
    for _ in range(2):
        assert torch.equal(in_order(torch.cat(list(islice(stream, 9)))), torch.from_numpy(x))
    stream.close()


def test_every_kind_of_source_gives_the_same_store(tmp_path: Path) -> None:
    x, g = rows(40), rows(40, seed=1)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(x.astype(np.float64)))
    save_file({"anything": torch.from_numpy(x)}, tmp_path / "only.safetensors")
    save_file({"x": torch.from_numpy(x), "g": torch.from_numpy(g)}, tmp_path / "both.safetensors")
    both = tmp_path / "both.safetensors"
    sources: list[Any] = [
        x,
        x.astype(np.float16),
        x.astype(">f8"),
        torch.from_numpy(x),
        torch.from_numpy(x).half().requires_grad_(),
        tmp_path / "x.npy",
        str(tmp_path / "fortran.npy"),
        tmp_path / "only.safetensors",
        both,
        [x[:11], torch.from_numpy(x[11:])],
        (x[i : i + 1] for i in range(len(x))),
    ]
    stores = [import_store("mine", one, pairs=(both, both), root=tmp_path / "s", shard_rows=9) for one in sources]
    assert {store.path for store in stores} == {stores[0].path}
    assert len(list_stores(tmp_path / "s")) == 1
    assert torch.equal(read(stores[0], Split.PAIRS, "g"), torch.from_numpy(g))


def test_what_the_store_depends_on_is_in_its_key(tmp_path: Path) -> None:
    x = rows(40)
    keys = [
        import_store("mine", x, root=tmp_path).key,
        import_store("other", x, root=tmp_path).key,
        import_store("mine", x[::-1].copy(), root=tmp_path).key,
        import_store("mine", x[:-1], root=tmp_path).key,
        import_store("mine", x, heldout=x, root=tmp_path).key,
        import_store("mine", x, pairs=(x, x), root=tmp_path).key,
        import_store("mine", x, dtype="float32", root=tmp_path).key,
        import_store("mine", x, dtype="bfloat16", root=tmp_path).key,
        import_store("mine", x, seed=1, root=tmp_path).key,
        import_store("mine", x, shard_rows=7, root=tmp_path).key,
    ]
    assert len(set(keys)) == len(keys) == len(list_stores(tmp_path))


def test_memory_is_bounded_by_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a shard is written, no more than one further chunk has been taken from the iterator."""
    taken = 0
    behind = []

    def chunks() -> Iterator[Rows]:
        nonlocal taken
        for start in range(0, 100, 5):
            taken += 5
            yield rows(100)[start : start + 5]

    really = StoreWriter.add

    def add(self: StoreWriter, file: str, tensors: dict[str, Tensor], dropped: dict[str, int]) -> Any:
        record = really(self, file, tensors, dropped)
        behind.append(taken - sum(one.rows for one in self.records.values()))
        return record

    monkeypatch.setattr(StoreWriter, "add", add)
    import_store("mine", chunks(), root=tmp_path, shard_rows=12)
    assert taken == 100
    assert max(behind) <= 5


def test_progress_is_reported_where_the_length_is_known(tmp_path: Path) -> None:
    recorder = Recorder()
    import_store("mine", rows(40), heldout=iter([rows(4)]), root=tmp_path, progress=recorder)
    assert recorder.bars == [("import train", 40)]


X = rows(20)
GOOD = rows(5)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (X[0], {}, r"x has shape \[3\]; expected .*\[rows, width\]\. Flatten"),
        (X[None], {}, r"x has shape \[1, 20, 3\]"),
        (X[:0], {}, r"x is empty: it has shape \[0, 3\]"),
        (X[:, :0], {}, r"x is empty: it has shape \[20, 0\]"),
        (iter(()), {}, r"x gave no rows; .*An iterator can be read only once"),
        (iter([X[:0]]), {}, r"x gave no rows"),
        ([[1.0, 2.0]], {}, r"x, array 0 is a list; expected floating-point"),
        ([X, X[:, 0]], {}, r"x, array 1 has shape \[20\]"),
        (3.0, {}, r"x is a float; expected .* an array, a tensor, a path or an iterator"),
        (X.astype(np.int32), {}, r"x has dtype int32; expected .*float64"),
        (X.astype(object), {}, r"x has dtype object"),
        (torch.zeros(4, 2).bool(), {}, r"x has dtype bool"),
        (np.where(X == 7, np.nan, X), {}, r"x is not finite in row 7\. Leave out"),
        ([X, np.where(X == 7, np.inf, X)], {}, r"x, array 1 is not finite in row 7"),
        (X * 1e4, {}, r"x does not fit into float16: its largest value is 1e\+06\. Choose another dtype"),
        (X.astype(np.float64) * 1e300, {"dtype": "float32"}, r"x does not fit into float32"),
        (X, {"heldout": GOOD[:, :2]}, r"x has width 3, but heldout has width 2\. All activations"),
        (X, {"pairs": (GOOD, GOOD[:, :2])}, r"pairs g has width 2, but pairs x has width 3"),
        ([X, X[:, :2]], {}, r"x has width 2, but earlier rows have width 3"),
        (X, {"pairs": (GOOD, GOOD[:4])}, r"pairs g ends after 4 rows, but pairs x has more\. Row i of g"),
        (X, {"pairs": (iter([GOOD]), iter([GOOD, GOOD]))}, r"pairs x ends after 5 rows, but pairs g has more"),
        (X, {"pairs": (GOOD, GOOD), "shard_rows": 5, "heldout": GOOD[:0]}, r"heldout is empty"),
        (X, {"pairs": (GOOD, rows(10)), "shard_rows": 5}, r"pairs x ends after 5 rows, but pairs g has more"),
        (X, {"pairs": GOOD}, r"pairs = 'ndarray'; it must be a tuple of two"),
        (X, {"dtype": "int8"}, r"dtype = 'int8'; it must be one of float32, bfloat16, float16"),
        (X, {"shard_rows": 0}, r"shard_rows = 0; it must be a whole number of at least 1"),
        (X, {"seed": -1}, r"seed = -1; it must be a whole number of at least 0"),
    ],
)
def test_what_cannot_be_imported_is_refused_and_leaves_nothing(
    x: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((StoreError, ConfigError), match=message):
        import_store("mine", x, root=tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_a_name_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name = ' '; it must not be empty"):
        import_store(" ", X, root=tmp_path)


def _text(path: Path) -> None:
    path.write_text("1,2\n")


def _pickled(path: Path) -> None:
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)


def _cut_short(path: Path) -> None:
    np.save(path, X)
    path.write_bytes(path.read_bytes()[:-8])


def _two_tensors(path: Path) -> None:
    save_file({"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)}, path)


def _whole_numbers(path: Path) -> None:
    save_file({"x": torch.zeros(2, 2, dtype=torch.int64)}, path)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("x.csv", _text, r"expected a \.npy or \.safetensors file"),
        ("x.npy", None, r"there is no such file"),
        ("x.npy", _text, r"x\.npy cannot be read"),
        ("x.npy", _pickled, r"x\.npy cannot be read"),
        ("x.npy", _cut_short, r"x\.npy cannot be read"),
        ("x.safetensors", _text, r"x\.safetensors cannot be read"),
        ("x.safetensors", _two_tensors, r"holds the tensors a, b; expected one called 'x', or only one"),
        ("x.safetensors", _whole_numbers, r"x has dtype int64"),
    ],
)
def test_files_that_cannot_be_read_are_named(
    name: str, make: Callable[[Path], None] | None, message: str, tmp_path: Path
) -> None:
    if make is not None:
        make(tmp_path / name)
    with pytest.raises(StoreError, match=message):
        import_store("mine", tmp_path / name, root=tmp_path / "stores")
    assert not list_stores(tmp_path / "stores")


@pytest.mark.parametrize("where", ["add", "move", "finish"])
def test_an_import_that_was_killed_never_looks_complete(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far it came, the next import ends with the same bytes and leaves nothing else."""
    whole = import_store("mine", X, root=tmp_path / "whole", shard_rows=6)
    root = tmp_path / "killed"
    code = (
        "import os, sys\nfrom pathlib import Path\nimport numpy as np\n"
        "from dmsae.activations import importing\nfrom dmsae.activations.store import StoreWriter\n"
        f"really, n_calls = StoreWriter.{where}, [0]\n"
        "def killed(*args):\n"
        "    n_calls[0] += 1\n"
        f"    if n_calls[0] == {5 if where == 'add' else 1}:\n"
        f"        {'really(*args)' if where == 'move' else 'pass'}\n"
        "        os._exit(9)\n"
        "    return really(*args)\n"
        f"StoreWriter.{where} = killed\n"
        "importing.import_store('mine', np.load(sys.argv[1]), root=Path(sys.argv[2]), shard_rows=6)\n"
    )
    np.save(tmp_path / "x.npy", X)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.npy"), str(root)], check=False)
    assert done.returncode == 9
    (left,) = list_stores(root)
    assert left.state == "unfinished"
    store = import_store("mine", X, root=root, shard_rows=6)
    assert [path.name for path in root.iterdir()] == [whole.key]
    assert {record.sha256 for record in store.records} == {record.sha256 for record in whole.records}


def test_an_interrupted_import_cleans_up(tmp_path: Path) -> None:
    def interrupted() -> Iterator[Rows]:
        yield X
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_store("mine", interrupted(), root=tmp_path, shard_rows=4)
    assert not list(tmp_path.iterdir())


def test_the_same_import_at_the_same_time_is_refused(tmp_path: Path) -> None:
    def nested() -> Iterator[Rows]:
        yield X
        with pytest.raises(BusyError, match=r"The store importing-[0-9a-f]+ is in use"):
            import_store("mine", X, root=tmp_path)

    assert import_store("mine", nested(), root=tmp_path).n_rows(Split.TRAIN) == len(X)


def test_the_command_imports_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, array in (("x", X), ("h", GOOD), ("g", rows(5, seed=1))):
        np.save(tmp_path / f"{name}.npy", array)
    x, h, g = (str(tmp_path / f"{name}.npy") for name in "xhg")
    root = ["--root", str(tmp_path / "stores"), "--dtype", "float32"]
    main(["store", "import", "cells", "--x", x, "--heldout", h, "--pairs-x", h, "--pairs-g", g, *root])
    store = import_store("cells", X, heldout=GOOD, pairs=(GOOD, g), dtype="float32", root=tmp_path / "stores")
    shown = capsys.readouterr().out
    assert f"Store {store.key}" in shown
    assert f"cells, imported from {x}" in shown
    assert len(list_stores(tmp_path / "stores")) == 1
    with pytest.raises(SystemExit):
        main(["store", "import", "cells", "--x", x, "--pairs-g", g, *root])
    assert "--pairs-g was given without --pairs-x. Give both, or neither." in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_noticed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def require(_directory: Path, needed_bytes: int, _what: str) -> None:
        asked.append(needed_bytes)
        raise DmsaeError

    monkeypatch.setattr(importing, "require_space", require)
    with pytest.raises(DmsaeError):
        import_store("mine", X, heldout=GOOD, pairs=(GOOD, GOOD), root=tmp_path)
    assert asked == [(20 + 5 + 5) * 3 * 2 + 5 * 3 * 4]
