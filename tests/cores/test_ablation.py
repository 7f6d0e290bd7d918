"""Latent ablation against one forward pass per latent and context, written out."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dmsae.activations.base_model import BaseModel
from dmsae.activations.harvest import Harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.cores.ablation import AblationConfig, ablate
from dmsae.cores.attribution import AttributionConfig, CandidateCodes, QuantileOver, attribute
from dmsae.errors import ConfigError
from dmsae.sae.config import DenseCore, SAEConfig
from dmsae.sae.sae import SAE

N_POOL = 7


@pytest.fixture
def case(tiny_config: Callable[..., HarvestConfig], tmp_path: Path) -> tuple[SAE, Store, BaseModel]:
    harvest = Harvest(tiny_config(train_tokens=0, heldout_tokens=0, pair_tokens=50), tmp_path)
    store = harvest.run()
    generator = torch.Generator().manual_seed(0)
    config = SAEConfig(16, 24, 2, (N_POOL, 24), DenseCore(2, k_noncore=2))
    sae = SAE.init(config, generator, torch.randn(2, 16, generator=generator))
    return sae, store, harvest.model


@torch.no_grad()
def literal_changes(sae: SAE, store: Store, model: BaseModel, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per candidate and context: the change of the loss, its linear prediction, and whether the latent fires."""
    tokens = store.tokens(Split.PAIRS)["tokens"]
    f = torch.zeros(N_POOL, *tokens.shape)
    g = torch.zeros(*tokens.shape, 16)
    codes = CandidateCodes(sae)
    for batch in store.batches(Split.PAIRS, batch_size):
        for row, code in enumerate(codes(batch["x"]).T):
            f[:, batch["context"][row], batch["position"][row]] = code
            g[batch["context"][row], batch["position"][row]] = batch["g"][row]
    change = torch.zeros(N_POOL, len(tokens), dtype=torch.float64)
    predicted = torch.zeros_like(change)
    hooked = model.model.get_submodule(model.identity.hook)
    counted = store.counted_losses(Split.PAIRS, model.keep_mask)
    for n, context in enumerate(tokens):
        ids = context[context >= 0].long()[None]
        labels, n_losses = ids.clone(), int(counted[n].sum())
        labels[0, 1:][~counted[n, : ids.shape[1] - 1]] = -100
        clean = model.model(input_ids=ids, labels=labels).loss.double() * n_losses
        for j in range(N_POOL):
            removed = f[j, n, : ids.shape[1], None] * sae.W_dec[j].detach()
            predicted[j, n] = -(removed * g[n, : ids.shape[1]]).sum()

            def subtract(_module: Any, _inputs: Any, output: Tensor, removed: Tensor = removed) -> Tensor:
                return output - removed

            handle = hooked.register_forward_hook(subtract)
            change[j, n] = model.model(input_ids=ids, labels=labels).loss.double() * n_losses - clean
            handle.remove()
    return change, predicted, (f > 0).any(2)


@pytest.mark.parametrize("over", QuantileOver)
def test_scores_equal_one_pass_per_latent_and_context(case: tuple[SAE, Store, BaseModel], over: QuantileOver) -> None:
    sae, store, model = case
    scored = attribute(sae, store, AttributionConfig(quantile=0.7, quantile_over=over, batch_size=64))
    ablated = ablate(sae, store, model, scored, AblationConfig(n_contexts=999, n_latents=None, batch_contexts=3))
    change, _, fires = literal_changes(sae, store, model, 64)
    expected = []
    for j in range(N_POOL):
        samples = change[j].abs() if over is QuantileOver.ALL else change[j].abs()[fires[j]]
        expected.append(float(samples.quantile(0.7)) if len(samples) else 0.0)
    assert not fires.all()
    assert ablated.latents_P.tolist() == list(range(N_POOL))
    torch.testing.assert_close(ablated.scores_P, torch.tensor(expected).double(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ablated.firing_rates_P, scored.firing_rates_P)
    assert ablated.n_positions == store.n_rows(Split.PAIRS)


def test_small_removals_change_the_loss_as_the_gradient_says(case: tuple[SAE, Store, BaseModel]) -> None:
    sae, store, model = case
    with torch.no_grad():
        sae.W_enc_core.mul_(0.005)
        sae.W_enc_noncore.mul_(0.005)
    change, predicted, _ = literal_changes(sae, store, model, 64)
    assert float((change - predicted).norm()) < 0.05 * float(predicted.norm())
    scored = attribute(sae, store, AttributionConfig(quantile=1.0, batch_size=64))
    ablated = ablate(sae, store, model, scored, AblationConfig(n_contexts=999, n_latents=None))
    torch.testing.assert_close(ablated.scores_P, predicted.abs().amax(1), rtol=0.05, atol=5e-4)


def test_latents_are_taken_from_the_whole_range_of_scores(case: tuple[SAE, Store, BaseModel]) -> None:
    """Seven candidates in three stretches by rank: two of the highest, two of the middle, three of the lowest."""
    sae, store, model = case
    scored = attribute(sae, store, AttributionConfig(quantile=0.9))
    ranked = scored.scores_P.sort(descending=True, stable=True).indices.tolist()
    chosen = set()
    for seed in range(4):
        config = AblationConfig(n_contexts=2, n_latents=3, seed=seed)
        ablated = ablate(sae, store, model, scored, config)
        latents = ablated.latents_P.tolist()
        assert latents == sorted(latents)
        ranks = sorted(ranked.index(latent) for latent in latents)
        assert [rank in stretch for rank, stretch in zip(ranks, ((0, 1), (2, 3), (4, 5, 6)), strict=True)] == [True] * 3
        assert torch.equal(ablated.scores_P, ablate(sae, store, model, scored, config).scores_P)
        chosen.add(tuple(latents))
    assert len(chosen) > 1, "the seed has no say"
    assert ablated.facts["n_contexts"] == 2
    assert ablated.n_positions < store.n_rows(Split.PAIRS)


def test_more_contexts_than_a_quantile_s_share_by_default() -> None:
    assert (1 - AttributionConfig().quantile) * AblationConfig().n_contexts > 1


def test_an_edit_that_changes_nothing_leaves_the_losses(case: tuple[SAE, Store, BaseModel]) -> None:
    _, store, model = case
    tokens = store.tokens(Split.PAIRS)["tokens"][:4]
    clean = model.losses(tokens)
    assert torch.equal(model.losses(tokens, lambda x: x), clean)
    assert torch.equal(model.gradients(tokens).loss_NL, clean)
    seen: list[Tensor] = []

    def erase(x: Tensor) -> Tensor:
        seen.append(x)
        return torch.zeros_like(x)

    changed = model.losses(tokens, erase)
    assert torch.equal(seen[0], model.activations(tokens))
    assert not torch.allclose(changed[:, :-1], clean[:, :-1])


def test_another_model_is_refused(case: tuple[SAE, Store, BaseModel]) -> None:
    sae, store, model = case
    scored = attribute(sae, store)
    model.identity = replace(model.identity, weights_sha256="other")
    with pytest.raises(ConfigError, match=rf"The models differ: the store {store.key} is of .*, but the model given"):
        ablate(sae, store, model, scored)


@pytest.mark.parametrize("name", ["n_contexts", "n_latents", "batch_contexts"])
def test_impossible_settings_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        AblationConfig(**{name: 0})
