"""Two identities are the same model when weights and hook are; the error says what each side is."""

from dataclasses import replace

import pytest

from dmsae.activations.identity import ModelIdentity
from dmsae.errors import ConfigError
from planted import MODEL


@pytest.mark.parametrize("field", ["name", "revision", "tokenizer_sha256", "dtype"])
def test_names_and_dtypes_make_no_difference(field: str) -> None:
    MODEL.require_same(replace(MODEL, **{field: "other"}), "the core", "the store")


@pytest.mark.parametrize("change", [{"weights_sha256": "ab" * 32}, {"hook": "elsewhere"}])
def test_other_weights_or_hooks_are_refused_both_ways(change: dict[str, str]) -> None:
    other = replace(MODEL, name="other", **change)
    for ours, theirs in ((MODEL, other), (other, MODEL)):
        with pytest.raises(ConfigError, match=r"The models differ: .*Choose a store of the same model") as caught:
            ours.require_same(theirs, "the core", "the store abc")
        described = f"the core is of {ours.name} at {ours.hook} (weights_sha256 {ours.weights_sha256[:12]}…)"
        assert described in str(caught.value)
        assert f"but the store abc is of {theirs.name} at {theirs.hook}" in str(caught.value)


def test_imported_activations_match_by_name() -> None:
    cells = ModelIdentity.imported("cells")
    cells.require_same(ModelIdentity.imported("cells"), "the core", "the store")
    assert cells.hook == "imported"
    with pytest.raises(ConfigError, match="the core is of imported activations named 'cells', but the store is of imp"):
        cells.require_same(ModelIdentity.imported("stars"), "the core", "the store")
    with pytest.raises(ConfigError, match="but the store is of planted at nowhere"):
        cells.require_same(MODEL, "the core", "the store")
