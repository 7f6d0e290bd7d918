"""Exported here and opened with the real packages, or made with them and imported here: the same codes.

On activations of the bundled model. Codes agree to 1e-5 of the largest one. A latent within that of its threshold may
be on in one and off in the other, because sums are rounded differently; there may be hardly any.
"""

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benched import KINDS, sae_of_kind
from hub_standin import OWN_ENVIRONMENT

pytest.importorskip("sae_lens", reason=OWN_ENVIRONMENT)
pytest.importorskip("sae_bench", reason=OWN_ENVIRONMENT)
pytest.importorskip("sparsify", reason=OWN_ENVIRONMENT)

import sae_lens
from sae_bench.custom_saes.run_all_evals_dictionary_learning_saes import TRAINER_LOADERS

from dmsae.activations.base_model import BaseModel
from dmsae.config import to_dict
from dmsae.errors import ExportError
from dmsae.formats.exchange import export_sae, import_sae
from dmsae.sae.sae import SAE

pytestmark = pytest.mark.real
sparsify: Any = importlib.import_module("sparsify")
PACKAGE: Any = importlib.util.find_spec("dictionary_learning")
ROOT = Path(__file__).parents[2]
WIDTH = 1024
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def x_BD(real_model: BaseModel) -> Tensor:
    """Activations of the bundled model after block 8 on this project's own pages, without first positions."""
    text = "\n".join((ROOT / name).read_text(encoding="utf8") for name in ("README.md", "docs/method.md"))
    tokens = torch.tensor(real_model.tokenizer(text).input_ids)[: 48 * 64].view(48, 64)
    return real_model.activations(tokens)[:, 1:].flatten(0, 1)


def assert_same_codes(theirs: Tensor, ours: Tensor, sae: SAE) -> None:
    """Check codes to 1e-5 of the largest; where only one of them is on, the latent has to be at its threshold."""
    theirs, ours = theirs.detach(), ours.detach()
    assert 0 < int((ours > 0).sum()) < 0.5 * ours.numel(), "this SAE tests nothing"
    atol = TOLERANCE * float(ours.max())
    one_on = (theirs > 0) != (ours > 0)
    at_threshold = (torch.maximum(theirs, ours) - sae.threshold).abs() <= atol
    assert not (one_on & ~at_threshold).any()
    assert int(one_on.sum()) <= 1e-5 * int((ours > 0).sum()) + 2
    assert float((theirs - ours)[~one_on].abs().max()) <= atol


def dictionary_learning(name: str) -> Any:
    """A module of dictionary_learning without its `__init__`, which needs packages that are not installed."""
    root = Path(next(iter(PACKAGE.submodule_search_locations)))
    for package, folder in (("dictionary_learning", root), ("dictionary_learning.trainers", root / "trainers")):
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [str(folder)]
    return importlib.import_module(f"dictionary_learning.{name}")


def with_one_threshold(sae: SAE) -> SAE:
    sae.set_threshold_(float(sae.threshold.max()))
    return sae


@pytest.mark.parametrize("kind", KINDS)
def test_saelens_opens_what_we_export(tmp_path: Path, x_BD: Tensor, kind: str) -> None:
    sae = sae_of_kind(kind, x_BD, WIDTH)
    export_sae(sae, "saelens", tmp_path / "out")
    theirs = sae_lens.SAE.load_from_disk(tmp_path / "out")
    assert type(theirs).__name__ == "JumpReLUSAE"
    assert_same_codes(theirs.encode(x_BD), sae.encode(x_BD), sae)
    torch.testing.assert_close(theirs(x_BD).detach(), sae(x_BD), rtol=1e-4, atol=1e-4 * float(x_BD.abs().max()))


