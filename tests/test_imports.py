"""The tree is the data flow: a module imports only what stands before it."""

import ast
from pathlib import Path

import dmsae

ROOT = Path(dmsae.__file__).parent

FLOW = (
    # the house
    "errors",
    "files",
    "seeds",
    "config",
    "progress",
    "artifact",
    "hub",
    # text → tokens → model → activations
    "assets",
    "text",
    "tokens",
    "base_model",
    "store",
    "harvest",
    "activations",
    # the SAE and its training
    "sparse",
    "sae",
    "objective",
    "metrics",
    "schedule",
    "checkpoint",
    "run",
    "learner",
    "train",
    "status",
    # from trained SAEs to a core, and what is done with it
    "quantile",
    "attribution",
    "core",
    "fidelity",
    "examples",
    "ablation",
    "formats",
    "distill",
    "transfer",
    "evaluate",
    "experiments",
    "report",
    "commands",
    "cli",
    "__main__",
)
"""Modules and folders in their order; not all need to exist. A folder's own files may import each other."""


def modules() -> dict[str, list[Path]]:
    """Every module or folder of the package with its files."""
    found: dict[str, list[Path]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        head = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if head != "__init__":
            found.setdefault(head, []).append(path)
    return found


def imported(path: Path) -> set[str]:
    """The modules and folders of this package that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}, line {node.lineno}: write the import absolutely, dmsae.…"
            names = [node.module or ""]
            if node.module == "dmsae":
                names = [f"dmsae.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("dmsae.")}
    return found & set(modules())


def test_every_module_has_its_place() -> None:
    lost = set(modules()) - set(FLOW)
    assert not lost, f"Place {sorted(lost)} in FLOW ({Path(__file__).name}), after all that they import."


def test_imports_point_one_way() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}, which comes after it"
        for head, paths in modules().items()
        for path in paths
        for name in imported(path)
        if name != head and FLOW.index(name) > FLOW.index(head)
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_are_seen(tmp_path: Path) -> None:
    source = "import dmsae.store\nfrom dmsae import text\ndef f():\n    from dmsae.sae import SAE\nimport torch\n"
    (tmp_path / "some.py").write_text(source)
    assert imported(tmp_path / "some.py") == {"store", "text", "sae"}
