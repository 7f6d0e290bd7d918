"""What a store records about itself: the journal of its finished files, and the seal that makes it complete.

    request.json                what the store is made from
    shards.jsonl                the journal: one line per finished file, with rows, its SHA-256, what was dropped, and a
                                checksum of the line
    store.json                  the seal, written last: checksums of the two above and of itself

Nothing here imports torch: listing stores should be fast.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dmsae.activations.splits import Split
from dmsae.config import Json, from_dict, to_dict
from dmsae.disk import layout
from dmsae.disk.files import canonical_hash, parse_json, read_json_value, sha256_of, write_json
from dmsae.errors import ConfigError, StoreCorruptError, StoreError, first_line
from dmsae.progress import SILENT, Progress

FORMAT = 3
"""Format 2 took pairs from training documents, and g from losses across documents."""
_FACTS_SEAL, _LINE_SEAL = "facts_sha256", "line_sha256"
_FILE_NAME = re.compile(rf"({'|'.join([layout.TOKENS, *Split])})/[0-9a-z]+\.safetensors")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One finished file of a store."""

    file: str
    rows: int
    sha256: str
    dropped: dict[str, int]
    documents: int = 0
    """Documents that start in this file; only a file of tokens has any."""

    def __post_init__(self) -> None:
        if not _FILE_NAME.fullmatch(self.file):
            raise ConfigError(f"{self.file!r} is no file of a store")


@dataclass(frozen=True, slots=True)
class Seal:
    """The content of `store.json`, apart from its own checksum."""

    format: int
    d_model: int
    journal_sha256: str
    request_sha256: str
    probe: Json | None = None
    """What the harvest measured about BOS tokens, see `dmsae.activations.probe`."""


def journal_line(record: FileRecord) -> str:
    """Return a record as one line of the journal, with a checksum of its own: a store in the making has no seal."""
    facts: Json = to_dict(record)
    return json.dumps(facts | {_LINE_SEAL: canonical_hash(facts)}) + "\n"


def journal_bytes(records: Iterable[FileRecord]) -> bytes:
    """Return a whole journal."""
    return "".join(map(journal_line, records)).encode()


def read_journal(store: Path) -> list[FileRecord]:
    """Return the files of a store whose journal is sealed: any line that cannot be read is an error."""
    path = store / layout.STORE_JOURNAL
    try:
        return [_record(line) for line in path.read_bytes().split(b"\n")[:-1]]
    except (OSError, ValueError, ConfigError) as error:
        raise StoreCorruptError(f"{path} is damaged: {first_line(error)}. {remedy(store)}") from error


def recover_journal(store: Path, progress: Progress = SILENT) -> list[FileRecord]:
    """Return the files that a store in the making has finished.

    A last line that a crash cut short is ignored. Any other that is not as it was written is named in a warning, and
    left out: its file is then made again.
    """
    path = store / layout.STORE_JOURNAL
    if not path.is_file():
        return []
    records: dict[str, FileRecord] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = _record(line, must_be_sealed=True)
        except (ValueError, ConfigError) as error:
            progress.warn(f"{path}, line {number} is damaged ({first_line(error)}). Its file will be made again.")
        else:
            records[record.file] = record
    return list(records.values())


def _record(line: bytes, must_be_sealed: bool = False) -> FileRecord:
    facts = parse_json(line.decode("utf8"))
    if not isinstance(facts, dict):
        raise ValueError(f"it holds a {type(facts).__name__}, not an object")
    seal = facts.pop(_LINE_SEAL, None)  # missing in stores that were finished by an earlier version
    if (must_be_sealed or seal is not None) and seal != canonical_hash(facts):
        raise ValueError("its checksum is not the one written")
    return from_dict(FileRecord, facts)


def unchanged(store: Path, records: list[FileRecord], progress: Progress = SILENT) -> list[FileRecord]:
    """Return the finished files that are still as they were written; the others must be made again."""
    intact = []
    with progress.bar("check finished files", len(records), "files") as bar:
        for record in records:
            file = store / record.file
            if file.is_file() and sha256_of(file) == record.sha256:
                intact.append(record)
            bar.advance(1)
    return intact


