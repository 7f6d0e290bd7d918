"""Predictions with a reconstruction spliced in, compared with the same run written out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from conftest import build_model, build_tokenizer
from dictionaries import constant, identity, random_sae
from dmsae.activations.above_hook import AboveHook
from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.activations.harvest import harvest
from dmsae.activations.request import HarvestConfig
from dmsae.activations.splits import Split
from dmsae.activations.store import Store
from dmsae.evaluation.splice import SpliceConfig, SpliceResult, splice
from dmsae.evaluation.subject import Subject
from dmsae.sae.config import SAEConfig

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def store(tiny_config: Callable[..., HarvestConfig], tmp_path: Path) -> Store:
    return harvest(tiny_config(), tmp_path / "stores")


@pytest.fixture
def model(tiny_model: Path) -> BaseModel:
    return BaseModel.load(ModelConfig(name=str(tiny_model), hook=0, device="cpu"))


def mean_of(store: Store) -> Tensor:
    return store.heldout().mean(0)


def test_a_perfect_reconstruction_recovers_all_and_ablations_nothing(store: Store, model: BaseModel) -> None:
    d, all_of_it = store.d_model, SpliceConfig(tokens=10**6)
    subjects = [
        Subject("identity", identity(d)),
        Subject("zero", constant(torch.zeros(d))),
        Subject("mean", constant(mean_of(store))),
    ]
    perfect, zero, mean = splice(subjects, model, store, all_of_it)
    assert perfect.n_tokens <= store.n_rows(Split.HELDOUT)
    assert (perfect.loss_recovered_zero, perfect.loss_recovered_mean) == pytest.approx((1, 1))
    assert (perfect.ce, perfect.kl) == pytest.approx((perfect.ce_clean, 0), abs=1e-6)
    assert (zero.loss_recovered_zero, zero.ce, zero.kl) == pytest.approx((0, zero.ce_zero, zero.kl_zero))
    assert (mean.loss_recovered_mean, mean.ce, mean.kl) == pytest.approx((0, mean.ce_mean, mean.kl_mean), abs=1e-5)
    assert zero.kl > 0.01, "the tiny model's predictions do not depend on the hook"


def test_the_figures_are_those_of_the_run_written_out(store: Store, model: BaseModel) -> None:
    """Every position that the store holds is replaced, no other, and losses count where both position and target do."""
    sae = random_sae(SAEConfig(store.d_model, 32, 4, (8, 32)), threshold=0.3)
    (figures,) = splice([Subject("random", sae)], model, store, SpliceConfig(tokens=10**6, batch_contexts=3))
    stored = store.tokens(Split.HELDOUT)
    tokens, keep = stored["tokens"], torch.zeros_like(stored["tokens"], dtype=torch.bool)
    for batch in store.batches(Split.HELDOUT, 100):
        keep[batch["context"].long(), batch["position"].long()] = True
    counted = model.keep_mask.targets(tokens, stored["starts"]) & keep

    def edit(x: Tensor) -> Tensor:
        return torch.where(keep[..., None], sae(x), x)

    logits, clean = model.logits(tokens, edit)[counted], model.logits(tokens)[counted]
    targets = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)[counted].long()
    assert figures.n_tokens == int(counted.sum())
    assert figures.ce == pytest.approx(float(cross_entropy(logits, targets)), rel=1e-5)
    assert figures.ce_clean == pytest.approx(float(cross_entropy(clean, targets)), rel=1e-5)
    kl = kl_div(log_softmax(logits, -1), log_softmax(clean, -1), log_target=True, reduction="batchmean")
    assert figures.kl == pytest.approx(float(kl), rel=1e-4)
    expected = (figures.ce_zero - figures.ce) / (figures.ce_zero - figures.ce_clean)
    assert figures.loss_recovered_zero == pytest.approx(expected)


def test_fewer_tokens_take_whole_contexts(store: Store, model: BaseModel) -> None:
    subjects = [Subject("identity", identity(store.d_model))]
    few, more = (splice(subjects, model, store, SpliceConfig(tokens=n))[0] for n in (20, 100))
    assert 10 <= few.n_tokens < more.n_tokens < store.n_rows(Split.HELDOUT)
    assert few.loss_recovered_zero == pytest.approx(1)


def test_what_no_subject_changes_is_run_once(
    store: Store, model: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects = [Subject(str(seed), random_sae(SAEConfig(store.d_model, 32, 4, (32,)), seed)) for seed in range(2)]
    config = SpliceConfig(tokens=50)

    def both() -> list[SpliceResult]:
        return splice(subjects, model, store, config, tmp_path / "cache")

    first = both()
    monkeypatch.setattr(model, "activations", lambda _: pytest.fail("the blocks below the hook ran again"))
    assert both() == first
    (kept,) = (tmp_path / "cache").glob("splice-*.safetensors")
    kept.write_bytes(kept.read_bytes()[:100])
    monkeypatch.undo()
    assert both() == first, "a damaged file was not made again"


@contextmanager
def counted_runs(model: BaseModel, block: int) -> Iterator[list[int]]:
    runs: list[int] = []
    mlp = model.model.get_submodule(f"model.layers.{block}.mlp")
    handle = mlp.register_forward_hook(lambda *_: runs.append(1))
    yield runs
    handle.remove()


def test_blocks_below_the_hook_are_left_out(tmp_path: Path) -> None:
    build_model(num_hidden_layers=4).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    model = BaseModel.load(ModelConfig(name=str(tmp_path), hook=2, device="cpu"))
    tokens = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    x = 0.5 * model.activations(tokens)
    above, expected = AboveHook(model), model.logits(tokens, lambda _: x)
    with counted_runs(model, 1) as below, counted_runs(model, 3) as upper:
        for _ in range(3):
            assert torch.equal(above.logits(tokens, x), expected)
    assert above.is_short
    assert (len(below), len(upper)) == (1, 4), "below: once, to try. Above: once more"
    assert torch.equal(model.logits(tokens), BaseModel.logits(model, tokens, lambda x: x)), "the model was not restored"


def test_a_model_that_needs_its_lower_blocks_runs_whole(model: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    x, upper = model.activations(tokens), model.model.get_submodule("model.layers.1")
    forward = upper.forward
    seen: list[Tensor] = []
    model.model.get_submodule("model.layers.0.mlp").register_forward_hook(
        lambda _module, _inputs, output: seen.append(output)
    )

    def takes_from_below(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        shared = seen.pop() if seen else torch.zeros_like(hidden)
        return forward(hidden + shared, *args, **kwargs)

    monkeypatch.setattr(upper, "forward", takes_from_below)
    above = AboveHook(model)
    expected = model.logits(tokens, lambda _: x)
    for _ in range(2):
        assert torch.equal(above.logits(tokens, x), expected)
    assert not above.is_short


def test_a_hook_inside_a_block_needs_the_whole_model(tiny_model: Path) -> None:
    model = BaseModel.load(ModelConfig(name=str(tiny_model), hook="model.layers.1.mlp", device="cpu"))
    tokens = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    x, above = model.activations(tokens), AboveHook(model)
    assert not above.is_short
    assert torch.allclose(above.logits(tokens, x), model.logits(tokens))


@pytest.mark.real
def test_the_real_model_can_be_run_from_its_hook_on(real_model: BaseModel) -> None:
    tokens = torch.tensor(real_model.tokenizer("The cat sat on the mat because it was")["input_ids"])[None]
    x, above = real_model.activations(tokens), AboveHook(real_model)
    with counted_runs(real_model, 3) as below:
        for _ in range(2):
            assert torch.allclose(above.logits(tokens, x), real_model.logits(tokens), atol=1e-4)
    assert above.is_short
    assert len(below) == 3, "twice for the whole model, once to try"
