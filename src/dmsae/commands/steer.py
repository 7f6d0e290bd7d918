"""`dmsae steer`: what a model predicts when latents are changed."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.text import Text

from dmsae.commands.output import out, plain_table
from dmsae.commands.read import title
from dmsae.commands.terminal import TERMINAL
from dmsae.errors import ConfigError
from dmsae.text.visible import visible

if TYPE_CHECKING:  # `--help` does not wait for torch
    from dmsae.interventions.intervention import Intervention
    from dmsae.interventions.steering import Steered


@dataclass(frozen=True)
class SteerCommand:
    """Ablate, clamp or scale latents of an SAE inside its model, and see what comes next after a text.

    Give one of --ablate, --clamp and --scale. The change is added to the activations at every position but the first,
    special tokens and norm outliers; what the SAE does not explain of them stays.
    """

    text: Annotated[str, tyro.conf.Positional]
    """What the model is given."""
    sae: Path
    """A distillation (its last SAE), a directory with a core or an SAE, or an SAE of another known format."""
    latent: tuple[int, ...]
    """The latents to change, by index in the SAE, as `dmsae read` prints it."""
    ablate: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Keep them from firing."""
    clamp: float | None = None
    """Set them to this value at every position."""
    scale: float | None = None
    """Multiply them by this factor where they fire."""
    continue_: Annotated[int, tyro.conf.arg(name="continue")] = 0
    """Also let the model write so many tokens, without and with the change."""
    temperature: float = 0.0
    """0: the most probable token each time. Above: tokens are drawn."""
    seed: int = 0
    """Decides what is drawn."""
    top: int = 8
    """Most probable next tokens to show, of each distribution."""
    replace: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Put the changed reconstruction in place of the activations, without what the SAE does not explain."""
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


def command(_recipe: str) -> SteerCommand:
    """Return the command; a recipe has nothing to say about it."""
    return SteerCommand(text=tyro.MISSING, sae=tyro.MISSING, latent=tyro.MISSING)


def run(command: SteerCommand) -> None:
    """Print the next-token distribution without and with the change, and both continuations."""
    from dmsae.distillation.in_use import take_in_use
    from dmsae.interventions.steering import steer

    interventions = _interventions(command)
    used = take_in_use(command.sae, command.model, command.hook, command.device, TERMINAL)
    steered = steer(
        used.sae,
        used.model,
        command.text,
        interventions,
        command.continue_,
        keep_error=not command.replace,
        temperature=command.temperature,
        seed=command.seed,
        n_top=command.top,
        prepend_bos=used.prepend_bos if command.prepend_bos is None else command.prepend_bos,
        max_norm_ratio=used.max_norm_ratio if command.max_norm_ratio is None else command.max_norm_ratio,
    )
    for column, one in enumerate(interventions):
        out.print(f"{title(one.latent, used.core, steered.reading, column)}; {_described(one)}")
    _print_next(steered)
    if command.continue_:
        for name, continued in (("before", steered.continued_before), ("after", steered.continued_after)):
            out.print(Text.assemble(f"{name:<7}  {visible(command.text)}", (visible(continued), "bold")))


def _interventions(command: SteerCommand) -> "list[Intervention]":
    """Return what is to be done with each latent; exactly one thing must be."""
    from dmsae.interventions.intervention import Intervention

    given = [command.ablate, command.clamp is not None, command.scale is not None]
    if sum(given) != 1:
        raise ConfigError(f"{sum(given)} of --ablate, --clamp and --scale are given. Give one of them.")
    if command.ablate:
        return [Intervention(latent, "ablate") for latent in command.latent]
    if command.clamp is not None:
        return [Intervention(latent, "clamp", command.clamp) for latent in command.latent]
    return [Intervention(latent, "scale", command.scale) for latent in command.latent]


def _described(one: "Intervention") -> str:
    match one.kind:
        case "ablate":
            return "ablated"
        case "clamp":
            return f"set to {one.value:g} everywhere"
        case "scale":
            return f"scaled by {one.value:g}"


def _print_next(steered: "Steered") -> None:
    """Print the most probable next tokens with both probabilities, and how far apart the distributions are."""
    table = plain_table("next token", "before", "after")
    for column in table.columns[1:]:
        column.justify = "right"
    for token in steered.top:
        table.add_row(Text(f"»{visible(token.text)}«"), f"{token.before:.4f}", f"{token.after:.4f}")
    out.print(table)
    out.print(f"KL {steered.kl:.4f} nats, from before to after")
