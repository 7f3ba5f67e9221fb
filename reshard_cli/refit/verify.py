"""Compares every destination element with a value that was found without the plan.

Each storage window names a logical box; the box is asked of an independent source (the checkpoint read
again, or the synthetic function) and compared bit for bit, a bounded number of elements at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from reshard_cli.errors import VerifyError
from reshard_cli.layout.storage import RankStorage, Window
from reshard_cli.plan.build import Plan
from reshard_cli.spec.casts import SCALE_SUFFIX
from reshard_cli.weights.tensors import same_bits, torch_dtype, typed
from reshard_cli.weights.windows import Corner, Source, within

__all__ = ["verify_rank", "wire_dtypes"]

_CHUNK = 1 << 20  # elements compared at a time


def wire_dtypes(plan: Plan) -> dict[str, str]:
    """Return by tensor the dtype through which its values are cast; a cast in blocks has a rule of its own."""
    found = {}
    for pair in plan.pairs:
        found[pair.name] = pair.destination_dtype if pair.quantised else pair.wire_dtype
        if pair.quantised == "receiver":
            found[pair.name + SCALE_SUFFIX] = "float32"
    return found


def verify_rank(
    rank: int,
    storages: Sequence[RankStorage],
    buffers: Mapping[str, Tensor],
    truth: Source,
    wire_dtypes: Mapping[str, str],
) -> int:
    """Return the number of elements compared. Raises VerifyError naming tensor, piece and rank.

    `wire_dtypes`: the dtype in which each tensor travelled; a cast goes through it.
    """
    compared = 0
    for storage in storages:
        flat = typed(buffers[storage.name], storage.dtype)
        covered = 0
        for window in storage.windows:
            compared += _verify_window(rank, storage, flat, window, truth, wire_dtypes[window.tensor])
            covered += window.num_elements
        if covered < storage.num_elements and not storage.keep_padding:
            _verify_padding(rank, storage, flat, covered)
    return compared


def _verify_window(
    rank: int, storage: RankStorage, flat: Tensor, window: Window, truth: Source, wire: str
) -> int:
    sizes = [b - a for a, b in zip(window.lo, window.hi, strict=True)]
    view = torch.as_strided(flat, sizes, window.strides, flat.storage_offset() + window.offset)
    seen = 0
    for chunk_lo, chunk_hi in _chunks(window.lo, window.hi):
        for lo, hi, values in truth.windows(window.tensor, chunk_lo, chunk_hi):
            mine = within(view, window.lo, lo, hi)
            expected = values.to(torch_dtype(wire)).to(flat.dtype).to(flat.device)
            equal = same_bits(mine, expected)
            if not bool(equal.all()):
                wrong = int((~equal).sum())
                at = [int(i) + a for i, a in zip((~equal).nonzero()[0], lo, strict=True)]
                raise VerifyError(
                    f"verification failed on rank {rank}: tensor {window.tensor!r} (storage {storage.name!r}), "
                    f"piece {_box(window.lo, window.hi)}: element {at} differs, "
                    f"as do {wrong - 1} more of the {mine.numel()} compared with it"
                )
            seen += mine.numel()
    if seen < window.num_elements:
        raise VerifyError(
            f"verification on rank {rank}: of tensor {window.tensor!r}, piece {_box(window.lo, window.hi)}, "
            f"only {seen} of {window.num_elements} elements could be compared"
        )
    return window.num_elements


def _verify_padding(rank: int, storage: RankStorage, flat: Tensor, covered: int) -> None:
    padding = torch.ones(storage.num_elements, dtype=torch.bool, device=flat.device)
    for window in storage.windows:
        sizes = [b - a for a, b in zip(window.lo, window.hi, strict=True)]
        torch.as_strided(padding, sizes, window.strides, window.offset).fill_(False)
    raw = flat.view(torch.uint8).view(storage.num_elements, -1)
    if bool(raw[padding].any()):
        raise VerifyError(
            f"verification failed on rank {rank}: padding of storage {storage.name!r} is not zero "
            f"({storage.num_elements - covered} padding elements)"
        )


def _chunks(lo: Corner, hi: Corner) -> Iterator[tuple[Corner, Corner]]:
    """Yield parts of a box of at most _CHUNK elements, cut along its outer dims."""
    total = 1
    for a, b in zip(lo, hi, strict=True):
        total *= b - a
    dim = next((d for d, (a, b) in enumerate(zip(lo, hi, strict=True)) if b - a > 1), None)
    if total <= _CHUNK or dim is None:
        yield lo, hi
        return
    rows = max(1, (hi[dim] - lo[dim]) * _CHUNK // total)
    for start in range(lo[dim], hi[dim], rows):
        stop = min(start + rows, hi[dim])
        yield from _chunks((*lo[:dim], start, *lo[dim + 1 :]), (*hi[:dim], stop, *hi[dim + 1 :]))


def _box(lo: Corner, hi: Corner) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(lo, hi, strict=True)) + "]"
