"""SAEs and cores on the Hub, against a server that stands in for it: what is pushed, and what comes back."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benched import sae_of_kind
from dmsae.activations.identity import ModelIdentity
from dmsae.config import to_dict
from dmsae.cores.core import Core, Lineage, Provenance
from dmsae.errors import CheckpointError, ConfigError
from dmsae.evaluation.evaluate import digest_of
from dmsae.evaluation.scores import Evaluation
from dmsae.formats.hub import push_to_hub
from dmsae.sae.detectors import Detectors
from dmsae.sae.sae import SAE
from hub_standin import hub, process

pytestmark = pytest.mark.usefixtures("one_thread")
MODEL = ModelIdentity("/home/someone/secret/gpt", "", "a" * 64, "b" * 64, "model.layers.3", "float32")
HUB_MODEL = replace(MODEL, name="some/model", revision="c0ffee")


def core_of(n: int = 3) -> Core:
    lineage = tuple(Lineage(i % 2, 10 + i, (i % 2,)) for i in range(n))
    rows = torch.randn(n, 16, generator=torch.Generator().manual_seed(0))
    detectors = Detectors(torch.zeros(n), torch.ones(n))
    config = {"run": "/home/someone/runs/1", "k": 4}
    scores, slots = torch.arange(n, dtype=torch.float64), torch.arange(n)
    return Core(rows, scores, slots, lineage, 1, Provenance(MODEL, "key", config), detectors)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The directory of an SAE, with a core beside it."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    made_from = {"model": to_dict(HUB_MODEL), "root": "/home/someone/stores"}
    sae_of_kind("detector", x).save(tmp_path / "sae", made_from, training={"train": {"tokens": 1000, "lr": 3e-4}})
    core_of().save(tmp_path / "core")
    return tmp_path / "sae"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repositories")


@pytest.fixture(scope="module")
def run(repositories: Path) -> Iterator[Callable[[str], str]]:
    """Return a function that runs code in a process which takes the little server for the Hub."""
    with hub(repositories) as environment, process(environment) as run:
        yield run


def test_an_sae_and_its_core_are_pushed_and_opened_again(
    saved: Path, repositories: Path, run: Callable[[str], str]
) -> None:
    code = f"""
import dmsae, os, torch
pushed = dmsae.push_to_hub({str(saved)!r}, "me/mine", core={str(saved.parent / "core")!r}, licence="mit")
print(pushed.url)
sae, ours = dmsae.from_pretrained("me/mine"), dmsae.SAE.load({str(saved)!r})
assert sae.config == ours.config
assert all(torch.equal(a, b) for a, b in zip(sae.state_dict().values(), ours.state_dict().values(), strict=True))
core, mine = dmsae.from_pretrained("me/mine", kind="core"), dmsae.Core.load({str(saved.parent / "core")!r})
assert torch.equal(core.encoder_CD, mine.encoder_CD) and core.lineage == mine.lineage
assert all(torch.equal(a, b) for a, b in zip(core.detectors, mine.detectors, strict=True))
os.environ["DMSAE_OFFLINE"] = "1"
dmsae.from_pretrained("me/mine")  # needs no network any more
del os.environ["DMSAE_OFFLINE"]
"""
    assert "/me/mine/commit/" in run(code)
    repository = repositories / "me" / "mine"
    files = sorted(str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file())
    assert files == [
        "README.md",
        "core.json",
        "core.safetensors",
        "sae.json",
        "sae.safetensors",
        "saelens/cfg.json",
        "saelens/sae_weights.safetensors",
    ]
    assert not any(b"someone" in path.read_bytes() for path in repository.rglob("*") if path.is_file())
    _check_card((repository / "README.md").read_text(encoding="utf8"), repository)


def _check_card(card: str, repository: Path) -> None:
    _, header, body = card.split("---\n", 2)
    facts = {name: json.loads(value) for name, value in (line.split(": ", 1) for line in header.splitlines())}
    assert facts["library_name"] == "dmsae"
    assert facts["base_model"] == "some/model"
    assert facts["license"] == "mit"
    assert {"sparse-autoencoder", "saelens"} <= set(facts["tags"])
    assert "dmsae.from_pretrained('me/mine')" in body
    assert "SAE.from_pretrained('me/mine', 'saelens')" in body
    assert "| core inside | detector, 8 latents |" in body
    assert "| training: tokens | 1,000 |" in body
    from dmsae.disk.files import sha256_of

    hashes = dict(re.findall(r"\| `([^`]+)` \| [\d,]+ \| `([0-9a-f]{64})` \|", body))
    assert len(hashes) == 6
    assert all(sha256_of(repository / name) == digest for name, digest in hashes.items())


def test_a_folder_of_a_repository_is_one_of_several(saved: Path, repositories: Path, run: Callable[[str], str]) -> None:
    code = f"""
