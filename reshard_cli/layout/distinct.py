"""The distinct boxes of a tensor over a whole job, and which ranks hold each: replicas share one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reshard_cli.layout.boxes import Intervals, Ints, make_disjoint, unique_boxes
from reshard_cli.layout.holdings import Holdings

__all__ = ["BoxKey", "DistinctBoxes", "distinct_boxes"]

BoxKey = tuple[tuple[int, ...], bytes, bytes]


@dataclass(frozen=True, slots=True)
class DistinctBoxes:
    """Boxes (lo, hi: [boxes, dims]) that are equal or share nothing; `ranks`: the job ranks of each, sorted."""

    lo: Ints
    hi: Ints
    ranks: list[tuple[int, ...]]
    intervals: Intervals


def distinct_boxes(
    parts: Sequence[Holdings], known: dict[BoxKey, DistinctBoxes] | None = None
) -> DistinctBoxes:
    """Return the distinct boxes of one tensor; several holdings are those of the tensor and its aliases.

    The same boxes on other ranks (another stage) share their arrays and intervals through `known`, so that
    what is worked out of them can be found again.
    """
    rank = np.concatenate([part.rank for part in parts])
    lo = np.concatenate([part.lo for part in parts])
    hi = np.concatenate([part.hi for part in parts])
    if len(parts) > 1 or parts[0].explicit:
        lo, hi, origin = make_disjoint(lo, hi)
        rank = rank[origin]
    unique_lo, unique_hi, box = unique_boxes(lo, hi)
    order = np.lexsort((rank, box))
    rank, box = rank[order], box[order]
    fresh = np.ones(len(rank), bool)
    fresh[1:] = (rank[1:] != rank[:-1]) | (box[1:] != box[:-1])
    rank, box = rank[fresh], box[fresh]
    ends = np.searchsorted(box, np.arange(len(unique_lo) + 1))
    everyone = rank.tolist()
    ranks = [tuple(everyone[a:b]) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
    if known is None:
        return DistinctBoxes(unique_lo, unique_hi, ranks, Intervals.of(unique_lo, unique_hi))
    # the shape, too: a scalar's box and no boxes have no bytes
    key: BoxKey = (unique_lo.shape, unique_lo.tobytes(), unique_hi.tobytes())
    if key not in known:
        known[key] = DistinctBoxes(unique_lo, unique_hi, ranks, Intervals.of(unique_lo, unique_hi))
    same = known[key]
    return DistinctBoxes(same.lo, same.hi, ranks, same.intervals)
