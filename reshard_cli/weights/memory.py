"""A source rank's storages in memory, as a live training rank holds them, filled from another source."""

from __future__ import annotations

import torch

from reshard_cli.layout.job import JobLayout
from reshard_cli.layout.storage import rank_storages
from reshard_cli.spec.dtypes import item_size
from reshard_cli.weights.tensors import copy_exact
from reshard_cli.weights.windows import Source, StorageWindows, window_view, within

__all__ = ["held_in_memory"]


def held_in_memory(layout: JobLayout, rank: int, origin: Source, device: torch.device) -> StorageWindows:
    """Return the storages of one rank of a job with the values of `origin`."""
    storages = rank_storages(layout, rank)
    buffers = {
        one.name: torch.zeros(one.num_elements * item_size(one.dtype), dtype=torch.uint8, device=device)
        for one in storages
    }
    held = StorageWindows()
    held.add(storages, buffers)
    for storage in storages:
        for window in storage.windows:
            view = window_view(storage, window, buffers[storage.name])
            for lo, hi, values in origin.windows(window.tensor, window.lo, window.hi):
                copy_exact(within(view, window.lo, lo, hi), values.to(device))
    return held
