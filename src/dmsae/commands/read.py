"""`dmsae read`: which latents fire on which tokens of a text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.text import Text

from dmsae.commands.output import out
from dmsae.commands.terminal import TERMINAL
from dmsae.text.visible import visible

if TYPE_CHECKING:  # `--help` does not wait for torch
    from dmsae.interventions.reading import Reading

_SHADES = ("grey19", "dark_green", "green4", "green3", "green1")
"""Backgrounds from weak to strong."""


@dataclass(frozen=True)
class ReadCommand:
    """Print which latents of a core, or of an SAE, fire on which tokens of a text.

    Tokens on which a latent fires are marked »so« and followed by its activation. As in training, the first position of
    a text, special tokens and norm outliers are not read.
    """

    text: Annotated[str, tyro.conf.Positional]
    """What to read."""
    sae: Path
    """A distillation (its distilled core), a directory with a core or an SAE, or an SAE of another known format."""
    latents: tuple[int, ...] = ()
    """Read these latents of the SAE, by index. Default: those of the core; without a core, all."""
    top: int = 8
    """How many to show, the strongest on this text first. With --latents, all that are named are shown."""
    model: str = ""
    """The model, if it is not where the SAE says that it was, or if the SAE does not say."""
    hook: str = ""
    """Layer number or module path, if the SAE does not say."""
    device: str = "auto"
    """Where the model runs: `cpu`, `cuda`, or `auto`."""
    prepend_bos: bool | None = None
    """Put the BOS token before the text. Default: as in the SAE's harvest, if its store is there."""
    max_norm_ratio: float | None = None
    """Leave out positions whose norm exceeds this many times the median. Default: as in the SAE's harvest."""


def command(_recipe: str) -> ReadCommand:
    """Return the command; a recipe has nothing to say about it."""
    return ReadCommand(text=tyro.MISSING, sae=tyro.MISSING)


def run(command: ReadCommand) -> None:
    """Print a text once for each latent, its tokens marked."""
    from dmsae.config import require_whole
    from dmsae.distillation.in_use import take_in_use
    from dmsae.interventions.reading import read

    require_whole("top", command.top, 1)
    used = take_in_use(command.sae, command.model, command.hook, command.device, TERMINAL)
    latents = command.latents or used.core or None
    bos = used.prepend_bos if command.prepend_bos is None else command.prepend_bos
    ratio = used.max_norm_ratio if command.max_norm_ratio is None else command.max_norm_ratio
    whole = read(used.sae, used.model, command.text, latents, prepend_bos=bos, max_norm_ratio=ratio)
    shown = whole if command.latents else whole.strongest(command.top)
    n_fire = len(whole.strongest(len(whole.latents)).latents) if whole.latents else 0
    what = "latents of the core" if latents and not command.latents else "latents"
    total = len(latents) if latents else used.sae.config.width
    out.print(
        f"{n_fire:,} of {total:,} {what} fire on {int(whole.kept_L.sum()):,} tokens"
        + (f"; the strongest {len(shown.latents)}:" if len(shown.latents) < n_fire else ".")
    )
    for column, latent in enumerate(shown.latents):
        out.print(title(latent, used.core, shown, column))
        out.print(_marked(shown, column))


def title(latent: int, core: Sequence[int], reading: "Reading", column: int) -> str:
    """Return which latent it is, its number in the core as `dmsae core show` counts, and how it fires on a text."""
    number = f" (number {core.index(latent)} of the core)" if latent in core else ""
    f_L = reading.activations_LR[:, column]
    if not (n_on := int((f_L > 0).sum())):
        return f"latent {latent}{number} does not fire"
    tokens = f"{n_on} of {int(reading.kept_L.sum())} tokens"
    return f"latent {latent}{number} fires on {tokens}, at most {float(f_L.max()):.1f}"


def _marked(reading: "Reading", column: int) -> Text:
    """Return the text with the tokens marked on which a latent fires: the stronger, the brighter."""
    f_L = reading.activations_LR[:, column].tolist()
    peak = max(f_L)
    line = Text("   ")
    for token, f in zip(reading.tokens, f_L, strict=True):
        if f > 0:
            shade = _SHADES[min(int(len(_SHADES) * f / peak), len(_SHADES) - 1)]
            line.append(f"»{visible(token)}«", f"bold on {shade}").append(f"{f:.1f}", "dim")
        else:
            line.append(visible(token))
    return line
