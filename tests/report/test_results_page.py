"""The results page says what the committed figures give, to the letter."""

import json
import shutil
from pathlib import Path

from dmsae.report.results_page import write_results

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_figures_give(tmp_path: Path) -> None:
    shutil.copytree(DOCS / "results", tmp_path / "results")
    write_results(tmp_path)
    assert (tmp_path / "results.md").read_text() == (DOCS / "results.md").read_text(), "run `make results`"
    made, there = ({path.relative_to(root) for path in (root / "figures").rglob("*.png")} for root in (tmp_path, DOCS))
    assert made <= there


def test_the_page_says_how_long_parts_took_where_that_is_known(tmp_path: Path) -> None:
    results = tmp_path / "results" / "small"
    results.mkdir(parents=True)
    for seed, minutes in enumerate((7, 9, None)):
        result = json.loads((DOCS / "results" / "small" / f"selection-seed-{seed}.json").read_text())
        result = {name: value for name, value in result.items() if name != "cpu_seconds"}
        recorded = {} if minutes is None else {"cpu_seconds": 60.0 * minutes}
        (results / f"selection-seed-{seed}.json").write_text(json.dumps(result | recorded))
    write_results(tmp_path)
    assert "(runs shared with another part count once): `selection` 8." in (tmp_path / "results.md").read_text()
