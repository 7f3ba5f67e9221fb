"""Boxes as arrays: `lo` and `hi` of shape [n, dims], half-open. Pure functions, no tensor data."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Intervals", "Ints", "changes", "disjoint", "make_disjoint", "overlaps", "unique_boxes", "volumes"]

Ints = NDArray[np.int64]


def volumes(lo: Ints, hi: Ints) -> Ints:
    """Return the number of elements of each box, 0 where it is empty; a box of no dims holds one."""
    product: Ints = np.prod(np.maximum(hi - lo, 0), axis=1, dtype=np.int64)
    return product


def unique_boxes(lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the distinct boxes (lo, hi) in lexicographic order, and for each input the index of its own."""
    dims = lo.shape[1]
    if dims == 0:
        return lo[:1], hi[:1], np.zeros(len(lo), np.int64)
    both = np.concatenate([lo, hi], axis=1)
    first, inverse = _unique_rows(both)
    return lo[first], hi[first], inverse


def _unique_rows(rows: Ints) -> tuple[Ints, Ints]:
    """Return (index of the first of each distinct row, in their order; for each row the number of its own).

    numpy's own `unique` over rows compares them as opaque records, which takes ten times as long.
    """
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    fresh = np.ones(len(rows), bool)
    np.any(ordered[1:] != ordered[:-1], axis=1, out=fresh[1:])
    inverse = np.empty(len(rows), np.int64)
    inverse[order] = np.cumsum(fresh) - 1
    return order[fresh].astype(np.int64), inverse


@dataclass(frozen=True, slots=True)
class Intervals:
    """Boxes by dim: the distinct [start, stop) of each dim, and which of them each box has there."""

    num_boxes: int
    distinct: tuple[Ints, ...]
    index: tuple[Ints, ...]

    @classmethod
    def of(cls, lo: Ints, hi: Ints) -> Intervals:
        """Return the intervals of these boxes."""
        sides = [np.stack([lo[:, dim], hi[:, dim]], 1) for dim in range(lo.shape[1])]
        found = [_unique_rows(side) for side in sides]
        return cls(
            len(lo),
            tuple(side[first] for side, (first, _) in zip(sides, found, strict=True)),
            tuple(index for _, index in found),
        )


def overlaps(one: Intervals, other: Intervals) -> tuple[Ints, Ints]:
    """Return the index pairs (i, j) of boxes that share an element with one of the other boxes.

    Compares the distinct intervals of each dim and combines the dims' answers, so the cost per pair of
    boxes is one byte and one operation per dim.
    """
    mask = np.ones((one.num_boxes, other.num_boxes), bool)
    for mine, theirs, my_index, their_index in zip(
        one.distinct, other.distinct, one.index, other.index, strict=True
    ):
        start = np.maximum(mine[:, None, 0], theirs[None, :, 0])
        shared = start < np.minimum(mine[:, None, 1], theirs[None, :, 1])
        if not shared.all():
            mask &= shared[np.ix_(my_index, their_index)]
    first, second = np.nonzero(mask)
    return first.astype(np.int64), second.astype(np.int64)


def changes(*columns: np.ndarray[Any, Any]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Say for each row whether it differs from the row before in any column; the first one does."""
    found = np.ones(len(columns[0]), bool)
    if len(found) > 1:
        found[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return found


def disjoint(lo: Ints, hi: Ints) -> bool:
    """Say whether no two of these boxes share an element."""
    intervals = Intervals.of(lo, hi)
    first, second = overlaps(intervals, intervals)
    return bool(np.all(first == second))


def make_disjoint(lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut boxes so that any two of the results are equal or share nothing.

    Returns (lo, hi, origin): the cut boxes and for each the index of the box that it is a part of. Boxes
    that already are so come back as they are. Meant for explicit pieces: placements never overlap partly.
    """
    unique_lo, unique_hi, _ = unique_boxes(lo, hi)
    if disjoint(unique_lo, unique_hi):
        return lo, hi, np.arange(len(lo), dtype=np.int64)
    dims = lo.shape[1]
    cuts = [np.unique(np.concatenate([lo[:, dim], hi[:, dim]])) for dim in range(dims)]
    out_lo: list[tuple[int, ...]] = []
    out_hi: list[tuple[int, ...]] = []
    origin: list[int] = []
    for index in range(len(lo)):
        edges = []
        for dim in range(dims):
            inside = cuts[dim][(cuts[dim] >= lo[index, dim]) & (cuts[dim] <= hi[index, dim])]
            edges.append(list(itertools.pairwise(inside.tolist())))
        for cell in itertools.product(*edges):
            out_lo.append(tuple(start for start, _ in cell))
            out_hi.append(tuple(stop for _, stop in cell))
            origin.append(index)
    shape = (len(origin), dims)
    return (
        np.array(out_lo, np.int64).reshape(shape),
        np.array(out_hi, np.int64).reshape(shape),
        np.array(origin, np.int64),
    )
