"""The tree is the data flow: a stage imports only the stages before it, and no two modules import each other."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dmsae

ROOT = Path(dmsae.__file__).parent

FLOW = (
    # what every stage uses
    "errors",
    "own_code",
    "ranks",
    "seeds",
    "config",
    "progress",
    "devices",
    "disk",
    # the paper's Figure 1
    "text",
    "activations",
    "sae",
    "training",
    "cores",
    "evaluation",
    "formats",
    "interventions",
    "distillation",
    "planning",
    "sweeps",
    "experiments",
    "report",
    # the command line
    "commands",
    "cli",
    "__main__",
)
"""Stages in their order: folders, and the few files beside them. Not all need to exist."""


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, without the package's own."""
    names = {path: path.relative_to(ROOT).with_suffix("").parts for path in sorted(ROOT.rglob("*.py"))}
    return {".".join(part for part in parts if part != "__init__"): path for path, parts in names.items()}


def imported(path: Path) -> set[str]:
    """The modules of this package that a file imports, anywhere in it but under TYPE_CHECKING at its top."""
    known = modules()
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}, line {node.lineno}: write the import absolutely, dmsae.…"
            # What is imported may itself be a module: `from dmsae.text import assets`.
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    inside = {name.removeprefix("dmsae.") for name in names if name.startswith("dmsae.")}
    exact = {name for name in inside if name in known}
    return {name for name in exact if not any(other.startswith(f"{name}.") for other in exact)}


def stage(module: str) -> str:
    return module.split(".")[0]


def test_every_stage_has_its_place() -> None:
    lost = {stage(module) for module in modules() if module} - set(FLOW)
    assert not lost, f"Place {sorted(lost)} in FLOW ({Path(__file__).name}), after all that they import."


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} imports {name}, which comes after it"
        for module, path in modules().items()
        for name in imported(path)
        if module and FLOW.index(stage(name)) > FLOW.index(stage(module))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other() -> None:
    graph = {module: imported(path) - {module} for module, path in modules().items() if module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"These modules import each other: {' → '.join(error.args[1])}")


def test_imports_are_seen(tmp_path: Path) -> None:
    source = (
        "import dmsae.activations.store\nfrom dmsae.text import assets\n"
        "def f():\n    from dmsae.sae.sae import SAE\nimport torch\n"
    )
    (tmp_path / "some.py").write_text(source)
    assert imported(tmp_path / "some.py") == {"activations.store", "text.assets", "sae.sae"}
