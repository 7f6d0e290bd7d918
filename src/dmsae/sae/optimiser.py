"""Adam on an SAE's trainable parameters, with the gradient clip folded into its step."""

import torch
from torch import Tensor
from torch.optim import adam

from dmsae.sae.sae import SAE


class Adam:
    """The fused kernel of `torch.optim.Adam` and the same state, without its class, which loads torch's compiler.

    The compiler takes 70 MB in every process and a second to import, and nothing here is compiled.
    """

    def __init__(self, sae: SAE, lr: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.parameters, self.lr, self._betas = list(sae.parameters()), lr, betas
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        """Of each parameter that has taken a step: `step`, and the moments `exp_avg` and `exp_avg_sq`."""

    @torch.no_grad()
    def step(self, grad_scale: Tensor | None = None) -> None:
        """Take one step along the gradients; they are divided by `grad_scale` as the kernel reads them."""
        moving = [parameter for parameter in self.parameters if parameter.grad is not None]
        states = [self.state.get(one) or self._begun(one) for one in moving]
        adam.adam(
            moving,  # type: ignore[arg-type]  # parameters are tensors
            [one.grad for one in moving if one.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=grad_scale,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=self.lr,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )

    def _begun(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        count = torch.zeros((), device=parameter.device)  # beside the parameter: the kernel is fused
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        self.state[parameter] = {"step": count} | moments
        return self.state[parameter]


def step_(sae: SAE, optimiser: Adam, grad_norm: float, max_norm: float) -> None:
    """Clip the gradients to `max_norm`, take one optimiser step, and bring decoder rows back to unit norm."""
    # As the kernel's `grad_scale`, clipping costs no pass of its own.
    excess = (grad_norm + 1e-6) / max_norm
    scale = torch.tensor(excess, dtype=torch.float32, device=sae.W_dec.device) if excess > 1 else None
    optimiser.step(scale)
    sae.renormalise_()
