"""`dmsae export`, `dmsae import` and `dmsae hub` from the command line."""

from pathlib import Path

import pytest
import torch

from benched import sae_of_kind
from dmsae import cli
from dmsae.sae.sae import SAE

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The directory of a training with an SAE in it."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    sae_of_kind("detector", x).save(tmp_path / "run" / "sae")
    return tmp_path / "run"


@pytest.mark.parametrize("to", ["saelens", "dictionary_learning", "safetensors"])
def test_there_and_back(saved: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = saved / "theirs", saved / "ours"
    cli.main(["export", str(saved), "--to", to, "--out", str(theirs)])
    assert f"{to}: " in capsys.readouterr().out
    cli.main(["import", str(theirs), "--out", str(ours)])
    printed = capsys.readouterr().out
    assert "64 latents on activations 16 wide, k = 6, a detector core of 8" in printed
    assert "It holds no token sample" in printed
    assert torch.equal(SAE.load(ours).offset, SAE.load(saved).offset)


def test_what_cannot_be_done_is_one_message(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["export", str(saved), "--to", "sparsify", "--out", str(saved / "out")], "Formats that can hold it: saelens"),
        (["import", str(saved / "nowhere"), "--out", str(saved / "out")], "There is nothing at this path"),
        (["hub", "push", str(saved), "me/mine"], "DMSAE_OFFLINE is set"),
        (["hub", "push", str(saved), "mine"], "owner/name"),
        (["hub", "pull", "me/mine", "--out", str(saved / "out")], "not found on the Hub"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split())
        assert not (saved / "out").exists()
