"""What an experiment found: one small JSON file for each part and seed, and the table over seeds."""

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dmsae.config import Json
from dmsae.devices import machine
from dmsae.disk.files import write_json
from dmsae.disk.run import differences
from dmsae.errors import CheckpointError, ConfigError


class Spread(NamedTuple):
    """A figure over seeds."""

    mean: float
    sd: float | None
    """Standard deviation between seeds; None with one seed."""
    n: int

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Spread | None":
        """Return the spread of the values that there are; None when there are none."""
        known = [value for value in values if value is not None and math.isfinite(value)]
        if not known:
            return None
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def result_file(directory: Path, part: str, seed: int) -> Path:
    """Return where the figures of one part and seed are kept."""
    return directory / f"{part}-seed-{seed}.json"


def kept_or_run(directory: Path, part: str, seed: int, settings: Json, run: Callable[[], Json]) -> Json:
    """Return the figures of a part and seed: those in its file, or those of a run now, which are then kept.

    A file that other settings made is refused.
    """
    if (kept := kept_result(directory, part, seed, settings)) is not None:
        return kept
    started, started_cpu = time.monotonic(), time.process_time()
    figures = run()
    took = {"seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - started_cpu}
    result = _facts(part, seed, settings) | _made_with() | {name: round(t, 1) for name, t in took.items()}
    result["figures"] = _rounded(figures)
    directory.mkdir(parents=True, exist_ok=True)
    packed = result | {"figures": pack(result["figures"])}
    write_json(result_file(directory, part, seed), packed, indent=None)  # curves are long lists of numbers
    return result


_TABLE = {"columns", "rows"}


def pack(value: Any) -> Any:
    """Return figures in which a list of entries with the same keys, at least two of them, names its keys once."""
    if isinstance(value, dict):
        return {name: pack(one) for name, one in value.items()}
    if not isinstance(value, list):
        return value
    keys = list(value[0]) if len(value) > 1 and isinstance(value[0], dict) else []
    if keys and all(isinstance(one, dict) and list(one) == keys for one in value):
        return {"columns": keys, "rows": [[pack(one[key]) for key in keys] for one in value]}
    return [pack(one) for one in value]


def unpack(value: Any) -> Any:
    """Return what was packed."""
    if isinstance(value, list):
        return [unpack(one) for one in value]
    if not isinstance(value, dict):
        return value
    if set(value) == _TABLE:
        return [dict(zip(value["columns"], map(unpack, row), strict=True)) for row in value["rows"]]
    return {name: unpack(one) for name, one in value.items()}


def _rounded(value: Any) -> Any:
    """Return figures with six significant digits, which is more than seeds agree in."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def kept_result(directory: Path, part: str, seed: int, settings: Json) -> Json | None:
    """Return the figures of a part and seed if there are any; those that other settings made are refused."""
    path = result_file(directory, part, seed)
    if not path.is_file():
        return None
    kept = _read(path)
    changed = differences(kept.get("settings", {}), _facts(part, seed, settings)["settings"])
    if changed:
        shown = "\n  ".join(changed)
        raise ConfigError(
            f"{path} was made with other settings:\n  {shown}\nGive another directory, or remove the file."
        )
    return kept


def _made_with() -> Json:
    return {**machine(), "threads": torch.get_num_threads()}


def made_with(results: Sequence[Json]) -> str:
    """Return which versions and machines made some results, as their files say."""
    known = [{name: one.get(name, "not recorded") for name in _made_with()} for one in results]
    described = Counter(", ".join(f"{name} {value}" for name, value in one.items()) for one in known)
    return "Made with " + "; ".join(f"{what} ({n} files)" for what, n in sorted(described.items()))


def _facts(part: str, seed: int, settings: Json) -> Json:
    facts: Json = json.loads(json.dumps({"part": part, "seed": seed, "settings": settings}))
    return facts


def read_results(directory: Path) -> list[Json]:
    """Return all figures in a directory, by part and seed."""
    results = [_read(path) for path in sorted(directory.glob("*-seed-*.json"))]
    if not results:
        raise CheckpointError(f"{directory} holds no results of an experiment.")
    return sorted(results, key=lambda one: (one["part"], one["seed"]))


def part_results(directory: Path, part: str) -> list[Json]:
    """Return the figures of one part, by seed; none when it has not been run."""
    return sorted((_read(path) for path in directory.glob(f"{part}-seed-*.json")), key=lambda one: one["seed"])


def aligned(results: Sequence[Json]) -> list[Json]:
    """Return the results of one part, with one name for the same SAE in all seeds.

    Where k follows a measured L0, it may differ between seeds, and with it the name of the SAE. If every seed has
    equally many SAEs of a method, they are taken in their order and have the names that the first seed gives them.
    """
    named = [_by_method(result["figures"]) for result in results]
    new: list[dict[str, str]] = [{} for _ in results]
    for method in dict.fromkeys(method for one in named for method in one):
        of_seeds = [one.get(method, []) for one in named]
        if len({len(names) for names in of_seeds}) == 1 and all(len(set(names)) == len(names) for names in of_seeds):
            for renaming, names in zip(new, of_seeds, strict=True):
                renaming.update(zip(names, of_seeds[0], strict=True))
    return [one | {"figures": _renamed(one["figures"], names)} for one, names in zip(results, new, strict=True)]


def _by_method(figures: Json) -> dict[str, list[str]]:
    """Return the names of the SAEs of each method: what precedes their k."""
    found: dict[str, list[str]] = {}
    for row in figures.get("rows", ()):
        found.setdefault(row["sae"].rpartition("-k")[0] or row["sae"], []).append(row["sae"])
    return found


def _renamed(figures: Json, new: dict[str, str]) -> Json:
    """Return the figures of a part with other names for some SAEs, in its rows and scores."""
    with_saes = {name: figures[name] for name in ("rows", "scores") if name in figures}
    return figures | {
        name: [entry | {"sae": new.get(entry["sae"], entry["sae"])} for entry in entries]
        for name, entries in with_saes.items()
    }


def over_seeds(results: Sequence[Json], part: str, figures: Sequence[str]) -> dict[str, dict[str, Spread | None]]:
    """Return, for each SAE of a part, the spread of some figures over seeds, in the order of the first seed.

    Transfers of one part may use a name twice: then the second SAE of that name is another one.
    """
    rows: dict[str, list[Json]] = {}
    for result in results:
        if result["part"] == part:
            times: Counter[str] = Counter()
            for row in result["figures"]["rows"]:
                times[row["sae"]] += 1
                nth = f" ({times[row['sae']]})" if times[row["sae"]] > 1 else ""
                rows.setdefault(f"{row['sae']}{nth}", []).append(row)
    return {
        name: {figure: Spread.of([row.get(figure) for row in of_sae]) for figure in figures}
        for name, of_sae in rows.items()
    }


def _read(path: Path) -> Json:
    try:
        result: Json = json.loads(path.read_text(encoding="utf8"))
        if not {"part", "seed", "figures"} <= set(result):
            raise ValueError("part, seed or figures is missing")
        result["figures"] = unpack(result["figures"])
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not the result of an experiment: {error}. Remove it and run again."
        ) from error
    return result
