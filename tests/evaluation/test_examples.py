"""When a latent fires on held-out text: the strongest places, and random ones."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conftest import Recorder
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.disk.layout import shard_file, token_file
from dmsae.errors import ConfigError, StoreError
from dmsae.evaluation import examples
from dmsae.evaluation.examples import Example, Firing, heldout_firing
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE
from dmsae.text.tokens import PAD
from planted import REQUEST

pytestmark = pytest.mark.usefixtures("one_thread")


class Spelling:
    """A tokenizer that writes token 7 as 't7 '."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(f"t{i} " for i in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"t{token}"


def reader(n: int) -> SAE:
    """An SAE whose latents are the positive parts of the dimensions."""
    sae = SAE(SAEConfig(d_model=n, width=n, k=1, prefixes=(n,))).requires_grad_(False)
    sae.W_enc_noncore.copy_(torch.eye(n))
    return sae


def make_store(path: Path, tokens_NL: Tensor, x_RD: Tensor, places: Sequence[tuple[int, int]]) -> Store:
    """A store of these held-out activations, each with its context and position."""
    writer = StoreWriter(path, REQUEST)
    writer.add(token_file(Split.HELDOUT), {"tokens": tokens_NL.int(), "starts": tokens_NL == 0}, {})
    columns = torch.tensor(places, dtype=torch.int32).reshape(-1, 2)
    shard = {"x": x_RD, "context": columns[:, 0].contiguous(), "position": columns[:, 1].contiguous()}
    writer.add(shard_file(Split.HELDOUT, 0), shard, {})
    return writer.finish(x_RD.shape[1])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Three contexts. Dimension 0 is largest at position 2 of context 1, then at position 3 of context 0."""
    tokens = torch.tensor([[0, 1, 2, 3], [4, 5, 6, PAD], [8, 9, 10, 11]])
    x = torch.tensor([[1.0, 0, 0], [2, 0, 0], [3, 0, 0], [4, 0, -1], [9, 0, 0], [-1, 5, 0]])
    return make_store(tmp_path / "store", tokens, x, [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1)])


def test_the_top_stands_where_the_latent_fires_most_one_from_each_context(store: Store) -> None:
    first, second, _ = heldout_firing(reader(3), [0, 1, 2], store, Spelling(), n_top=3, n_random=0, n_around=2)
    assert first.top == [
        Example(9.0, "t4 t5 ", "t6 ", "", ("t4 ", "t5 ", "t6 "), (None, 4.0, 9.0), 2),
        Example(3.0, "t1 t2 ", "t3 ", "", ("t1 ", "t2 ", "t3 "), (1.0, 2.0, 3.0), 2),
    ]
    assert second.top == [
        Example(5.0, "t8 ", "t9 ", "t10 t11 ", ("t8 ", "t9 ", "t10 ", "t11 "), (None, 5, None, None), 1)
    ]
    assert (first.rate, first.mean) == (5 / 6, 19 / 5)
    assert (second.rate, second.mean) == (1 / 6, 5.0)


def test_a_latent_that_never_fires(store: Store) -> None:
    assert heldout_firing(reader(3), [2], store, Spelling()) == [Firing(0.0, 0.0, [], [])]


def test_without_a_tokenizer_there_are_figures_alone(store: Store) -> None:
    (firing,) = heldout_firing(reader(3), [0], store)
    assert firing == Firing(5 / 6, 19 / 5, [], [])


def place(example: Example) -> tuple[int, int]:
    """Where an example is from, in stores whose token at (context, position) is 100 · context + position."""
    return divmod(int(example.token.strip(" t")), 100)


def numbered_store(path: Path, f_NLC: Tensor) -> Store:
    """A store in which latent j of `reader` has the activations f[:, :, j], at every position but the first."""
    n, length, width = f_NLC.shape
    tokens = 100 * torch.arange(n)[:, None] + torch.arange(length)
    places = [(context, position) for context in range(n) for position in range(1, length)]
    return make_store(path, tokens, f_NLC[:, 1:].reshape(-1, width).contiguous(), places)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    density=st.floats(0, 1),
    n_top=st.integers(0, 4),
    n_random=st.integers(0, 6),
)
def test_random_examples_are_active_others_than_the_top_and_from_different_contexts(
    tmp_path_factory: pytest.TempPathFactory, seed: int, density: float, n_top: int, n_random: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    f_NLC = torch.rand(5, 6, 2, generator=made) * (torch.rand(5, 6, 2, generator=made) < density)
    store = numbered_store(tmp_path_factory.mktemp("store"), f_NLC)
    both = heldout_firing(reader(2), [0, 1], store, Spelling(), n_top, n_random, seed=seed)
    for latent, firing in enumerate(both):
        top, drawn = ([place(example) for example in some] for some in (firing.top, firing.random))
        for example in (*firing.top, *firing.random):
            assert example.activation == float(f_NLC[*place(example), latent]) > 0
            assert example.activations[example.centre] == example.activation
            assert example.tokens[example.centre] == example.token
            assert len(example.tokens) == len(example.activations)
        left = {(n, p) for n, p in (f_NLC[:, 1:, latent] > 0).nonzero().add(torch.tensor([0, 1])).tolist()} - set(top)
        assert set(drawn) <= left
        assert len(drawn) == len({context for context, _ in drawn}) == min(n_random, len({n for n, _ in left}))
        assert heldout_firing(reader(2), [latent], store, Spelling(), n_top, n_random, seed=seed) == [firing]


def test_random_examples_are_drawn_evenly_from_all_places_where_the_latent_fires(tmp_path: Path) -> None:
    """Of eleven firing positions one is the top; each of the ten others is drawn first about equally often."""
    f_NLC = torch.zeros(3, 7, 1)
    f_NLC[0, 1:7], f_NLC[1, 1:5], f_NLC[2, 3] = 1.0, 2.0, 9.0
    store, n_draws = numbered_store(tmp_path / "store", f_NLC), 400
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(n_draws):
        (firing,) = heldout_firing(reader(1), [0], store, Spelling(), n_top=1, n_random=1, seed=seed)
        counts[place(firing.random[0])] += 1
    assert len(counts) == 10
    # Six standard deviations of a count.
    assert all(abs(count - n_draws / 10) < 6 * (n_draws * 0.1 * 0.9) ** 0.5 for count in counts.values())
    assert max(counts.values()) != min(counts.values()), "a different draw for each seed"


def test_many_latents_are_taken_in_several_passes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = heldout_firing(reader(3), [2, 0, 1], store, Spelling())
    monkeypatch.setattr(examples, "_ELEMENTS", 12)
    monkeypatch.setattr(examples, "_BATCH", 4)
    recorder = Recorder()
    assert heldout_firing(reader(3), [2, 0, 1], store, Spelling(), progress=recorder) == at_once
    assert recorder.bars == [("examples", 12)]


def test_a_store_without_held_out_activations_or_of_another_width_is_an_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"width 2; those of the store store have width 3"):
        heldout_firing(reader(2), [0], store)
    empty = StoreWriter(tmp_path / "empty", REQUEST).finish(2)
    with pytest.raises(StoreError, match="heldout_tokens"):
        heldout_firing(reader(2), [0], empty, Spelling())
