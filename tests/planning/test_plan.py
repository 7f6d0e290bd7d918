"""A plan is made before anything runs, from the recipe alone, and says what will not fit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dmsae import cli
from dmsae.activations.base_model import ModelConfig
from dmsae.activations.request import HarvestConfig
from dmsae.commands.recipes import read_sections
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.transfer import TransferConfig
from dmsae.errors import ConfigError, ModelError
from dmsae.planning import plan as planning
from dmsae.planning.models import PUBLISHED, ModelFacts, model_bytes, model_facts
from dmsae.planning.plan import plan
from dmsae.planning.probe import seconds_by_k, step_seconds
from dmsae.sae.config import SAEConfig
from dmsae.training.config import TrainConfig
from dmsae.training.mesh import MeshConfig

GEMMA = PUBLISHED["google/gemma-2-2b"]


@pytest.fixture
def _no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "seconds_by_k", lambda saes, *_: [3.6] * len(saes))


def test_a_model_that_is_here_is_measured(tiny_model: Path) -> None:
    facts = model_facts(ModelConfig(name=str(tiny_model), hook=0))
    assert facts[:2] == (16, 2)
    assert facts.n_parameters > 16 * facts.vocabulary


def test_a_gated_model_is_known_by_its_published_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise ModelError("no network")

    monkeypatch.setattr("dmsae.planning.models.locate", unreachable)
    assert model_facts(ModelConfig(name="google/gemma-2-2b", hook=12)) == GEMMA
    with pytest.raises(ModelError, match="no network"):
        model_facts(ModelConfig(name="somebody/else", hook=12))


def test_large_logits_do_not_count_as_a_whole() -> None:
    config = ModelConfig(name="google/gemma-2-2b", dtype="bfloat16")
    weights = 2 * GEMMA.n_parameters
    assert weights < model_bytes(GEMMA, config, 8, 1024) < weights + 4 * 8 * 1024 * GEMMA.vocabulary + (8 << 30)


@pytest.mark.usefixtures("_no_steps")
def test_the_papers_setting() -> None:
    sections = read_sections("gemma-2-2b")
    needs = plan(sections.harvest, sections.distill, sections.transfer, GEMMA, MeshConfig(data=8), int(80e9))
    harvest, cycles, transfer = needs.stages
    assert harvest.disk_bytes == pytest.approx(500e6 * 2304 * 2, rel=0.03)
    assert cycles.name == "cycles 1–7", "cycle 0 is the published checkpoint"
    assert cycles.device_bytes == pytest.approx(16 * 2 * 65_536 * 2304, rel=0.1)
    assert cycles.hours == pytest.approx(7 * 244_140 / 1000, rel=0.01)
    assert transfer.what.startswith("12 SAEs")
    assert needs.passes == 1
    assert plan(sections.harvest, sections.distill, sections.transfer, GEMMA, MeshConfig(), int(24e9)).passes == 3


@pytest.mark.usefixtures("_no_steps")
def test_a_mesh_that_training_would_refuse_is_refused() -> None:
    sections = read_sections("gemma-2-2b")
    recipe = (sections.harvest, sections.distill, sections.transfer, GEMMA)
    with pytest.raises(ConfigError, match=r"batch_size = 2048; it must be a multiple of mesh\.data \(3\)"):
        plan(*recipe, MeshConfig(data=3))
    with pytest.raises(ConfigError, match=r"distill: width = 65536; it must be a multiple of mesh\.latents \(3\)"):
        plan(*recipe, MeshConfig(latents=3))
    few = replace(sections.harvest, train_tokens=7 * sections.harvest.shard_tokens)
    with pytest.raises(ConfigError, match=r"mesh\.data = 8; it must be at most 7, the training shards of the store"):
        plan(few, *recipe[1:], MeshConfig(data=8))


@pytest.mark.usefixtures("_no_steps")
def test_ranks_of_a_cpu_count_the_gradients_of_others_that_they_add_up() -> None:
    sections = read_sections("demo")
    facts = ModelFacts(576, 30, 134_000_000, 49_152, "known")
    recipe = (sections.harvest, sections.distill, sections.transfer, facts)
    sharing, sending = (plan(*recipe, MeshConfig(data=2, share_memory=share)).stages[1] for share in (True, False))
    assert sharing.host_bytes is not None
    assert sending.host_bytes is not None
    assert sharing.host_bytes - sending.host_bytes == pytest.approx(4 * 2 * 2048 * 576 / 2, rel=0.01)
    on_gpus = plan(*recipe, MeshConfig(data=2), available=int(80e9)).stages[1]
    assert on_gpus.host_bytes == sending.host_bytes


@pytest.mark.usefixtures("_no_steps")
def test_a_data_rank_holds_only_the_shards_that_it_reads() -> None:
    sections = read_sections("demo")
    harvest = replace(sections.harvest, train_tokens=8 * sections.harvest.shard_tokens)
    recipe = (harvest, sections.distill, sections.transfer, ModelFacts(576, 30, 134_000_000, 49_152, "known"))
    shard = harvest.shard_tokens * 576 * 2
    one, two, eight = (plan(*recipe, MeshConfig(data=n, share_memory=False)).stages[1] for n in (1, 2, 8))
    assert one.host_bytes == 2 * 4 * shard, "two blocks"
    checkpoint = (two.host_bytes or 0) - 2 * 2 * shard
    assert (eight.host_bytes or 0) - checkpoint == 2 * shard
    assert eight.wire_bytes > two.wire_bytes > 4 * 2048 * 576 // 2


@pytest.mark.usefixtures("_no_steps")
def test_one_process_sends_nothing_and_trains_its_own_cycle_0() -> None:
    train = TrainConfig(tokens=20_480, device="cpu")
    facts = ModelFacts(64, 2, 10_000, 100, "made up")
    distill = DistillConfig(width=512, k=8, cycles=1, train=train)
    transfer = TransferConfig(k=(8,), width=512, baselines=("msae", "unconstrained"), train=train)
    stages = plan(HarvestConfig(), distill, transfer, facts, MeshConfig()).stages
    assert [one.name for one in stages] == ["harvest", "cycle 0", "cycle 1", "transfer"]
    assert stages[3].what.startswith("5 SAEs"), "with the core, MSAE, and three that keep nothing"
    assert {one.wire_bytes for one in stages} == {0}
    assert stages[0].hours is None
    assert stages[3].hours == pytest.approx(5 * 10 * 3.6 / 3600)


@pytest.mark.usefixtures("_no_steps")
def test_what_ranks_share_falls_with_their_number_and_what_each_loads_whole_does_not() -> None:
    sections = read_sections("gemma-2-2b")
    given = sections.harvest, sections.distill, sections.transfer, GEMMA
    one, two, many = (plan(*given, MeshConfig(latents=n), None, 3600.0).stages for n in (1, 2, 64))
    assert [stages[0].hours for stages in (one, two, many)] == [1, 0.5, 1 / 64]
    assert two[1].device_bytes == pytest.approx((one[1].device_bytes or 0) / 2, rel=0.1)
    assert (many[1].device_bytes or 0) > 8 * 65_536 * 2304  # encoder and decoder, to score the trained SAE


def test_a_step_takes_time_and_wide_ones_are_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_seconds(SAEConfig(16, 64, 4, (8, 64)), 32, "cpu") > 0
    monkeypatch.setattr("dmsae.planning.probe._measured", lambda width, *_: 1 + width / 1000)
    assert step_seconds(SAEConfig(16, 64_000, 4, (8, 64_000)), 32, "cpu") == pytest.approx(65)
    monkeypatch.setattr("dmsae.planning.probe.step_seconds", lambda sae, *_: float(sae.k))
    saes = [SAEConfig(16, 64, k, (8, 64)) for k in (4, 2, 8)]
    assert seconds_by_k(saes, 32, "cpu") == pytest.approx([4, 2, 8])


def test_the_command_shows_every_stage(
    tiny_config: Callable[..., HarvestConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config()
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        f"""
        [harvest]
        train_tokens = 256
        shard_tokens = 128
        heldout_tokens = 64
        pair_tokens = 64
        [harvest.model]
        name = "{config.model.name}"
        hook = 0
        [harvest.text]
        source = "{config.text.source}"
        [harvest.tokens]
        context_length = 16
        [distill]
        width = 64
        k = 4
        cycles = 2
        [distill.train]
        tokens = 2560
        batch_size = 64
        [transfer]
        width = 64
        k = [4]
        [transfer.train]
        tokens = 2560
        batch_size = 64
        """
    )
    cli.main(["plan", "--recipe", str(recipe), "--gpus", "2", "--gpu-memory", "0.000001"])
    shown = capsys.readouterr().out
    for words in ("width 16, 2 blocks", "2 data × 1 latents", "harvest", "cycle 0", "cycles 1–2", "transfer"):
        assert words in shown
    assert "cycle 0 does not fit" in shown
    with pytest.raises(SystemExit):
        cli.main(["plan", "--recipe", str(recipe), "--gpus", "3", "--mesh.data", "2"])
    assert "gpus = 3; it must be the ranks of the mesh, 2 × 1" in capsys.readouterr().err
