"""The results page of the documentation, made from the JSON that experiments left, and from nothing else."""

import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import median

from dmsae.config import Json
from dmsae.errors import CheckpointError
from dmsae.experiments.catalog import EXPERIMENTS, current_results, outdated_note
from dmsae.experiments.claims import CLAIMS
from dmsae.experiments.results import made_with
from dmsae.experiments.tables import tables, verdict_table
from dmsae.experiments.verdicts import Outcome, Verdict, verdicts
from dmsae.report.figures import CAPTIONS, FIGURES, draw

_HEAD = """# Results

This page is made by `make results` from the JSON files in [`results/`](results), and a test checks that it is what they
give. Each file is one part of an experiment with one seed; [experiments](experiments.md) says what the parts are and
how a verdict is reached. Below, a part that several experiments have stands with the first. A verdict needs three
seeds. Intervals are Student's t over seeds, and not corrected for the number of claims. All seeds have the same model,
text and held-out set.

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
    """Return what one preset gave: the questions that were asked, one after the other."""
    read = current_results(folder)
    if read.outdated:  # the page would be silent about them
        raise CheckpointError(outdated_note(read))
    found = verdicts(read.current, CLAIMS)
    lines = [f"## Preset `{folder.name}`", "", _about(read.current), ""]
    asked = _asked(read.current)
    lines += [_overview(asked, found), ""]
    shown = {name: [file for file in figures if _question_of(file.stem, asked) == name] for name in asked}
    for name, results in asked.items():
        made = f"{_made(name, folder.name, results)}{_elsewhere(name, asked)}"
        lines += [f"### `{name}`", "", f"{EXPERIMENTS[name].question} {made}", ""]
        parts = {result["part"] for result in results}
        if judged := [one for one in found if one.part in parts and one.outcome is not Outcome.UNTESTED]:
            lines += [verdict_table(judged).markdown(), ""]
        for file in shown[name]:
            caption = CAPTIONS[file.stem]
            lines += [f"![{caption}]({file.relative_to(docs).as_posix()})", "", f"*{caption}*", ""]
        for table in tables(results):
            lines += [table.markdown(), ""]
    if untested := [one.claim for one in found if one.outcome is Outcome.UNTESTED]:
        lines += ["### Not tested here", "", *(f"- {claim}" for claim in untested), ""]
    return "\n".join(lines)


def _overview(asked: dict[str, list[Json]], found: Sequence[Verdict]) -> str:
    """Return how many claims hold in each experiment."""
    outcomes = (Outcome.HOLDS, Outcome.FAILS, Outcome.OPEN)
    lines = ["| experiment | " + " | ".join(outcomes) + " |", "| --- | --- | --- | --- |"]
    for name, results in asked.items():
        parts = {result["part"] for result in results}
        counts = Counter(one.outcome for one in found if one.part in parts)
        lines.append(f"| `{name}` | " + " | ".join(str(counts[outcome]) for outcome in outcomes) + " |")
    return "\n".join(lines)


def _asked(results: list[Json]) -> dict[str, list[Json]]:
    """Return the experiments that were run, each with the results of those parts that an earlier one does not have."""
    left, asked = list(results), {}
    for name, experiment in EXPERIMENTS.items():
        if mine := [result for result in left if result["part"] in experiment.parts]:
            asked[name] = mine
            left = [result for result in left if result not in mine]
    return asked


def _question_of(figure: str, asked: Collection[str]) -> str:
    """Return the experiment that a figure belongs to: the one with most of the parts that it shows."""
    parts = set(FIGURES[figure][0])
    return max(asked, key=lambda name: len(parts & set(EXPERIMENTS[name].parts)))


def _about(results: list[Json]) -> str:
    """Return what all experiments of a preset have in common."""
    settings = results[0]["settings"]
    distill = settings["distill"]
    train = distill["train"]
    return (
        f"{settings['model']}, store `{settings['store']}`; width {distill['width']}, k {distill['k']}, "
        f"{train['tokens']:,} activations a training run, learning rate {train['lr']:g}. "
        "The last digits depend on the CPU's instruction set."
    )


def _made(name: str, preset: str, results: list[Json]) -> str:
    """Return how the results of an experiment are made: command, seeds, parts, versions, machine and time."""
    parts = list(dict.fromkeys(result["part"] for result in results))
    command = f"`dmsae experiment {name} --preset {preset} --out runs/{preset}`"
    shown = "" if parts == [name] else f", parts {_listed(parts)}"
    return f"{command}{shown}; {_seeds(results)}. {made_with(results)}.{_minutes(results)}"


def _elsewhere(name: str, asked: dict[str, list[Json]]) -> str:
    """Return where the other parts of an experiment are shown, and which were not run."""
    places = {result["part"]: one for one, results in asked.items() for result in results}
    others = {part: places.get(part) for part in EXPERIMENTS[name].parts if places.get(part) != name}
    shown = "".join(f" `{part}` is shown with `{place}`." for part, place in others.items() if place)
    missing = [part for part, place in others.items() if not place]
    return shown + (f" Not run: {_listed(missing)}." if missing else "")


def _listed(parts: list[str]) -> str:
    return ", ".join(f"`{part}`" for part in parts)


def _seeds(results: list[Json]) -> str:
    """Return the seeds of the parts: those that most have, and then those of the others."""
    seeds: dict[str, list[int]] = {}
    for result in results:
        seeds.setdefault(result["part"], []).append(result["seed"])
    texts = {part: " ".join(map(str, sorted(of_part))) for part, of_part in seeds.items()}
    usual = Counter(texts.values()).most_common(1)[0][0]
    others = "".join(f", of `{part}` {text}" for part, text in texts.items() if text != usual)
    return f"seeds {usual}{others}"


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