def in_order(records: Iterable[FileRecord]) -> list[FileRecord]:
    """Return tokens first, then the splits in their order, shard by shard."""

    def place(record: FileRecord) -> tuple[bool, int, str]:
        folder, name = record.file.split("/")
        is_shard = folder != layout.TOKENS
        split = Split(folder if is_shard else name.removesuffix(".safetensors"))
        return is_shard, list(Split).index(split), name

    return sorted(records, key=place)


def rows_by_split(records: Iterable[FileRecord]) -> dict[Split, int]:
    """Return how many rows the shards of each split hold."""
    rows = dict.fromkeys(Split, 0)
    for record in records:
        folder = record.file.split("/")[0]
        if folder != layout.TOKENS:
            rows[Split(folder)] += record.rows
    return rows


def write_seal(store: Path, d_model: int, probe: Json | None = None) -> None:
    """Declare a store complete."""
    journal, request = (sha256_of(store / name) for name in (layout.STORE_JOURNAL, layout.STORE_REQUEST))
    facts: Json = to_dict(Seal(FORMAT, d_model, journal, request, probe))
    write_json(store / layout.STORE_COMPLETE, facts | {_FACTS_SEAL: canonical_hash(facts)})


def read_seal(store: Path) -> Seal:
    """Return the seal of a store that is complete and whose small files are as they were written."""
    if not (store / layout.STORE_REQUEST).is_file():
        if (store / layout.STORE_COMPLETE).exists() or (store / layout.STORE_JOURNAL).exists():
            raise StoreCorruptError(f"{store / layout.STORE_REQUEST} is missing. Restore it, or remove {store}.")
        raise StoreError(f"There is no store at {store}. 'dmsae store list' shows those that exist.")
    if not (store / layout.STORE_COMPLETE).is_file():
        raise StoreError(
            f"The store {store} is not complete. Run the same 'dmsae harvest' or 'dmsae store import' again to finish "
            "it."
        )
    facts = _sealed_facts(store)
    if facts.get("format") != FORMAT:
        raise StoreError(
            f"The store {store} has format {facts.get('format')!r}; this version of dmsae reads format {FORMAT}. Run "
            "the same 'dmsae harvest' or 'dmsae store import' again, which makes a new store under another key; then "
            f"'dmsae store remove {store.name} --root {store.parent}' frees the space of this one."
        )
    try:
        seal = from_dict(Seal, facts)
    except ConfigError as error:
        path = store / layout.STORE_COMPLETE
        raise StoreCorruptError(f"{path} is not the seal of a store: {first_line(error)}. {remedy(store)}") from error
    for name, expected in (
        (layout.STORE_JOURNAL, seal.journal_sha256),
        (layout.STORE_REQUEST, seal.request_sha256),
    ):
        if not (store / name).is_file() or sha256_of(store / name) != expected:
            raise _changed(store, name)
    return seal


def has_old_format(store: Path) -> bool:
    """Return whether a complete store is as it was written, by a version of dmsae with another format."""
    return bool(_sealed_facts(store).get("format") != FORMAT)


def _sealed_facts(store: Path) -> Json:
    facts = read_json(store / layout.STORE_COMPLETE)
    if facts.pop(_FACTS_SEAL, None) != canonical_hash(facts):
        raise _changed(store, layout.STORE_COMPLETE)
    return facts


def read_json(path: Path) -> Json:
    """Return a JSON object of a store."""
    try:
        value = read_json_value(path)
    except (OSError, ValueError) as error:
        raise StoreCorruptError(f"{path} is not readable JSON: {error}. {remedy(path.parent)}") from error
    if not isinstance(value, dict):
        raise StoreCorruptError(f"{path} holds a {type(value).__name__}, not an object. {remedy(path.parent)}")
    return value


def remedy(store: Path) -> str:
    """Return what to do about a damaged store."""
    return f"Run 'dmsae store remove {store.name} --root {store.parent}' and make the store again."


def _changed(store: Path, name: str) -> StoreCorruptError:
    return StoreCorruptError(f"{store / name} has changed since it was written. {remedy(store)}")
