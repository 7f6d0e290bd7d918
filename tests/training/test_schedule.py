"""The settings of a training, and the timetable that follows from them."""

import math
from typing import Any

import pytest

from dmsae.config import from_dict, to_dict
from dmsae.errors import ConfigError
from dmsae.training.config import TrainConfig


def test_the_published_recipe_at_its_own_length() -> None:
    schedule = TrainConfig(tokens=500_000_000).schedule()
    assert schedule.steps == 244_140
    assert (schedule.warmup_steps, schedule.threshold_start) == (1000, 1000)
    assert schedule.threshold_beta == 0.999
    assert schedule.dead_after_tokens == 10_000_000
    assert schedule.decay_start == 195_312  # the last 20 %


def test_short_runs_scale_down() -> None:
    schedule = TrainConfig(tokens=200 * 2048).schedule()
    assert (schedule.steps, schedule.warmup_steps, schedule.threshold_start) == (200, 10, 10)
    assert schedule.threshold_beta == 0.9
    assert schedule.dead_after_tokens == 20 * 2048
    assert schedule.decay_start == 160


def test_given_fields_are_kept() -> None:
    config = TrainConfig(warmup_steps=7, threshold_start=9, threshold_beta=0.5, dead_after_tokens=11, decay_fraction=0)
    schedule = config.schedule()
    assert schedule[1:] == (7, schedule.steps, 9, 0.5, 11)


@pytest.mark.parametrize("steps", [1, 2, 3, 19, 21, 1000])
def test_any_length_warms_up_and_averages_a_threshold(steps: int) -> None:
    schedule = TrainConfig(tokens=steps * 8, batch_size=8).schedule()
    factors = [schedule.lr_factor(step) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)
    assert schedule.threshold_start < steps
    assert 0 <= schedule.threshold_beta < 1
    assert schedule.dead_after_tokens >= 8


def test_the_learning_rate_rises_stays_and_falls_to_zero() -> None:
    schedule = TrainConfig(tokens=100, batch_size=1, warmup_steps=10, decay_fraction=0.2).schedule()
    factors = [schedule.lr_factor(step) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[10:80] == [1.0] * 70
    assert factors[80:] == pytest.approx([1 - step / 20 for step in range(20)])
    assert schedule.lr_factor(100) == 0.0


def test_no_warm_up_and_no_decay() -> None:
    schedule = TrainConfig(tokens=50, batch_size=1, warmup_steps=0, decay_fraction=0.0).schedule()
    assert [schedule.lr_factor(step) for step in range(50)] == [1.0] * 50


def test_logging_and_saving_are_not_among_the_result_settings() -> None:
    one, other = TrainConfig(), TrainConfig(log_every=1, checkpoint_seconds=3, log_to=("wandb",), device="cpu")
    assert one.result_settings() == other.result_settings()
    assert one.result_settings() != TrainConfig(lr=1.0).result_settings()
    assert one.result_settings().keys() <= to_dict(one).keys()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", 100),
        ("tokens", 1e6),
        ("batch_size", 0),
        ("batch_size", True),
        ("lr", 0.0),
        ("lr", math.inf),
        ("lr", math.nan),
        ("max_grad_norm", -1.0),
        ("betas", (0.9,)),
        ("betas", (0.9, 1.0)),
        ("decay_fraction", 1.5),
        ("decay_fraction", math.nan),
        ("warmup_steps", -1),
        ("warmup_steps", 2.5),
        ("threshold_start", -1),
        ("threshold_start", 488),
        ("threshold_beta", 1.0),
        ("dead_after_tokens", 0),
        ("norm_batches", 0),
        ("log_every", 0),
        ("checkpoint_seconds", -1.0),
        ("checkpoint_seconds", math.nan),
        ("collapse_fve", 1.0),
        ("collapse_fve", math.nan),
        ("log_to", ("tensorboad",)),
    ],
)
def test_impossible_settings_are_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        TrainConfig(**{field: value})
    assert str(error.value).startswith(f"{field} = {value!r}; it must ")


def test_an_unknown_sink_offers_the_known_ones() -> None:
    unknown: dict[str, Any] = {"log_to": ("tensorboad",)}
    with pytest.raises(ConfigError, match="it must name only tensorboard and wandb"):
        TrainConfig(**unknown)
    with pytest.raises(ConfigError, match="Did you mean 'tensorboard'"):
        from_dict(TrainConfig, unknown)
