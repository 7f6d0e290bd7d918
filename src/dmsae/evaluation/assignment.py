"""One-to-one matching of two sets of directions that makes the summed cosine largest (the Hungarian method's optimum).

A dense solver wants the matrix of all cosines in float64: 2 GiB for 16k × 16k, and copies of it. But nearly every match
is among a row's nearest, so the problem is solved on a sparse graph of near pairs. The dual prices of the solution tell
which other pairs could improve it; these are added and it is solved again, until there are none. The result is the
optimum over all pairs, and no more than a block of cosines is ever in memory.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dmsae.errors import ConfigError

_BLOCK = 1024
_DENSE = 1 << 22
"""Problems with no more pairs than this are solved densely."""
_NEAR = 32
"""Nearest of each row, and of each column, with which the sparse graph begins."""
_ADDED = 32
"""Pairs that are added for a row at a time, at most."""
_SLACK = 1e-6
"""A solution is optimal when no pair would gain more than this: cosines are in float32."""
_MARGIN = 0.01
"""Pairs that fall short of a gain by less are added with those that gain: the next prices may favour them."""
_SHIFT, _DUMMY = 2.0, 1e-3
"""Weights in the sparse graph: cosine + shift, which is positive; less than any of them for having no partner."""


class Matching(NamedTuple):
    """Rows of one set matched one to one with rows of another."""

    partners_K: Tensor
    """For each row of the first, its partner in the second; −1 for those left over when the second has fewer."""
    cosines_K: Tensor
    """The cosine with the partner, float64, signed even when matched by size; NaN without a partner."""

    @property
    def matched(self) -> Tensor:
        """Which rows of the first have a partner."""
        return self.partners_K >= 0


class _Edges(NamedTuple):
    """Pairs of a sparse graph, by row, then by column, none of them twice."""

    rows: Tensor
    columns: Tensor
    values: Tensor


@torch.no_grad()
def match_rows(first_KD: Tensor, second_KD: Tensor, absolute: bool = False) -> Matching:
    """Return the matching with the largest summed cosine; `absolute`: with the largest sum of their sizes."""
    if first_KD.shape[1] != second_KD.shape[1]:
        raise ConfigError(
            f"Rows of widths {first_KD.shape[1]} and {second_KD.shape[1]} cannot be compared: they are of activations "
            "of other models."
        )
    first, second = (normalize(rows.detach().float().cpu(), dim=1) for rows in (first_KD, second_KD))
    swapped = len(first) > len(second)
    small, large = (second, first) if swapped else (first, second)
    dense = len(small) * len(large) <= _DENSE
    columns = _solve_densely(small, large, absolute) if dense else _solve_sparsely(small, large, absolute)
    partners = torch.full((len(first),), -1)
    partners[columns if swapped else torch.arange(len(small))] = torch.arange(len(small)) if swapped else columns
    ours, theirs = (normalize(rows.detach().double().cpu(), dim=1) for rows in (first_KD, second_KD))
    cosines = (ours * theirs[partners]).sum(1).clamp(-1, 1)
    return Matching(partners, cosines.where(partners >= 0, torch.nan))


def _solve_densely(small: Tensor, large: Tensor, absolute: bool) -> Tensor:
    """Return the column of each row."""
    from scipy.optimize import linear_sum_assignment

    cosines = small @ large.T
    _, columns = linear_sum_assignment((cosines.abs() if absolute else cosines).numpy(), maximize=True)
    return torch.from_numpy(columns)


def _solve_sparsely(small: Tensor, large: Tensor, absolute: bool) -> Tensor:
    """Return the column of each row, from sparse graphs that grow until no pair outside would improve the sum."""
    edges = _near_pairs(small, large, absolute)
    while True:
        columns, values = _solve(edges, len(small), len(large))
        prices = _prices(edges, columns, values, len(large))
        gains = values - prices[columns.clamp(min=0)] * (columns >= 0)
        worth_more = _worth_more(small, large, absolute, prices, gains)
        if not len(worth_more.rows):
            return columns
        edges = _merged(edges, worth_more)


def _blocks(small: Tensor, large: Tensor, absolute: bool) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, cosines of some rows with all columns)."""
    for start in range(0, len(small), _BLOCK):
        cosines = small[start : start + _BLOCK] @ large.T
        yield start, cosines.abs_() if absolute else cosines


