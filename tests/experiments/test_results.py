"""What experiments keep: small files, in which a list of rows names its columns once."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dmsae.experiments.results import pack, unpack

ENTRIES = st.lists(st.fixed_dictionaries({"sae": st.text(), "l0": st.none() | st.floats(allow_nan=False)}), max_size=4)


@given(
    st.recursive(
        st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | ENTRIES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    )
)
def test_what_is_packed_can_be_unpacked(value: Any) -> None:
    assert unpack(json.loads(json.dumps(pack(value)))) == value
