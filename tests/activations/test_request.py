"""What a store is asked to hold: the key that it gives, and what no store can be asked for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dmsae.activations.harvest import Harvest
from dmsae.activations.request import HarvestConfig
from dmsae.errors import ConfigError
from dmsae.text.tokens import TokenConfig

pytestmark = pytest.mark.usefixtures("one_thread")
MakeConfig = Callable[..., HarvestConfig]


def test_what_content_depends_on_is_in_the_key(tiny_config: MakeConfig, tiny_model: Path, tmp_path: Path) -> None:
    base = tiny_config()
    others = [
        base,
        replace(base, model=replace(base.model, hook=1)),
        replace(base, model=replace(base.model, dtype="bfloat16")),
        replace(base, text=replace(base.text, heldout_fraction=0.3)),
        replace(base, text=replace(base.text, pairs_fraction=0.3)),
        replace(base, text=replace(base.text, txt_documents="file")),
        replace(base, tokens=replace(base.tokens, context_length=17)),
        replace(base, tokens=replace(base.tokens, prepend_bos=True)),
        replace(base, train_tokens=1999),
        replace(base, heldout_tokens=299),
        replace(base, pair_tokens=199),
        replace(base, max_contexts_per_document=3),
        replace(base, skip_boundary_targets=False),
        replace(base, dtype="float16"),
        replace(base, gradient_dtype="float16"),
        replace(base, shard_tokens=512),
        replace(base, max_norm_ratio=None),
        replace(base, seed=1),
    ]
    assert len({Harvest(config, tmp_path).path for config in others}) == len(others)


def test_the_same_bytes_read_as_another_kind_are_another_store(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config()
    keys = set()
    for name in ("a.jsonl", "b.jsonl", "a.txt"):
        (tmp_path / name).write_text('{"text": "one"}\n')
        text = replace(config.text, source=str(tmp_path / name))
        keys.add(Harvest(replace(config, text=text), tmp_path).path)
    assert len(keys) == 2, "a name alone is no difference, a kind is"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_tokens": -1}, r"train_tokens = -1; it must be a whole number of at least 0"),
        ({"pair_tokens": 0.5}, r"pair_tokens = 0\.5; it must be a whole number of at least 0"),
        (
            {"train_tokens": 0, "heldout_tokens": 0, "pair_tokens": 0},
            r"train_tokens \+ heldout_tokens \+ pair_tokens = 0; it must be at least 1",
        ),
        ({"max_contexts_per_document": 0}, r"max_contexts_per_document = 0; it must be a whole number of at least 1"),
        ({"batch_contexts": 0}, r"batch_contexts = 0; it must be a whole number of at least 1"),
        ({"shard_tokens": 15}, r"shard_tokens = 15; it must hold a context of 16 tokens"),
        ({"max_norm_ratio": 1.0}, r"max_norm_ratio = 1\.0; it must be above 1, or None"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str, tiny_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(**settings)


def test_a_context_longer_than_the_models_positions_is_refused_before_anything_is_written(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"tokens\.context_length = 65; it must be at most 64, the positions that"):
        Harvest(tiny_config(tokens=TokenConfig(context_length=65)), tmp_path)
    assert not list(tmp_path.iterdir())
    Harvest(tiny_config(tokens=TokenConfig(context_length=64)), tmp_path)
