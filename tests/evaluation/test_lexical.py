"""Firing that follows from tokens is predicted; firing at random is not."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.disk.layout import shard_file, token_file
from dmsae.errors import ConfigError
from dmsae.evaluation.firing_sample import heldout_text, sample_latents
from dmsae.evaluation.lexical import Classifier, LexicalConfig, _best_threshold, measure
from dmsae.evaluation.subject import Subject
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE
from planted import REQUEST

N_CONTEXTS, LENGTH, N_WORDS = 80, 17, 20
CONFIG = LexicalConfig(n_latents=4, n_others=200)


def identity_sae(width: int = 4) -> SAE:
    sae = SAE(SAEConfig(d_model=width, width=width, k=1, prefixes=(width,)))
    with torch.no_grad():
        sae.W_enc_noncore.copy_(torch.eye(width))
        sae.W_dec.copy_(torch.eye(width))
    return sae


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Random words. Latent 0 fires on words 0 to 2, latent 1 after word 5, latent 2 at random, latent 3 never."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(N_WORDS, (N_CONTEXTS, LENGTH), generator=draw, dtype=torch.int32)
    context = torch.arange(N_CONTEXTS).repeat_interleave(LENGTH - 1)
    position = torch.arange(1, LENGTH).repeat(N_CONTEXTS)
    current, previous = tokens[context, position], tokens[context, position - 1]
    strength = 1 + torch.rand(len(context), 4, generator=draw)
    chance = torch.rand(len(context), generator=draw) < 0.15
    on = torch.stack([current < 3, previous == 5, chance, torch.zeros_like(chance)], dim=1)
    writer = StoreWriter(tmp_path / "store", REQUEST)
    writer.add(token_file(Split.HELDOUT), {"tokens": tokens, "starts": tokens < 0}, {})
    columns = {"x": strength * on, "context": context.int(), "position": position.int()}
    writer.add(shard_file(Split.HELDOUT, 0), columns, {})
    return writer.finish(4)


def test_what_tokens_decide_is_predicted_and_chance_is_not(store: Store) -> None:
    (result,) = measure([Subject("planted", identity_sae())], store, CONFIG)
    accuracy = {one.latent: one.accuracy for one in result.latents}
    assert accuracy[0] == 1
    assert accuracy[1] == 1
    assert accuracy[2] == pytest.approx(0.5, abs=0.12)
    assert 3 not in accuracy  # it never fires
    assert result.n_latents == 3
    assert result.lexical_predictability == pytest.approx(sum(accuracy.values()) / 3)
    assert result.shuffled == pytest.approx(0.5, abs=0.12)


def test_without_looking_back_what_came_before_is_not_seen(store: Store) -> None:
    config = LexicalConfig(n_latents=4, n_others=200, n_previous=0)
    (result,) = measure([Subject("planted", identity_sae())], store, config)
    accuracy = {one.latent: one.accuracy for one in result.latents}
    assert accuracy[0] == 1
    assert accuracy[1] < 0.7


def test_shuffled_labels_give_one_half_on_average(store: Store) -> None:
    text = heldout_text(store, [], 10_000)
    f_R = text.x_RD[:, 0]
    nulls = [
        Classifier(text, LexicalConfig(n_others=200, seed=seed)).accuracy(f_R, 0, shuffle=True) for seed in range(20)
    ]
    assert sum(nulls) / len(nulls) == pytest.approx(0.5, abs=0.1)


def test_results_depend_on_the_seed_alone_and_not_on_other_subjects(store: Store) -> None:
    subjects = [Subject("one", identity_sae()), Subject("two", SAE.init(SAEConfig(4, 16, 2, (16,)), torch.Generator()))]
    together = measure(subjects, store, CONFIG)
    assert together == measure(subjects, store, CONFIG)
    assert measure(subjects[1:], store, CONFIG) == together[1:]


def test_a_dictionary_that_never_fires_has_no_score(store: Store) -> None:
    sae = identity_sae()
    with torch.no_grad():
        sae.b_enc.fill_(-100)
    (result,) = measure([Subject("silent", sae)], store, CONFIG)
    assert (result.lexical_predictability, result.shuffled, result.n_latents) == (None, None, 0)


def test_the_halves_share_no_context(store: Store) -> None:
    text = heldout_text(store, [], 10_000)
    assert not set(text.context_R[text.is_test_R].tolist()) & set(text.context_R[~text.is_test_R].tolist())
    assert int(text.is_test_R.sum()) == len(text.x_RD) // 2
    few = heldout_text(store, [], 100)
    assert len(few.x_RD) == len(few.context_R) == 100


def test_tokens_before_the_beginning_are_none(store: Store) -> None:
    text = heldout_text(store, [], 100)
    first = int((text.position_R == 1).nonzero()[0])
    assert text.tokens(0)[first] == text.tokens_NL[int(text.context_R[first]), 1]
    assert text.tokens(2)[first] == -1


def test_latents_that_always_or_hardly_fire_are_not_drawn(store: Store) -> None:
    sae = identity_sae()
    with torch.no_grad():
        sae.b_enc.copy_(torch.tensor([0.0, 0, 5, 0]))  # latent 2 always fires now
    latents, f_CR = sample_latents(sae, heldout_text(store, [], 10_000), 4, 10, seed=0)
    assert sorted(latents) == [0, 1]
    assert len(f_CR) == 2


@pytest.mark.parametrize(
    ("yes", "no", "expected"),
    [
        ([3.0, 4], [1.0, 2], (1.0, 2.5)),
        ([2.0, 4], [1.0, 3], (0.75, 1.5)),
        ([1.0, 1], [1.0, 1], (0.5, 1.0)),
        ([1.0], [2.0], (0.5, 2.0)),
    ],
)
def test_the_best_threshold_by_hand(yes: list[float], no: list[float], expected: tuple[float, float]) -> None:
    """Equal scores cannot be divided; what does not help is refused altogether."""

    def tensor(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    assert _best_threshold(tensor(yes), tensor(no)) == expected


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"lexical\.n_top"):
        LexicalConfig(n_top=1)
    with pytest.raises(ConfigError, match=r"lexical\.smoothing"):
        LexicalConfig(smoothing=0.0)
