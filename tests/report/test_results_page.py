"""The results page says what the committed figures give, to the letter."""

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
