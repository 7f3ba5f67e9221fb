"""Copies between a rank's tensors and its staging, found once and run at every refit.

On the CPU they run as numpy's copies, from a loop that is not Python's: a fifth of a microsecond each where torch
takes two, so that a model of many small tensors is packed almost at memory speed. On a GPU they run as batches of
torch, and one by one where dtypes differ. Copies whose targets are neighbours in one allocation, and whose sources
are too, run as one. Between a GPU and the CPU they go through pinned buffers, if there are any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import repeat
from operator import setitem
from typing import Any

import torch
from torch import Tensor

from reshard_cli.weights.pinned import PinnedBuffers
from reshard_cli.weights.tensors import as_bytes, raw

__all__ = ["Copies"]


class Copies:
    """A list of copies; the views that it holds have to stay where they are."""

    def __init__(self, pinned: Callable[[], PinnedBuffers | None] = lambda: None) -> None:
        """`pinned` is asked when a copy leads from a GPU to the CPU or back."""
        self._ask = pinned
        self._pinned: PinnedBuffers | None = None
        self._across: list[tuple[Tensor, Tensor]] = []
        self._array_targets: list[Any] = []
        self._array_sources: list[Any] = []
        # whole numbers by their width: torch before 2.11 casts all of a batch to its first target's dtype
        self._batches: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        self._casts: list[tuple[Tensor, Tensor]] = []
        self._run: tuple[Tensor, Tensor] | None = None  # bytes, to which the next ones may be neighbours

    def add(self, target: Tensor, source: Tensor) -> None:
        """Add the copy of one view into another of the same shape: bit for bit, or torch's cast."""
        if target.dtype != source.dtype or not (target.is_contiguous() and source.is_contiguous()):
            self._add(target, source)
            return
        target, source = as_bytes(target), as_bytes(source)
        if self._run is not None:
            joined = [_joined(before, one) for before, one in zip(self._run, (target, source), strict=True)]
            if joined[0] is not None and joined[1] is not None:
                self._run = joined[0], joined[1]
                return
            self._add(*self._run)
        self._run = target, source

    def __len__(self) -> int:
        """Return how many copies a run makes; neighbours count as one."""
        batched = sum(len(targets) for targets, _ in self._batches.values())
        single = len(self._array_targets) + len(self._casts) + len(self._across)
        return batched + single + (self._run is not None)

    def _add(self, target: Tensor, source: Tensor) -> None:
        if target.dtype == source.dtype:
            target, source = raw(target), raw(source)
            if target.device.type == source.device.type == "cpu":
                self._array_targets.append(target.numpy())
                self._array_sources.append(source.numpy())
                return
        if target.device.type != source.device.type:
            self._pinned = self._ask()
            if self._pinned is not None:
                self._across.append((target, source))
                return
        if target.dtype != source.dtype:
            self._casts.append((target, source))
            return
        targets, sources = self._batches.setdefault(target.dtype, ([], []))
        targets.append(target)
        sources.append(source)

    def run(self) -> None:
        """Run all of them."""
        if self._run is not None:
            self._add(*self._run)
            self._run = None
        assignments = map(setitem, self._array_targets, repeat(Ellipsis), self._array_sources)
        deque(assignments, maxlen=0)  # runs them all
        if self._batches or self._casts:
            with torch.inference_mode():  # where tensors may be written that were made under it
                for targets, sources in self._batches.values():
                    torch._foreach_copy_(targets, sources)
                for target, source in self._casts:
                    target.copy_(source)
        if self._pinned is not None and self._across:
            self._pinned.run(self._across)


def _joined(one: Tensor, following: Tensor) -> Tensor | None:
    """Return the bytes of both where the second lie behind the first in one allocation, or None."""
    end = one.data_ptr() + one.numel()
    if (
        end != following.data_ptr()
        or one.untyped_storage().data_ptr() != following.untyped_storage().data_ptr()
    ):
        return None
    return one.as_strided((one.numel() + following.numel(),), (1,))
