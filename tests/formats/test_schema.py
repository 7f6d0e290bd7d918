"""What is saved is what the schema says, and docs/format.md names every field of it."""

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from benched import KINDS, sae_of_kind
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.distill import distill
from dmsae.formats.exchange import import_sae
from dmsae.sae.config import CoreMode
from dmsae.training.config import TrainConfig
from planted import planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE = Path(__file__).parents[2] / "docs" / "format.md"
NAMES = ("sae", "core", "sample")


def schema(name: str) -> Any:
    return json.loads((files("dmsae") / "formats" / "schema" / f"{name}.json").read_text())


def saved(directory: Path, name: str) -> dict[str, Any]:
    """The facts of an artifact, and the header of its tensors, as the schema describes them."""
    data = (directory / f"{name}.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = {
        key: {what: value[what] for what in ("dtype", "shape")} for key, value in header.items() if key[:2] != "__"
    }
    return {"facts": json.loads((directory / f"{name}.json").read_text()), "tensors": tensors}


def problems(name: str, instance: Any) -> list[str]:
    return [error.message for error in Draft202012Validator(schema(name)).iter_errors(instance)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distillation of detectors from a store with text."""
    where = tmp_path_factory.mktemp("schema")
    recipe = TrainConfig(tokens=6400, batch_size=128, lr=3e-3, device="cpu")
    config = DistillConfig(width=64, k=4, nesting=(16, 64), cycles=1, core_mode=CoreMode.DETECTOR, train=recipe)
    distill(config, planted_store(where / "store").store, where / "run")
    return where / "run"


@pytest.mark.parametrize("name", NAMES)
def test_the_schemas_are_schemas(name: str) -> None:
    Draft202012Validator.check_schema(schema(name))


def test_what_a_distillation_saves_is_as_the_schema_says(run: Path) -> None:
    found = [(path.parent, name) for name in NAMES for path in sorted(run.rglob(f"{name}.json"))]
    assert [name for _, name in found] == ["sae", "sae", "core", "core", "core", "sample", "sample"]
    for directory, name in found:
        assert not problems(name, saved(directory, name)), directory


def test_saes_of_every_kind_are_as_the_schema_says(tmp_path: Path) -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    for kind in KINDS:
        sae_of_kind(kind, x).save(tmp_path / kind)
        assert not problems("sae", saved(tmp_path / kind, "sae")), kind
    import_sae(tmp_path / "dense", tmp_path / "imported")
    assert not problems("sae", saved(tmp_path / "imported", "sae"))


def test_the_schema_refuses_what_is_not_so(run: Path) -> None:
    def changed(name: str, part: str, key: str, value: Any) -> list[str]:
        place = {"sae": run / "cycle-1" / "sae", "core": run / "distilled", "sample": run / "cycle-1" / "sae"}[name]
        instance = saved(place, name)
        if value is None:
            del instance[part][key]
        else:
            instance[part][key] = value
        return problems(name, instance)

    assert changed("sae", "facts", "format", 3)
    assert changed("sae", "facts", "config", None)
    assert changed("sae", "facts", "surprise", 1)
    assert changed("sae", "facts", "tensors_sha256", "short")
    assert changed("sae", "tensors", "offset", None), "detectors have offsets"
    assert changed("sae", "tensors", "W_enc", {"dtype": "I64", "shape": [64, 32]})
    assert changed("sae", "tensors", "b_dec", {"dtype": "F32", "shape": [64, 32]})
    assert changed("core", "facts", "lineage", [{"birth_cycle": 0}])
    assert changed("core", "tensors", "offsets", None)
    assert changed("sample", "facts", "model", None)


def fields(node: Any) -> Iterator[str]:
    """Every name that a schema gives to a field."""
    if isinstance(node, dict):
        yield from node.get("properties", {})
        for value in node.values():
            yield from fields(value)
    elif isinstance(node, list):
        for value in node:
            yield from fields(value)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_about_the_format_names_every_field(name: str) -> None:
    text = PAGE.read_text(encoding="utf8")
    missing = {field for field in fields(schema(name)) if f"`{field}`" not in text} - {"facts", "tensors"}
    assert not missing - {"dtype", "shape"}
