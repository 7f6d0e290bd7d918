"""The report of runs: one page with what was run, what was found about the method, and the latents that came out."""

import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from dmsae.activations.request import HarvestRequest
from dmsae.activations.store import Store, open_store
from dmsae.config import Json
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.disk.files import write_bytes
from dmsae.disk.run import read_settings
from dmsae.distillation.inspection import has_core
from dmsae.distillation.matching import open_store_of
from dmsae.distillation.status import read_summary
from dmsae.distillation.survivors import DISTILLATION, survivors
from dmsae.errors import ConfigError, DmsaeError
from dmsae.evaluation.fidelity import kept_fidelity
from dmsae.experiments.catalog import current_results, outdated_note
from dmsae.experiments.claims import CLAIMS
from dmsae.experiments.results import made_with
from dmsae.experiments.tables import tables, verdict_table
from dmsae.experiments.verdicts import Outcome, Verdict, verdicts
from dmsae.progress import SILENT, Progress
from dmsae.report.figures import CAPTIONS, draw
from dmsae.report.latents import latent_cards
from dmsae.report.markup import Markup, table, tag
from dmsae.report.page import figure, page, section
from dmsae.training.result import read_result

_CAUTION = (
    "Intervals are Student's t over seeds, not corrected for the number of claims. All seeds have the same model, text "
    "and held-out set."
)
_CLASSES = {Outcome.HOLDS: "holds", Outcome.FAILS: "fails", Outcome.OPEN: "open", Outcome.UNTESTED: "untested"}


def write_report(
    places: Sequence[Path], to: Path, n_latents: int = 24, root: Path | None = None, progress: Progress = SILENT
) -> None:
    """Write the page of some experiments, distillations and transfers, in this order: verdicts first."""
    experiments = [place for place in places if (place / layout.RESULTS).is_dir()]
    runs = [place for place in places if place not in experiments]
    if missing := [place for place in runs if not (place / layout.SETTINGS).is_file()]:
        raise ConfigError(f"{missing[0]} is neither a run nor an experiment: there is nothing to report.")
    sections = [part for place in experiments for part in _experiment(place, root)]
    cores = {place: Core.load(place) for place in runs if has_core(place)}
    for place in runs:
        sections += _run(place, cores, n_latents, root, progress)
    document = page("dmsae: what was run and what was found", *sections, _versions())
    to.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(to, document.encode())


def _experiment(place: Path, root: Path | None) -> list[Markup]:
    read = current_results(place / layout.RESULTS)
    results = read.current
    found = verdicts(results, CLAIMS)
    about = tag("p", f"{_made_of(results, root)} {outdated_note(read)}", class_="soft")
    verdicts_shown = verdict_table(found)
    shown = [_verdict_row(one, cells) for one, cells in zip(found, verdicts_shown.rows, strict=True)]
    with TemporaryDirectory() as scratch:
        drawn = {path.stem: path for path in draw(place / layout.RESULTS, Path(scratch)) if path.suffix == ".svg"}
        command = f"dmsae figures {place}"
        figures = [figure(path, CAPTIONS[name], command) for name, path in drawn.items()]
    figured = [tag("h3", one.title) + table(one.header, [list(row) for row in one.rows]) for one in tables(results)]
    return [
        section(
            f"Verdicts: {place.name}", about, tag("p", _CAUTION, class_="soft"), table(verdicts_shown.header, shown)
        ),
        section(f"Figures: {place.name}", *figures),
        section(f"Tables: {place.name}", *(Markup(one) for one in figured)),
    ]


def _made_of(results: Sequence[Json], root: Path | None) -> str:
    """Return what some results were made of and with, as their files say."""
    first = results[0]
    settings = first.get("settings", {})
    distill = settings.get("distill", {})
    text, key = "", settings.get("store", "")
    with suppress(DmsaeError):  # the store need not be there any more
        request = open_store(key, root).request
        text = f"text {request.source}, " if isinstance(request, HarvestRequest) else "imported activations, "
    sizes = (
        f" Width {distill['width']}, k {distill['k']}, coverage {distill['coverage']}, "
        f"{distill['train']['tokens']:,} activations a training run."
        if distill
        else ""
    )
    return f"{settings.get('model', '')}, {text}store {key}.{sizes} {made_with(results)}."


def _verdict_row(one: Verdict, cells: Sequence[str]) -> list[object]:
    """Return the cells of a verdict, with the verdict itself marked."""
    said = tag("span", one.outcome, class_=f"verdict {_CLASSES[one.outcome]}")
    return [said if cell == one.outcome else cell for cell in cells]


def _run(place: Path, cores: dict[Path, Core], n_latents: int, root: Path | None, progress: Progress) -> list[Markup]:
    settings = read_settings(place)
    if settings.get("kind") == "distill":
        return [_distillation(place, settings, cores.get(place), n_latents, root, progress)]
    store = _store(place, settings, root)
    parts = [_trained(place, settings, store)]
    if store is not None:
        parts += _survived(place, settings, store, cores)
    return [section(f"SAEs: {place.name}", *parts)]


