"""Adam on an SAE's trainable parameters, with the gradient clip folded into its step."""

import torch

from dmsae.sae.sae import SAE


def adam(sae: SAE, lr: float, betas: tuple[float, float] = (0.9, 0.999)) -> torch.optim.Adam:
    """Return the optimiser of an SAE's trainable parameters; what is frozen is not among them."""
    return torch.optim.Adam(sae.parameters(), lr=lr, betas=betas, fused=True)


def step_(sae: SAE, optimiser: torch.optim.Adam, grad_norm: float, max_norm: float) -> None:
    """Clip the gradients to `max_norm`, take one optimiser step, and bring decoder rows back to unit norm."""
    # The fused kernel divides the gradients by `grad_scale` as it reads them: clipping costs no pass of its own.
    excess = (grad_norm + 1e-6) / max_norm
    scale = torch.tensor(excess, dtype=torch.float32, device=sae.W_dec.device) if excess > 1 else None
    optimiser.grad_scale = scale  # type: ignore[attr-defined]
    optimiser.step()
    sae.renormalise_()
