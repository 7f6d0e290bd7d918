"""SAEBench on our SAEs, from here: one process of the other environment for each eval, one after the other.

    <out>/<eval>/<name>_custom_sae_eval_results.json   as the package writes it, where its plotting looks for it
    <out>/records/<eval>/<name>.json                   what that result was made from, and figures of our own
    <out>/nulls/<name>-<kind>/                         nulls that stand beside the SAEs, saved as such
    <out>/logs/<eval>.log                              what the package printed
    <out>/summary.json                                 all headline figures beside nulls, and what has not run and why

An eval that is stopped loses the SAE that it was at, at most; the same call resumes.
"""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dmsae.config import to_dict
from dmsae.disk import layout
from dmsae.disk.files import exclusive_lock
from dmsae.errors import BenchmarkError, ConfigError
from dmsae.evaluation.saebench.environment import find_python, measuring_versions, started
from dmsae.evaluation.saebench.evals import HELDOUT, require_evals, settings_of
from dmsae.evaluation.saebench.heldout import HeldoutText
from dmsae.evaluation.saebench.job import Event, How, Job, JobModel, JobSAE, require_name, routed_by
from dmsae.evaluation.saebench.nulls import Nulls
from dmsae.evaluation.saebench.results import Outcome, State, Summary, is_kept, read_figures
from dmsae.progress import SILENT, Bar, Progress

_WORKER = "dmsae.evaluation.saebench.worker"
_LAST_LINES = 6
"""Lines of a log that an error shows."""


def run_saebench(
    saes: Sequence[JobSAE],
    model: JobModel,
    out: Path,
    evals: Iterable[str],
    *,
    small: bool = False,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    heldout: HeldoutText | None = None,
    nulls: Nulls | None = None,
    how: How | None = None,
    environment: Path | None = None,
    progress: Progress = SILENT,
) -> Summary:
    """Run evals of SAEBench on SAEs of one model and hook, and return how each ended.

    Settings are the published ones, or those for a machine without a GPU (`small`), with `changes` by eval. `heldout`
    is text for the core eval; `nulls` are evaluated after the SAEs.
    """
    python = find_python(environment)
    versions = measuring_versions(python)
    evals = require_evals(evals)
    settings = settings_of(evals, small, changes)
    for chosen in settings.values():
        chosen |= {name: _absolute(chosen[name]) for name in ("dataset", "dataset_name") if name in chosen}
    nulls = nulls or Nulls([], {}, {})
    saes = [*saes, *nulls.entries]
    _require_saes(saes)
    out = out.absolute()
    if wrong := routed_by(str(out)):
        progress.warn(
            f"SAEBench's plotting tells kinds of results apart by parts of the path, and {out} holds {wrong!r}. To "
            "plot, give it paths relative to that directory, or choose another one."
        )
    if settings.get("core", {}).get("dataset") == HELDOUT:
        if heldout is None:
            raise ConfigError("core.dataset = 'heldout', but there is no held-out text. Give a store, or a data set.")
        settings["core"] = heldout.fitted(settings["core"])
    summary = Summary(to_dict(model), settings, nulls=nulls.beside, nulls_not_made=nulls.not_made)
    cache = layout.saebench_cache().absolute() / f"{model.alias}-{model.digest[:12]}-layer-{model.layer}"
    with exclusive_lock(out / layout.LOCK, f"The results in {out}"):
        for index, name in enumerate(evals):
            progress.note(f"{name} ({index + 1} of {len(evals)})")
            job = Job(name, tuple(saes), model, settings[name], out, cache, how or How(), versions)
            summary.outcomes.extend(_run(job, python, progress))
            summary.save(out)
    return summary


def _absolute(dataset: str) -> str:
    """Return a data set as the worker finds it, which has another current directory; the name of one stays."""
    return str(Path(dataset).absolute()) if Path(dataset).is_dir() else dataset


def _require_saes(saes: Sequence[JobSAE]) -> None:
    if not saes:
        raise ConfigError("No SAEs were given. Name the directories of those to evaluate.")
    for sae in saes:
        require_name(sae.name)
    names = [sae.name for sae in saes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"Two SAEs are called {twice[0]!r}. Their results would overwrite each other.")


def _run(job: Job, python: Path, progress: Progress) -> list[Outcome]:
    """Return how one eval ended for each SAE; it is not started when all results are there."""
    ended = {sae.name: Event("kept", sae.name) for sae in job.saes if is_kept(job, sae)}
    if len(ended) < len(job.saes):
        ended |= _work(job, python, progress)
    return [_outcome(job, sae, ended.get(sae.name)) for sae in job.saes]


def _work(job: Job, python: Path, progress: Progress) -> dict[str, Event]:
    """Run the worker, and return the last thing that it said of each SAE."""
    ended: dict[str, Event] = {}
    with tempfile.TemporaryDirectory() as scratch, progress.bar(job.eval, len(job.saes), "SAEs") as bar:
        file = Path(scratch) / "job.json"
        job.write(file)
        with started(python, _WORKER, file, job.log()) as process:
            assert process.stdout is not None, "it was asked for"
            for line in process.stdout:
                event = Event.of(line)
                _show(event, bar, progress)
                if event.kind == "refused":
                    raise ConfigError(event.text)
                if event.kind in ("done", "kept", "failed", "not run"):
                    ended[event.sae] = event
            if process.wait():
                _note_death(job, ended, process.returncode)
    return ended


def _show(event: Event, bar: Bar, progress: Progress) -> None:
    match event.kind:
        case "done" | "kept":
            bar.advance(1, event.sae)
        case "failed" | "not run":
            bar.advance(1)
            progress.warn(f"{event.sae}: {event.text}")
        case _:
            bar.advance(0, event.text[-60:])


def _note_death(job: Job, ended: dict[str, Event], code: int) -> None:
    """Give the SAEs that a dead worker left behind a reason; if it never got to work, that is an error."""
    lines = job.log().read_text(encoding="utf8", errors="replace").strip().splitlines() if job.log().is_file() else []
    said = "\n  ".join(lines[-_LAST_LINES:]) or "nothing"
    why = f"The process that ran it ended with status {code}. The end of {job.log()}:\n  {said}"
    if not ended and any("No module named" in line for line in lines):
        raise BenchmarkError(f"SAEBench's environment is not complete: run 'make saebench-env' again. {why}")
    for sae in job.saes:
        ended.setdefault(sae.name, Event("failed", sae.name, why))


def _outcome(job: Job, sae: JobSAE, event: Event | None) -> Outcome:
    if event is None:
        return Outcome(job.eval, sae.name, "failed", {}, 0.0, f"The worker said nothing of it. See {job.log()}.")
    if event.kind == "done" or event.kind == "kept":
        return Outcome(job.eval, sae.name, event.kind, read_figures(job, sae), event.seconds)
    state: State = "not run" if event.kind == "not run" else "failed"
    return Outcome(job.eval, sae.name, state, {}, event.seconds, event.text)
