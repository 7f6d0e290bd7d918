"""An evaluation reads prompts as the text of the store was read: how they begin, which norms are too large."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from dictionaries import random_sae
from dmsae.activations.base_model import BaseModel
from dmsae.activations.harvest import harvest
from dmsae.activations.request import HarvestConfig
from dmsae.evaluation.evaluate import EvaluateConfig, evaluate
from dmsae.evaluation.fidelity import FidelityConfig
from dmsae.evaluation.measures import MEASURES, Measure, Score
from dmsae.evaluation.subject import Subject
from dmsae.progress import SILENT, Progress
from dmsae.sae.config import SAEConfig


class Beginning(NamedTuple):
    with_bos: float


@pytest.mark.parametrize("wanted", [None, True, False])
def test_the_model_reads_prompts_as_the_store_s_text(
    wanted: bool | None,
    tiny_config: Callable[..., HarvestConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[bool | None, float | None]] = []

    def look(
        subjects: Sequence[Subject], model: BaseModel, config: FidelityConfig, progress: Progress = SILENT
    ) -> list[Beginning]:
        seen.append((model.prepend_bos, model.max_norm_ratio))
        return [Beginning(0.0) for _ in subjects]

    monkeypatch.setitem(MEASURES, "look", Measure("", look, FidelityConfig, ("model",), (Score("with_bos", ""),)))
    config = tiny_config()
    config = replace(config, tokens=replace(config.tokens, prepend_bos=wanted), max_norm_ratio=7.0)
    store = harvest(config, tmp_path / "stores")
    sae = random_sae(SAEConfig(store.d_model, 32, 4, (32,)), 0, 0.3)
    evaluate({"sae": sae}, store, tmp_path / "out", EvaluateConfig(measures=("look",), nulls=()))
    assert seen == [(wanted, 7.0)]
