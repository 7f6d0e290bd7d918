"""Our own fidelity and SAEBench's core eval agree on the same SAE and tokens, where they define the same thing.

They do not on two points, and both ways are computed here. Its zero ablation also takes away the BOS token, which
changes the baseline of the loss recovered; its explained variance divides by something that is no variance.
"""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benched import SKIP, job_of, sae_of_kind, save
from conftest import build_documents

pytest.importorskip("sae_bench", reason=SKIP)

import json

from sae_lens.training.activations_store import ActivationsStore

from dmsae.activations.base_model import BaseModel, ModelConfig
from dmsae.activations.request import ImportRequest
from dmsae.activations.splits import Split
from dmsae.activations.store import Store, StoreWriter
from dmsae.disk.layout import shard_file, token_file
from dmsae.evaluation.fidelity import FidelityConfig, measure_fidelity
from dmsae.evaluation.saebench.job import JobSAE
from dmsae.evaluation.saebench.worker import Worker
from dmsae.evaluation.splice import SpliceConfig, splice
from dmsae.evaluation.subject import Subject
from dmsae.sae.sae import SAE

KINDS = ("msae", "dense", "detector")
BATCHES, CONTEXTS, LENGTH = 3, 4, 16


class Run:
    """One run of the core eval: what it found, and on which tokens."""

    def __init__(self, tokens: dict[str, Tensor], results: dict[str, Any], fve: dict[str, float]) -> None:
        self.tokens, self.results, self.fve = tokens, results, fve


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> BaseModel:
    return BaseModel.load(ModelConfig(str(tiny_model), hook=0, device="cpu"))


@pytest.fixture(scope="module")
def saes(tmp_path_factory: pytest.TempPathFactory, model: BaseModel) -> list[JobSAE]:
    """SAEs that suit the activations of the tiny model; the decoder is not trained, so they are bad ones."""
    x_BD = model.activations(torch.randint(3, 60, (64, LENGTH), generator=torch.Generator().manual_seed(0)))[:, 1:]
    place = tmp_path_factory.mktemp("saes")
    return [save(sae_of_kind(kind, x_BD.flatten(0, 1)), place / kind) for kind in KINDS]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, saes: list[JobSAE]) -> Run:
    """Run the core eval, and note which tokens it reads."""
    place = tmp_path_factory.mktemp("core")
    (place / "text").mkdir()
    lines = [json.dumps({"text": document}) for document in build_documents(200)]
    (place / "text" / "text.jsonl").write_text("\n".join(lines))
    settings = {
        "n_eval_reconstruction_batches": BATCHES,
        "n_eval_sparsity_variance_batches": BATCHES,
        "eval_batch_size_prompts": CONTEXTS,
        "context_size": LENGTH,
        "dataset": str(place / "text"),
        "exclude_special_tokens_from_reconstruction": True,
        "compute_featurewise_density_statistics": True,
        "compute_featurewise_weight_based_metrics": True,
    }
    job = job_of("core", saes, tiny_model, 0, place, **settings)
    read, seen = ActivationsStore.get_batch_tokens, []

    def noting(self: ActivationsStore, *args: Any, **kwargs: Any) -> Any:
        seen.append(read(self, *args, **kwargs))
        return seen[-1]

    before = Path.cwd()
    with patch.object(ActivationsStore, "get_batch_tokens", noting):
        Worker(job, _Silent()).run()  # type: ignore[arg-type]
    os.chdir(before)
    # For each SAE, the same batches are read, first those for the losses, then those for the variance.
    assert len(seen) == 2 * BATCHES * len(saes)
    assert all(torch.equal(seen[i], seen[i % (2 * BATCHES)]) for i in range(len(seen)))
    results = {sae.name: json.loads(job.result(sae).read_text())["eval_result_metrics"] for sae in saes}
    fve = {sae.name: json.loads(job.record(sae).read_text())["figures"]["FVE"] for sae in saes}
    tokens = {"losses": torch.cat(seen[:BATCHES]), "variance": torch.cat(seen[BATCHES : 2 * BATCHES])}
    return Run(tokens, results, fve)


class _Silent:
    def say(self, _: Any) -> None:
        pass


