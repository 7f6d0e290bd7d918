"""Logistic regression to its exact optimum: small, in float64, several problems at once.

The objective is the usual one, `C · Σᵢ sᵢ log(1 + exp(−yᵢ zᵢ)) + ½ ‖w‖²` with z = w·x + b, y = ±1 and an intercept that
is not penalised. It is strictly convex in w, so damped Newton steps reach its one optimum.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dmsae.evaluation.cached import Tensors, cached, tensor_key
from dmsae.progress import SILENT, Progress

_MAX_STEPS = 100
_TOLERANCE = 1e-12
"""Newton's decrement, relative to the objective, at which a problem counts as solved."""


class Logistic(NamedTuple):
    """Fitted weights and intercepts of one or several problems."""

    w: Tensor
    """[..., F]"""
    b: Tensor
    """[...]"""

    def logits(self, x: Tensor) -> Tensor:
        """Return w·x + b, [..., N], for features [..., N, F] or [N, F]."""
        return (x.double() @ self.w[..., None])[..., 0] + self.b[..., None]


@torch.no_grad()
def fit(x: Tensor, y: Tensor, c: float | Tensor = 1.0, balanced: bool = False) -> Logistic:
    """Return the optimum for features [..., N, F] and labels [..., N] of 0 and 1.

    `c` may be [...] as well: the leading dimensions of all three are broadcast, and each is a problem of its own. With
    `balanced` the two classes of each problem have the same total weight, N / 2.
    """
    x, y = x.double(), y.to(x.device, torch.float64)
    c = torch.as_tensor(c, dtype=torch.float64, device=x.device)
    # With more features than samples, w lies in the span of the samples: an orthonormal basis of it is enough.
    basis = torch.linalg.qr(x.mT).Q if x.shape[-1] > x.shape[-2] else None
    z = x if basis is None else x @ basis
    weights = _class_weights(y) if balanced else torch.ones_like(y)
    shape = torch.broadcast_shapes(z.shape[:-2], y.shape[:-1], c.shape)
    z = torch.cat([z, torch.ones_like(z[..., :1])], -1).expand(*shape, -1, -1)
    theta = _newton(z, y.expand(*shape, -1), weights.expand(*shape, -1), c.expand(shape))
    w = theta[..., :-1]
    return Logistic(w if basis is None else (basis @ w[..., None])[..., 0], theta[..., -1])


def fit_each(x_NF: Tensor, y_VN: Tensor, c: float, cache: Path | None = None, progress: Progress = SILENT) -> Logistic:
    """Return a balanced regression for each row of labels on the same features, w [V, F]; zero where none is positive.

    Here `c` is relative to the features' total variance, so that it suits any scale of activations.
    """

    def make() -> Tensors:
        w, b = torch.zeros(len(y_VN), x_NF.shape[1]).double(), torch.zeros(len(y_VN)).double()
        strength = c / float(x_NF.double().var(0, correction=0).sum().clamp(min=1e-300))
        with progress.bar("probes", len(y_VN), "probe") as bar:
            for i, y_N in enumerate(y_VN):
                if bool(y_N.any()):
                    w[i], b[i] = fit(x_NF, y_N, strength, balanced=True)
                bar.advance(1)
        return {"w": w, "b": b}

    made_of = {"version": 2, "x": tensor_key(x_NF), "y": tensor_key(y_VN.long()), "c": c}
    kept = cached(cache, "probes", made_of, make)
    return Logistic(kept["w"], kept["b"])


def _class_weights(y: Tensor) -> Tensor:
    n, n_positive = y.shape[-1], y.sum(-1, keepdim=True)
    return torch.where(y > 0, n / (2 * n_positive.clamp(min=1)), n / (2 * (n - n_positive).clamp(min=1)))


def _newton(z: Tensor, y: Tensor, weights: Tensor, c: Tensor) -> Tensor:
    """Return the optimal [..., F + 1] for features whose last column is 1."""
    size = z.shape[-1]
    penalised = torch.ones(size, dtype=z.dtype, device=z.device)
    penalised[-1] = 0
    scale = c[..., None] * weights

    def objective(theta: Tensor) -> Tensor:
        margin = (z @ theta[..., None])[..., 0] * (1 - 2 * y)
        return (scale * F.softplus(margin)).sum(-1) + 0.5 * (penalised * theta**2).sum(-1)

    theta = z.new_zeros(*z.shape[:-2], size)
    value = objective(theta)
    for _ in range(_MAX_STEPS):
        p = torch.sigmoid((z @ theta[..., None])[..., 0])
        gradient = (z.mT @ (scale * (p - y))[..., None])[..., 0] + penalised * theta
        hessian = z.mT @ ((scale * p * (1 - p))[..., None] * z) + torch.diag(penalised)
        # Where all samples are sure, nothing holds the intercept.
        hessian.diagonal(dim1=-2, dim2=-1)[..., -1] += 1e-10 * scale.sum(-1)
        step = _solved(hessian, gradient)
        decrement = (step * gradient).sum(-1)
        solved = decrement <= _TOLERANCE * value
        theta, value = _descend(objective, theta, value, step, decrement.masked_fill(solved, -torch.inf))
        if bool(solved.all()):
            break
    return theta


def _solved(a: Tensor, b: Tensor) -> Tensor:
    """Return the x [..., F] with a x = b, one problem at a time.

    Given several, oneMKL 2024.2 on more than one thread of a CPU with AVX-512 fails from about 250 unknowns on.
    """
    problems = zip(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, b.shape[-1]), strict=True)
    return torch.stack([torch.linalg.solve(one, other) for one, other in problems]).view_as(b)


def _descend(
    objective: Callable[[Tensor], Tensor], theta: Tensor, value: Tensor, step: Tensor, decrement: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the point along the Newton step, halved until each objective falls as the decrement asks, and its value.

    A problem whose decrement is −∞ asks for nothing.
    """
    size = torch.ones_like(value)
    for _ in range(30):
        tried = theta - size[..., None] * step
        new = objective(tried)
        enough = new <= value - 1e-4 * size * decrement
        if bool(enough.all()):
            break
        size = torch.where(enough, size, size / 2)
    better = new < value
    return torch.where(better[..., None], tried, theta), torch.where(better, new, value)


def accuracy(logits: Tensor, y: Tensor) -> float:
    """Return the share of samples on the right side of 0."""
    return float(((logits > 0) == (y > 0)).double().mean())


def auc(scores: Tensor, y: Tensor) -> float:
    """Return the area under the ROC curve: how often a positive scores above a negative, ties counting half.

    Without both classes there is nothing to rank, and it is ½.
    """
    from scipy.stats import rankdata

    positive = y.bool()
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if not n_positive or not n_negative:
        return 0.5
    ranks = torch.from_numpy(rankdata(scores.double().cpu().numpy()))
    above = float(ranks[positive.cpu()].sum()) - n_positive * (n_positive + 1) / 2
    return above / (n_positive * n_negative)
