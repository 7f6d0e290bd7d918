"""SAEs and cores on the Hugging Face Hub: pushed in one commit with their card, opened again as strangers' files.

A folder of a repository (by default its root) holds

    sae.safetensors, sae.json, sample.*   the SAE in our format, with its token sample
    saelens/                              the same SAE for SAELens
    core.safetensors, core.json           a core
    README.md                             the card

Places on the disk of whoever pushes stay at home: of absolute paths in what is recorded, only the last part is pushed.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple, overload

from rich.filesize import decimal as human_bytes

from dmsae.activations.identity import ModelIdentity
from dmsae.config import Json, from_dict, require
from dmsae.cores.core import Core
from dmsae.disk import layout
from dmsae.disk.artifact import read_facts, read_sealed
from dmsae.disk.files import sha256_of, user_path, without_places
from dmsae.errors import CheckpointError, ConfigError, ExportError, HubError, first_line
from dmsae.evaluation.beside import ScoreRow
from dmsae.evaluation.evaluate import digest_of
from dmsae.evaluation.scores import Evaluation
from dmsae.formats import Imported, load_any, saelens
from dmsae.formats.card import Card
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE
from dmsae.text.hub import download, file_sizes

SAELENS = "saelens"
"""The folder of the export for SAELens."""
CARD = "README.md"
_FACTS_BYTES = 1 << 26
_CORE_BYTES = 1 << 32
_HEADER_BYTES = 1 << 20
"""How large JSON, the tensors of a core, and the header of a file of tensors may be."""
_TENSORS, _FACTS = "safetensors", "json"


class Pushed(NamedTuple):
    """What is on the Hub now."""

    url: str
    """Of the commit."""
    commit: str
    files: tuple[str, ...]


def push_to_hub(
    place: Path | str,
    repo: str,
    *,
    core: Path | str | None = None,
    folder: str = "",
    evaluation: Path | str | None = None,
    private: bool = False,
    licence: str = "",
) -> Pushed:
    """Push an SAE, a core or both to a repository `owner/name` of the Hub, with a card and an export for SAELens.

    `place` holds an SAE of ours or a core; `core` is a core to push beside an SAE. `evaluation` is the directory of an
    evaluation of this SAE, whose scores and nulls go into the card. The repository is made if it is not there, and all
    is one commit. Needs a token: `hf auth login`, or HF_TOKEN.

    >>> try:
    ...     dmsae.push_to_hub(run / "cycle-1" / "sae", "me/my-sae").url
    ... except dmsae.DmsaeError as error:  # here, without a network
    ...     print(error)
    DMSAE_OFFLINE is set, so nothing is pushed. Unset it.
    """
    _require_repo(repo, folder)
    found = _found(user_path(str(place)), core)
    with TemporaryDirectory(prefix="dmsae-push-") as scratch:
        root = Path(scratch)
        stage(found, root, repo, folder, evaluation, licence)
        files = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
        return _commit(root, files, repo, folder, private)


@overload
def from_pretrained(repo: str, folder: str = "", kind: Literal["sae"] = "sae", revision: str | None = None) -> SAE: ...


@overload
def from_pretrained(repo: str, folder: str = "", *, kind: Literal["core"], revision: str | None = None) -> Core: ...


def from_pretrained(
    repo: str, folder: str = "", kind: Literal["sae", "core"] = "sae", revision: str | None = None
) -> SAE | Core:
    """Return an SAE, or with `kind="core"` a core, from a folder of a repository `owner/name` on the Hub.

    Only JSON and safetensors are downloaded, no larger than what they say of themselves; what was downloaded before
    needs no network. `revision` is a branch, a tag or a commit.

    >>> try:
    ...     sae = dmsae.from_pretrained("me/my-sae")
    ... except dmsae.DmsaeError as error:  # here, without a network
    ...     print(error)
    'me/my-sae': no such directory; not found on the Hub either: DMSAE_OFFLINE is set...
    """
    path = pull(repo, folder, kind, revision)
    return SAE.load(path) if kind == "sae" else Core.load(path)


def pull(repo: str, folder: str = "", kind: Literal["sae", "core"] = "sae", revision: str | None = None) -> Path:
    """Return the local directory of an SAE or a core of the Hub, downloaded if it is not there."""
    _require_repo(repo, folder)
    require(kind in ("sae", "core"), "kind", kind, "be 'sae' or 'core'")
    name, prefix = layout.SAE if kind == "sae" else layout.CORE, f"{folder}/" if folder else ""
    sizes = file_sizes(repo, revision)
    facts = [f"{prefix}{name}.{_FACTS}"]
    if sizes is not None:
        _require_there(repo, folder, kind, facts[0], sizes)
        _require_small(repo, facts[0], sizes, _FACTS_BYTES)
    path = download(repo, facts, HubError, revision) / folder
    tensors = f"{prefix}{name}.{_TENSORS}"
    if sizes is not None:
        _require_small(repo, tensors, sizes, _most_bytes(path, kind))
    wanted = [*facts, tensors]
    sample = [f"{prefix}{layout.SAMPLE}.{suffix}" for suffix in (_FACTS, _TENSORS)] if kind == "sae" else []
    if sizes is None or all(one in sizes for one in sample):
        for one in sample if sizes is not None else ():
            _require_small(repo, one, sizes or {}, _FACTS_BYTES)
        wanted += sample
    return download(repo, wanted, HubError, revision) / folder


class Found(NamedTuple):
    """What is to be pushed."""

    one: Imported | None
    core: Core | None
    facts: Json
    """Of the SAE, as its JSON holds them."""
    figures: Json | None


def _found(place: Path, core: Path | str | None) -> Found:
    inside = place / layout.SAE
    directory = inside if layout.has_artifact(inside, layout.SAE) else place
    has_sae = layout.has_artifact(directory, layout.SAE)
    where = user_path(str(core)) if core is not None else None if has_sae else place
    try:
        loaded = Core.load(where) if where is not None else None
    except CheckpointError as error:
        if where != place:
            raise
        raise ConfigError(
            f"{place} holds neither an SAE of ours nor a core: {first_line(error)}. Give a directory that does; an SAE "
            "of another format is first made one of ours with 'dmsae import'."
        ) from error
    if not has_sae:
        return Found(None, loaded, {}, None)
    fidelity = directory / layout.FIDELITY
    figures = read_sealed(fidelity, must_be_sealed=False) if fidelity.is_file() else None
    return Found(load_any(directory), loaded, read_facts(directory, layout.SAE), figures)


def stage(
    found: Found, root: Path, repo: str, folder: str = "", evaluation: Path | str | None = None, licence: str = ""
) -> Card:
    """Write all files of a push below a directory, and return their card."""
    here, refused, scores = root / folder, "", []
    if found.one is not None:
        _save_public(found.one.sae, without_places(found.facts), here)
        scores = _scores(found.one.sae, evaluation) if evaluation is not None else []
        try:
            saelens.write(found.one, here / SAELENS)
        except ExportError as error:
            refused = str(error)
    core = found.core
    if core is not None:
        provenance = replace(core.provenance, config=without_places(core.provenance.config))
        provenance = replace(provenance, model=_public(provenance.model))
        replace(core, provenance=provenance).save(here)
    elif evaluation is not None and found.one is None:
        raise ConfigError("An evaluation is of an SAE, and none is pushed. Leave it out.")
    files = {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}
    model = found.one.model if found.one else core.provenance.model if core else None
    card = Card(
        repo,
        folder,
        {name: (path.stat().st_size, sha256_of(path)) for name, path in files.items()},
        _public(model) if model else None,
        found.one.sae.config if found.one else None,
        core,
        found.facts.get("training"),
        found.figures,
        scores,
        found.one is not None and found.one.sae.sample is not None,
        refused,
        licence,
    )
    (here / CARD).write_text(card.text(), encoding="utf8")
    return card


def _scores(sae: SAE, evaluation: Path | str) -> list[ScoreRow]:
    """Return the scores of an SAE in an evaluation, which is recognised by its weights."""
    found, digest = Evaluation.load(user_path(str(evaluation))), digest_of(sae)
    names = [name for name in found.saes() if found.subjects[name].get("digest") == digest]
    if not names:
        raise ConfigError(
            f"The evaluation in {evaluation} is of {', '.join(found.saes())}, none of which has the weights of the SAE "
            "that is pushed. Give the evaluation of this SAE, or none."
        )
    return [row for row in found.rows() if row.sae == names[0]]


def _commit(root: Path, files: list[str], repo: str, folder: str, private: bool) -> Pushed:
    from huggingface_hub import CommitOperationAdd, HfApi

    if os.environ.get("DMSAE_OFFLINE"):
        raise HubError("DMSAE_OFFLINE is set, so nothing is pushed. Unset it.")
    try:
        api = HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        add = [CommitOperationAdd(name, root / name) for name in files]
        if folder and not api.file_exists(repo, CARD):  # the Hub shows only the card at the root
            add.append(CommitOperationAdd(CARD, root / folder / CARD))
        done = api.create_commit(repo, add, commit_message=f"Add {folder or 'files'} with dmsae")
    except Exception as error:  # what an unreachable host raises depends on the HTTP client in use
        raise HubError(
            f"{repo!r} cannot be pushed to: {first_line(error)}. Check the name, the network, and that your token may "
            "write ('hf auth login')."
        ) from error
    return Pushed(str(done.commit_url), str(done.oid), tuple(files))


def _save_public(sae: SAE, facts: Json, directory: Path) -> None:
    """Save an SAE with facts that others may see; its sample names the model without its place."""
    sample = sae.sample
    if sample is not None:
        sae.sample = sample._replace(tokens=sample.tokens._replace(model=_public(sample.tokens.model)))
    try:
        sae.save(directory, facts.get("made_from"), training=facts.get("training"))
    finally:
        sae.sample = sample


def _public(model: ModelIdentity) -> ModelIdentity:
    """Return a model's identity without the place of its directory."""
    return replace(model, name=without_places(model.name))


