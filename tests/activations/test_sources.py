"""Every source gives all of its rows once in an epoch, and says what they are made from."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conftest import Recorder
from dmsae.activations.harvest import Harvest, harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.sources import ActivationSource, ArraySource, LiveSource, StoreSource, joined_
from dmsae.activations.stream import ActivationStream
from dmsae.config import to_dict
from dmsae.errors import ConfigError, StoreError
from planted import MODEL, planted_store

pytestmark = pytest.mark.usefixtures("one_thread")


def epoch_of(source: ActivationSource, epoch: int, seed: int = 0) -> list[Tensor]:
    blocks: list[Tensor] = []
    while (block := source.block(epoch, len(blocks), seed)) is not None:
        blocks.append(block)
    return blocks


def test_a_corpus_that_is_too_small_for_live_is_warned_of_once(
    tiny_config: Callable[..., HarvestConfig], tmp_path: Path
) -> None:
    def warnings(config: HarvestConfig) -> list[str]:
        recorder = Recorder()
        live = LiveSource(Harvest(config, tmp_path), mix_shards=2, progress=recorder)
        for epoch in range(2):
            epoch_of(live, epoch)
        return recorder.warnings

    assert not warnings(tiny_config(train_tokens=500, pair_tokens=0, heldout_tokens=0))
    (warning,) = warnings(tiny_config(train_tokens=10_000_000, pair_tokens=0, heldout_tokens=0))
    assert "of the 10,000,000 training activations asked for; it will be repeated as needed" in warning


def test_facts_say_what_activations_are_made_from(tiny_config: Callable[..., HarvestConfig], tmp_path: Path) -> None:
    job = Harvest(tiny_config(), tmp_path)
    model = to_dict(job.identity)
    assert LiveSource(job).facts == {"live": to_dict(job.request), "model": model}
    store = harvest(tiny_config(), tmp_path)
    assert StoreSource(store).facts == {"store": store.key, "model": model}
    planted = planted_store(tmp_path / "planted").store
    assert StoreSource(planted).facts == {"store": "planted", "model": to_dict(MODEL)}


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 3))
def test_an_array_gives_each_row_once_an_epoch_in_a_new_order(n_rows: int, block_rows: int, seed: int) -> None:
    x = np.arange(2.0 * n_rows, dtype=np.float32).reshape(n_rows, 2)
    source = ArraySource(x, block_rows)
    epochs = [epoch_of(source, epoch, seed) for epoch in (0, 1)]
    for blocks in epochs:
        assert all(len(block) == block_rows for block in blocks[:-1])
        rows = torch.cat(blocks)
        assert torch.equal(rows[rows[:, 0].argsort()], torch.from_numpy(x))
    if n_rows > 20:
        orders = [torch.cat(blocks)[:, 0].tolist() for blocks in (*epochs, epoch_of(source, 0, seed + 1))]
        assert orders[0] != orders[1]
        assert orders[0] != orders[2]
        assert orders[0] == torch.cat(epoch_of(ArraySource(x, block_rows), 0, seed))[:, 0].tolist()


def test_arrays_and_tensors_of_the_same_values_are_the_same_source() -> None:
    x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float16)
    sources = [
        ArraySource(x, 7),
        ArraySource(torch.from_numpy(x), 7),
        ArraySource(x.astype(np.float64), 7),
        ArraySource(x.astype(">f4"), 7),
        ArraySource(np.asfortranarray(x), 7),
        ArraySource(torch.from_numpy(x).float().requires_grad_(), 7),
    ]
    streams = [ActivationStream(source, 8, seed=1) for source in sources]
    batches = [torch.cat(list(islice(stream, 12))) for stream in streams]
    assert all(torch.equal(one, batches[0]) for one in batches)
    assert not any(one.requires_grad for one in batches)
    assert all(source.facts == sources[0].facts for source in sources)
    assert sources[0].facts["arrays"]["rows"] == 50
    assert ArraySource(x[::-1].copy(), 7).facts != sources[0].facts
    assert ArraySource(x.reshape(75, 2), 7).facts != sources[0].facts
    for stream in streams:
        stream.close()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros(5), r"x has shape \[5\]; expected .*\[rows, width\]"),
        (torch.zeros(2, 3, 4), r"x has shape \[2, 3, 4\]; .*Flatten"),
        (np.zeros((0, 4)), r"x is empty: it has shape \[0, 4\]"),
        (np.zeros((4, 0)), r"x is empty: it has shape \[4, 0\]"),
        (np.zeros((4, 2), np.int64), r"x has dtype int64; expected floating-point"),
        (torch.zeros(4, 2, dtype=torch.complex64), r"x has dtype complex64; expected floating-point"),
        (np.array([[0.0], [1.0], [np.nan]]), r"x is not finite in row 2"),
        (torch.tensor([[0.0], [torch.inf]]), r"x is not finite in row 1"),
        (np.array([[1e300]]), r"x does not fit into float32: its largest value is 1e\+300\. Scale it down"),
    ],
)
def test_arrays_that_are_no_activations_are_refused(x: Any, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        ArraySource(x)


def test_impossible_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="block_rows = 0; it must be a whole number of at least 1"):
        ArraySource(np.zeros((3, 2)), 0)
    with pytest.raises(ConfigError, match="mix_shards = 0; it must be a whole number of at least 1"):
        StoreSource(planted_store(tmp_path / "planted").store, 0)


def test_joined_shards_are_let_go() -> None:
    parts = {3: torch.randn(4, 8), 1: torch.zeros(0, 8), 2: torch.randn(2, 8)}
    expected = torch.cat([parts[1], parts[2], parts[3]])
    assert torch.equal(joined_(parts, 8), expected)
    assert not parts
    half = joined_({0: torch.randn(3, 8).bfloat16()}, 8)
    assert half.dtype is torch.bfloat16
    assert joined_({}, 8).shape == joined_({0: torch.zeros(0, 8)}, 8).shape == (0, 8)
