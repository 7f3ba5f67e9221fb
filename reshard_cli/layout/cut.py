"""What the axes of a mesh do to one tensor: the shard of every rank, for all ranks at once.

A shard is start and count per dim, of the padded tensor. Every placement keeps a shard an interval in each
dim; only experts dealt out in turn leave gaps, so dim 0 of an expert tensor also has a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from reshard_cli.layout.boxes import Ints
from reshard_cli.spec.placement import Expert, Placement, Shard, Stage

__all__ = ["Shards", "coordinates", "cut"]


@dataclass(frozen=True, slots=True)
class Shards:
    """The shard of each rank. start, count: [ranks, dims], padded coordinates; step: [ranks], of dim 0.

    `present` is False for ranks whose stage does not hold the tensor at all.
    """

    start: Ints
    count: Ints
    step: Ints
    present: np.ndarray[tuple[int], np.dtype[np.bool_]]


def coordinates(axes: Mapping[str, int]) -> dict[str, Ints]:
    """Return each axis's coordinate of every rank: row-major, outermost axis first."""
    sizes = tuple(axes.values())
    grid = np.indices(sizes, dtype=np.int64).reshape(len(sizes), -1)
    return {axis: grid[index] for index, axis in enumerate(axes)}


def cut(
    shape: tuple[int, ...],
    axes: Mapping[str, int],
    place: Mapping[str, Placement],
    *,
    stage: frozenset[int] | None = None,
    has_experts: bool = False,
) -> Shards:
    """Return every rank's shard of a tensor of this (padded) shape, axes applied in the order of `place`.

    `shard(d)` cuts what the axes before it left, as `torch.chunk` does: pieces of ceil(length / n), the
    last ones short or empty. So `{tp: shard(0), dp: shard(0)}` is FSDP2 over TP (DTensor's _StridedShard).
    `expert` cuts dim 0 into blocks of floor, the first ranks one more (vLLM's linear expert placement).
    Dims of `shard` count from the tensor as named, so they are one higher in an expert tensor.
    """
    coordinate = coordinates(axes)
    num_ranks = len(next(iter(coordinate.values())))
    dims = len(shape)
    start = np.zeros((num_ranks, dims), np.int64)
    count = np.tile(np.array(shape, np.int64).reshape(1, dims), (num_ranks, 1))
    step = np.ones(num_ranks, np.int64)
    present = np.ones(num_ranks, bool)
    for axis, placement in place.items():
        at, size = coordinate[axis], axes[axis]
        if isinstance(placement, Stage):
            assert stage is not None
            present &= np.isin(at, list(stage))
        elif isinstance(placement, Expert):
            if placement.round_robin:
                start[:, 0] += at * step
                count[:, 0] = np.maximum(0, -(-(count[:, 0] - at) // size))
                step = step * size
            else:
                floor, extra = count[:, 0] // size, count[:, 0] % size
                start[:, 0] += (at * floor + np.minimum(at, extra)) * step
                count[:, 0] = floor + (at < extra)
        elif isinstance(placement, Shard):
            dim = placement.dim + (1 if has_experts and placement.dim >= 0 else 0)
            parts = placement.parts or size
            at = at // (size // parts)
            chunk = -(-count[:, dim] // parts)
            offset = np.minimum(at * chunk, count[:, dim])
            start[:, dim] += offset
            count[:, dim] = np.minimum(chunk, count[:, dim] - offset)
    return Shards(start, count, step, present)
