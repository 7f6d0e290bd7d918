"""A total budget: beside a dense core, BatchTopK keeps what the core leaves of k."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dmsae.errors import ConfigError
from dmsae.sae.config import DenseCore, SparseCore
from dmsae.sae.sae import SAE
from dmsae.training.learner import SAESpec
from dmsae.training.passes import Pass
from dmsae.training.result import TrainState
from zipf import Zipf, small_sae, trainer

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = Zipf().directions[:5]
SPEC = SAESpec("sae", replace(small_sae(DenseCore(5, 1)), k=7), ROWS, total_budget=True)


def measured_l0(sae: SAE) -> float:
    return float((sae.encode(Zipf().rows(4000, 99)) > 0).float().sum(1).mean())


def test_the_measured_l0_is_the_k_that_was_asked_for(tmp_path: Path) -> None:
    (result,) = trainer(tmp_path, SPEC, tokens=400 * 64).run()
    sae = SAE.load(tmp_path)
    assert result.state is TrainState.FINISHED
    assert isinstance(sae.config.core, DenseCore)
    assert sae.config.core.k_noncore > 1
    assert measured_l0(sae) == pytest.approx(7, abs=0.7)


def test_an_interrupted_run_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(tmp_path / "whole", SPEC).run()
    stopped = trainer(tmp_path / "resumed", SPEC, checkpoint_seconds=0.0)
    count, advance = 0, Pass._next_batch

    def interrupt(self: Pass) -> tuple[torch.Tensor, float]:
        nonlocal count
        count += 1
        if count == 31:
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(Pass, "_next_batch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    monkeypatch.undo()
    trainer(tmp_path / "resumed", SPEC).run()
    for name in ("sae.safetensors", "sae.json", "metrics.jsonl"):
        assert (tmp_path / "resumed/sae" / name).read_bytes() == (tmp_path / "whole/sae" / name).read_bytes()


def test_a_core_that_uses_more_than_the_budget_is_recorded_with_the_numbers(tmp_path: Path) -> None:
    crowded = replace(SPEC, sae=replace(SPEC.sae, k=1))
    (result,) = trainer(tmp_path, crowded).run()
    assert result.state is TrainState.OVER_BUDGET
    assert "active latents per token, and k = 1 is for all" in result.cause


def test_only_a_dense_core_needs_one() -> None:
    with pytest.raises(ConfigError, match="total_budget = True; it must be left out unless the core is dense"):
        SAESpec("sae", small_sae(SparseCore(5)), ROWS, total_budget=True)
