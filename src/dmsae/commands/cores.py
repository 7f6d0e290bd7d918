"""Commands that look at cores."""

from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dmsae.activations.base_model import BaseModel, ModelConfig, load_tokenizer
from dmsae.activations.store import Store, default_root, find_store
from dmsae.commands.output import number, out, plain_table
from dmsae.config import from_dict
from dmsae.cores.ablation import AblationConfig, ablate, agreement
from dmsae.cores.attribution import Attribution
from dmsae.cores.core import Core, Nearest, RandomKind, carry_over, nearest_in, random_core
from dmsae.disk.files import write_json
from dmsae.disk.run import claimed, read_settings
from dmsae.distillation.distill import Distillation, distilled_directory
from dmsae.errors import CheckpointError, ConfigError, DmsaeError
from dmsae.evaluation.examples import Example, top_examples
from dmsae.progress import console
from dmsae.sae.sae import load_sae

Place = Annotated[Path, tyro.conf.Positional]


def load_core(place: Path) -> Core:
    """Return the core in a directory, or the distilled core of a distillation run."""
    if (place / "core.json").is_file():
        return Core.load(place)
    if (distilled_directory(place) / "core.json").is_file():
        return Core.load(distilled_directory(place))
    raise CheckpointError(f"{place} holds no core, and is not the directory of a finished distillation.")


def core_show(place: Place, top: int = 12, examples: int = 2, root: Path | None = None) -> None:
    """Show a core: its latents by attribution, where they came from, and the text that fires them most.

    Args:
        place: A distillation run, or a directory with a core in it.
        top: How many latents to show.
        examples: Texts per latent; needs the run that the core came from, and its store.
        root: Directory of stores.
    """
    core = load_core(place)
    model = core.provenance.model
    out.print(f"Core of {len(core)} latents, selected after cycle {core.cycle}", style="bold")
    out.print(f"model  {model['name']} {model['revision']} at {model['hook']}; store {core.provenance.store}")
    out.print("born   " + ", ".join(f"cycle {cycle}: {count}" for cycle, count in core.births().items()))
    shown = _examples(place, core, top, examples, root) if examples else []
    for i, (lineage, score) in enumerate(zip(core.lineage[:top], core.scores_C.tolist(), strict=False)):
        out.print(
            f"\n{i + 1}. attribution {score:.3g}, born in cycle {lineage.birth_cycle} as latent "
            f"{lineage.birth_index}, selected {len(lineage.selected_in)} times"
        )
        for example in shown[i] if shown else []:
            out.print(_line(example))


def core_diff(first: Place, second: Place, pairs: int = 10) -> None:
    """Compare two cores: which latents they share, and how near the others are.

    Args:
        first: A distillation run, or a directory with a core in it.
        second: Another one.
        pairs: How many latents of the first to list, by attribution, with their nearest in the second.
    """
    a, b = load_core(first), load_core(second)
    if a.provenance == b.provenance:
        kept = carry_over(b, a)
        out.print(
            f"Same run: of {len(a)} latents {kept.kept} were kept and {kept.dropped} dropped; {kept.new} are new."
        )
    rows = {row.numpy().tobytes() for row in b.encoder_CD}
    same = sum(row.numpy().tobytes() in rows for row in a.encoder_CD)
    out.print(f"Encoder rows identical to the bit: {same} of {len(a)} and {len(b)}.")
    if not (len(a) and len(b)):
        return
    found = nearest_in(a, b)
    chance = nearest_in(a, random_core(b, RandomKind.UNIT, seed=0))
    columns = (found.cosine_C, nearest_in(b, a).cosine_C, chance.cosine_C)
    table = plain_table("best cosine", "first in second", "second in first", "first in as many random directions")
    for bound in (0.99, 0.9, 0.7, 0.5):
        table.add_row(f"≥ {bound}", *(f"{100 * float((best >= bound).float().mean()):.0f} %" for best in columns))
    table.add_row("median", *(f"{best.median():.2f}" for best in columns))
    out.print(table)
    if pairs > 0:
        out.print(_pairs_table(a, b, found, pairs))


def _pairs_table(a: Core, b: Core, found: Nearest, n_pairs: int) -> Table:
    """Return the first latents of one core, by attribution, beside their nearest in the other."""
    table = plain_table("first", "born", "nearest in second", "born", "cosine")
    for i, (cosine, j) in enumerate(zip(found.cosine_C[:n_pairs].tolist(), found.index_C.tolist(), strict=False)):
        born = [f"cycle {core.lineage[at].birth_cycle}" for core, at in ((a, i), (b, j))]
        table.add_row(str(i + 1), born[0], str(j + 1), born[1], f"{cosine:.3f}")
    return table


