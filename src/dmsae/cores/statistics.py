"""What controls are matched to: a sample of activations and its principal directions."""

import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.errors import StoreError


def sample_activations(store: Store, n_rows: int = 16_384) -> Tensor:
    """Return the first training activations of a store [n, D], in float32; it may hold fewer.

    A store whose training activations were too many to keep gives those of its pairs.
    """
    split = Split.TRAIN if store.n_rows(Split.TRAIN) else Split.PAIRS
    if not store.n_rows(split):
        raise StoreError(f"The store {store.key} holds no activations to sample. Harvest with train_tokens > 0.")
    x_BD = next(store.batches(split, n_rows))["x"]
    if not torch.isfinite(x_BD).all() or not (x_BD != x_BD[0]).any():
        raise StoreError(
            f"The {split} activations of the store {store.key} are not finite, or do not vary over {len(x_BD)} rows: "
            "no control can be matched to them. Harvest it again."
        )
    return x_BD


def principal_directions(x_BD: Tensor, n: int) -> Tensor:
    """Return the first n principal directions of activations [n, D], in float64, unit norm.

    Each points to the long tail of the activations along it: a latent fires on one side only.
    """
    centred_BD = x_BD.double() - x_BD.double().mean(0)
    vectors_DD = torch.linalg.eigh(centred_BD.T @ centred_BD).eigenvectors
    directions: Tensor = vectors_DD.flip(1)[:, :n].T
    skew = (centred_BD @ directions.T).pow_(3).sum(0)
    return directions * torch.where(skew < 0, -1, 1)[:, None]