def _distillation(
    place: Path, settings: Json, core: Core | None, n_latents: int, root: Path | None, progress: Progress
) -> Markup:
    model, distill = settings["model"], settings["distill"]
    about = (
        f"{model['name']} {model['revision']} at {model['hook']}, {_text(place, settings, root)}. Width "
        f"{distill['width']}, k {distill['k']}, core mode {distill['core_mode']}, coverage {distill['coverage']}, "
        f"max_rate {distill['max_rate'] or 'none'}, seed {distill['seed']}, {distill['train']['tokens']:,} tokens a "
        "cycle."
    )
    summary = read_summary(place)
    if made_with := summary.get("made_with"):
        about += f" Made with {', '.join(f'{name} {value}' for name, value in made_with.items())}."
    rows = [_cycle_row(cycle) for cycle in summary.get("cycles", ())]
    header = ["cycle", "core", "kept", "new", "dropped", "L0 of the core", "of", "median rate", "pool taken", "FVE"]
    header += ["Jaccard with the cycle before", "by chance", "decoder cosine"]
    parts = [tag("p", about, class_="soft"), table(header, rows)]
    if core is not None:
        parts.append(tag("p", f"Distilled core: {len(core)} latents. The first {min(n_latents, len(core))}:"))
        if len(core):
            parts.append(latent_cards(place, core, n_latents, root, progress))
    return section(f"Distillation: {place.name}", *parts)


def _text(place: Path, settings: Json, root: Path | None) -> str:
    """Return which text a run was made from, as far as that is known."""
    key = settings["store"]
    try:
        request = open_store_of(place, key, root).request
    except DmsaeError:
        return f"store {key}"
    source = request.source if isinstance(request, HarvestRequest) else "imported activations"
    return f"text {source}, store {key}"


def _cycle_row(cycle: Json) -> list[object]:
    core, selection = cycle["core"], cycle.get("selection") or {}
    share, rate, fve = selection.get("share_selected"), selection.get("median_rate"), cycle["heldout_fve"]
    survival = cycle.get("survival") or {}
    survived = [survival.get(name) for name in ("jaccard", "jaccard_chance", "decoder_cosine")]
    return [
        cycle["cycle"],
        core["size"],
        core["kept"],
        core["new"],
        core["dropped"],
        f"{cycle['l0_core']:.1f}" if cycle["n_frozen"] else "–",
        cycle["n_frozen"] or "–",
        "–" if rate is None else f"{100 * rate:.0f} %",
        "–" if share is None else f"{100 * share:.0f} %",
        "–" if fve is None else f"{fve:.3f}",
        *(_two_digits(value) for value in survived),
    ]


def _two_digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _store(place: Path, settings: Json, root: Path | None) -> Store | None:
    """Return the store on whose held-out activations SAEs were measured, if it is still there."""
    made_from = settings["made_from"]
    key = made_from.get("heldout_store") or made_from.get("store")
    try:
        return open_store_of(place, key, root) if key else None
    except DmsaeError:
        return None


def _survived(place: Path, settings: Json, store: Store, cores: dict[Path, Core]) -> list[Markup]:
    """Return what became of the cores on this page in these SAEs: a table for each that one of them carries."""
    made = []
    header = ["core in", "and in", "rate", "rate there", "Jaccard", "by chance", "correlation", "decoder cosine"]
    for run, core in cores.items():
        try:
            found = survivors(run, core, [place / name for name in settings["saes"]], store)
        except DmsaeError:
            continue
        if any(one.before == DISTILLATION for one in found):
            rows: list[list[object]] = [[one.before, one.after, *map(_two_digits, one.summary[3:9])] for one in found]
            made.append(tag("p", f"What became of the core of {run.name}, medians over its latents:", class_="soft"))
            made.append(table(header, rows))
    return made


def _trained(place: Path, settings: Json, store: Store | None) -> Markup:
    rows: list[list[object]] = []
    for name in settings["saes"]:
        result = read_result(place / name)
        figures = kept_fidelity(place / name, store) if store else None
        l0 = figures.l0_core + figures.l0_noncore if figures else None
        numbers = [figures.fve, figures.fve_prefixes[0], figures.l0_core, l0] if figures else [None] * 4
        cells = ["–" if value is None else f"{value:.3f}" if value < 1 else f"{value:.1f}" for value in numbers]
        rows.append([name, result.state, *cells])
    return table(["SAE", "training", "FVE", "core + prefix-0", "L0 of the core", "L0"], rows)


def _versions() -> Markup:
    from dmsae import __version__

    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    about = f"dmsae {__version__}, torch {torch.__version__}, {machine}."
    return section("This page was written with", tag("p", about, class_="soft"))
