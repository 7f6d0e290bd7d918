"""Cores of other rules: when one cannot choose as many latents, and at which L0 SAEs that keep nothing are trained."""

from dataclasses import replace
from pathlib import Path

import pytest

from dmsae.cores.attribution import AttributionConfig
from dmsae.cores.controls import Rule
from dmsae.distillation.config import DistillConfig
from dmsae.distillation.transfer import above, below
from dmsae.experiments.grid import GRIDS, Preset
from dmsae.experiments.lab import Lab
from dmsae.experiments.parts import uncapped
from dmsae.experiments.pricing import ks_around
from dmsae.training.config import TrainConfig
from planted import planted_store


@pytest.mark.usefixtures("one_thread")
def test_a_core_of_more_latents_than_dimensions_has_no_principal_components_beside_it(tmp_path: Path) -> None:
    few = planted_store(tmp_path / "store", d_model=8, n_read=4)
    scores = AttributionConfig(n_bootstrap=0)
    train = TrainConfig(tokens=60 * 64, batch_size=64, lr=3e-3, device="cpu")
    base = DistillConfig(width=64, k=6, nesting=(16, 64), coverage=1.0, attribution=scores, train=train)
    grid = replace(GRIDS[Preset.SMOKE], rules=(Rule.PRINCIPAL_COMPONENTS, Rule.FIRING_RATE))
    found = uncapped.run(Lab(few.store, base, tmp_path), grid, 0)
    sizes = {row["sae"]: row["n_core"] for row in found["rows"]}
    assert sizes["dense-k6"] == sizes["firing_rate-dense-k6"] > 8
    for mode in ("dense", "sparse"):
        assert "at most 8, the number of directions" in found["left_out"][f"principal_components-{mode}"]


def test_principal_components_do_not_move_what_other_cores_are_compared_with() -> None:
    l0s = {"dense-k6": 80.0, "random-norm_matched-dense-k6": 90.0}
    around = {1: below(80.0), 2: above(90.0)}
    assert ks_around(l0s) == around

    def with_components(l0: float) -> dict[int, int]:
        return ks_around(l0s | {"principal_components-dense-k6": l0})

    assert with_components(85.0) == with_components(79.0) == with_components(95.0) == around
    assert with_components(70.0) == around | {3: below(70.0)}
    assert with_components(40.0) == around | {3: below(40.0), 4: above(40.0)}
    assert with_components(110.0) == around | {5: above(110.0)}
    assert with_components(150.0) == around | {5: above(150.0), 6: below(150.0)}
    assert ks_around({"principal_components-dense-k6": 40.0}) == {1: below(40.0), 2: above(40.0)}