@pytest.mark.parametrize("architecture", ["matryoshka_batchtopk", "batchtopk", "jumprelu", "standard"])
def test_what_saelens_saves_is_imported(tmp_path: Path, x_BD: Tensor, architecture: str) -> None:
    like = sae_of_kind("msae", x_BD, WIDTH)
    if architecture.endswith("batchtopk"):
        matryoshka = architecture.startswith("matryoshka")
        extra: dict[str, Any] = {"matryoshka_widths": [256, WIDTH]} if matryoshka else {}
        name = "MatryoshkaBatchTopKTraining" if matryoshka else "BatchTopKTraining"
        config = getattr(sae_lens, f"{name}SAEConfig")(d_in=576, d_sae=WIDTH, k=6, **extra)
        theirs = getattr(sae_lens, f"{name}SAE")(config)
    else:
        name = {"jumprelu": "JumpReLU", "standard": "Standard"}[architecture]
        theirs = getattr(sae_lens, f"{name}SAE")(getattr(sae_lens, f"{name}SAEConfig")(d_in=576, d_sae=WIDTH))
    with torch.no_grad():
        theirs.W_enc.copy_(like.W_enc.T)
        theirs.W_dec.copy_(like.W_dec)
        theirs.b_enc.copy_(like.b_enc - (float(like.threshold.mean()) if architecture == "standard" else 0))
        theirs.b_dec.copy_(like.b_dec)
        if hasattr(theirs, "topk_threshold"):
            theirs.topk_threshold.fill_(float(like.threshold.mean()))
        elif hasattr(theirs, "threshold"):
            theirs.threshold.copy_(like.threshold)
    if hasattr(theirs, "save_inference_model"):
        theirs.save_inference_model(tmp_path / "theirs")
        theirs = sae_lens.SAE.load_from_disk(tmp_path / "theirs")
        imported = import_sae(tmp_path / "theirs", tmp_path / "ours")
    else:
        theirs.save_model(tmp_path / "theirs")
        imported = import_sae(tmp_path / "theirs", tmp_path / "ours", k=6, prefixes=(256, WIDTH))
    assert imported.sae.config.k == 6
    ours = SAE.load(tmp_path / "ours")
    assert_same_codes(theirs.encode(x_BD), ours.encode(x_BD), ours)


@pytest.mark.parametrize("kind", ["jumprelu", *KINDS])
def test_dictionary_learning_opens_what_we_export(tmp_path: Path, x_BD: Tensor, kind: str) -> None:
    sae = sae_of_kind("msae" if kind == "jumprelu" else kind, x_BD, WIDTH)
    if kind in ("batch_topk", "msae"):
        with_one_threshold(sae)
    export_sae(sae, "dictionary_learning", tmp_path / "out")
    with_one = {
        "batch_topk": ("trainers.batch_top_k", "BatchTopKSAE"),
        "msae": ("trainers.matryoshka_batch_top_k", "MatryoshkaBatchTopKSAE"),
    }
    module, name = with_one.get(kind, ("dictionary", "JumpReluAutoEncoder"))
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["trainer"]["dict_class"]
    assert stated == name
    theirs = getattr(dictionary_learning(module), name).from_pretrained(tmp_path / "out" / "ae.pt")
    assert_same_codes(theirs.encode(x_BD), sae.encode(x_BD), sae)
    torch.testing.assert_close(theirs(x_BD).detach(), sae(x_BD), rtol=1e-4, atol=1e-4 * float(x_BD.abs().max()))


@pytest.mark.parametrize("name", ["MatryoshkaBatchTopKSAE", "BatchTopKSAE", "JumpReluAutoEncoder"])
def test_what_dictionary_learning_saves_is_imported(tmp_path: Path, x_BD: Tensor, name: str) -> None:
    like = sae_of_kind("msae", x_BD, WIDTH)
    if name == "MatryoshkaBatchTopKSAE":
        theirs = dictionary_learning("trainers.matryoshka_batch_top_k").MatryoshkaBatchTopKSAE(
            576, WIDTH, 6, [256, 768]
        )
    elif name == "BatchTopKSAE":
        theirs = dictionary_learning("trainers.batch_top_k").BatchTopKSAE(576, WIDTH, 6)
    else:
        theirs = dictionary_learning("dictionary").JumpReluAutoEncoder(576, WIDTH)
    with torch.no_grad():
        if name == "BatchTopKSAE":
            theirs.encoder.weight.copy_(like.W_enc)
            theirs.encoder.bias.copy_(like.b_enc)
            theirs.decoder.weight.copy_(like.W_dec.T)
        else:
            theirs.W_enc.copy_(like.W_enc.T)
            theirs.b_enc.copy_(like.b_enc)
            theirs.W_dec.copy_(like.W_dec)
        theirs.b_dec.copy_(like.b_dec)
        if name == "JumpReluAutoEncoder":
            theirs.b_enc.sub_(like.W_enc @ like.b_dec)
            theirs.threshold.copy_(like.threshold)
        else:
            theirs.threshold.fill_(float(like.threshold.mean()))
    (tmp_path / "theirs").mkdir()
    torch.save(theirs.state_dict(), tmp_path / "theirs" / "ae.pt")
    trainer = {"dict_class": name, "layer": 8, "lm_name": "smollm2-135m"}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({"trainer": trainer, "buffer": {}}))
    given: dict[str, Any] = {"k": 6, "prefixes": (WIDTH,)} if name == "JumpReluAutoEncoder" else {}
    imported = import_sae(tmp_path / "theirs", tmp_path / "ours", **given)
    assert imported.sae.config.k == 6
    ours = SAE.load(tmp_path / "ours")
    assert_same_codes(theirs.encode(x_BD), ours.encode(x_BD), ours)