def store_of(path: Path, tokens_NL: Tensor, model: BaseModel) -> Store:
    """A store whose held-out text is what the core eval read, without the positions that it leaves out."""
    tokens_NL = tokens_NL.to(torch.int32)
    x_NLD = model.activations(tokens_NL)
    ignored = torch.tensor([model.tokenizer.bos_token_id, model.tokenizer.eos_token_id], dtype=torch.int32)
    contexts, positions = torch.where(~torch.isin(tokens_NL, ignored))
    assert (tokens_NL[:, 0] == model.tokenizer.bos_token_id).all()
    request = ImportRequest("what core read", model.identity, "0" * 64, shard_rows=1, dtype="float32", seed=0)
    writer = StoreWriter(path, request)
    for split in Split:
        writer.add(
            token_file(split), {"tokens": tokens_NL, "starts": torch.zeros_like(tokens_NL, dtype=torch.bool)}, {}
        )
    where = {"context": contexts.int(), "position": positions.int()}
    writer.add(shard_file(Split.HELDOUT, 0), {"x": x_NLD[contexts, positions], **where}, {})
    return writer.finish(x_NLD.shape[-1])


def subject(sae: JobSAE) -> Subject:
    return Subject(sae.name, SAE.load(sae.directory))


@pytest.mark.parametrize("at", range(len(KINDS)), ids=KINDS)
def test_sparsity_variance_and_cosine_agree(
    at: int, saes: list[JobSAE], core: Run, model: BaseModel, tmp_path: Path
) -> None:
    store = store_of(tmp_path / "store", core.tokens["variance"], model)
    (ours,) = measure_fidelity([subject(saes[at])], store, FidelityConfig())
    theirs = core.results[saes[at].name]
    assert ours.l0 == pytest.approx(theirs["sparsity"]["l0"], rel=1e-3)
    assert ours.cosine == pytest.approx(theirs["reconstruction_quality"]["cossim"], abs=1e-4)
    assert ours.fve == pytest.approx(core.fve[saes[at].name], abs=1e-4)


@pytest.mark.parametrize("at", range(len(KINDS)), ids=KINDS)
def test_their_explained_variance_is_not_one_and_can_be_computed_from_ours(
    at: int, saes: list[JobSAE], core: Run, model: BaseModel, tmp_path: Path
) -> None:
    x_BD = store_of(tmp_path / "store", core.tokens["variance"], model).heldout()
    sae = SAE.load(saes[at].directory)
    error = (x_BD - sae(x_BD)).square().sum(1).mean()
    no_variance = x_BD.square().sum(1).mean() - x_BD.square().mean() ** 2
    theirs = core.results[saes[at].name]["reconstruction_quality"]["explained_variance"]
    # They average over batches, whose numbers of kept tokens differ a little.
    assert float(1 - error / no_variance) == pytest.approx(theirs, abs=2e-2)
    assert abs(theirs - core.fve[saes[at].name]) > 0.02


@pytest.mark.parametrize("at", range(len(KINDS)), ids=KINDS)
def test_losses_agree(at: int, saes: list[JobSAE], core: Run, model: BaseModel, tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", core.tokens["losses"], model)
    (ours,) = splice([subject(saes[at])], model, store, SpliceConfig(tokens=10**9))
    performance = core.results[saes[at].name]["model_performance_preservation"]
    assert ours.ce_clean == pytest.approx(performance["ce_loss_without_sae"], abs=1e-4)
    assert ours.ce == pytest.approx(performance["ce_loss_with_sae"], abs=1e-3)
    # With their baseline, the loss recovered is theirs.
    zero = performance["ce_loss_with_ablation"]
    recovered = (zero - ours.ce) / (zero - ours.ce_clean)
    assert recovered == pytest.approx(performance["ce_loss_score"], abs=1e-4)


@pytest.mark.parametrize("at", range(len(KINDS)), ids=KINDS)
def test_kl_agrees_on_the_same_positions_and_has_their_direction(
    at: int, saes: list[JobSAE], core: Run, model: BaseModel, tmp_path: Path
) -> None:
    """Theirs is a mean over the last position of a context as well, which has no next token and does not count in ours.

    With one more token after it, it has: what is predicted at a position does not depend on tokens after it.
    """
    tokens_NL = core.tokens["losses"]
    store = store_of(tmp_path / "store", torch.cat([tokens_NL, tokens_NL[:, 1:2]], 1), model)
    (ours,) = splice([subject(saes[at])], model, store, SpliceConfig(tokens=10**9))
    behaviour = core.results[saes[at].name]["model_behavior_preservation"]
    assert ours.kl == pytest.approx(behaviour["kl_div_with_sae"], rel=1e-4)