import dmsae
for k in (16, 32):
    dmsae.push_to_hub({str(saved)!r}, "me/many", folder=f"layer-3/k-{{k}}")
print(dmsae.from_pretrained("me/many", "layer-3/k-32").config.width)
try:
    dmsae.from_pretrained("me/many")
except dmsae.DmsaeError as error:
    print(error)
"""
    width, error = run(code).splitlines()
    assert width == "64"
    assert "Give one of these folders: layer-3/k-16, layer-3/k-32." in error
    assert "k-16" in (repositories / "me/many/README.md").read_text()


def test_the_commands_push_and_pull(saved: Path, tmp_path: Path, run: Callable[[str], str]) -> None:
    code = f"""
from dmsae.cli import main
main(["hub", "push", {str(saved)!r}, "me/pushed", "--folder", "k-6"])
main(["hub", "pull", "me/pushed", "--folder", "k-6", "--out", {str(tmp_path / "pulled")!r}])
"""
    printed = run(code)
    assert "5 files: k-6/README.md, k-6/sae.json" in printed
    assert "sae of 64 latents in" in printed
    assert torch.equal(SAE.load(tmp_path / "pulled").W_dec, SAE.load(saved).W_dec)


def test_what_is_larger_than_it_says_is_not_downloaded(
    saved: Path, repositories: Path, run: Callable[[str], str]
) -> None:
    run(f"import dmsae; dmsae.push_to_hub({str(saved)!r}, 'me/larger')")
    weights = repositories / "me/larger/sae.safetensors"
    weights.write_bytes(weights.read_bytes() + bytes(3 << 20))
    code = """
import dmsae
try:
    dmsae.from_pretrained("me/larger")
except dmsae.DmsaeError as error:
    print(type(error).__name__, error)
"""
    assert run(code).startswith("HubError sae.safetensors of me/larger has 3.2 MB; at most")
    assert not [path for path in (repositories / "cache").rglob("*.safetensors") if "larger" in str(path)]


def test_changed_weights_and_refused_tokens_are_typed_errors(
    saved: Path, repositories: Path, run: Callable[[str], str]
) -> None:
    run(f"import dmsae; dmsae.push_to_hub({str(saved)!r}, 'me/changed')")
    weights = repositories / "me/changed/sae.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    code = f"""
import dmsae, os
mine, os.environ["HF_TOKEN"] = os.environ["HF_TOKEN"], "hf_of_a_stranger"
for what in (
    lambda: dmsae.from_pretrained("me/changed"),
    lambda: dmsae.from_pretrained("me/absent"),
    lambda: dmsae.from_pretrained("me/changed", kind="core"),
    lambda: dmsae.push_to_hub({str(saved)!r}, "me/changed"),
):
    try:
        what()
    except dmsae.DmsaeError as error:
        print(type(error).__name__, error)
