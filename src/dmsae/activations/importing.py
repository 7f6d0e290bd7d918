"""Bring your own activations: arrays from any model, or from any domain, become a store.

Such a store holds no text and no model can be run on it. All else works on it as on a harvested one: training needs
`x`, evaluation `heldout`, attribution (and so distillation) `pairs`.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from dmsae.activations.arrays import ArrayLike, Rows, rows_of
from dmsae.activations.catalog import is_complete, remove_store, store_lock
from dmsae.activations.dtypes import DTYPE_NAMES, DtypeName, to_stored, torch_dtype
from dmsae.activations.identity import ModelIdentity
from dmsae.activations.journal import in_order
from dmsae.activations.request import ImportRequest
from dmsae.activations.shards import shuffled_rows
from dmsae.activations.splits import Split
from dmsae.activations.store import Shard, Store, StoreWriter
from dmsae.config import require, require_whole
from dmsae.disk.files import canonical_hash, require_space
from dmsae.disk.layout import shard_file, stores_directory, token_file
from dmsae.errors import StoreError
from dmsae.progress import SILENT, Bar, Progress

_GRADIENT_DTYPE: DtypeName = "float32"
"""How g is stored. Gradients are small: 16 bits may lose them."""
Columns = dict[str, Rows]
"""The tensors of a split, by their name in the store."""


def import_store(
    name: str,
    x: ArrayLike,
    *,
    heldout: ArrayLike | None = None,
    pairs: tuple[ArrayLike, ArrayLike] | None = None,
    root: Path | str | None = None,
    dtype: DtypeName = "float16",
    seed: int = 0,
    shard_rows: int = 65_536,
    progress: Progress = SILENT,
) -> Store:
    """Return a store of activations that were made elsewhere.

    `x`, `heldout` and both of `pairs` (x, and the gradient g of the loss at each row of it) are activations [n, D]: a
    numpy array, a tensor, the path of a .npy or .safetensors file, or an iterator of arrays, of which only one shard is
    held in memory. The same import gives the same store. Cores and SAEs can be carried from one store to another if
    both have the same `name`.

    >>> mine = dmsae.import_store("my-model-layer-3", x, heldout=x[:512], pairs=(x[:512], g[:512]))
    >>> mine.d_model
    16
    """
    require(bool(name.strip()), "name", name, "not be empty")
    require(dtype in DTYPE_NAMES, "dtype", dtype, f"be one of {', '.join(DTYPE_NAMES)}")
    require_whole("shard_rows", shard_rows, 1)
    require_whole("seed", seed, 0)
    splits = _columns(x, heldout, pairs)
    source = os.fspath(x) if isinstance(x, str | os.PathLike) else "arrays"
    request = ImportRequest(source, ModelIdentity.imported(name), "", shard_rows, dtype, seed)
    root = Path(root or stores_directory())
    # The key is known when all has been read. Until then the store is made under a name that says what it is.
    scratch = root / f"importing-{request.key}"
    if scratch.exists():  # left by an import that was killed
        remove_store(scratch)
    require_space(root, sum(_known_bytes(columns, dtype) for columns in splits.values()), f"The import {name!r}")
    with store_lock(scratch):
        try:
            writer = StoreWriter(scratch, request)
            d_model = _write(writer, splits, request, progress)
            return _finish(writer, root, request, d_model)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise


def _columns(
    x: ArrayLike, heldout: ArrayLike | None, pairs: tuple[ArrayLike, ArrayLike] | None
) -> dict[Split, Columns]:
    """Return what each split is made from; the small ones come first, so that a mismatch shows early."""
    columns: dict[Split, Columns] = {}
    if pairs is not None:
        holds = isinstance(pairs, tuple | list) and len(pairs) == 2
        require(holds, "pairs", type(pairs).__name__, "be a tuple of two: x, and the gradients g at the same rows")
        columns[Split.PAIRS] = {"x": rows_of("pairs x", pairs[0]), "g": rows_of("pairs g", pairs[1], "g")}
    if heldout is not None:
        columns[Split.HELDOUT] = {"x": rows_of("heldout", heldout)}
    columns[Split.TRAIN] = {"x": rows_of("x", x)}
    return columns


def _write(writer: StoreWriter, splits: dict[Split, Columns], request: ImportRequest, progress: Progress) -> int:
    """Write all files but the seal, and return the width of the activations."""
    width = _Width()
    none = torch.zeros(0, 1, dtype=torch.int32)
    for split in Split:
        writer.add(token_file(split), {"tokens": none, "starts": none.bool()}, {})
    for split, columns in splits.items():
        with _bar(progress, split, columns) as bar:
            for index, shard in enumerate(_shards(columns, request, width)):
                n_rows = len(shard["x"])
                if split is Split.TRAIN:
                    order = shuffled_rows(n_rows, request.seed, split, index)
                    shard = {name: tensor[order] for name, tensor in shard.items()}
                writer.add(shard_file(split, index), shard, {})
                bar.advance(n_rows)
    assert width.width is not None, "x has rows"
    return width.width


def _finish(writer: StoreWriter, root: Path, request: ImportRequest, d_model: int) -> Store:
    """Move the store to its key, unless it is there already, and seal it."""
    content = canonical_hash([[record.file, record.sha256] for record in in_order(writer.records.values())])
    request = replace(request, content_sha256=content)
    target = root / request.key
    if is_complete(target):
        shutil.rmtree(writer.path)
        return Store.open(target)
    if target.exists():  # killed between the next two lines, or half removed
        remove_store(target)
    writer.move(target, request)
    return writer.finish(d_model)


class _Width:
    """The one width that all activations of a store have."""

    def __init__(self) -> None:
        self.width: int | None = None
        self._first = ""

    def check(self, what: str, chunk: Tensor) -> None:
        """Raise unless a chunk is as wide as all before it."""
        if self.width is None:
            self.width, self._first = chunk.shape[1], what
        if chunk.shape[1] != self.width:
            others = "earlier rows have" if what == self._first else f"{self._first} has"
            raise StoreError(
                f"{what} has width {chunk.shape[1]}, but {others} width {self.width}. All activations of a store must "
                "have the same width."
            )


def _shards(columns: Columns, request: ImportRequest, width: _Width) -> Iterator[Shard]:
    """Yield a split's shards, in their stored dtypes."""
    n_rows = 0
    streams = [_stored_blocks(name, rows, request, width) for name, rows in columns.items()]
    for blocks in zip_longest(*streams):
        sizes = [0 if block is None else len(block) for block in blocks]
        if min(sizes) != max(sizes):
            ends, longer = (list(columns.values())[sizes.index(size)].what for size in (min(sizes), max(sizes)))
            raise StoreError(
                f"{ends} ends after {n_rows + min(sizes):,} rows, but {longer} has more. Row i of g must be the "
                "gradient at row i of x."
            )
        n_rows += sizes[0]
        yield dict(zip(columns, blocks, strict=True))


