"""What we push to the Hub (a stand-in for it) opens in the real SAELens in one line."""

from pathlib import Path

import pytest
import torch

from benched import sae_of_kind
from hub_standin import OWN_ENVIRONMENT, hub, process

pytest.importorskip("sae_lens", reason=OWN_ENVIRONMENT)


def test_saelens_opens_what_we_push_in_one_line(tmp_path: Path) -> None:
    x = 4 * torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) + 2
    sae = sae_of_kind("detector", x)
    sae.save(tmp_path / "sae")
    torch.save(x, tmp_path / "x.pt")
    torch.save(sae.encode(x), tmp_path / "f.pt")
    code = f"""
import torch, dmsae
from sae_lens import SAE
x, f = torch.load({str(tmp_path / "x.pt")!r}), torch.load({str(tmp_path / "f.pt")!r})
for folder, theirs in (("", "saelens"), ("layer-8/k-32", "layer-8/k-32/saelens")):
    dmsae.push_to_hub({str(tmp_path / "sae")!r}, "me/mine", folder=folder)
    sae = SAE.from_pretrained("me/mine", theirs)
    torch.testing.assert_close(sae.encode(x).detach(), f, rtol=1e-5, atol=1e-5 * float(f.max()))
    print(type(sae).__name__, int((f > 0).sum()) > 0)
"""
    (tmp_path / "repositories").mkdir()
    with hub(tmp_path / "repositories") as environment, process(environment) as run:
        assert run(code).split() == ["JumpReLUSAE", "True"] * 2
