"""What a job holds of a tensor's block scales: the boxes of the tensor itself, counted in blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reshard_cli.layout.boxes import Ints
from reshard_cli.layout.holdings import Holdings

__all__ = ["CutBlock", "cut_block", "scaled_holdings"]


class CutBlock(ValueError):
    """A piece ends inside a block, so that the block's scale would belong to two pieces."""


def cut_block(holdings: Holdings, shape: tuple[int, ...], size: int) -> str | None:
    """Return in words the first edge of a piece that cuts a block of the last two dims; None if none does."""
    whole = np.array(shape, np.int64)
    for dim in (len(shape) - 2, len(shape) - 1):
        for edge, free in ((holdings.lo, False), (holdings.hi, True)):
            column = edge[:, dim]
            wrong = column % size != 0
            if free:
                wrong &= column != whole[dim]
            at = np.nonzero(wrong)[0]
            if len(at):
                return (
                    f"rank {int(holdings.rank[at[0]])}'s shard {'ends' if free else 'begins'} at {int(column[at[0]])} "
                    f"of dim {dim - len(shape)}, inside a block of {size}"
                )
    return None


def scaled_holdings(holdings: Holdings, shape: tuple[int, ...], size: int, *, cover: bool) -> Holdings:
    """Return the pieces of the scales of a tensor of this shape and these pieces.

    cover: a block that pieces cut belongs to each of them; else that raises CutBlock. So does a piece that
    does not begin at a block of its rank's own tensor.
    """
    told = None if cover else cut_block(holdings, shape, size)
    if told is not None:
        raise CutBlock(told)
    lo, hi = _blocks(holdings.lo, size, up=False), _blocks(holdings.hi, size, up=True)
    within = holdings.local_lo[:, -2:] % size
    if np.any(within):
        rank = int(holdings.rank[np.nonzero(np.any(within, axis=1))[0][0]])
        raise CutBlock(f"rank {rank} holds a piece that begins inside a block of {size} of its own tensor")
    local_shape = _blocks(holdings.local_shape, size, up=True)
    if cover:
        # a shard that begins inside a block has a share in one block more than its own size has
        ends = np.zeros_like(local_shape)
        np.maximum.at(ends, holdings.rank, _blocks(holdings.local_lo, size, up=False) + hi - lo)
        local_shape = np.maximum(local_shape, ends)
    return replace(
        holdings, lo=lo, hi=hi, local_lo=_blocks(holdings.local_lo, size, up=False), local_shape=local_shape
    )


def _blocks(positions: Ints, size: int, *, up: bool) -> Ints:
    """Return positions [n, dims] with the last two dims counted in blocks."""
    found = positions.copy()
    found[:, -2:] = -(-found[:, -2:] // size) if up else found[:, -2:] // size
    return found