def core_ablate(
    run: Place, cycle: int | None = None, latents: int = 32, contexts: int = 24, root: Path | None = None
) -> None:
    """Measure latents of a distillation by ablation, and say how far that agrees with gradient × activation.

    Takes each latent out of the model's activations and measures the change of the next-token loss: more direct than
    the gradient, and far dearer. The scores and the agreement are kept beside the cycle's attribution.

    Args:
        run: Directory of a distillation.
        cycle: Which cycle's SAE. Default: the last one.
        latents: How many latents to ablate: those with the highest attribution. 0: all candidates.
        contexts: How many contexts to measure them on.
        root: Directory of stores.
    """
    settings = read_settings(run)
    if settings.get("kind") != "distill":
        raise ConfigError(f"{run} is not a distillation, but a run of kind {settings.get('kind')!r}.")
    with claimed(run, settings):
        _ablate(run, settings, cycle, latents, contexts, root)


def _ablate(
    run: Path, settings: dict[str, Any], cycle: int | None, latents: int, contexts: int, root: Path | None
) -> None:
    last = settings["distill"]["cycles"] if cycle is None else cycle
    here = run / f"cycle-{last}"
    scored, sae = Attribution.load(here), load_sae(here / "sae")
    store = Store.open(find_store(root or default_root(), settings["store"]))
    place = {name: store.model[name] for name in ("name", "revision", "hook", "dtype")}
    model = BaseModel.load(from_dict(ModelConfig, place))
    measured = ablate(sae, store, model, scored, AblationConfig(contexts, latents or None))
    measured.save(here / "ablation")
    found = agreement(scored, measured, settings["distill"]["coverage"])
    write_json(here / "ablation" / "agreement.json", found._asdict())
    out.print(f"Cycle {last}: {found.n_latents} latents ablated in {measured.facts['n_contexts']} contexts.")
    out.print(f"Spearman correlation with gradient × activation: {number(found.spearman)}")
    out.print(
        f"At coverage {settings['distill']['coverage']} among these, gradient × activation selects {found.n_first}, "
        f"ablation {found.n_second}, both {found.n_both} (Jaccard {found.jaccard:.2f})."
    )


def show_distillation(done: Distillation) -> None:
    """Print what persisted."""
    last, before = done.cores[-1], done.cores[-2]
    out.print(
        f"Distilled core: {len(done.distilled)} latents, in both of the last cores ({len(before)} and {len(last)}).",
        style="bold",
    )
    births = ", ".join(f"{count} from cycle {cycle}" for cycle, count in done.distilled.births().items())
    if not len(done.distilled):
        out.print("No latent was selected twice. Try a larger k, more tokens per cycle, or a higher coverage.")
        return
    out.print(f"Born: {births}.")
    report = done.reports[-1]
    if report.n_frozen and report.l0_core > 0.5 * report.n_frozen:
        out.print(
            f"Mind: in the last cycle {report.l0_core:.0f} of its {report.n_frozen} core latents fired on the average "
            "token. Compare such SAEs at their measured total L0, and beside a random core.",
            style="yellow",
        )


def _examples(place: Path, core: Core, top: int, n_examples: int, root: Path | None) -> list[list[Example]]:
    """Return the texts that fire the first latents, or nothing (and say why) when what is needed is not there."""
    cycle = f"cycle-{core.cycle}"
    places = (place / cycle / "sae", place / "sae", place.parent / cycle / "sae")
    directory = next((one for one in places if (one / "sae.json").is_file()), places[0])
    model = core.provenance.model
    try:
        store = Store.open(find_store(root or default_root(), core.provenance.store))
        tokenizer = load_tokenizer(ModelConfig(name=model["name"], revision=model["revision"]))
        return top_examples(load_sae(directory), core.slots_C[:top].tolist(), store, tokenizer, n_examples)
    except DmsaeError as error:
        console.print(f"No example texts: {escape(str(error))}", soft_wrap=True)
        return []


def _line(example: Example) -> Text:
    before, token, after = (part.replace("\n", "⏎") for part in example[1:])
    return Text.assemble(f"   {number(example.activation, 1):>7}  {before}", (f"»{token}«", "bold"), after)


CORE_COMMANDS = {"show": core_show, "diff": core_diff, "ablate": core_ablate}
