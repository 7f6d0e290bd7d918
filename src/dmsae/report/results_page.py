"""The results page of the documentation, made from the JSON that experiments left, and from nothing else."""

import sys
from collections import Counter
from pathlib import Path
from statistics import median

from dmsae.config import Json
from dmsae.errors import CheckpointError
from dmsae.experiments.catalog import EXPERIMENTS, current_results, outdated_note
from dmsae.experiments.claims import CLAIMS
from dmsae.experiments.results import made_with
from dmsae.experiments.tables import tables, verdict_table
from dmsae.experiments.verdicts import Outcome, verdicts
from dmsae.report.figures import CAPTIONS, draw

_HEAD = """# Results

This page is made by `make results` from the JSON files in [`results/`](results), and a test checks that it is what they
give. Each file is one part of an experiment with one seed; [experiments](experiments.md) says what the parts are and
how a verdict is reached. A verdict needs three seeds. Intervals are Student's t over seeds, and not corrected for the
number of claims. All seeds have the same model, text and held-out set.

In the tables of SAEs: *core*, latents kept; *L0*, active latents per token, the core included; *FVE*, held-out variance
explained; *price*, how much FVE keeping the core costs, compared with an SAE that keeps nothing at the same L0; *loss*,
the next-token loss in nats with the reconstruction in place; *median rate*, share of positions on which the median core
latent fires; *selected again*, core latents that attribution would choose again, without a cap on firing rates. SAEs
named `unconstrained` keep nothing. Several are trained, at L0s around that of the SAEs that they are compared with; the
k in their names is that of the comparison. A core brings the training of the SAE that it comes from with it; the part
`longer` is about that. The [glossary](glossary.md) has the rest.
"""


def write_results(docs: Path) -> None:
    """Write `results.md` and its figures, from the folders of results in a directory of documentation."""
    sections = [_HEAD]
    for folder in sorted(path for path in (docs / "results").iterdir() if path.is_dir()):
        files = draw(folder, docs / "figures" / folder.name)
        for file in files:
            if file.suffix == ".svg":  # the page shows the PNG, which every viewer renders alike
                file.unlink()
        sections.append(_section(folder, [file for file in files if file.suffix == ".png"], docs))
    (docs / "results.md").write_text("\n".join(sections), encoding="utf8")


def _section(folder: Path, figures: list[Path], docs: Path) -> str:
    read = current_results(folder)
    if read.outdated:  # the page would be silent about them
        raise CheckpointError(outdated_note(read))
    results = read.current
    lines = [f"## Preset `{folder.name}`", "", _about(folder.name, results), ""]
    found = verdicts(results, CLAIMS)
    lines += [verdict_table([one for one in found if one.outcome is not Outcome.UNTESTED]).markdown(), ""]
    for file in figures:
        lines += [f"![{CAPTIONS[file.stem]}]({file.relative_to(docs).as_posix()})", "", f"*{CAPTIONS[file.stem]}*", ""]
    for table in tables(results):
        lines += [table.markdown(), ""]
    if untested := [one.claim for one in found if one.outcome is Outcome.UNTESTED]:
        lines += ["**Not tested here**", "", *(f"- {claim}" for claim in untested), ""]
    return "\n".join(lines)


def _about(preset: str, results: list[Json]) -> str:
    settings = results[0]["settings"]
    distill = settings["distill"]
    train = distill["train"]
    return (
        f"{_commands(preset, results)} "
        f"{settings['model']}, store `{settings['store']}`; width {distill['width']}, k {distill['k']}, "
        f"{train['tokens']:,} activations a training run, learning rate {train['lr']:g}. "
        f"{made_with(results)}. The last digits depend on the CPU's instruction set.{_minutes(results)}"
    )


def _commands(preset: str, results: list[Json]) -> str:
    """Return which experiments were run, each with those of its parts that an earlier one does not have."""
    left = dict.fromkeys(result["part"] for result in results)
    shown = []
    for name, experiment in EXPERIMENTS.items():
        mine = [part for part in experiment.parts if part in left]
        left = {part: None for part in left if part not in mine}
        if mine:
            shown.append(f"`{name}`" + ("" if mine == [name] else f" ({', '.join(mine)})"))
    return (
        f"Made with `dmsae experiment NAME --preset {preset} --out runs/{preset}`. NAME, and its parts in brackets: "
        f"{', '.join(shown)}. {_seeds(results)}"
    )


def _seeds(results: list[Json]) -> str:
    """Return the seeds of the parts: those that most have, and then those of the others."""
    seeds: dict[str, list[int]] = {}
    for result in results:
        seeds.setdefault(result["part"], []).append(result["seed"])
    texts = {part: " ".join(map(str, sorted(of_part))) for part, of_part in seeds.items()}
    usual = Counter(texts.values()).most_common(1)[0][0]
    others = "".join(f"; `{part}`: `--seeds {text}`" for part, text in texts.items() if text != usual)
    return f"`--seeds {usual}`{others}."


def _minutes(results: list[Json]) -> str:
    """Return how long the parts took, where that was recorded."""
    took: dict[str, list[float]] = {}
    for result in results:
        if "cpu_seconds" in result:
            took.setdefault(result["part"], []).append(result["cpu_seconds"] / 60)
    if not took:
        return ""
    shown = ", ".join(f"`{part}` {median(minutes):.0f}" for part, minutes in took.items())
    return f" Minutes of one core for a seed, where recorded (runs shared with another part count once): {shown}."


if __name__ == "__main__":
    write_results(Path(sys.argv[1]))
