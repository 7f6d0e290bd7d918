"""The adapter gives SAEBench exactly our SAE, whatever its kind."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benched import KINDS, SKIP, sae_of_kind

pytest.importorskip("sae_bench", reason=SKIP)

from sae_bench.custom_saes.base_sae import BaseSAE
from sae_bench.sae_bench_utils.general_utils import check_decoder_norms

from dmsae.activations.base_model import BaseModel
from dmsae.errors import CheckpointError
from dmsae.evaluation.saebench.adapter import Adapter, architecture
from dmsae.sae.sae import SAE

TEXT = "SAEBench was written by many people. It has eight evals; each of them asks for another kind of evidence. " * 8


@pytest.fixture(scope="module")
def x_NLD(real_model: BaseModel) -> Tensor:
    """Activations of the bundled model at block 8, without the first position."""
    tokens = torch.tensor(real_model.tokenizer(TEXT).input_ids)[: 8 * 24].view(8, 24)
    return real_model.activations(tokens)[:, 1:]


def adapted(sae: SAE) -> Adapter:
    return Adapter(sae, "smollm2-135m", 8, torch.device("cpu"))


def by_the_formula(sae: SAE, x_BD: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and reconstruction in float64, from the tensors as they are saved."""
    config, n = sae.config, sae.config.n_detectors
    x, rows = x_BD.double(), sae.W_enc.double()
    pre = (x - sae.b_dec.double() if config.center_input else x) @ rows[n:].T + sae.b_enc.double()
    pre = torch.cat([x @ rows[:n].T + sae.offset.double(), pre], 1)
    f = pre * (pre > sae.threshold.double())
    f[:, n:].clamp_(min=0)
    return f, f @ sae.W_dec.double() + sae.b_dec.double()


@pytest.mark.real
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_reconstructions_are_ours(kind: str, x_NLD: Tensor, tmp_path: Path) -> None:
    x_BD = x_NLD.flatten(0, 1)
    sae_of_kind(kind, x_BD).save(tmp_path)
    sae = SAE.load(tmp_path)
    adapter = adapted(SAE.load(tmp_path))
    assert isinstance(adapter, BaseSAE)
    f_BK, out_BD = sae.encode(x_BD), sae(x_BD)
    assert 0 < (f_BK > 0).float().mean() < 0.5, "the SAE is neither silent nor always on"
    torch.testing.assert_close(adapter.encode(x_BD), f_BK, rtol=0, atol=1e-5)
    torch.testing.assert_close(adapter(x_BD), out_BD, rtol=0, atol=1e-5)
    torch.testing.assert_close(adapter.decode(adapter.encode(x_NLD)), out_BD.view(x_NLD.shape), rtol=1e-5, atol=1e-3)
    expected_f, expected_out = by_the_formula(sae, x_BD)
    torch.testing.assert_close(adapter.encode(x_BD).double(), expected_f, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(adapter(x_BD).double(), expected_out, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_shapes_and_meaning_that_the_package_expects(kind: str) -> None:
    x_BD = torch.randn(256, 16, generator=torch.Generator().manual_seed(1)) + 3
    sae = sae_of_kind(kind, x_BD)
    adapter = adapted(sae)
    assert adapter.W_enc.shape == (16, 64)
    assert adapter.W_dec.shape == (64, 16)
    assert adapter.check_decoder_norms()
    assert check_decoder_norms(adapter.W_dec.data)
    seen = x_BD if kind == "uncentred" else x_BD - adapter.b_dec
    torch.testing.assert_close(seen @ adapter.W_enc + adapter.b_enc, sae.pre_activations(x_BD))


def test_moving_the_adapter_moves_the_sae() -> None:
    x_BD = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    adapter = adapted(sae_of_kind("detector", x_BD))
    before = adapter(x_BD)
    adapter.to(dtype=torch.float64)
    assert adapter.sae.W_dec is adapter.W_dec
    assert adapter.sae.offset.dtype == adapter.W_enc.dtype == adapter.dtype == torch.float64
    torch.testing.assert_close(adapter(x_BD.double()), before.double(), rtol=1e-5, atol=1e-5)


def test_kinds_are_named_as_the_plots_name_them() -> None:
    x_BD = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    names = {kind: architecture(sae_of_kind(kind, x_BD).config) for kind in KINDS}
    assert names["batch_topk"] == "batch_topk"
    assert names["msae"] == names["uncentred"] == "matryoshka_batch_topk"
    assert [names[kind] for kind in ("dense", "sparse", "detector")] == [
        "dmsae_dense",
        "dmsae_sparse",
        "dmsae_detector",
    ]


def test_decoder_rows_of_other_norms_are_refused() -> None:
    sae = sae_of_kind("msae", torch.randn(64, 16, generator=torch.Generator().manual_seed(1)))
    sae.W_dec[3] *= 2
    with pytest.raises(CheckpointError, match="first: latent 3"):
        adapted(sae)
