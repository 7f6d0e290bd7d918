"""Checkpoints of other packages: dictionary_learning's from the real package, SAELens's by hand after its source."""

import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dmsae.config import to_dict
from dmsae.cores.attribution import CandidateCodes
from dmsae.disk.files import sha256_of
from dmsae.errors import CheckpointError, ConfigError
from dmsae.formats import load_any, require_checkpoint
from dmsae.sae.config import SAEConfig
from dmsae.sae.sae import SAE
from planted import MODEL

D_MODEL, WIDTH, K, GROUPS = 8, 32, 3, [4, 8, 20]


@pytest.fixture
def dictionary_learning(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import a module of the real package without its `__init__`, which needs packages that are not installed."""
    spec = importlib.util.find_spec("dictionary_learning")
    if spec is None or spec.submodule_search_locations is None:
        pytest.fail("dictionary-learning is not installed: pip install --no-deps dictionary-learning==0.1.0 einops")
    root = Path(next(iter(spec.submodule_search_locations)))
    before = set(sys.modules)
    for name, folder in (("dictionary_learning", root), ("dictionary_learning.trainers", root / "trainers")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        monkeypatch.setitem(sys.modules, name, package)
    yield lambda name: importlib.import_module(f"dictionary_learning.trainers.{name}")
    for name in set(sys.modules) - before:
        if name.startswith("dictionary_learning"):
            del sys.modules[name]


def randomise(module: torch.nn.Module, threshold: float) -> None:
    """Give biases and the threshold values as training would."""
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            if tensor.ndim == 1:
                tensor.normal_(std=0.3)
            elif "enc" in name:
                tensor.add_(0.2 * torch.randn_like(tensor))
        module.get_buffer("threshold").fill_(threshold)


def write_trainer(directory: Path, module: torch.nn.Module, **trainer: Any) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(module.state_dict(), directory / "ae.pt")
    (directory / "config.json").write_text(json.dumps({"trainer": trainer, "buffer": {}}))


@pytest.mark.parametrize("threshold", [0.4, -1.0])
@pytest.mark.parametrize("kind", ["matryoshka_batch_top_k", "batch_top_k"])
def test_codes_equal_those_of_dictionary_learning(
    tmp_path: Path, dictionary_learning: Any, kind: str, threshold: float
) -> None:
    torch.manual_seed(0)
    module = dictionary_learning(kind)
    if kind == "batch_top_k":
        theirs = module.BatchTopKSAE(D_MODEL, WIDTH, K)
    else:
        theirs = module.MatryoshkaBatchTopKSAE(D_MODEL, WIDTH, K, GROUPS)
    randomise(theirs, threshold)
    write_trainer(tmp_path, theirs, dict_class=type(theirs).__name__, k=K)
    ours, kind_read, notes, digest, _ = load_any(tmp_path)
    assert kind_read == "dictionary_learning"
    assert digest == sha256_of(tmp_path / "ae.pt")
    assert ours.config.prefixes == ((WIDTH,) if kind == "batch_top_k" else (4, 12, 32))
    assert (ours.config.k, ours.config.n_core, ours.config.center_input) == (K, 0, True)
    assert len(notes) == (1 if threshold < 0 else 0)
    x = 2 * torch.randn(64, D_MODEL)
    torch.testing.assert_close(ours.encode(x), theirs.encode(x))
    torch.testing.assert_close(ours(x), theirs(x))
    trained = theirs.encode(x, use_threshold=False)[:, : ours.config.prefixes[0]]
    torch.testing.assert_close(CandidateCodes(ours)(x).T, trained)


def test_group_sizes_may_stand_in_the_config_or_be_given(tmp_path: Path, dictionary_learning: Any) -> None:
    theirs = dictionary_learning("matryoshka_batch_top_k").MatryoshkaBatchTopKSAE(D_MODEL, WIDTH, K, GROUPS)
    write_trainer(tmp_path, theirs, group_sizes=GROUPS)
    state = theirs.state_dict()
    del state["group_sizes"]
    torch.save(state, tmp_path / "ae.pt")
    assert load_any(tmp_path).sae.config.prefixes == (4, 12, 32)
    with pytest.raises(ConfigError, match="prefixes is given"):
        load_any(tmp_path, prefixes=[5, 32])
    with pytest.raises(ConfigError, match="k is given as 9"):
        load_any(tmp_path, k=9)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="does not say its prefixes"):
        load_any(tmp_path)
    assert load_any(tmp_path, prefixes=[5, 32]).sae.config.prefixes == (5, 32)


def test_decoder_rows_are_brought_to_unit_norm(tmp_path: Path, dictionary_learning: Any) -> None:
    torch.manual_seed(0)
    theirs = dictionary_learning("matryoshka_batch_top_k").MatryoshkaBatchTopKSAE(D_MODEL, WIDTH, K, GROUPS)
    randomise(theirs, 0.4)
    norms = torch.rand(WIDTH) + 0.5
    with torch.no_grad():
        theirs.W_dec *= norms[:, None]
    write_trainer(tmp_path, theirs)
    ours, _, notes, _, _ = load_any(tmp_path)
    assert "of 32 decoder rows had norms from 0.5" in notes[0]
    x = 2 * torch.randn(64, D_MODEL)
    torch.testing.assert_close(ours.W_dec.norm(dim=1), torch.ones(WIDTH))
    torch.testing.assert_close(ours.encode(x), theirs.encode(x) * norms)
    torch.testing.assert_close(ours(x), theirs(x))


def saelens_files(directory: Path, weights: dict[str, Tensor], **changes: Any) -> None:
    """Write the files of SAELens 6, by hand after its source rather than with the package."""
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "d_in": D_MODEL,
        "d_sae": WIDTH,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {
            "sae_lens_version": "6.54.12",
            "training_architecture": "matryoshka_batchtopk",
            "training_architecture_details": {"k": 3.0, "matryoshka_widths": [4, 12, 32]},
        },
        "architecture": "jumprelu",
    }
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "sae_weights.safetensors")
    (directory / "cfg.json").write_text(json.dumps(config | changes))


def saelens_weights(threshold: Tensor | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    W_dec = torch.nn.functional.normalize(torch.randn(WIDTH, D_MODEL, generator=generator), dim=1)
    return {
        "W_enc": W_dec.T + 0.2 * torch.randn(D_MODEL, WIDTH, generator=generator),
        "W_dec": W_dec,
        "b_enc": 0.3 * torch.randn(WIDTH, generator=generator),
        "b_dec": 0.3 * torch.randn(D_MODEL, generator=generator),
        "threshold": torch.rand(WIDTH, generator=generator) if threshold is None else threshold,
    }


def jumprelu(weights: dict[str, Tensor], x: Tensor, centered: bool) -> Tensor:
    """What SAELens's JumpReLU SAE computes."""
    pre = (x - weights["b_dec"] if centered else x) @ weights["W_enc"] + weights["b_enc"]
    return pre.relu() * (pre > weights["threshold"])


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("norm", [1.0, 0.05])
def test_codes_of_a_saelens_directory(tmp_path: Path, centered: bool, norm: float) -> None:
    """A folded normalisation changes the norms of decoder rows; undoing it scales the codes and nothing else."""
    weights = saelens_weights()
    unfolded = weights["W_enc"].T.clone()
    weights["W_enc"] /= norm
    weights["W_dec"] *= norm
    saelens_files(tmp_path, weights, apply_b_dec_to_input=centered)
    ours, kind, notes, digest, _ = load_any(tmp_path)
    assert kind == "saelens"
    assert digest == sha256_of(tmp_path / "sae_weights.safetensors")
    assert bool(notes) == (norm != 1)
    assert (ours.config.k, ours.config.prefixes, ours.config.center_input) == (3, (4, 12, 32), centered)
    torch.testing.assert_close(ours.W_enc, unfolded)
    x = 2 * norm * torch.randn(64, D_MODEL, generator=torch.Generator().manual_seed(1))
    f = jumprelu(weights, x, centered)
    assert 0 < (f > 0).float().mean() < 1
    torch.testing.assert_close(ours.encode(x), f * norm)
    torch.testing.assert_close(ours(x), f @ weights["W_dec"] + weights["b_dec"])


@pytest.mark.parametrize("rescaled", [True, False])
def test_a_saelens_training_checkpoint(tmp_path: Path, rescaled: bool) -> None:
    """When activations are rescaled by the decoder norm, the one threshold applies to them after rescaling."""
    weights = saelens_weights()
    del weights["threshold"]
    norms = torch.rand(WIDTH) + 0.5
    weights["W_dec"] *= norms[:, None]
    weights["topk_threshold"] = torch.tensor(0.4, dtype=torch.float64)
    saelens_files(
        tmp_path,
        weights,
        architecture="matryoshka_batchtopk",
        metadata={"sae_lens_version": "6.0.0"},
        k=3,
        matryoshka_widths=[4, 12],
        rescale_acts_by_decoder_norm=rescaled,
    )
    ours = load_any(tmp_path).sae
    assert ours.config.prefixes == (4, 12, 32)
    torch.testing.assert_close(ours.threshold, torch.full((WIDTH,), 0.4) if rescaled else 0.4 * norms)


def test_a_plain_jumprelu_sae_needs_k_and_prefixes(tmp_path: Path) -> None:
    saelens_files(tmp_path, saelens_weights(), metadata={"sae_lens_version": "6.1.0"})
    with pytest.raises(CheckpointError, match="does not say its k"):
        load_any(tmp_path)
    with pytest.raises(CheckpointError, match="does not say its prefixes"):
        load_any(tmp_path, k=5)
    imported = load_any(tmp_path, k=5, prefixes=(8, 32))
    assert imported.sae.config.prefixes == (8, 32)
    assert imported.notes == (
        "The checkpoint does not say its k; 5 was given.",
        "The checkpoint does not say its prefixes; [8, 32] was given.",
    )


def test_codes_of_an_imported_sae_carry_no_graph(tmp_path: Path) -> None:
    saelens_files(tmp_path, saelens_weights())
    assert load_any(tmp_path).sae.encode(torch.ones(2, D_MODEL)).numpy().shape == (2, WIDTH)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "topk"}, "architecture 'topk'"),
        ({"normalize_activations": "expected_average_only_in"}, "Fold the normalisation"),
        ({"normalize_activations": "layer_norm"}, "normalised by 'layer_norm'"),
        ({"reshape_activations": "hook_z"}, "plain vectors"),
        ({"metadata": {}}, "before 6"),
        ({"metadata": {"sae_lens_version": "5.10.0"}}, "SAELens 5.10.0"),
    ],
)
def test_saelens_directories_that_cannot_be_read(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    saelens_files(tmp_path, saelens_weights(), **changes)
    with pytest.raises(CheckpointError, match=message):
        load_any(tmp_path)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    weights = saelens_weights()
    for name, changed, message in (
        ("W_dec", None, "lacks W_dec"),
        ("threshold", None, "lacks threshold"),
        ("b_dec", torch.zeros(3), "'b_dec_D': \\(3,\\)"),
        ("b_enc", torch.full((WIDTH,), float("nan")), "b_enc_K is not finite"),
    ):
        broken = {**weights, name: changed} if changed is not None else {n: t for n, t in weights.items() if n != name}
        saelens_files(tmp_path, broken)
        with pytest.raises(CheckpointError, match=message):
            load_any(tmp_path)
    (tmp_path / "sae_weights.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_any(tmp_path)


class Stranger:
    """Something that cannot be unpickled without running code."""


@pytest.mark.parametrize("content", [Stranger(), {"W_enc": Stranger()}])
def test_pickled_code_is_never_run(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "ae.pt")
    with pytest.raises(CheckpointError, match=r"nothing else is loaded: it names .*Stranger"):
        load_any(tmp_path)


def test_other_pickles_are_refused(tmp_path: Path) -> None:
    torch.save([torch.zeros(2)], tmp_path / "ae.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        load_any(tmp_path)
    (tmp_path / "ae.pt").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="is not an archive of torch"):
        load_any(tmp_path)
    torch.save({"weight": torch.zeros(2)}, tmp_path / "ae.pt")
    with pytest.raises(CheckpointError, match=r"lacks encoder\.weight"):
        load_any(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"trainer": {"dict_class": "GatedAutoEncoder"}}))
    with pytest.raises(CheckpointError, match="holds a GatedAutoEncoder"):
        load_any(tmp_path)