def _stored_blocks(name: str, rows: Rows, request: ImportRequest, width: _Width) -> Iterator[Tensor]:
    """Yield rows in their stored dtype, a shard at a time; only the last may be smaller."""
    dtype, remedy = request.dtype, "Choose another dtype (bfloat16 and float32 hold larger values), or scale them down."
    if name == "g":
        dtype, remedy = _GRADIENT_DTYPE, "Scale them down."
    held: list[Tensor] = []
    n_held = 0
    for chunk in rows.chunks(request.shard_rows):
        width.check(rows.what, chunk)
        held.append(to_stored(chunk, dtype, rows.what, remedy))
        n_held += len(chunk)
        while n_held >= request.shard_rows:
            joined = torch.cat(held)
            yield joined[: request.shard_rows]
            held = [joined[request.shard_rows :].clone()]
            n_held -= request.shard_rows
    if n_held:
        yield torch.cat(held)


def _known_bytes(columns: Columns, dtype: DtypeName) -> int:
    """Return how many bytes a split takes, as far as that is known before it is read."""
    sizes = {name: torch_dtype(_GRADIENT_DTYPE if name == "g" else dtype).itemsize for name in columns}
    return sum((rows.n_rows or 0) * (rows.width or 0) * sizes[name] for name, rows in columns.items())


def _bar(progress: Progress, split: Split, columns: Columns) -> AbstractContextManager[Bar]:
    """Return a bar, if it is known how long it is to be."""
    total = columns["x"].n_rows
    return (progress if total else SILENT).bar(f"import {split}", total or 0, "rows")
