"""`dmsae evaluate saebench`: the real package on our SAEs."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dmsae.commands.found import store_of
from dmsae.commands.output import BESIDE_NULLS, number, plain_table
from dmsae.commands.output import out as printed
from dmsae.commands.terminal import TERMINAL
from dmsae.disk import layout
from dmsae.errors import BenchmarkError, ConfigError
from dmsae.evaluation.evaluate import EvaluateConfig
from dmsae.evaluation.nulls import NullKind
from dmsae.evaluation.saebench.evals import EVALS, HELDOUT, read_changes, settings_of
from dmsae.evaluation.saebench.job import How

if TYPE_CHECKING:  # `--help` does not wait for torch
    from dmsae.activations.identity import ModelIdentity
    from dmsae.activations.store import Store
    from dmsae.distillation.inspection import FoundSAE
    from dmsae.evaluation.saebench.heldout import HeldoutText
    from dmsae.evaluation.saebench.job import JobModel, JobSAE
    from dmsae.evaluation.saebench.nulls import Nulls
    from dmsae.evaluation.saebench.results import Summary

_ALL = "all"


def evaluate_saebench(
    saes: Annotated[tuple[Path, ...], tyro.conf.Positional],
    how: Annotated[How, tyro.conf.arg(name="")],
    evals: tuple[str, ...] = ("core", "absorption", "sparse_probing_sae_probes"),
    out: Path = Path("saebench"),
    env: Path | None = None,
    small: bool = False,
    settings: Path | None = None,
    nulls: tuple[NullKind, ...] = (),
    share_nulls: float = EvaluateConfig.share_nulls,
    store: str = "",
    root: Path | None = None,
    model: str = "",
) -> None:
    """Evaluate SAEs with SAEBench, the real package, in the environment that 'make saebench-env' builds.

    Settings are those of the published results unless you say otherwise. Results lie where the package's plotting looks
    for them; an eval that cannot run here says what it lacks. Ctrl-C keeps what is finished; the same command resumes.

    Args:
        saes: Directories of SAEs of one model and hook.
        evals: core, absorption, sparse_probing, sparse_probing_sae_probes, scr, tpp, ravel, unlearning, autointerp,
            meta_structure, or all.
        out: Directory for the results.
        env: SAEBench's environment. Default: $DMSAE_SAEBENCH, else .venv-saebench in the current directory.
        small: Settings for a machine without a GPU: less of everything, so the figures are no published ones.
        settings: A TOML file with a table of settings for each eval, under the package's own names.
        nulls: What to evaluate beside the SAEs, to show what a worthless one gets: untrained, random_encoder,
            permuted_decoder. Results are filed as <SAE>-<null>; each null costs as much as an SAE.
        share_nulls: SAEs of one width whose L0s, and latents in the core and each prefix group, differ by no more than
            this share are compared with the nulls of the first of them. 0: each has nulls of its own.
        store: Key of the store whose held-out text the core eval reads, and from whose activations nulls are made.
            Default: the one that the SAEs name.
        root: Directory of stores.
        model: Where the base model is now, if it is no longer where the SAEs say.
    """
    from dmsae.evaluation.saebench.environment import find_python
    from dmsae.evaluation.saebench.nulls import require_savable
    from dmsae.evaluation.saebench.runner import run_saebench

    find_python(env)  # say at once when it is not there
    require_savable(nulls)
    names = tuple(EVALS) if _ALL in evals else evals
    changes = read_changes(settings) if settings else {}
    wants_text = settings_of(names, small, changes).get("core", {}).get("dataset") == HELDOUT
    found = _found(saes)
    opened = store_of(found, store, root) if store or wants_text or nulls else None
    summary = run_saebench(
        _job_saes(found, out),
        _job_model(_identity(found, opened), model),
        out,
        names,
        small=small,
        changes=changes,
        heldout=_text(opened) if opened and wants_text else None,
        nulls=_nulls(found, opened, nulls, out, share_nulls) if opened and nulls else None,
        how=replace(how, data=how.data.absolute()) if how.data else how,
        environment=env,
        progress=TERMINAL,
    )
    print_summary(summary, small)
    printed.print(f"Results are below {out}; {out / layout.SUMMARY} has them all.")
    if not summary.has_results():
        raise BenchmarkError(f"No eval gave a result. {out / layout.SUMMARY} says why for each; so do the lines above.")


def _text(store: "Store") -> "HeldoutText":
    from dmsae.evaluation.saebench.heldout import heldout_text

    return heldout_text(store, layout.saebench_cache())


def _nulls(
    found: "dict[str, FoundSAE]", store: "Store", kinds: tuple[NullKind, ...], out: Path, share: float
) -> "Nulls":
    from dmsae.evaluation.saebench.nulls import save_nulls

    return save_nulls({name: one.sae for name, one in found.items()}, store, kinds, out, share, TERMINAL)


def _found(places: tuple[Path, ...]) -> "dict[str, FoundSAE]":
    """Return the SAEs by name: their folder, or that of their training when it is just called `sae`."""
    from dmsae.distillation.inspection import find_sae

    found: dict[str, FoundSAE] = {}
    for place in places:
        one = find_sae(place)
        directory = one.directory.resolve()
        name = directory.parent.name if directory.name == layout.SAE else directory.name
        if name in found:
            name = f"{directory.parent.parent.name if directory.name == layout.SAE else directory.parent.name}-{name}"
        if name in found:
            raise ConfigError(f"{place} and {found[name].directory} have the same name. Rename one of them.")
        found[name] = one
    return found


def _job_saes(found: "dict[str, FoundSAE]", out: Path) -> "list[JobSAE]":
    """Return the SAEs for the worker; one of a foreign format is saved in ours first."""
    from dmsae.evaluation.evaluate import digest_of
    from dmsae.evaluation.saebench.job import JobSAE

    jobs = []
    for name, one in found.items():
        directory = one.directory
        if not layout.has_artifact(directory, layout.SAE):
            directory = out / layout.FOREIGN_SAES / name
            one.sae.save(directory)
        jobs.append(JobSAE(name, directory.absolute(), digest_of(one.sae)))
    return jobs


def _identity(found: "dict[str, FoundSAE]", store: "Store | None") -> "ModelIdentity":
    """Return the model and hook that all SAEs are of."""
    from dmsae.activations.identity import ModelIdentity
    from dmsae.config import from_dict

    known = {name: one.made_from.get("model") for name, one in found.items()}
    models = {name: from_dict(ModelIdentity, facts) for name, facts in known.items() if facts}
    if not models and store is None:
        raise ConfigError("No SAE says which model it is of. Give a store of that model and hook with --store.")
    first = store.model if store is not None else next(iter(models.values()))
    for name, identity in models.items():
        first.require_same(identity, "the store" if store else "the first SAE", name, "Evaluate them separately.")
    return first


def _job_model(identity: "ModelIdentity", place: str) -> "JobModel":
    """Return where the model is, after checking that it is the one."""
    from dmsae.activations.base_model import ModelConfig, identify, locate
    from dmsae.evaluation.saebench.job import JobModel, layer_of

    layer = layer_of(identity.hook)
    config = ModelConfig(place or identity.name, "" if place else identity.revision, identity.hook)
    path, _ = locate(config, TERMINAL)
    identity.require_same(identify(config, TERMINAL), "the SAEs", f"the model in {path}", "Give it with --model.")
    return JobModel(identity.name, path.absolute(), identity.weights_sha256, layer)


def print_summary(summary: "Summary", small: bool) -> None:
    """Print the headline figures, beside those of nulls, and what has not run."""
    kinds = list(dict.fromkeys(kind for beside in summary.nulls.values() for kind in beside))
    nulls = ("null", "ceiling", "part", *(kind.replace("_", " ") for kind in kinds)) if kinds else ()
    table = plain_table("eval", "SAE", "figure", "value", *nulls)
    for row in summary.rows():
        beside = (row.null, row.ceiling, row.part, *(row.nulls.get(kind) for kind in kinds)) if kinds else ()
        table.add_row(row.measure, row.sae, row.figure, *map(number, (row.score, *beside)))
    if table.row_count:
        printed.print(table)
    if kinds:
        printed.print(BESIDE_NULLS)
    for name, reason in summary.nulls_not_made.items():
        printed.print(f"{name}, a null: not made. {reason}")
    for outcome in summary.outcomes:
        if not outcome.figures:
            printed.print(f"{outcome.eval}, {outcome.sae}: {outcome.state}. {outcome.reason}")
    if small:
        printed.print("Settings for small machines: not comparable with published figures.")
