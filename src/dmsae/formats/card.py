"""The model card of a repository on the Hub: what it holds, how good it is, and how to open it in each tool."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dmsae import __version__
from dmsae.activations.identity import ModelIdentity
from dmsae.config import Json
from dmsae.cores.core import Core
from dmsae.evaluation.beside import ScoreRow
from dmsae.evaluation.measures import MEASURES
from dmsae.sae.config import SAEConfig
from dmsae.text.visible import visible

_TAGS = ("sparse-autoencoder", "matryoshka", "interpretability", "mechanistic-interpretability", "dmsae")


@dataclass(frozen=True)
class Card:
    """What a card is made from; what is not known is left out of it."""

    repo: str
    folder: str
    files: Mapping[str, tuple[int, str]]
    """Size and SHA-256 of each file, by its path in the repository."""
    model: ModelIdentity | None = None
    sae: SAEConfig | None = None
    core: Core | None = None
    training: Json | None = None
    figures: Json | None = None
    """Held-out figures of the SAE, as `fidelity.json` holds them."""
    scores: Sequence[ScoreRow] = ()
    """Of an evaluation, beside their nulls."""
    has_sample: bool = False
    not_in_saelens: str = ""
    """Why there is no export for SAELens."""
    licence: str = ""

    def text(self) -> str:
        """Return the card as Markdown with its header."""
        parts = [self._header(), self._title(), self._loading(), self._facts()]
        parts += [self._evaluation()] if self.scores else []
        return "\n\n".join([*parts, self._hashes()]) + "\n"

    def _header(self) -> str:
        hub_id = self.model is not None and self.model.name.count("/") == 1 and not self.model.name.startswith("/")
        header: dict[str, Any] = {"library_name": "dmsae", "tags": [*_TAGS, *(["saelens"] if self._in_saelens else [])]}
        header |= {"base_model": self.model.name} if hub_id and self.model else {}
        header |= {"license": self.licence} if self.licence else {}
        # JSON is YAML, and cannot be broken out of by a name
        return "\n".join(["---", *(f"{name}: {json.dumps(value)}" for name, value in header.items()), "---"])

    @property
    def _in_saelens(self) -> bool:
        return self.sae is not None and not self.not_in_saelens

    def _title(self) -> str:
        what = "A sparse autoencoder" if self.sae else "A core of sparse autoencoder latents"
        if self.sae and self.core:
            what += " and the core that was selected from it"
        of = f" of {_code(self.model.name)} at {_code(self.model.hook)}" if self.model else ""
        place = f"{self.repo}/{self.folder}" if self.folder else self.repo
        return f"# {place}\n\n{what}{of}, made with dmsae {__version__} (distilled Matryoshka SAEs)."

    def _loading(self) -> str:
        at = f", folder={self.folder!r}" if self.folder else ""
        lines = ["## How to load it", "```python", "import dmsae", ""]
        lines += [f"sae = dmsae.from_pretrained({self.repo!r}{at})"] if self.sae else []
        lines += [f"core = dmsae.from_pretrained({self.repo!r}{at}, kind='core')"] if self.core else []
        lines += ["```"]
        if self._in_saelens:
            folder = f"{self.folder}/saelens" if self.folder else "saelens"
            lines += ["", "With SAELens 6 or later, the same codes:", "", "```python", "from sae_lens import SAE", ""]
            lines += [f"sae = SAE.from_pretrained({self.repo!r}, {folder!r})", "```"]
        elif self.sae:
            lines += ["", f"It is not here for SAELens: {self.not_in_saelens}"]
        if self.sae:
            lines += ["", "With dictionary_learning, SAEBench, or as bare safetensors:", "", "```bash"]
            lines += [f"dmsae hub pull {self.repo} {'--folder ' + self.folder + ' ' if self.folder else ''}--out ours"]
            lines += ["dmsae export ours --to dictionary_learning --out theirs   # or: --to safetensors", "```"]
            lines += ["", "It takes activations as the model puts them out: every normalisation is folded in."]
            lines += [_SAMPLED if self.has_sample else _NOT_SAMPLED]
        return "\n".join(lines)

    def _facts(self) -> str:
        rows: list[tuple[str, object]] = []
        if self.model:
            rows += [("base model", _code(self.model.name)), ("revision", _code(self.model.revision or "–"))]
            rows += [("hook", _code(self.model.hook)), ("weights SHA-256", _code(self.model.weights_sha256))]
        if self.sae:
            rows += [("latents", f"{self.sae.width:,}"), ("width of the activations", f"{self.sae.d_model:,}")]
            rows += [("k", self.sae.k), ("prefixes", ", ".join(f"{size:,}" for size in self.sae.prefixes))]
            core = self.sae.core
            rows += [("core inside", f"{core.kind}, {core.n} latents" if core else "none")]
        if self.core:
            births = ", ".join(f"{n} in cycle {cycle}" for cycle, n in self.core.births().items())
            rows += [("selected core", f"{len(self.core)} latents, after cycle {self.core.cycle}"), ("born", births)]
            rows += [("detectors", "offsets and thresholds included" if self.core.detectors else "rows only")]
        train = (self.training or {}).get("train", {})
        told = [name for name in ("tokens", "batch_size", "lr", "seed") if name in train]
        rows += [(f"training: {name}", _plain(train[name])) for name in told]
        figures = (self.figures or {}).get("figures") or {}
        rows += [(f"held-out {name}", _plain(value)) for name, value in figures.items() if not isinstance(value, list)]
        return "\n".join(
            ["## What it is", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
        )

    def _evaluation(self) -> str:
        kinds = sorted({kind for row in self.scores for kind in row.nulls})
        names = ["measure", "figure", "score", "null to beat", "ceiling", *kinds]
        lines = ["## Evaluation", "", "Every score is beside what worthless dictionaries get (the nulls).", ""]
        lines += [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
        for row in self.scores:
            values = (row.score, row.null, row.ceiling, *(row.nulls.get(kind) for kind in kinds))
            lines.append(f"| {' | '.join([row.measure, row.figure, *map(_plain, values)])} |")
        for name in dict.fromkeys(row.measure for row in self.scores):
            if caveat := MEASURES[name].caveat:
                lines += ["", f"{name}: {caveat}."]
        return "\n".join(lines)

    def _hashes(self) -> str:
        rows = [f"| {_code(name)} | {size:,} | {_code(digest)} |" for name, (size, digest) in self.files.items()]
        return "\n".join(["## Files", "", "| file | bytes | SHA-256 |", "|---|---|---|", *rows])


_SAMPLED = (
    "A token sample is included: `splice_into`, `read` and `steer` run it once, and a model or hook that it was not "
    "made from is an error."
)
_NOT_SAMPLED = "It holds no token sample, so whether a model is the one that it was made from cannot be checked."


def _code(text: str) -> str:
    """Return text as code that no character in it can end."""
    return f"`{visible(text).replace('`', '´').replace('|', '¦')}`"


def _plain(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else visible(str(value))
