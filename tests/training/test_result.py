"""How a training ended, read from its directory."""

from pathlib import Path

import pytest

from dmsae.errors import CheckpointError
from dmsae.training.result import TrainResult, TrainState, read_result


def test_an_sae_that_never_got_to_log_has_no_metrics(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"state": "diverged", "step": 1, "cause": "loss nan", "metrics": null}')
    expected = TrainResult(tmp_path.name, tmp_path, TrainState.DIVERGED, step=1, cause="loss nan", metrics=None)
    assert read_result(tmp_path) == expected


def test_a_result_that_is_missing_or_is_not_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no finished training"):
        read_result(tmp_path)
    wrong_state = '{"state": "happy", "step": 1, "cause": "", "metrics": null}'
    wrong_metrics = '{"state": "finished", "step": 1, "cause": "", "metrics": {"loss": 1}}'
    for text in ("{", "{}", wrong_state, wrong_metrics):
        (tmp_path / "status.json").write_text(text)
        with pytest.raises(
            CheckpointError, match=r"status\.json is not the (status of a training|JSON of a saved status)"
        ):
            read_result(tmp_path)