def _require_repo(repo: str, folder: str) -> None:
    holds = repo.count("/") == 1 and all(repo.split("/")) and not set(repo) & set("\\: ")
    require(holds, "repo", repo, "be the name of a repository on the Hub, owner/name")
    parts = folder.split("/") if folder else []
    plain = all(part and not part.startswith(".") and "\\" not in part for part in parts)
    require(plain, "folder", folder, "be a folder inside the repository, such as layer-8/k-32")


def _require_there(repo: str, folder: str, kind: str, file: str, sizes: Mapping[str, int]) -> None:
    if file in sizes:
        return
    name = Path(file).name
    others = sorted(one.removesuffix(name).rstrip("/") or "(the root)" for one in sizes if Path(one).name == name)
    where = f"the folder {folder!r}" if folder else "its root"
    remedy = f"Give one of these folders: {', '.join(others[:12])}." if others else "Check the name."
    raise HubError(f"{repo} holds no {kind} of dmsae in {where}: {file} is not there. {remedy}")


def _require_small(repo: str, file: str, sizes: Mapping[str, int], most_bytes: int) -> None:
    """Raise before anything is downloaded that is larger than it has reason to be."""
    if (size := sizes.get(file, 0)) > most_bytes:
        raise HubError(
            f"{file} of {repo} has {human_bytes(size)}; at most {human_bytes(most_bytes)} were expected. It is not "
            "downloaded. Look at the repository on the Hub."
        )


def _most_bytes(path: Path, kind: str) -> int:
    """Return how many bytes the tensors of an SAE can have, by its config, in the widest arithmetic."""
    if kind == "core":
        return _CORE_BYTES
    facts = read_facts(path, layout.SAE)
    try:
        config = from_dict(SAEConfig, facts.get("config", {}))
    except ConfigError as error:
        raise CheckpointError(f"{path / layout.SAE}.json does not describe a saved SAE: {error}") from error
    n_numbers = 2 * config.width * config.d_model + 3 * config.width + config.d_model
    return 8 * n_numbers + _HEADER_BYTES
