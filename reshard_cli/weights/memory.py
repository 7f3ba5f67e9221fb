"""A rank's storages in memory: zeroed, or as a live training rank holds them, filled from another source."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from reshard_cli.layout.job import JobLayout
from reshard_cli.layout.storage import RankStorage, rank_storages
from reshard_cli.spec.dtypes import item_size
from reshard_cli.weights.tensors import copy_exact
from reshard_cli.weights.windows import Source, StorageWindows, window_view, within

__all__ = ["held_in_memory", "zeroed"]

_ALIGN = 16


def zeroed(storages: Sequence[RankStorage], device: torch.device) -> dict[str, Tensor]:
    """Return zeroed bytes for each storage, by name.

    On the CPU they are cut from one allocation, in order, so that what is copied into neighbours is one copy. On a GPU
    each has its own: torch's allocator finds room for many tensors where it has none for their sum in one piece.
    """
    sizes = [one.num_elements * item_size(one.dtype) for one in storages]
    if device.type != "cpu":
        pieces = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
        return {one.name: piece for one, piece in zip(storages, pieces, strict=True)}
    ends = list(accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes))
    whole = torch.zeros(ends[-1] if ends else 0, dtype=torch.uint8)
    starts = [0, *ends][: len(sizes)]
    return {
        one.name: whole[start : start + size]
        for one, start, size in zip(storages, starts, sizes, strict=True)
    }


def held_in_memory(layout: JobLayout, rank: int, origin: Source, device: torch.device) -> StorageWindows:
    """Return the storages of one rank of a job with the values of `origin`."""
    storages = rank_storages(layout, rank)
    buffers = zeroed(storages, device)
    held = StorageWindows()
    held.add(storages, buffers)
    for storage in storages:
        for window in storage.windows:
            view = window_view(storage, window, buffers[storage.name])
            for lo, hi, values in origin.windows(window.tensor, window.lo, window.hi):
                copy_exact(within(view, window.lo, lo, hi), values.to(device))
    return held
