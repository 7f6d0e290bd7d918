"""How two cores, and two scorings of one SAE, are compared."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dmsae.cores.attribution import Attribution
from dmsae.cores.compare import (
    CarryOver,
    agreement,
    carry_over,
    n_identical_rows,
    nearest_in,
    require_comparable,
)
from dmsae.cores.ranking import spearman
from dmsae.errors import AttributionError, ConfigError
from planted import MODEL
from three_cycles import D_MODEL, run_cycles, three_cycles


def test_what_a_core_kept_gained_and_lost() -> None:
    core_0, core_1, core_2 = three_cycles().cores
    assert carry_over(core_0, None) == CarryOver(size=2, kept=0, new=2, dropped=0)
    assert carry_over(core_1, core_0) == CarryOver(size=2, kept=1, new=1, dropped=1)
    assert carry_over(core_2, core_1) == CarryOver(size=2, kept=1, new=1, dropped=1)
    assert carry_over(core_2, core_0) == CarryOver(size=2, kept=0, new=2, dropped=2)
    grown = run_cycles([[0, 1, 0, 0], [1, 1, 1, 0, 1]]).cores
    assert carry_over(grown[1], grown[0]) == CarryOver(size=4, kept=1, new=3, dropped=0)


def test_rows_are_identical_to_the_bit_or_not_at_all() -> None:
    core_0, core_1, core_2 = three_cycles().cores
    assert n_identical_rows(core_1, core_0) == 1
    assert n_identical_rows(core_2, core_0) == 1  # relearned: another latent, the same row
    assert n_identical_rows(core_2, core_2) == 2
    assert n_identical_rows(core_2, replace(core_2, encoder_CD=core_2.encoder_CD * (1 + 2**-20))) == 0


def test_the_nearest_latent_is_found_whatever_its_length() -> None:
    first = three_cycles().cores[1]
    other = replace(first, encoder_CD=torch.stack([-first.encoder_CD[0], 7 * first.encoder_CD[1]]))
    cosine, index = nearest_in(first, other)
    assert index[1] == 1
    assert cosine[1] == pytest.approx(1)
    assert cosine[0] < 1 - 1e-3
    with pytest.raises(ConfigError, match=rf"widths \({D_MODEL} and 3\)"):
        nearest_in(first, replace(first, encoder_CD=first.encoder_CD[:, :3]))


def test_cores_of_other_models_or_hooks_are_not_compared() -> None:
    core = three_cycles().cores[1]
    require_comparable(core, replace(core, lineage=core.lineage))
    for change in ({"hook": "layers.3"}, {"weights_sha256": "other"}):
        other = replace(core, provenance=replace(core.provenance, model=replace(MODEL, **change)))
        with pytest.raises(ConfigError, match=r"The models differ: the first core .* cannot be compared"):
            require_comparable(core, other)


def scoring(scores: dict[int, float]) -> Attribution:
    latents = torch.tensor(list(scores))
    return Attribution(latents, torch.tensor(list(scores.values())).double(), torch.ones(len(scores)), 5, {})


def test_agreement_is_on_shared_latents() -> None:
    first = scoring({0: 100.0, 1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0})
    second = scoring({1: 4.0, 2: 1.0, 3: 3.0, 4: 2.0})
    result = agreement(first, second, coverage=0.7)
    assert (result.n_latents, result.n_first, result.n_second, result.n_both) == (4, 2, 2, 1)
    assert result.jaccard == pytest.approx(1 / 3)
    assert result.spearman == pytest.approx(0.4)
    same = agreement(first, first, 0.9)
    assert same.spearman == pytest.approx(1.0)
    assert (same.n_latents, same.n_first, same.n_second, same.n_both, same.jaccard) == (5, 1, 1, 1, 1.0)
    with pytest.raises(AttributionError, match="no latent in common"):
        agreement(first, scoring({7: 1.0}), 0.9)


def test_a_cap_on_rates_keeps_the_same_latents_out_of_both_selections() -> None:
    """The first scoring saw more positions: its rates decide, whatever the second's are."""
    first = replace(scoring({0: 9.0, 1: 4.0, 2: 3.0}), firing_rates_P=torch.tensor([0.9, 0.2, 0.1]))
    second = replace(scoring({0: 9.0, 1: 1.0, 2: 8.0}), firing_rates_P=torch.tensor([0.1, 0.9, 0.9]))
    free, capped = agreement(first, second, 0.55), agreement(first, second, 0.55, max_rate=0.2)
    assert (free.n_first, free.n_second, free.n_both) == (1, 2, 1)
    assert (capped.n_first, capped.n_second, capped.n_both, capped.jaccard) == (1, 1, 0, 0.0)
    assert capped.spearman == free.spearman
    none = agreement(first, second, 0.55, max_rate=0.05)
    assert (none.n_latents, none.n_first, none.n_second, none.jaccard) == (3, 0, 0, None)


def test_rank_correlation_with_ties() -> None:
    """With tied values Spearman's coefficient is Pearson's of the mean ranks."""
    result = spearman(torch.tensor([1.0, 2.0, 2.0, 5.0]), torch.tensor([0.0, 3.0, 1.0, 1.0]))
    assert result == pytest.approx(np.corrcoef([1, 2.5, 2.5, 4], [1, 4, 2.5, 2.5])[0, 1])
    assert spearman(torch.ones(3), torch.arange(3.0)) is None