os.environ["HF_TOKEN"] = mine
"""
    errors = run(code).splitlines()
    assert len(errors) == 4
    assert errors[0].startswith("CheckpointError")
    assert "is not the file that sae.json was written for" in errors[0]
    assert errors[1].startswith("HubError 'me/absent'")
    assert errors[2].startswith("HubError me/changed holds no core of dmsae in its root")
    assert errors[3].startswith("HubError 'me/changed' cannot be pushed to")


@pytest.mark.parametrize("repo", ["mine", "a/b/c", "/a", "a/", "https://x/y", "a b/c"])
def test_only_names_of_repositories_are_taken(saved: Path, repo: str) -> None:
    with pytest.raises(ConfigError, match="owner/name"):
        push_to_hub(saved, repo)


@pytest.mark.parametrize("folder", ["../up", "/etc", "a//b", ".git", "a\\b"])
def test_only_folders_inside_are_taken(saved: Path, folder: str) -> None:
    with pytest.raises(ConfigError, match="folder inside the repository"):
        push_to_hub(saved, "me/mine", folder=folder)


def test_only_what_is_ours_is_pushed(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither an SAE of ours nor a core"):
        push_to_hub(tmp_path / "empty", "me/mine")
    with pytest.raises(CheckpointError, match="holds no core"):
        push_to_hub(saved, "me/mine", core=tmp_path / "empty")


def test_scores_go_into_the_card_beside_their_nulls(saved: Path, tmp_path: Path) -> None:
    from dmsae.formats.hub import _found, stage

    digest = digest_of(SAE.load(saved))
    subjects = {
        "mine": {"digest": digest, "config": {}, "null_of": "", "null_kind": ""},
        "mine / random": {"digest": "x", "config": {}, "null_of": "mine", "null_kind": "random"},
    }
    results = {"mine": {"fve": 0.8125}, "mine / random": {"fve": 0.25}}
    removal = {"settings": {}, "seconds": 0.0, "results": {name: {"scr": {"20": 0.1}} for name in results}}
    measures = {"fidelity": {"settings": {}, "seconds": 0.0, "results": results}, "concept_removal": removal}
    Evaluation("key", {}, subjects, measures, {}).save(tmp_path / "evaluation")
    stage(_found(saved, None), tmp_path / "a", "me/mine", evaluation=tmp_path / "evaluation")
    card = (tmp_path / "a" / "README.md").read_text()
    assert re.search(r"\| fidelity \| fve \| 0\.8125 \| 0\.25 \| .* \| 0\.25 \|", card)
    assert "concept_removal: unreliable" in card
    subjects["mine"]["digest"] = "another"
    Evaluation("key", {}, subjects, measures, {}).save(tmp_path / "other")
    with pytest.raises(ConfigError, match="none of which has the weights"):
        stage(_found(saved, None), tmp_path / "b", "me/mine", evaluation=tmp_path / "other")


def test_what_saelens_cannot_hold_is_pushed_without_it(saved: Path, tmp_path: Path) -> None:
    from dmsae.formats.hub import _found, stage

    sae = SAE.load(saved)
    sae.set_detectors_(Detectors(sae.offset, torch.full((8,), -1.0)))
    sae.save(tmp_path / "negative")
    stage(_found(tmp_path / "negative", None), tmp_path / "a", "me/mine")
    assert not (tmp_path / "a" / "saelens").exists()
    card = (tmp_path / "a" / "README.md").read_text()
    assert "It is not here for SAELens: 8 of 8 detectors" in card
    assert "saelens" not in card.split("---")[1]


def test_a_core_alone_has_a_card_too(tmp_path: Path) -> None:
    from dmsae.formats.hub import _found, stage

    core_of().save(tmp_path / "core")
    stage(_found(tmp_path / "core", None), tmp_path / "a", "me/mine")
    card = (tmp_path / "a" / "README.md").read_text()
    assert "kind='core'" in card
    assert "| born | 2 in cycle 0, 1 in cycle 1 |" in card
    assert "someone" not in card