@pytest.mark.parametrize("kind", ["batch_topk", "msae", "dense", "detector"])
def test_saebench_opens_what_we_export(
    tmp_path: Path, x_BD: Tensor, kind: str, real_model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sae = sae_of_kind(kind, x_BD, WIDTH)
    if kind in ("batch_topk", "msae"):
        with_one_threshold(sae)
    sae.save(tmp_path / "ours", {"model": to_dict(real_model.identity)})
    export_sae(tmp_path / "ours", "dictionary_learning", tmp_path / "out")
    trainer = json.loads((tmp_path / "out" / "config.json").read_text())["trainer"]
    load = TRAINER_LOADERS[trainer["trainer_class"]]
    here = sys.modules[load.__module__]
    monkeypatch.setattr(here, "hf_hub_download", lambda repo_id, filename, **_: str(tmp_path / "out" / filename))
    theirs = load("owner/name", "ae.pt", "smollm2-135m", torch.device("cpu"), torch.float32, layer=8)
    assert_same_codes(theirs.encode(x_BD), sae.encode(x_BD), sae)


def dense_codes(theirs: Any, x_BD: Tensor) -> Tensor:
    """What sparsify gives as the k largest, as a matrix."""
    encoded = theirs.encode(x_BD)
    return torch.zeros(len(x_BD), theirs.num_latents).scatter(1, encoded.top_indices, encoded.top_acts)


def test_sparsify_opens_what_it_can_hold(tmp_path: Path, x_BD: Tensor) -> None:
    sae = sae_of_kind("msae", x_BD, WIDTH)
    with pytest.raises(ExportError, match="sparsify has none"):
        export_sae(sae, "sparsify", tmp_path / "refused")
    with torch.no_grad():
        sae.b_enc.sub_(sae.threshold.max())
        sae.threshold.zero_()
    export_sae(sae, "sparsify", tmp_path / "out")
    theirs = sparsify.Sae.load_from_disk(tmp_path / "out")
    assert_same_codes(dense_codes(theirs, x_BD), sae.encode(x_BD), sae)


@pytest.mark.parametrize("k", [32, WIDTH])
def test_what_sparsify_saves_is_imported(tmp_path: Path, x_BD: Tensor, k: int) -> None:
    like = sae_of_kind("msae", x_BD, WIDTH)
    theirs = sparsify.Sae(576, sparsify.SaeConfig(num_latents=WIDTH, k=k))
    with torch.no_grad():
        theirs.encoder.weight.copy_(like.W_enc)
        theirs.encoder.bias.copy_(like.b_enc - like.threshold.mean())
        theirs.W_dec.copy_(like.W_dec)
        theirs.b_dec.copy_(like.b_dec)
    theirs.save_to_disk(tmp_path / "theirs")
    imported = import_sae(tmp_path / "theirs", tmp_path / "ours", activations=x_BD)
    ours, f = SAE.load(tmp_path / "ours"), dense_codes(theirs, x_BD).detach()
    if k == WIDTH:
        assert_same_codes(f, ours.encode(x_BD), ours)
        return
    # the k largest of each token and a threshold agree on most of what fires, and exactly on how strongly
    both = (f > 0) & (ours.encode(x_BD) > 0)
    assert both.sum() > 0.5 * (f > 0).sum()
    assert float((f - ours.encode(x_BD))[both].abs().max()) <= TOLERANCE * float(f.max())
    assert "sparsify keeps the 32 largest" in imported.notes[-1]


def test_our_own_codes_are_those_of_the_bare_file(tmp_path: Path, x_BD: Tensor) -> None:
    from safetensors.torch import load_file

    for kind in KINDS:
        sae = sae_of_kind(kind, x_BD, WIDTH)
        export_sae(sae, "safetensors", tmp_path / kind)
        w = load_file(tmp_path / kind / "model.safetensors")
        pre = x_BD @ w["W_enc"].T + w["b_enc"]
        assert_same_codes(pre * (pre > w["threshold"]), sae.encode(x_BD), sae)
