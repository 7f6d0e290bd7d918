"""Cycle 0 from an SAE that exists: what it says of itself counts, what it does not say has to be said."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conftest import Recorder
from dmsae.cores.attribution import AttributionConfig
from dmsae.distillation.distill import Cycle0, DistillConfig, distill
from dmsae.errors import CheckpointError, ConfigError, DmsaeError
from dmsae.sae.config import DenseCore, SAEConfig
from dmsae.sae.sae import SAE, read_made_from
from dmsae.training.config import TrainConfig
from planted import Planted, planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = DistillConfig(
    width=64,
    k=2,
    nesting=(16, 64),
    cycles=1,
    train=TrainConfig(tokens=60 * 64, batch_size=64, lr=3e-3, device="cpu"),
    attribution=AttributionConfig(quantile=0.95, batch_size=64),
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return planted_store(tmp_path_factory.mktemp("planted") / "store")


def fresh(config: SAEConfig, planted: Planted) -> SAE:
    """Return an SAE whose first latents are the planted directions, so that there is something to select."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(config.n_core, config.d_model, generator=generator) if config.n_core else None
    sae = SAE.init(config, generator, rows)
    with torch.no_grad():
        sae.W_enc_noncore[:8] = planted.directions[:8]
        sae.W_dec[config.n_core : config.n_core + 8] = planted.directions[:8]
    return sae


def jumprelu(directory: Path, sae: SAE) -> None:
    """Write an SAE as SAELens writes one that was never a Matryoshka SAE."""
    directory.mkdir()
    weights = {"W_enc": sae.W_enc.T, "W_dec": sae.W_dec, "b_enc": sae.b_enc, "b_dec": sae.b_dec}
    weights |= {"threshold": sae.threshold}
    save_file({k: t.detach().contiguous() for k, t in weights.items()}, directory / "sae_weights.safetensors")
    facts = {"architecture": "jumprelu", "metadata": {"sae_lens_version": "6.1.0"}, "apply_b_dec_to_input": True}
    (directory / "cfg.json").write_text(json.dumps(facts))


def test_cycle_0_may_differ_from_the_later_cycles(planted: Planted, tmp_path: Path) -> None:
    fresh(SAEConfig(32, 96, 5, (24, 48, 96)), planted).save(tmp_path / "sae")
    seen = Recorder()
    config = replace(CONFIG, cycle0=Cycle0(str(tmp_path / "sae")))
    done = distill(config, planted.store, tmp_path / "run", progress=seen)
    first, second = (SAE.load(tmp_path / "run" / f"cycle-{cycle}").config for cycle in (0, 1))
    assert (first.width, first.k, first.prefixes) == (96, 5, (24, 48, 96))
    assert (second.width, second.k, second.n_core) == (64, 2, len(done.cores[0]))
    assert second.prefixes == (16 + len(done.cores[0]), 64)
    assert any("width 96 (later cycles: 64), k 5 (later cycles: 2)" in note for note in seen.notes)


def test_what_a_checkpoint_does_not_say_is_never_taken_from_the_run(planted: Planted, tmp_path: Path) -> None:
    jumprelu(tmp_path / "sae", fresh(SAEConfig(32, 64, 2, (16, 64)), planted))
    for cycle0, missing in (
        (Cycle0(str(tmp_path / "sae")), "k"),
        (Cycle0(str(tmp_path / "sae"), k=3), "prefixes"),
    ):
        with pytest.raises(CheckpointError, match=rf"does not say its {missing}, .*cycle0\.k and cycle0\.nesting"):
            distill(replace(CONFIG, cycle0=cycle0), planted.store, tmp_path / "run")
        assert not (tmp_path / "run").exists()
    seen = Recorder()
    said = Cycle0(str(tmp_path / "sae"), k=3, nesting=(12, 64))
    distill(replace(CONFIG, cycle0=said), planted.store, tmp_path / "run", progress=seen)
    config = SAE.load(tmp_path / "run" / "cycle-0").config
    assert (config.k, config.prefixes) == (3, (12, 64))
    assert "cycle 0: The checkpoint does not say its k; 3 was given." in seen.notes
    origin = read_made_from(tmp_path / "run" / "cycle-0")["imported_from"]
    assert "The checkpoint does not say its prefixes; [12, 64] was given." in origin["notes"]


@pytest.mark.parametrize(
    ("config", "k", "message"),
    [
        (SAEConfig(32, 64, 2, (20, 64), DenseCore(4, k_noncore=2)), None, "SAE with a core of 4 latents"),
        (SAEConfig(8, 64, 2, (16, 64)), None, "takes activations of width 8, but those of the store"),
        (SAEConfig(32, 64, 2, (16, 64)), 3, r"k is given as 3, but .* says that it is 2\. Leave it out"),
        (None, None, "There is nothing at this path"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_run_begins(
    config: SAEConfig | None, k: int | None, message: str, planted: Planted, tmp_path: Path
) -> None:
    if config is not None:
        rows = torch.ones(config.n_core, config.d_model) if config.n_core else None
        SAE.init(config, torch.Generator().manual_seed(0), rows).save(tmp_path / "sae")
    given = Cycle0(str(tmp_path / "sae"), k)
    with pytest.raises(DmsaeError, match=message):
        distill(replace(CONFIG, cycle0=given), planted.store, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_settings_of_a_cycle_0_that_is_trained_here_are_those_of_the_run() -> None:
    given: list[dict[str, Any]] = [{"k": 3}, {"nesting": (12, 64)}]
    for one in given:
        with pytest.raises(ConfigError, match=rf"cycle0\.{next(iter(one))} = .* left out without cycle0\.source"):
            Cycle0(**one)
    with pytest.raises(ConfigError, match=r"cycle0\.k = 0"):
        Cycle0("somewhere", k=0)
