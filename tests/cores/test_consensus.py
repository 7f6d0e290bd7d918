"""Consensus: latents that independent SAEs share are found, matched one to one, and nothing else is."""

from pathlib import Path

import pytest
import torch

from dmsae.cores.attribution import AttributionConfig, attribute
from dmsae.cores.consensus import ConsensusConfig, consensus_core, firing_jaccard, match_candidates
from dmsae.cores.core import Core, Provenance
from dmsae.errors import AttributionError, ConfigError
from dmsae.sae.config import DenseCore, SAEConfig
from dmsae.sae.sae import SAE
from planted import Planted, planted_store

pytestmark = pytest.mark.usefixtures("one_thread")
SHARED = 6
POOL = 12


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    return planted_store(tmp_path_factory.mktemp("planted") / "store")


def sae_that_shares(planted: Planted, seed: int) -> SAE:
    """Return an SAE with six planted directions among its twelve candidates, in an order of its own."""
    made = torch.Generator().manual_seed(seed)
    sae = SAE.init(SAEConfig(32, 48, 4, (POOL, 48)), made)
    slots = torch.randperm(POOL, generator=made)[:SHARED]
    with torch.no_grad():
        for rows in (sae.W_dec, sae.W_enc_noncore):
            rows[slots] = planted.directions[:SHARED]
    sae.set_threshold_(0.5)
    return sae.requires_grad_(False)


def agreed(planted: Planted, saes: list[SAE], config: ConsensusConfig | None = None) -> Core:
    attribution = attribute(saes[0], planted.store, AttributionConfig(quantile=0.95, batch_size=256))
    return consensus_core(saes, attribution, planted.store, Provenance.of(planted.store, {}), config)


def test_what_all_of_them_have_is_the_core(planted: Planted) -> None:
    core = agreed(planted, [sae_that_shares(planted, seed) for seed in range(4)])
    cosine = core.encoder_CD @ planted.directions[:SHARED].T
    assert len(core) == SHARED
    assert (cosine.max(1).values > 0.999).all()
    assert sorted(cosine.argmax(1).tolist()) == list(range(SHARED))
    assert core.scores_C.tolist() == sorted(core.scores_C.tolist(), reverse=True)
    details = core.provenance.config["consensus"]
    assert details["found_by"] == [[1, 2, 3]] * SHARED
    assert all(similarity > 0.9 for similarity in details["similarity"])


def test_a_latent_that_too_few_have_is_left_out(planted: Planted) -> None:
    alone = SAE.init(SAEConfig(32, 48, 4, (POOL, 48)), torch.Generator().manual_seed(99)).requires_grad_(False)
    alone.set_threshold_(0.5)
    saes = [sae_that_shares(planted, 0), sae_that_shares(planted, 1), alone, alone]
    assert len(agreed(planted, saes, ConsensusConfig(min_share=0.3))) == SHARED
    with pytest.raises(AttributionError, match="agree on no candidate: the most alike have similarity"):
        agreed(planted, saes, ConsensusConfig(min_similarity=0.8, min_share=0.9))


def test_matching_is_one_to_one_and_survives_the_disk(planted: Planted, tmp_path: Path) -> None:
    first, second = sae_that_shares(planted, 0), sae_that_shares(planted, 1)
    match = match_candidates(first, second, planted.store)
    assert sorted(match.partners_P.tolist()) == list(range(POOL))
    assert int((match.similarity_P > 0.9).sum()) == SHARED
    core = agreed(planted, [first, second])
    core.save(tmp_path)
    assert Core.load(tmp_path).provenance == core.provenance


def test_firing_is_compared_as_a_loop_over_tokens_would(planted: Planted) -> None:
    first, second = sae_that_shares(planted, 0), sae_that_shares(planted, 1)
    x = planted.store.heldout()
    on = [first.encode(x)[:, :POOL] > 0, second.encode(x)[:, :POOL] > 0]
    jaccard = firing_jaccard(first, second, planted.store, 10**6)
    for i in range(POOL):
        for j in range(POOL):
            both, either = (on[0][:, i] & on[1][:, j]).sum(), (on[0][:, i] | on[1][:, j]).sum()
            assert jaccard[i, j] == pytest.approx(float(both / either) if either else 0.0)


def test_what_cannot_agree_is_refused(planted: Planted) -> None:
    sae = sae_that_shares(planted, 0)
    with_core = SAE.init(SAEConfig(32, 48, 4, (POOL, 48), DenseCore(2, 4)), torch.Generator(), torch.ones(2, 32))
    with pytest.raises(ConfigError, match="agree on it by construction"):
        agreed(planted, [sae, with_core])
    with pytest.raises(ConfigError, match="saes = 1; it must be at least 2 SAEs"):
        agreed(planted, [sae])
    with pytest.raises(ConfigError, match=r"min_similarity = 1\.5; it must lie between 0 and 1"):
        ConsensusConfig(min_similarity=1.5)
