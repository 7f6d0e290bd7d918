"""SAEs of every shape, for hypothesis."""

from hypothesis import strategies as st

from dmsae.sae.sae import CoreMode, SAEConfig


@st.composite
def configs(draw: st.DrawFn, max_width: int, max_core: int, max_inner: int, max_d: int) -> SAEConfig:
    """Draw any SAE of at most this size: no core, a dense or a sparse one, one prefix or several."""
    width = draw(st.integers(2, max_width))
    n_core = draw(st.integers(0, min(max_core, width - 1)))
    inner = draw(st.sets(st.integers(n_core + 1, width), max_size=max_inner))
    mode = draw(st.sampled_from(CoreMode))
    competing = width - (n_core if mode is CoreMode.DENSE else 0)
    return SAEConfig(
        d_model=draw(st.integers(2, max_d)),
        width=width,
        k=draw(st.integers(1, competing)),
        prefixes=tuple(sorted(inner | {width})),
        n_core=n_core,
        core_mode=mode,
        center_input=draw(st.booleans()),
    )
