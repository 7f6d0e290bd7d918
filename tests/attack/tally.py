"""What became of every attempt, counted."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dmsae.errors import DmsaeError


class Outcome(StrEnum):
    """What became of one attempt."""

    DETECTED = "detected"
    """An error of ours that names what is wrong."""
    HARMLESS = "harmless"
    """The result is the same to the bit, because the damage changed nothing, or was made good."""
    UNNAMED = "unnamed"
    """An error of ours that does not name the file."""
    SILENT = "silent"
    """Another result, and no error."""
    UNTYPED = "untyped"
    """A traceback."""


@dataclass
class Tally:
    """Counts of outcomes by kind of attack, and an example of each that should not be."""

    counts: dict[str, dict[Outcome, int]] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    n_kills: int = 0
    """Processes that were killed."""

    def add(self, kind: str, outcome: Outcome, example: str = "") -> None:
        """Count one attempt."""
        counts = self.counts.setdefault(kind, dict.fromkeys(Outcome, 0))
        counts[outcome] += 1
        if outcome not in (Outcome.DETECTED, Outcome.HARMLESS) and len(self.examples) < 40:
            self.examples.append(f"{kind}: {outcome}: {example}")

    def attempt(
        self, kind: str, name: str, use: Callable[[], object], expected: object, warnings: Sequence[str] = ()
    ) -> Outcome:
        """Use something that may be damaged, and count what comes of it; an error or a warning must hold `name`."""
        try:
            outcome, example = (Outcome.HARMLESS, "") if use() == expected else (Outcome.SILENT, name)
            outcome = Outcome.DETECTED if any(name in warning for warning in warnings) else outcome
        except DmsaeError as error:
            outcome, example = (Outcome.DETECTED if name in str(error) else Outcome.UNNAMED), f"{name}: {error}"
        except Exception:
            outcome, example = Outcome.UNTYPED, f"{name}: {traceback.format_exc(limit=-3)}"
        self.add(kind, outcome, example)
        return outcome

    @property
    def total(self) -> int:
        """How many attempts there were."""
        return sum(sum(counts.values()) for counts in self.counts.values())

    @property
    def is_clean(self) -> bool:
        """Whether every attempt was detected or harmless."""
        return bool(self.total) and not self.examples

    def table(self) -> str:
        """Return the counts as a table."""
        lines = [f"{'attack':<34}{'tried':>8}" + "".join(f"{outcome:>10}" for outcome in Outcome)]
        for kind, counts in sorted(self.counts.items()):
            row = "".join(f"{counts[outcome]:>10}" for outcome in Outcome)
            lines.append(f"{kind:<34}{sum(counts.values()):>8}{row}")
        return "\n".join(lines)
