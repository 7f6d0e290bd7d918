"""Export and import: the same codes there and back in every format, and what cannot be held is refused unwritten."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benched import KINDS, sae_of_kind
from dmsae.activations.identity import ModelIdentity
from dmsae.config import to_dict
from dmsae.errors import CheckpointError, ConfigError, DmsaeError, ExportError
from dmsae.formats import FORMATS, Given, Imported, format_of, load_any
from dmsae.formats.exchange import export_sae, import_sae
from dmsae.formats.plain import centred, folded
from dmsae.sae.config import SAEConfig
from dmsae.sae.detectors import Detectors
from dmsae.sae.sae import SAE
from planted import MODEL
from strategies import configs

pytestmark = pytest.mark.usefixtures("one_thread")
THRESHOLDED = ("saelens", "dictionary_learning", "safetensors")
BLOCK = ModelIdentity("some/model", "c0ffee", "0" * 64, "1" * 64, "model.layers.8", "float32")


@pytest.fixture(scope="module")
def x() -> Tensor:
    draws = torch.Generator().manual_seed(3)
    return 4 * torch.randn(256, 16, generator=draws) + 3 * torch.randn(16, generator=draws)


def without_thresholds(sae: SAE) -> SAE:
    with torch.no_grad():
        sae.threshold.zero_()
    return sae


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("to", FORMATS)
def test_codes_are_the_same_after_an_export_and_an_import(tmp_path: Path, x: Tensor, to: str, kind: str) -> None:
    sae = sae_of_kind(kind, x)
    if to == "sparsify":
        sae = without_thresholds(sae)
    sae.save(tmp_path / "ours", {"model": to_dict(BLOCK)})
    exported = export_sae(tmp_path / "ours", to, tmp_path / "theirs")
    assert sorted(exported.files) == sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert format_of(tmp_path / "theirs") == to
    imported = import_sae(tmp_path / "theirs", tmp_path / "back")
    back = SAE.load(tmp_path / "back")
    assert imported.kind == to
    if not (to == "sparsify" and kind == "detector"):  # there its offsets cannot be told from b_dec
        assert (back.config.core, back.config.k, back.config.prefixes) == (
            sae.config.core,
            sae.config.k,
            sae.config.prefixes,
        )
        assert imported.model == BLOCK
    f = sae.encode(x)
    assert 0 < int((f > 0).sum()) < f.numel()
    torch.testing.assert_close(back.encode(x), f, rtol=1e-5, atol=1e-5 * float(f.max()))
    torch.testing.assert_close(back(x), sae(x), rtol=1e-5, atol=1e-5 * float(x.abs().max()))


@settings(max_examples=60)
@given(configs(max_width=12, max_core=5, max_inner=3, max_d=6), st.integers(0, 1000))
def test_both_ways_to_write_a_bias_are_the_same_encoder(config: SAEConfig, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    sae = SAE(config).double().requires_grad_(False)
    for tensor in sae.state_dict().values():
        tensor.normal_(generator=draws)
    sae.threshold.abs_()
    x = torch.randn(20, config.d_model, generator=draws, dtype=torch.float64)
    f = sae.encode(x)
    for weights, seen in ((folded(sae), x), (centred(sae), x - sae.b_dec)):
        pre = seen @ weights.W_enc_KD.double().T + weights.b_enc_K
        close = (pre - weights.threshold_K).abs() < 1e-5  # which side it falls on is a matter of rounding
        torch.testing.assert_close((pre * (pre > weights.threshold_K))[~close], f[~close], rtol=1e-5, atol=1e-5)


def test_a_detector_s_offset_survives_to_the_bit(tmp_path: Path, x: Tensor) -> None:
    sae = sae_of_kind("detector", x)
    for to in THRESHOLDED:
        export_sae(sae, to, tmp_path / to)
        back = load_any(tmp_path / to).sae
        assert torch.equal(back.offset, sae.offset)
        assert torch.equal(back.detectors.thresholds_C, sae.detectors.thresholds_C)


def test_dictionary_learning_has_a_class_for_each_kind(tmp_path: Path, x: Tensor) -> None:
    def written(sae: SAE, name: str) -> tuple[str, str]:
        export_sae(sae, "dictionary_learning", tmp_path / name)
        trainer = json.loads((tmp_path / name / "config.json").read_text())["trainer"]
        return trainer["trainer_class"], trainer["dict_class"]

    one, several = sae_of_kind("batch_topk", x), sae_of_kind("msae", x)
    assert written(several, "a") == ("JumpReluTrainer", "JumpReluAutoEncoder")  # thresholds differ
    one.set_threshold_(0.7)
    several.set_threshold_(0.7)
    assert written(one, "b") == ("BatchTopKTrainer", "BatchTopKSAE")
    assert written(several, "c") == ("MatryoshkaBatchTopKTrainer", "MatryoshkaBatchTopKSAE")
    dense = sae_of_kind("dense", x)
    assert written(dense, "d") == ("JumpReluTrainer", "JumpReluAutoEncoder")


def test_what_sparsify_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path, x: Tensor) -> None:
    with pytest.raises(ExportError, match=r"64 of 64 latents have a threshold.*saelens, dictionary_learning"):
        export_sae(sae_of_kind("msae", x), "sparsify", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_negative_codes_fit_only_where_there_is_no_relu(tmp_path: Path, x: Tensor) -> None:
    sae = sae_of_kind("detector", x)
    sae.set_detectors_(Detectors(sae.offset, torch.full((8,), -0.5)))
    assert (sae.encode(x) < 0).any()
    for to in ("saelens", "dictionary_learning", "sparsify"):
        with pytest.raises(ExportError, match=r"8 of 8 detectors have a threshold below 0.*can hold it: safetensors"):
            export_sae(sae, to, tmp_path / to)
        assert not (tmp_path / to).exists()
    export_sae(sae, "safetensors", tmp_path / "bare")
    torch.testing.assert_close(load_any(tmp_path / "bare").sae.encode(x), sae.encode(x), rtol=1e-5, atol=1e-4)


def test_an_sae_that_diverged_is_not_exported(tmp_path: Path, x: Tensor) -> None:
    sae = sae_of_kind("msae", x)
    sae.b_enc[3] = float("nan")
    for to in FORMATS:
        with pytest.raises(ExportError, match="b_enc is not finite"):
            export_sae(sae, to, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_that_is_there_is_overwritten(tmp_path: Path, x: Tensor) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "cfg.json").write_text("mine")
    sae = sae_of_kind("msae", x)
    with pytest.raises(ConfigError, match="not empty"):
        export_sae(sae, "saelens", tmp_path / "full")
    sae.save(tmp_path / "ours")
    with pytest.raises(ConfigError, match="not empty"):
        import_sae(tmp_path / "ours", tmp_path / "full")
    assert (tmp_path / "full" / "cfg.json").read_text() == "mine"
    with pytest.raises(ConfigError, match="be one of saelens, dictionary_learning, sparsify, safetensors"):
        export_sae(sae, "pickle", tmp_path / "out")


def test_the_bare_file_explains_itself(tmp_path: Path, x: Tensor) -> None:
    sae = sae_of_kind("dense", x)
    export_sae(sae, "safetensors", tmp_path / "bare")
    with safe_open(tmp_path / "bare" / "model.safetensors", framework="pt") as file:
        header: dict[str, str] = file.metadata()
        names = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    scope: dict[str, Any] = {"x": x, **names}
    exec(header["formula"], scope)
    torch.testing.assert_close(scope["f"], sae.encode(x), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(scope["x_hat"], sae(x), rtol=1e-5, atol=1e-4)


def test_a_bare_file_of_another_program_needs_to_be_explained(tmp_path: Path, x: Tensor) -> None:
    draws = torch.Generator().manual_seed(0)
    W_dec = torch.nn.functional.normalize(torch.randn(24, 16, generator=draws), dim=1)
    tensors = {"W_enc": W_dec.T.contiguous(), "b_enc": torch.zeros(24), "W_dec": W_dec, "b_dec": x.mean(0)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="does not say its k"):
        load_any(tmp_path)
    with pytest.raises(CheckpointError, match="does not say its center_input"):
        load_any(tmp_path, 4, (24,))
    ours = load_any(tmp_path, 4, (24,), center_input=True).sae
    torch.testing.assert_close(ours.encode(x), ((x - x.mean(0)) @ W_dec.T).relu())
    save_file(tensors | {"threshold": torch.tensor([2.0])}, tmp_path / "model.safetensors")
    f = load_any(tmp_path, 4, (24,), center_input=True).sae.encode(x)
    assert float(f[f > 0].min()) > 2
    save_file(tensors | {"W_enc": torch.zeros(16, 16)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="nothing tells its rows from its columns"):
        load_any(tmp_path, 4, (24,), center_input=True)


def sparsify_files(directory: Path, k: int, **changes: Any) -> dict[str, Tensor]:
    """Write the files of sparsify, by hand after its source."""
    draws = torch.Generator().manual_seed(1)
    W_dec = torch.nn.functional.normalize(torch.randn(32, 16, generator=draws), dim=1)
    tensors = {
        "encoder.weight": W_dec + 0.1 * torch.randn(32, 16, generator=draws),
        "encoder.bias": 0.2 * torch.randn(32, generator=draws),
        "W_dec": W_dec,
        "b_dec": torch.randn(16, generator=draws),
    }
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "sae.safetensors")
    config = {"activation": "topk", "num_latents": 32, "k": k, "d_in": 16, "transcode": False} | changes
    (directory / "cfg.json").write_text(json.dumps(config))
    return tensors


def test_the_top_k_of_sparsify_becomes_a_threshold_on_activations(tmp_path: Path, x: Tensor) -> None:
    tensors = sparsify_files(tmp_path, k=4)
    with pytest.raises(CheckpointError, match=r"keeps the 4 largest activations of each token.*--store"):
        load_any(tmp_path)
    with pytest.raises(ConfigError, match=r"takes \[n, 16\]"):
        load_any(tmp_path, activations=x[:, :8])
    imported = load_any(tmp_path, activations=x)
    f = imported.sae.encode(x)
    assert abs(float((f > 0).sum(1).float().mean()) - 4) < 0.05
    pre = ((x - tensors["b_dec"]) @ tensors["encoder.weight"].T + tensors["encoder.bias"]).relu()
    on = f > 0
    torch.testing.assert_close(f[on], pre[on])
    top = torch.zeros_like(pre).scatter(1, pre.topk(4).indices, 1.0) * pre > 0
    share = float((on & top).sum() / (on | top).sum())
    assert f"{share:.1%} of the codes" in imported.notes[-1]
    assert share > 0.5


@pytest.mark.parametrize(
    "changes", [{"transcode": True}, {"activation": "groupmax"}, {"skip_connection": True}, {"k": 0}, {"k": "4"}]
)
def test_what_sparsify_can_do_and_we_cannot_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    sparsify_files(tmp_path, **({"k": 32} | changes))
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        load_any(tmp_path)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    "own",
    [
        [],
        {"config": {"width": 3}},
        {"config": "x"},
        {"model": {"name": 1}},
        {"config": {"width": 2**60, "d_model": 16}},
    ],
)
def test_what_we_wrote_into_a_foreign_config_is_not_trusted(tmp_path: Path, x: Tensor, to: str, own: Any) -> None:
    export_sae(without_thresholds(sae_of_kind("msae", x)), to, tmp_path / "out")
    name = {"dictionary_learning": "config.json"}.get(to, "cfg.json")
    if to == "safetensors":
        with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
            tensors = {one: file.get_tensor(one) for one in file.keys()}  # noqa: SIM118
        save_file(tensors, tmp_path / "out" / "model.safetensors", {"dmsae": json.dumps(own)})
    else:
        path = tmp_path / "out" / name
        config = json.loads(path.read_text())
        holder = {"dictionary_learning": config.get("trainer"), "saelens": config.get("metadata")}.get(to) or config
        holder["dmsae"] = own
        path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_any(tmp_path / "out")


def test_the_place_of_a_model_on_our_disk_is_not_given_away(tmp_path: Path, x: Tensor) -> None:
    here = ModelIdentity("/home/someone/secret/gpt", "", "0" * 64, "1" * 64, "transformer.h.3", "float32")
    for to in FORMATS:
        FORMATS[to].write(Imported(without_thresholds(sae_of_kind("msae", x)), "dmsae", (), "", here), tmp_path / to)
        assert not any(b"someone" in file.read_bytes() for file in (tmp_path / to).iterdir())
    metadata = json.loads((tmp_path / "saelens" / "cfg.json").read_text())["metadata"]
    assert (metadata["model_name"], metadata["hook_name"]) == ("gpt", "blocks.3.hook_resid_post")


def test_saelens_standard_is_a_relu(tmp_path: Path, x: Tensor) -> None:
    export_sae(without_thresholds(sae_of_kind("msae", x)), "saelens", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "cfg.json").read_text()) | {"architecture": "standard"}
    with safe_open(tmp_path / "out" / "sae_weights.safetensors", framework="pt") as file:
        tensors = {one: file.get_tensor(one) for one in file.keys() if one != "threshold"}  # noqa: SIM118
    save_file(tensors, tmp_path / "out" / "sae_weights.safetensors")
    (tmp_path / "out" / "cfg.json").write_text(json.dumps(config))
    assert not load_any(tmp_path / "out").sae.threshold.any()


def test_an_import_says_where_it_came_from(tmp_path: Path) -> None:
    sae = SAE.init(SAEConfig(4, 8, 2, (4, 8)), torch.Generator().manual_seed(0))
    sae.save(tmp_path / "a", {"model": to_dict(MODEL)})
    imported = import_sae(tmp_path / "a", tmp_path / "b")
    facts = json.loads((tmp_path / "b" / "sae.json").read_text())
    assert imported.kind == facts["made_from"]["imported_from"]["kind"] == "dmsae"
    assert facts["made_from"]["model"] == to_dict(MODEL)


@pytest.mark.parametrize("to", FORMATS)
def test_damaged_exports_end_in_a_typed_error(tmp_path: Path, x: Tensor, to: str) -> None:
    exported = export_sae(without_thresholds(sae_of_kind("dense", x)), to, tmp_path)
    whole = {name: (tmp_path / name).read_bytes() for name in exported.files}
    draws, refused = random.Random(0), 0
    for _ in range(120):
        name = draws.choice(sorted(whole))
        data = bytearray(whole[name][: draws.randrange(len(whole[name]))] if draws.random() < 0.2 else whole[name])
        for _ in range(draws.choice([1, 2, 8]) if data else 0):
            data[draws.randrange(min(len(data), 2000))] = draws.randrange(256)  # where headers are
        (tmp_path / name).write_bytes(data)
        try:
            load_any(tmp_path)
        except DmsaeError as error:
            refused += 1
            assert str(tmp_path) in str(error)  # noqa: PT017 (some mutations change nothing that is read)
        (tmp_path / name).write_bytes(whole[name])
    assert refused > 20
    load_any(tmp_path)


@pytest.mark.parametrize("to", FORMATS)
def test_a_pipe_in_place_of_weights_is_not_waited_for(tmp_path: Path, x: Tensor, to: str) -> None:
    export_sae(without_thresholds(sae_of_kind("dense", x)), to, tmp_path)
    (tmp_path / FORMATS[to].WEIGHTS_NAME).unlink()
    os.mkfifo(tmp_path / FORMATS[to].WEIGHTS_NAME)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_any(tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        FORMATS[to].read(tmp_path, Given())
