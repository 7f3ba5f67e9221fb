"""Whether live tensors have memory, and memory of their own: what else is written would be something else's values.

Freed storages (offloading code resizes them to nothing) would be read or written out of bounds. Two tensors on the
same memory, as tied parameters are, end with the values of whichever comes last, unless the document ties them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from reshard_cli.errors import WeightsError
from reshard_cli.layout.storage import RankStorage
from reshard_cli.weights.windows import intersection, window_view, within

__all__ = ["memory_fault", "sharing_faults"]

Place = np.ndarray[tuple[int, ...], np.dtype[np.void]]

_COUNTED = 1 << 20  # elements whose places are counted at most; beyond, they count as shared
_HARD = 100_000  # steps that the exact answer for two strided views may take; beyond, they count as shared


def memory_fault(tensor: Tensor) -> str | None:
    """Say what is wrong with a tensor's memory, or None.

    It has none (meta, fake, a subclass that wraps other tensors), or less than its strides reach, or its values are
    not what lies there (sparse, a lazy conjugate).
    """
    if tensor.device.type == "meta":
        return "has no memory: it is on the meta device"
    if tensor.layout != torch.strided:
        return f"is no dense tensor ({str(tensor.layout).removeprefix('torch.')}): bind its parts, each by a name"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazy conjugate: what lies in its memory is not its values; bind resolve_conj() of it"
    if tensor.numel() == 0:
        return None
    span = tensor.numel() if tensor.is_contiguous() else _span(tensor)
    reach = (tensor.storage_offset() + span) * tensor.element_size()
    there = tensor.untyped_storage().nbytes()
    if there < reach:
        return f"has {there} bytes of memory, and needs {reach}: was it freed?"
    if isinstance(tensor, FakeTensor) or not tensor.data_ptr():
        return f"has no memory of its own: it is a {type(tensor).__name__}; bind the tensors that hold its values"
    return None


def sharing_faults(storages: Sequence[RankStorage], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return what is wrong with tensors that are to be written: elements that are one place in memory.

    The same element of the same logical tensor may be held twice in one place: tied parameters whose document ties
    them (alias), a fused tensor and its part, a transposed one.
    """
    lines = []
    spans = []
    for storage in storages:
        tensor = tensors[storage.name]
        if tensor.numel() == 0:
            continue
        if _overlaps_itself(tensor):
            lines.append(
                f"live tensor {storage.name!r} has several elements in one place (strides {list(tensor.stride())}): "
                f"bind a contiguous one"
            )
            continue
        start = tensor.data_ptr()
        end = start + _span(tensor) * tensor.element_size()
        spans.append((tensor.device.index or 0, start, end, storage))
    spans.sort(key=lambda one: one[:3])
    place_of = cache(lambda name: _place(tensors[name]))  # few are asked for
    open_spans: list[tuple[int, int, int, RankStorage]] = []
    for span in spans:
        device, start, _, storage = span
        open_spans = [one for one in open_spans if one[0] == device and one[2] > start]
        for _, _, _, other in open_spans:
            if _share(place_of(other.name), place_of(storage.name)) and _clash(
                other, tensors[other.name], storage, tensors[storage.name]
            ):
                lines.append(
                    f"live tensors {other.name!r} and {storage.name!r} share memory, and the document gives them "
                    f"values of their own: tie them there (alias: {{{storage.name}: {other.name}}}), or bind copies"
                )
        open_spans.append(span)
    return lines


def _span(tensor: Tensor) -> int:
    """Return how many elements lie from the first to the last, both counted."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _overlaps_itself(tensor: Tensor) -> bool:
    covered = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if step == 0:
            return True
        if step < covered:  # steps that are no multiples of each other: only counting tells
            return tensor.numel() > _COUNTED or _num_places(tensor) < tensor.numel()
        covered = step * (size - 1) + covered
    return False


def _num_places(tensor: Tensor) -> int:
    places = np.zeros(1, np.int64)
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = np.add.outer(places, np.arange(size) * step).ravel()
    return len(np.unique(places))


def _clash(one: RankStorage, first: Tensor, other: RankStorage, second: Tensor) -> bool:
    """Say whether an element that two tensors share is not the same one of the same logical tensor."""
    if one.windows == other.windows and _at(first) == _at(second):
        return False
    if one.has_padding or other.has_padding:
        return True  # which is written, too
    try:
        views = [
            [window_view(it, window, held) for window in it.windows]
            for it, held in ((one, first), (other, second))
        ]
    except WeightsError:
        return True
    for window, view in zip(one.windows, views[0], strict=True):
        for twin, its_view in zip(other.windows, views[1], strict=True):
            if not _share(_place(view), _place(its_view)):
                continue
            box = (
                None if window.tensor != twin.tensor else intersection(window.lo, window.hi, twin.lo, twin.hi)
            )
            # with equal steps from an equal place, elements of other coordinates are at other places
            if box is None or _at(within(view, window.lo, *box)) != _at(within(its_view, twin.lo, *box)):
                return True
    return False


def _at(tensor: Tensor) -> tuple[object, ...]:
    """Return where a tensor's elements are, in their order: along a dim of one element no step is taken."""
    steps = tuple(step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    return tensor.data_ptr(), tuple(tensor.shape), steps, tensor.dtype


def _share(first: Place, second: Place) -> bool:
    """Say whether two places have a byte in common; nothing is read, so they may be on a GPU."""
    try:
        return bool(np.shares_memory(first, second, max_work=_HARD))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _place(tensor: Tensor) -> Place:
    """Return a tensor's place in memory as an array that is never read."""
    size = tensor.element_size()
    interface = {
        "version": 3,
        "data": (tensor.data_ptr(), True),
        "shape": tuple(tensor.shape),
        "strides": tuple(step * size for step in tensor.stride()),
        "typestr": f"|V{size}",
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
