"""The notebooks run from top to bottom, and are kept with what they print."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from notebooks import Notebook, code_cells, read_notebook, run, store_outputs, to_markdown

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "notebooks"
MANY_BYTES = 100_000


def execute(name: str, tmp_path: Path) -> list[str]:
    """Run a copy of a notebook in a process of its own, and return what each of its cells of code printed."""
    copy = tmp_path / name
    copy.write_bytes((FOLDER / name).read_bytes())
    command = [sys.executable, str(ROOT / "docs" / "generate" / "notebooks.py"), str(copy)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    cells = read_notebook(copy)["cells"]
    outputs = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]
    return ["".join(line for one in cell for line in one.get("text", [])) for cell in outputs]


@pytest.mark.usefixtures("_one_thread_in_children")
def test_the_planted_dictionary_is_recovered(tmp_path: Path) -> None:
    printed = "".join(execute("own-activations.ipynb", tmp_path))  # its own assertions are the test
    assert "features that the core stands for:" in printed


@pytest.mark.real
@pytest.mark.usefixtures("_one_thread_in_children")
def test_a_core_from_nothing(tmp_path: Path) -> None:
    printed = "".join(execute("from-nothing.ipynb", tmp_path))
    assert "distilled core:" in printed
    assert "KL" in printed


@pytest.fixture
def _one_thread_in_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MPLBACKEND", "agg")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_what_is_kept_is_small_and_whole(path: Path) -> None:
    notebook = read_notebook(path)
    assert path.stat().st_size < MANY_BYTES
    printing = [source for source in code_cells(notebook) if "print(" in source or "show" in source]
    kept = [cell for cell in notebook["cells"] if cell.get("outputs")]
    assert len(kept) == len(printing) >= 4


def test_a_notebook_is_run_kept_and_shown(tmp_path: Path) -> None:
    code: Notebook = {"cell_type": "code", "id": "b", "metadata": {}, "execution_count": None, "outputs": []}
    cells: list[Notebook] = [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# Title"]},
        code | {"source": ["x = 6 * 7\n", "print(x)"]},
        code | {"source": ["y = x + 1"]},
    ]
    path = tmp_path / "small.ipynb"
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}), encoding="utf8")
    store_outputs(path)
    outputs = [cell.get("outputs") for cell in read_notebook(path)["cells"]]
    assert outputs == [None, [{"output_type": "stream", "name": "stdout", "text": ["42\n"]}], []]
    page = to_markdown(read_notebook(path), "small.ipynb")
    assert page.startswith("# Title\n\n*[Download this notebook](small.ipynb)")
    assert "```python\nx = 6 * 7\nprint(x)\n```\n\n```text\n42\n```" in page
    cells[1]["source"] = ["1 / 0"]
    with pytest.raises(ZeroDivisionError):
        run({"cells": cells})
