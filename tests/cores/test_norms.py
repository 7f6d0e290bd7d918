"""Row norms: what they change, and that detectors fire where they did."""

import pytest
import torch

from dmsae.cores.core import Core, Lineage, Provenance
from dmsae.cores.norms import CoreNorm, row_norms, with_norm
from dmsae.errors import CheckpointError, ConfigError
from dmsae.sae.detectors import Detectors, detect
from planted import MODEL


def core_of(rows: torch.Tensor) -> Core:
    n = len(rows)
    draws = torch.Generator().manual_seed(1)
    return Core(
        encoder_CD=rows,
        scores_C=torch.ones(n, dtype=torch.float64),
        slots_C=torch.arange(n),
        lineage=tuple(Lineage(0, i, (0,)) for i in range(n)),
        cycle=0,
        provenance=Provenance(MODEL, "store", {}),
        detectors=Detectors(torch.randn(n, generator=draws), torch.rand(n, generator=draws)),
    )


@pytest.fixture
def core() -> Core:
    return core_of(torch.randn(6, 16, generator=torch.Generator().manual_seed(0)))


def test_a_core_as_found_is_the_same_object(core: Core) -> None:
    assert with_norm(core, "found") is core


@pytest.mark.parametrize(("norm", "expected"), [("unit", 1.0), (2.0, None), (0.5, None)])
def test_rows_get_the_norm_asked_for(core: Core, norm: CoreNorm, expected: float | None) -> None:
    changed = with_norm(core, norm)
    before, after = (one.encoder_CD.double().norm(dim=1) for one in (core, changed))
    wanted = torch.full_like(before, expected) if expected else before * float(norm)
    torch.testing.assert_close(after, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(after[:, None] * core.encoder_CD, before[:, None] * changed.encoder_CD)
    norms = row_norms(changed)
    assert norms is not None
    assert norms.smallest <= norms.median <= norms.largest
    assert norms.largest == pytest.approx(float(after.max()))


def test_detectors_fire_where_they_did_with_values_that_follow_the_norm(core: Core) -> None:
    x = torch.randn(500, 16, generator=torch.Generator().manual_seed(2))
    changed = with_norm(core, 4.0)  # a power of two rounds nothing
    assert core.detectors is not None
    assert changed.detectors is not None
    codes = detect(x, core.encoder_CD, core.detectors)
    assert codes.any()
    torch.testing.assert_close(detect(x, changed.encoder_CD, changed.detectors), 4 * codes)


def test_rows_that_were_carried_are_not_changed_twice(core: Core) -> None:
    changed = with_norm(core, 3.0, n_carried=2)
    assert torch.equal(changed.encoder_CD[:2], core.encoder_CD[:2])
    torch.testing.assert_close(changed.encoder_CD[2:], 3 * core.encoder_CD[2:])


@pytest.mark.parametrize("norm", [0.0, -1.0, float("inf"), float("nan"), "long"])
def test_impossible_norms_are_refused(core: Core, norm: CoreNorm) -> None:
    with pytest.raises(ConfigError, match=r"core_norm = .*; it must be found, unit, or a positive factor"):
        with_norm(core, norm)


def test_a_zero_row_has_no_unit_norm() -> None:
    with pytest.raises(CheckpointError, match="A row of the core is zero"):
        with_norm(core_of(torch.zeros(2, 16)), "unit")
