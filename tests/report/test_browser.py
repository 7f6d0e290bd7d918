"""The report in a real browser: no error on its console, both themes, a narrow screen, hostile text that stays text."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dmsae.report.latents import Scored, card
from dmsae.report.markup import table
from dmsae.report.page import page, section
from dmsae.report.report import write_report
from hostile import HOSTILE, hostile_core, hostile_facts

BROWSER = next((path for name in ("chromium", "google-chrome", "chrome") if (path := shutil.which(name))), None)
pytestmark = [pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome"), pytest.mark.browser]
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "small"
HARNESS = """<!doctype html>
<iframe id="page" src="report.html" width="{width}" height="900"></iframe><pre id="told"></pre>
<script>
document.getElementById("page").onload = event => {{
  const inside = event.target.contentDocument, root = inside.documentElement;
  const told = [
    "background=" + getComputedStyle.call(event.target.contentWindow, inside.body).backgroundColor,
    "overflow=" + (root.scrollWidth - root.clientWidth),
    "scripts=" + inside.scripts.length,
    "attacked=" + (event.target.contentWindow.attacked || window.attacked || "no"),
    "articles=" + inside.querySelectorAll("article").length,
    "drawn=" + [...inside.images].filter(image => image.naturalWidth > 0).length,
    "images=" + inside.images.length,
  ];
  document.getElementById("told").textContent = told.join(";");
}};
</script>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("browser")
    wide = table([f"column {i}" for i in range(14)], [[HOSTILE, *range(13)]])
    cards = [card(0, hostile_core(), hostile_facts(), Scored(1.0, 0.5, 2.0)) for _ in range(3)]
    (directory / "report.html").write_text(page(HOSTILE, section("Tables", wide), section("Latents", *cards)))
    return directory


@pytest.fixture(scope="module")
def experiment_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real report of the experiments whose figures are in the repository."""
    directory = tmp_path_factory.mktemp("experiment")
    shutil.copytree(RESULTS, directory / "small" / "results")
    write_report([directory / "small"], directory / "report.html")
    return directory


def told(directory: Path, width: int, dark: bool) -> tuple[dict[str, str], str]:
    """Return what the page looks like inside a window of a width, and the browser's console."""
    harness = directory / f"harness-{width}.html"
    harness.write_text(HARNESS.format(width=width))
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=3000", f"--user-data-dir={directory / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", harness.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="told">(.*?)</pre>', done.stdout)
    assert found, done.stdout
    return dict(part.split("=", 1) for part in found[1].split(";")), done.stderr


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1100])
def test_the_page_stands_on_any_screen(report: Path, width: int, dark: bool) -> None:
    seen, console = told(report, width, dark)
    assert "CONSOLE" not in console, console
    assert seen["overflow"] == "0", "the page is wider than the screen"
    assert (seen["scripts"], seen["attacked"], seen["articles"]) == ("0", "no", "3")
    brightness = sum(map(int, re.findall(r"\d+", seen["background"])[:3])) / 3
    assert brightness < 60 if dark else brightness > 200


@pytest.mark.parametrize("dark", [False, True])
def test_the_report_of_experiments_shows_every_figure(experiment_report: Path, dark: bool) -> None:
    for width in (360, 1100):
        seen, console = told(experiment_report, width, dark)
        assert "CONSOLE" not in console, console
        assert (seen["overflow"], seen["scripts"]) == ("0", "0")
        assert int(seen["images"]) == int(seen["drawn"]) > 0
