"""Random cores: controls of equal size that nothing was distilled into."""

import pytest
import torch

from dmsae.cores.controls import RandomKind, random_core
from three_cycles import three_cycles


@pytest.mark.parametrize("kind", RandomKind)
def test_a_random_core_shares_size_and_norms_only(kind: RandomKind) -> None:
    like = three_cycles().cores[1]
    control = random_core(like, kind, seed=3)

    expected = like.encoder_CD.norm(dim=1) if kind is RandomKind.NORM_MATCHED else torch.ones(2)
    torch.testing.assert_close(control.encoder_CD.norm(dim=1), expected)
    assert torch.equal(control.encoder_CD, random_core(like, kind, seed=3).encoder_CD)
    assert not torch.allclose(control.encoder_CD, random_core(like, kind, seed=4).encoder_CD)
    assert all(latent.selected_in == () for latent in control.lineage)
    assert control.provenance.config["random_core"]["like"] == like.digest()
