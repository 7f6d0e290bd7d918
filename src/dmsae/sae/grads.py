"""The gradients of an SAE's parameters: written as they are found, summed over the ranks of a mesh, and measured."""

import torch
from torch import Tensor

from dmsae.sae.comms import Comms
from dmsae.sae.sae import SAE
from dmsae.sae.sparse import Gradients


def write_(sae: SAE, part: Gradients) -> list[Tensor]:
    """Write gradients into `.grad`, the decoder's projected, and return their square norms."""
    decoder = part.decoder.addcmul_(sae.W_dec[part.rows], part.parallel[:, None], value=-1)
    _grad(sae.W_dec)[part.rows] = decoder
    squares = [square_norm(decoder)]
    if part.bias is not None:
        _grad(sae.b_enc)[_shifted(part.rows, sae.config.n_detectors)] = part.bias
        squares.append(square_norm(part.bias))
    if part.encoder is not None:
        _grad(sae.W_enc_noncore)[_shifted(part.rows, sae.config.n_core)] = part.encoder
        squares.append(square_norm(part.encoder))
    return squares


def _shifted(rows: slice | Tensor, n: int) -> slice | Tensor:
    """Return the same latents as indices into a tensor that leaves out the first n."""
    return slice(rows.start - n, rows.stop - n) if isinstance(rows, slice) else rows - n


def write_b_dec_(sae: SAE, upstream_BD: Tensor, comms: Comms) -> Tensor:
    """Write the gradient of b_dec, which the encoder sees too when it centres its input; return its square norm."""
    n_core = sae.config.n_core
    grad_D = upstream_BD.sum(0)
    if comms.latents.rank > 0:  # the first of the ranks with these tokens has it
        grad_D.zero_()
    if sae.config.center_input:
        bias = _grad(sae.b_enc)
        if sae.config.n_detectors:
            grad_D -= bias @ sae.W_enc_noncore
        else:
            grad_D -= bias[:n_core] @ sae.W_enc_core + bias[n_core:] @ sae.W_enc_noncore
    _grad(sae.b_dec).copy_(comms.both.sum_(grad_D))
    return square_norm(grad_D)


def summed_norm(sae: SAE, squares: list[Tensor], square_b_dec: Tensor, comms: Comms) -> float:
    """Sum the gradients of the rank's latents over the tokens of all ranks; return the norm of all gradients together.

    `squares` are the square norms of what the rank wrote, which are those of the gradients if all tokens are its own.
    """
    if comms.data.size > 1:
        summed = [comms.data.sum_(_grad(parameter)) for parameter in (sae.W_dec, sae.W_enc_noncore, sae.b_enc)]
        squares = [square_norm(gradient) for gradient in summed]
    if comms.latents.rank == 0:
        squares = [*squares, square_b_dec]
    return float(comms.latents.sum_(torch.stack(squares).sum()).sqrt())


def square_norm(tensor: Tensor) -> Tensor:
    flat = tensor.flatten()
    return torch.dot(flat, flat)


def _grad(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
