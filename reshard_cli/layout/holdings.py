"""Which boxes of one tensor each rank holds, and where they lie in the rank's local tensor.

The local tensor is the rank's shard, padding included; where several tensors are interleaved before the
cut (Megatron's linear_qkv), it is the rank's shard of the fused tensor, and each operand finds its rows
in it. Everything is per geometry, not per tensor: tensors that are cut alike share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reshard_cli.layout.boxes import Ints
from reshard_cli.layout.cut import Shards, cut
from reshard_cli.spec.placement import Placement

__all__ = [
    "Holdings",
    "Interleaved",
    "blocked_holdings",
    "explicit_holdings",
    "interleaved_holdings",
    "placed_holdings",
]


@dataclass(frozen=True, slots=True)
class Holdings:
    """The pieces of one tensor over a whole job.

    rank [n]; lo, hi [n, dims]: the logical box; local_lo [n, dims]: where it starts in the rank's local
    tensor; local_shape [ranks, dims]: that tensor's shape, with padding (all zeros where absent);
    present [ranks]: whether the rank has such a local tensor, be it empty. `explicit` pieces may overlap
    those of other ranks in part; placements never do. first, step [ranks]: the local tensor's index i of
    dim 0 is the logical index first + i * step (padding included), which numbers a rank's experts.
    """

    rank: Ints
    lo: Ints
    hi: Ints
    local_lo: Ints
    local_shape: Ints
    present: np.ndarray[tuple[int], np.dtype[np.bool_]]
    first: Ints
    step: Ints
    explicit: bool = False


@dataclass(frozen=True, slots=True)
class Interleaved:
    """One operand's part in an interleaved storage: its place among the operands, along one dim.

    sizes: each operand's rows; index: which one is meant; num_groups: the groups that each is cut into.
    unzip: rows of the operand's runs of which, inside a group, the even ones lie before the odd ones (a gated
    query has each head's query and then its gate; Megatron keeps a group's queries before its gates); 0: none.
    """

    dim: int
    sizes: tuple[int, ...]
    index: int
    num_groups: int
    unzip: int = 0

    def segments(self) -> tuple[Ints, Ints, Ints]:
        """Return (fused start, logical start, rows) of the runs in which the operand lies in the whole."""
        rows = self.sizes[self.index] // self.num_groups
        group_rows = sum(self.sizes) // self.num_groups
        before = sum(size // self.num_groups for size in self.sizes[: self.index])
        groups = np.arange(self.num_groups, dtype=np.int64)[:, None]
        run = self.unzip or rows
        runs = np.arange(rows // run, dtype=np.int64)[None, :]
        place = np.where(runs % 2, (len(runs[0]) + 1) // 2 + runs // 2, runs // 2) if self.unzip else runs
        fused = groups * group_rows + before + place * run
        logical = groups * rows + runs * run
        return fused.reshape(-1), logical.reshape(-1), np.full(fused.size, run, np.int64)


def placed_holdings(
    shape: tuple[int, ...],
    axes: Mapping[str, int],
    place: Mapping[str, Placement],
    *,
    stage: frozenset[int] | None,
    has_experts: bool,
    pad: Mapping[int, int],
) -> Holdings:
    """Return what each rank holds of a tensor by its placement; empty shards leave no piece."""
    padded = tuple(-(-size // pad.get(dim, 1)) * pad.get(dim, 1) for dim, size in enumerate(shape))
    shards = cut(padded, axes, place, stage=stage, has_experts=has_experts)
    rank, lo, hi, local_lo = _boxes(shards)
    hi = np.minimum(hi, np.array(shape, np.int64).reshape(1, -1))
    return _holdings(shards, rank, lo, hi, local_lo)


def blocked_holdings(
    shape: tuple[int, ...],
    axes: Mapping[str, int],
    place: Mapping[str, Placement],
    dim: int,
    sizes: Sequence[int],
    *,
    stage: frozenset[int] | None,
    has_experts: bool,
) -> Holdings:
    """Return what each rank holds of a tensor whose blocks along `dim` are each cut by themselves.

    A rank's local tensor is its shard of the first block, then of the second, and so on: Mamba's in_proj
    (z, x, B, C, dt), a gated delta net's projections, gate and up in one tensor.
    """
    parts = []
    local_rows: Ints | None = None
    for size, first in zip(sizes, np.cumsum([0, *sizes]), strict=False):
        part = placed_holdings(
            (*shape[:dim], size, *shape[dim + 1 :]), axes, place, stage=stage, has_experts=has_experts, pad={}
        )
        rows = part.local_shape[:, dim]
        local_rows = np.zeros_like(rows) if local_rows is None else local_rows
        lo, hi, local_lo = part.lo.copy(), part.hi.copy(), part.local_lo.copy()
        lo[:, dim] += first
        hi[:, dim] += first
        local_lo[:, dim] += local_rows[part.rank]
        local_rows = local_rows + rows
        parts.append((part, lo, hi, local_lo))
    whole = parts[0][0]
    local_shape = whole.local_shape.copy()
    assert local_rows is not None
    local_shape[:, dim] = local_rows
    return Holdings(
        np.concatenate([part.rank for part, _, _, _ in parts]),
        np.concatenate([lo for _, lo, _, _ in parts]),
        np.concatenate([hi for _, _, hi, _ in parts]),
        np.concatenate([local_lo for _, _, _, local_lo in parts]),
        local_shape,
        whole.present,
        whole.first,
        whole.step,
    )


def interleaved_holdings(
    shape: tuple[int, ...],
    axes: Mapping[str, int],
    place: Mapping[str, Placement],
    fused: Interleaved,
    *,
    stage: frozenset[int] | None,
    has_experts: bool,
) -> Holdings:
    """Return what each rank holds of one operand of a fused tensor that is interleaved before the cut.

    The fused rows are, group by group, each operand's share of the group; a cut may pass through a group.
    """
    dim = fused.dim
    whole = (*shape[:dim], sum(fused.sizes), *shape[dim + 1 :])
    shards = cut(whole, axes, place, stage=stage, has_experts=has_experts)
    rank, lo, hi, local_lo = _boxes(shards)
    start, logical, rows = fused.segments()
    first = np.maximum(lo[:, None, dim], start[None, :])
    last = np.minimum(hi[:, None, dim], (start + rows)[None, :])
    box, run = np.nonzero(first < last)
    out_lo, out_hi, out_local = lo[box].copy(), hi[box].copy(), local_lo[box].copy()
    out_local[:, dim] += first[box, run] - lo[box, dim]
    out_lo[:, dim] = first[box, run] - start[run] + logical[run]
    out_hi[:, dim] = last[box, run] - start[run] + logical[run]
    return _holdings(shards, rank[box], out_lo, out_hi, out_local)


def explicit_holdings(
    dims: int, num_ranks: int, pieces: Sequence[tuple[int, tuple[tuple[int, int], ...]]]
) -> Holdings:
    """Return the holdings of explicit pieces: (rank, box) each.

    A rank's local tensor is the smallest box around all its pieces, so one piece is stored as it is.
    """
    rank = np.array([rank for rank, _ in pieces], np.int64)
    bounds = np.array([box for _, box in pieces], np.int64).reshape(len(pieces), dims, 2)
    lo, hi = bounds[:, :, 0], bounds[:, :, 1]
    first = np.full((num_ranks, dims), np.iinfo(np.int64).max)
    last = np.zeros((num_ranks, dims), np.int64)
    np.minimum.at(first, rank, lo)
    np.maximum.at(last, rank, hi)
    present = np.zeros(num_ranks, bool)
    present[rank] = True
    local_shape = np.where(present[:, None], last - np.minimum(first, last), 0)
    keep = np.all(hi > lo, axis=1)
    start = np.where(present, first[:, 0], 0) if dims else np.zeros(num_ranks, np.int64)
    return Holdings(
        rank[keep], lo[keep], hi[keep], (lo - first[rank])[keep], local_shape, present,
        start, np.ones(num_ranks, np.int64), explicit=True,
    )  # fmt: skip


def _boxes(shards: Shards) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (rank, lo, hi, local_lo) of the shards' boxes; a shard with gaps gives a box per index."""
    ranks = np.nonzero(shards.present & np.all(shards.count > 0, axis=1))[0].astype(np.int64)
    start, count, step = shards.start[ranks], shards.count[ranks], shards.step[ranks]
    if start.shape[1] == 0 or not np.any((step > 1) & (count[:, 0] > 1)):
        return ranks, start, start + count, np.zeros_like(start)
    repeats = np.where(step > 1, count[:, 0], 1)
    owner = np.repeat(np.arange(len(ranks)), repeats)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    lo, hi = start[owner].copy(), (start + count)[owner].copy()
    gapped = step[owner] > 1
    lo[:, 0] += nth * np.where(gapped, step[owner], 0)
    hi[gapped, 0] = lo[gapped, 0] + 1
    local_lo = np.zeros_like(lo)
    local_lo[gapped, 0] = nth[gapped]
    return ranks[owner], lo, hi, local_lo


def _holdings(shards: Shards, rank: Ints, lo: Ints, hi: Ints, local_lo: Ints) -> Holdings:
    keep = np.all(hi > lo, axis=1)  # a shard that is all padding holds nothing
    local_shape = np.where(shards.present[:, None], shards.count, 0)
    first = shards.start[:, 0] if shards.start.shape[1] else np.zeros_like(shards.step)
    return Holdings(
        rank[keep], lo[keep], hi[keep], local_lo[keep], local_shape, shards.present, first, shards.step
    )