def _near_pairs(small: Tensor, large: Tensor, absolute: bool) -> _Edges:
    """Return the nearest columns of each row, and the nearest rows of each column."""
    near = []
    best_of_column, best_rows = torch.full((_NEAR, len(large)), -3.0), torch.zeros(_NEAR, len(large), dtype=torch.int64)
    for start, cosines in _blocks(small, large, absolute):
        values, columns = cosines.topk(min(_NEAR, cosines.shape[1]), dim=1)
        rows = torch.arange(start, start + len(cosines))
        near.append(_Edges(rows[:, None].expand_as(columns).flatten(), columns.flatten(), values.flatten()))
        best_of_column, taken = torch.cat([best_of_column, cosines]).topk(_NEAR, dim=0)
        best_rows = torch.cat([best_rows, rows[:, None].expand_as(cosines)]).gather(0, taken)
    known = best_of_column > -3
    columns = torch.arange(len(large)).expand_as(known)[known]
    return _merged(*near, _Edges(best_rows[known], columns, best_of_column[known]))


def _merged(*parts: _Edges) -> _Edges:
    """Return all edges in order, those that are there several times once."""
    rows, columns, values = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    width = int(columns.max()) + 1
    keys, inverse = torch.unique(rows * width + columns, return_inverse=True)
    merged = values.new_empty(len(keys)).scatter_(0, inverse, values)
    return _Edges(keys // width, keys % width, merged)


def _solve(edges: _Edges, n_rows: int, n_columns: int) -> tuple[Tensor, Tensor]:
    """Return the column of each row in the best matching of a sparse graph and its value; −1 for one left without."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import min_weight_full_bipartite_matching

    # Every row has a column of its own besides, at less than any cosine: so there always is a full matching.
    own = torch.arange(n_rows)
    rows, columns = torch.cat([edges.rows, own]), torch.cat([edges.columns, n_columns + own])
    weights = torch.cat([edges.values.double() + _SHIFT, torch.full((n_rows,), _DUMMY, dtype=torch.float64)])
    graph = csr_matrix((weights.numpy(), (rows.numpy(), columns.numpy())), (n_rows, n_columns + n_rows))
    matched_rows, matched = (torch.from_numpy(side).long() for side in min_weight_full_bipartite_matching(graph, True))
    found = torch.full((n_rows,), -1).scatter_(0, matched_rows, matched.where(matched < n_columns, -1))
    values = torch.full((n_rows,), _DUMMY - _SHIFT, dtype=torch.float64)
    chosen = found[edges.rows] == edges.columns
    values[edges.rows[chosen]] = edges.values[chosen].double()
    return found, values


def _prices(edges: _Edges, columns: Tensor, values: Tensor, n_columns: int) -> Tensor:
    """Return the least dual prices of columns that make the matching optimal: no row gains by changing to another.

    With v the prices and m(i) the column of row i: v_j ≥ s_ij − s_im(i) + v_m(i) for every edge, and 0 for columns
    without a row. They are the longest paths in a graph that has no cycle of positive length, found by relaxation.
    """
    prices = torch.zeros(n_columns, dtype=torch.float64)
    gain = edges.values.double() - values[edges.rows]
    of_row = columns[edges.rows]
    matched = of_row >= 0
    of_row = of_row.clamp(min=0)
    for _ in range(n_columns + 1):
        offered = gain + prices[of_row] * matched
        raised = prices.scatter_reduce(0, edges.columns, offered, "amax")
        if bool((raised <= prices + 1e-12).all()):
            break
        prices = raised
    return prices


def _worth_more(small: Tensor, large: Tensor, absolute: bool, prices: Tensor, gains: Tensor) -> _Edges:
    """Return pairs whose cosine is above its column's price and its row's gain together, and those nearly so.

    There are none at all when no pair is above: the matching is the best there is.
    """
    found, largest = [], -_MARGIN
    for start, cosines in _blocks(small, large, absolute):
        surplus = cosines - prices.float()
        surplus -= gains[start : start + len(cosines), None].float()
        best, columns = surplus.topk(min(_ADDED, surplus.shape[1]), dim=1)
        largest = max(largest, float(best.max()))
        near = best > -_MARGIN
        rows = torch.arange(start, start + len(cosines))[:, None].expand_as(columns)
        found.append(_Edges(rows[near], columns[near], cosines.gather(1, columns)[near]))
    edges = _Edges(*(torch.cat(tensors) for tensors in zip(*found, strict=True)))
    return edges if largest > _SLACK else _Edges(*(tensor[:0] for tensor in edges))
