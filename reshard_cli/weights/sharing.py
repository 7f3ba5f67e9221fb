"""Whether live tensors have memory, and memory of their own: what else is written would be something else's values.

Freed storages (offloading code resizes them to nothing) would be read or written out of bounds. Two tensors on the
same memory, as tied parameters are, end with the values of whichever comes last, unless the document ties them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np
from torch import Tensor

from reshard_cli.layout.storage import RankStorage

__all__ = ["memory_fault", "sharing_faults"]

_HARD = 100_000  # steps that the exact answer for two strided views may take; beyond, they count as shared


def memory_fault(tensor: Tensor) -> str | None:
    """Say what is wrong with a tensor's memory, or None: it has none (meta), or less than its strides reach."""
    if tensor.device.type == "meta":
        return "has no memory: it is on the meta device"
    if tensor.numel() == 0:
        return None
    span = tensor.numel() if tensor.is_contiguous() else _span(tensor)
    reach = (tensor.storage_offset() + span) * tensor.element_size()
    there = tensor.untyped_storage().nbytes()
    return None if there >= reach else f"has {there} bytes of memory, and needs {reach}: was it freed?"


def sharing_faults(storages: Sequence[RankStorage], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return what is wrong with tensors that are to be written: elements that are one place in memory.

    Tensors that hold the same elements of the same logical tensors (aliases) may lie in one place.
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
        spans.append(
            (tensor.device.index or 0, start, start + _span(tensor) * tensor.element_size(), storage)
        )
    spans.sort(key=lambda one: one[:3])
    open_spans: list[tuple[int, int, int, RankStorage]] = []
    for span in spans:
        device, start, _, storage = span
        open_spans = [one for one in open_spans if one[0] == device and one[2] > start]
        for _, _, _, other in open_spans:
            if not _tied(other, tensors[other.name], storage, tensors[storage.name]) and _share(
                tensors[other.name], tensors[storage.name]
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
        if step < covered:
            return True
        covered = step * (size - 1) + covered
    return False


def _tied(one: RankStorage, first: Tensor, other: RankStorage, second: Tensor) -> bool:
    return one.windows == other.windows and (first.data_ptr(), first.stride(), first.dtype) == (
        second.data_ptr(),
        second.stride(),
        second.dtype,
    )


def _share(first: Tensor, second: Tensor) -> bool:
    """Say whether two tensors have a byte in common; nothing is read, so they may be on a GPU."""
    try:
        share = np.shares_memory(_place(first), _place(second), max_work=_HARD)  # type: ignore[arg-type]
        return bool(share)
    except np.exceptions.TooHardError:
        return True


def _place(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
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