def test_one_of_ours(tmp_path: Path) -> None:
    sae = SAE.init(SAEConfig(4, 8, 2, (4, 8)), torch.Generator().manual_seed(0))
    sae.save(tmp_path, {"model": to_dict(MODEL)})
    imported = load_any(tmp_path)
    assert (imported.kind, imported.sae.config, imported.model) == ("dmsae", sae.config, MODEL)
    assert torch.equal(imported.sae.W_enc, sae.W_enc)
    with pytest.raises(ConfigError, match="k is given as 3"):
        load_any(tmp_path, k=3)


def test_what_is_not_a_checkpoint_is_an_error_that_helps(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing at this path"):
        load_any(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"Expected sae\.json"):
        load_any(tmp_path)
    saelens_files(tmp_path / "layer_12", saelens_weights())
    with pytest.raises(CheckpointError, match="layer_12"):
        load_any(tmp_path)
    with pytest.raises(CheckpointError, match="It is a file"):
        load_any(tmp_path / "layer_12" / "cfg.json")


def test_that_a_checkpoint_is_there_can_be_asked_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "ae.pt").write_bytes(b"not read")
    require_checkpoint(str(tmp_path))
    require_checkpoint("hub:owner/name/folder")
    with pytest.raises(CheckpointError, match="nothing at this path"):
        require_checkpoint(str(tmp_path / "nowhere"))
