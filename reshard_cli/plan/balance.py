"""Shares bytes out among the ranks that could send (or take) them, so that the busiest has least to do.

Bytes come in sets: those that only the ranks of a set hold. Filling each set's bytes into its least loaded
members, over and over, converges to the division whose maximum is the least possible. The bound that
proves it: no division can give the ranks H together less than the bytes that only ranks of H hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard_cli.layout.boxes import Ints

__all__ = ["Floats", "RankSets", "best_maximum", "least_maximum", "share_out"]

Floats = NDArray[np.float64]
_PASSES = 200
_CLOSE = 1e-4


@dataclass(slots=True)
class RankSets:
    """Distinct sets of ranks, flattened: set i is members[offsets[i]:offsets[i+1]], sorted."""

    members: Ints
    offsets: Ints

    def of(self, index: int) -> Ints:
        """Return the ranks of one set."""
        return self.members[self.offsets[index] : self.offsets[index + 1]]

    @property
    def sizes(self) -> Ints:
        """The number of ranks of each set."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1


def share_out(sets: RankSets, amounts: Ints, num_ranks: int) -> Floats:
    """Return how much of each set's amount each member gets, aligned with `sets.members`.

    In sixteenths of a byte: ranks on unlike processors may add up in another order, and come to the same
    plan all the same, as sums of such numbers are exact.
    """
    shares = np.zeros(len(sets.members))
    loads = np.zeros(num_ranks)
    sizes = sets.sizes
    single = sizes == 1
    at = sets.offsets[:-1][single]
    shares[at] = amounts[single]
    np.add.at(loads, sets.members[at], amounts[single])
    several = [i for i in np.nonzero(sizes > 1)[0] if amounts[i] > 0]
    several.sort(key=lambda i: (sizes[i], i))
    for _ in range(_PASSES):
        before = loads.copy()
        for index in several:
            start, stop = sets.offsets[index], sets.offsets[index + 1]
            members = sets.members[start:stop]
            others = loads[members] - shares[start:stop]
            filled = _fill(others, float(amounts[index]))
            loads[members] = others + filled
            shares[start:stop] = filled
        if len(several) <= 1 or np.max(np.abs(loads - before)) <= _CLOSE * max(1.0, loads.max()):
            break
    return np.rint(shares * 16) / 16


def _fill(loads: Floats, amount: float) -> Floats:
    """Pour `amount` onto the lowest loads until they stand level; return what each one got."""
    order = np.sort(loads)
    poured = np.arange(1, len(order) + 1) * order - np.cumsum(order)
    lowest = int(np.searchsorted(poured, amount, side="right"))
    level = (amount + order[:lowest].sum()) / lowest
    got = np.maximum(level - loads, 0.0)
    total = got.sum()
    filled: Floats = got * (amount / total) if total > 0 else got
    return filled


def best_maximum(sets: RankSets, amounts: Ints, shares: Floats, num_ranks: int) -> float:
    """Return a lower bound of the busiest rank's load over every possible division.

    For a set of ranks H the bound is the bytes that only ranks of H hold over |H|. The sets tried are
    those of the ranks above each load of the given division, which contain the best one when the division
    is the least possible; in any case the result is a true bound.
    """
    return least_maximum(sets, amounts, np.bincount(sets.members, shares, minlength=num_ranks))


def least_maximum(sets: RankSets, amounts: Ints, loads: NDArray[Any]) -> float:
    """Return that bound where the given division is known by its ranks' loads."""
    if not len(amounts) or loads.max() <= 0:
        return 0.0
    lowest = np.minimum.reduceat(loads[sets.members], sets.offsets[:-1])
    order = np.argsort(-lowest, kind="stable")
    ranked = np.sort(loads)[::-1]
    # ranks in H: those loaded at least as much as the threshold; a set is inside H if its lowest is
    inside = np.cumsum(amounts[order])
    slack = 1e-3 * ranked[0]
    count = np.searchsorted(-ranked, -(lowest[order] - slack), side="right")
    upto = np.searchsorted(-lowest[order], -(lowest[order] - slack), side="right") - 1
    return float(np.max(inside[upto] / count))
