"""Notebooks are run, kept with what they print, and shown as pages, all without Jupyter.

`python docs/generate/notebooks.py docs/notebooks/*.ipynb` runs each from top to bottom and stores what it prints and
draws. Jupyter opens and runs the same files.
"""

import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Notebook = dict[str, Any]


def read_notebook(path: Path) -> Notebook:
    """Return a notebook as the JSON that it is."""
    notebook: Notebook = json.loads(path.read_text(encoding="utf8"))
    return notebook


def code_cells(notebook: Notebook) -> list[str]:
    """Return the source of every cell of code."""
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: Notebook) -> Notebook:
    """Return the notebook with what its cells print and draw, run in order in one namespace, in an empty directory."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    with _elsewhere():
        for number, cell in enumerate(notebook["cells"]):
            if cell["cell_type"] == "code":
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
                cell = cell | {"outputs": [*_text_output(printed.getvalue()), *_figures()]}
            cells.append(cell)
    return notebook | {"cells": cells}


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def _text_output(text: str) -> list[dict[str, Any]]:
    return [{"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}] if text else []


def _figures() -> list[dict[str, Any]]:
    """Return what was drawn since the last cell, as Jupyter keeps it."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    from matplotlib import pyplot

    outputs = []
    for number in pyplot.get_fignums():
        image = io.BytesIO()
        pyplot.figure(number).savefig(image, format="png", dpi=110, metadata={"Software": None})
        data = {"image/png": base64.b64encode(image.getvalue()).decode(), "text/plain": ["<Figure>"]}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    pyplot.close("all")
    return outputs


def to_markdown(notebook: Notebook, name: str) -> str:
    """Return a notebook as a page: its text, its code, and what was printed and drawn when it was last run."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).rstrip()
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [_shown(output) for output in cell.get("outputs", [])]
    parts.insert(1, f"*[Download this notebook]({name}). What it printed is from a run on a CPU.*")
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    return f'<img alt="figure" src="data:image/png;base64,{output["data"]["image/png"]}">'


def store_outputs(path: Path) -> None:
    """Run a notebook and write it back with what it printed and drew."""
    notebook = run(read_notebook(path))
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf8")


if __name__ == "__main__":
    for given in sys.argv[1:]:
        store_outputs(Path(given))
