"""The public surface: what `import dmsae` offers, how fast, and that every example in it and in the README runs."""

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dmsae
from dmsae.activations.request import HarvestConfig

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = [name for name in dmsae.__all__ if name != "__version__"]
README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the examples take as given: activations `x`, gradients `g`, a `store` of them, a finished `run`."""
    made = np.random.default_rng(0)
    directions = made.standard_normal((24, 16)).astype(np.float32)
    x = (np.maximum(made.standard_normal((4096, 24)) - 1, 0) @ directions).astype(np.float32)
    g = made.standard_normal((4096, 16)).astype(np.float32)
    where = tmp_path_factory.mktemp("examples")
    store = dmsae.import_store("toy", x, heldout=x[:512], pairs=(x[:512], g[:512]), root=where / "stores")
    train = dmsae.TrainConfig(tokens=25_600, batch_size=128, lr=3e-3, device="cpu")
    config = dmsae.DistillConfig(width=64, k=4, nesting=(16, 64), cycles=2, train=train)
    dmsae.distill(config, store, where / "run")
    return {"dmsae": dmsae, "torch": torch, "np": np, "x": x, "g": g, "store": store, "run": where / "run"}


@pytest.fixture
def somewhere(tmp_path: Path) -> Iterator[Path]:
    """A working directory of the test's own."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


@pytest.mark.usefixtures("somewhere")
@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example_that_runs(
    name: str, examples: dict[str, Any], tiny_model: Path, tiny_config: Callable[..., HarvestConfig]
) -> None:
    given = examples | {"tiny_model": tiny_model, "tiny_harvest": tiny_config()}
    text = getattr(dmsae, name).__doc__ or ""
    example = doctest.DocTestParser().get_doctest(text, given, name, None, None)
    assert example.examples, f"dmsae.{name} has no example in its docstring"
    lines: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=lines.append)
    assert not failed, "".join(lines)


def test_the_names_are_what_they_say() -> None:
    assert set(dmsae.__all__) == set(dir(dmsae))
    for name in NAMES:
        assert getattr(dmsae, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'distil'"):
        getattr(dmsae, "distil")  # noqa: B009


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, dmsae; print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["--help"], ["store", "list"], ["assets", "list"], ["core", "show", "--help"], ["status", "."]],
    ids=" ".join,
)
@pytest.mark.usefixtures("somewhere")
def test_commands_without_tensors_start_without_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom dmsae.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'transformers', 'pyarrow', 'datasets') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("[]\n"), result.stderr


@pytest.mark.usefixtures("somewhere")
def test_the_readme_s_python_example_runs_as_pasted() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf8"), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
