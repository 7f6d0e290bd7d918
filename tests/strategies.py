"""SAEs of every shape, for hypothesis."""

from hypothesis import strategies as st

from dmsae.sae.config import DenseCore, DetectorCore, SAEConfig, SparseCore


@st.composite
def configs(draw: st.DrawFn, max_width: int, max_core: int, max_inner: int, max_d: int) -> SAEConfig:
    """Draw any SAE of at most this size: no core, a dense, sparse or detector one, one or several prefixes.

    Beside a core that does not compete, `k` is drawn apart from `k_noncore`: only the latter may change what BatchTopK
    keeps.
    """
    width = draw(st.integers(2, max_width))
    dense = dense_cores(max_core, width)
    detector = dense.map(lambda core: DetectorCore(core.n, core.k_noncore))
    core = draw(st.one_of(st.none(), dense, sparse_cores(max_core, width), detector))
    inner = draw(st.sets(st.integers((core.n if core else 0) + 1, width), max_size=max_inner))
    return SAEConfig(
        d_model=draw(st.integers(2, max_d)),
        width=width,
        k=draw(st.integers(1, width)),
        prefixes=tuple(sorted(inner | {width})),
        core=core,
        center_input=draw(st.booleans()),
    )


@st.composite
def dense_cores(draw: st.DrawFn, max_core: int, width: int) -> DenseCore:
    """Draw a dense core that fits into an SAE."""
    n = draw(st.integers(1, min(max_core, width - 1)))
    return DenseCore(n, k_noncore=draw(st.integers(1, width - n)))


def sparse_cores(max_core: int, width: int) -> st.SearchStrategy[SparseCore]:
    """Draw a sparse core that fits into an SAE."""
    return st.integers(1, min(max_core, width - 1)).map(SparseCore)
