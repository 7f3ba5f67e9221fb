"""Finds a logical box in a rank's storages: the views that hold it, without a copy."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from reshard_cli.errors import WeightsError
from reshard_cli.layout.storage import RankStorage, Window
from reshard_cli.plan.schedule import Fragment
from reshard_cli.weights.tensors import as_bytes, typed

__all__ = [
    "Boxed",
    "Corner",
    "Source",
    "StorageWindows",
    "contiguous_bytes",
    "intersection",
    "parts_of",
    "window_view",
    "within",
]

Corner = tuple[int, ...]
Boxed = tuple[Corner, Corner, Tensor]


class Source(Protocol):
    """Whatever gives the values of logical boxes."""

    def windows(self, name: str, lo: Corner, hi: Corner) -> Iterator[Boxed]:
        """Yield (lo, hi, values) of boxes that together are the box asked for."""
        ...

    def in_place(self, name: str) -> bool:
        """Say whether the tensor's bytes lie somewhere as they are, rather than being made when asked for."""
        ...


def intersection(lo: Corner, hi: Corner, other_lo: Corner, other_hi: Corner) -> tuple[Corner, Corner] | None:
    """Return the box that both boxes share, or None."""
    low = tuple(max(a, b) for a, b in zip(lo, other_lo, strict=True))
    high = tuple(min(a, b) for a, b in zip(hi, other_hi, strict=True))
    return (low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None


def within(view: Tensor, origin: Corner, lo: Corner, hi: Corner) -> Tensor:
    """Return the part lo..hi of a view whose first element is at `origin`."""
    for dim, (start, stop, at) in enumerate(zip(lo, hi, origin, strict=True)):
        if start != at or stop - start != view.shape[dim]:
            view = view.narrow(dim, start - at, stop - start)
    return view


def window_view(storage: RankStorage, window: Window, buffer: Tensor) -> Tensor:
    """Return the view of a window into a storage, without a copy.

    `buffer` is the storage's bytes, flat and contiguous, or a tensor of its shape and dtype with any strides.
    """
    sizes = [b - a for a, b in zip(window.lo, window.hi, strict=True)]
    if str(buffer.dtype) == f"torch.{storage.dtype}" and tuple(buffer.shape) == storage.shape:
        start, strides = _in_strides(storage, window, buffer)
        return torch.as_strided(buffer, sizes, strides, buffer.storage_offset() + start)
    flat = typed(buffer, storage.dtype)
    return torch.as_strided(flat, sizes, window.strides, flat.storage_offset() + window.offset)


def _in_strides(storage: RankStorage, window: Window, buffer: Tensor) -> tuple[int, tuple[int, ...]]:
    """Return a window's offset and strides in a tensor with strides of its own.

    Raises WeightsError where a dim of the window runs through several dims of the tensor that do not follow each other.
    """
    if buffer.is_contiguous():
        return window.offset, window.strides
    # of each dim: the row-major step, the tensor's step, and the steps left to its end
    dims: list[tuple[int, int, int]] = []
    start, left, row_major = 0, window.offset, math.prod(storage.shape)
    for size, stride in zip(storage.shape, buffer.stride(), strict=True):
        row_major //= max(size, 1)
        if size > 1:
            at, left = divmod(left, row_major)
            start += at * stride
            if dims and dims[-1][1] == size * stride:  # the two follow each other, and are one
                _, _, room = dims.pop()
                dims.append((row_major, stride, room * size + size - 1 - at))
            else:
                dims.append((row_major, stride, size - 1 - at))
    strides = [0] * len(window.strides)
    for dim in sorted(range(len(strides)), key=lambda dim: window.strides[dim], reverse=True):
        last = window.hi[dim] - window.lo[dim] - 1
        if last == 0:
            continue  # along a dim of one element no step is taken, whatever its stride says
        for number, (step, stride, room) in enumerate(dims):
            steps = window.strides[dim] // step
            if window.strides[dim] % step == 0 and 0 < steps * last <= room:
                strides[dim] = steps * stride
                dims[number] = step, stride, room - steps * last
                break
        else:
            raise WeightsError(
                f"live tensor {storage.name!r}: shape {list(storage.shape)} with strides {list(buffer.stride())} shows "
                f"tensor {window.tensor!r} in no order that can be written in place: make it contiguous"
            )
    return start, tuple(strides)


def parts_of(lo: Corner, hi: Corner, most: int) -> Iterator[tuple[Corner, Corner]]:
    """Yield boxes of at most `most` elements (or one row) that together are the box, in order."""
    for dim in range(len(lo)):
        rows = hi[dim] - lo[dim]
        inner = math.prod(b - a for a, b in zip(lo[dim + 1 :], hi[dim + 1 :], strict=True))
        if rows * inner <= most:
            break
        if rows > 1:
            step = max(1, most // inner)
            for start in range(lo[dim], hi[dim], step):
                stop = min(start + step, hi[dim])
                part = (*lo[:dim], start, *lo[dim + 1 :]), (*hi[:dim], stop, *hi[dim + 1 :])
                yield from parts_of(*part, most) if step == 1 and inner > most else iter([part])
            return
    yield lo, hi


class StorageWindows:
    """The windows of one or more ranks' storages, over their buffers by storage name."""

    def __init__(self) -> None:
        self._views: dict[str, list[Boxed]] = defaultdict(list)

    def add(self, storages: Iterable[RankStorage], buffers: Mapping[str, Tensor]) -> None:
        """Index the windows of one rank's storages; `buffers` are as in `window_view`."""
        for storage in storages:
            for window in storage.windows:
                view = window_view(storage, window, buffers[storage.name])
                self._views[window.tensor].append((window.lo, window.hi, view))

    def in_place(self, name: str) -> bool:
        """Say that the bytes lie where they are held."""
        return True

    def views(self, name: str) -> list[Boxed]:
        """Return all that is held of a tensor."""
        return list(self._views.get(name, ()))

    def windows(self, name: str, lo: Corner, hi: Corner) -> Iterator[Boxed]:
        """Yield the parts of the box that are held here."""
        for own_lo, own_hi, view in self._views.get(name, ()):
            if own_lo == lo and own_hi == hi:
                yield lo, hi, view
                continue
            shared = intersection(lo, hi, own_lo, own_hi)
            if shared is not None:
                yield (*shared, within(view, own_lo, *shared))


def contiguous_bytes(source: Source, name: str, fragment: Fragment, dtype: str) -> Tensor | None:
    """Return the fragment's bytes in their place, or None where they are scattered or of another dtype."""
    found = list(source.windows(name, fragment.lo, fragment.hi))
    start, stop = fragment.start, fragment.stop
    if len(found) != 1 or found[0][:2] != (fragment.lo, fragment.hi) or not found[0][2].is_contiguous():
        boxes = list(fragment.boxes())
        if len(boxes) != 1:
            return None
        lo, hi, _ = boxes[0]
        found = list(source.windows(name, lo, hi))
        start, stop = 0, stop - start
    if len(found) != 1:
        return None
    view = found[0][2]
    if not view.is_contiguous() or view.numel() < stop or str(view.dtype) != f"torch.{dtype}":
        return None
    return as_bytes(view)[start * fragment.item_size : stop * fragment.item_size]
