"""Compares every destination element with a value that was found without the plan.

Each storage window names a logical box; the box is asked of an independent source (the checkpoint read
again, or the synthetic function) and compared bit for bit, a bounded number of elements at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from reshard_cli.errors import VerifyError
from reshard_cli.layout.storage import RankStorage, Window
from reshard_cli.plan.build import Plan
from reshard_cli.spec.casts import SCALE_SUFFIX
from reshard_cli.weights.tensors import as_bytes, same_bits, torch_dtype
from reshard_cli.weights.windows import Corner, Source, parts_of, window_view, within

__all__ = ["CHUNK", "shown_box", "verify_padding", "verify_rank", "wire_dtypes"]

CHUNK = 1 << 20  # elements compared at a time


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
        buffer = buffers[storage.name]
        for window in storage.windows:
            compared += _verify_window(rank, storage, buffer, window, truth, wire_dtypes[window.tensor])
        verify_padding(rank, storage, buffer)
    return compared


def _verify_window(
    rank: int, storage: RankStorage, buffer: Tensor, window: Window, truth: Source, wire: str
) -> int:
    view = window_view(storage, window, buffer)
    seen = 0
    for chunk_lo, chunk_hi in parts_of(window.lo, window.hi, CHUNK):
        for lo, hi, values in truth.windows(window.tensor, chunk_lo, chunk_hi):
            mine = within(view, window.lo, lo, hi)
            expected = values.to(torch_dtype(wire)).to(view.dtype).to(view.device)
            equal = same_bits(mine, expected)
            if not bool(equal.all()):
                wrong = int((~equal).sum())
                at = [int(i) + a for i, a in zip((~equal).nonzero()[0], lo, strict=True)]
                raise VerifyError(
                    f"verification failed on rank {rank}: tensor {window.tensor!r} (storage {storage.name!r}), "
                    f"piece {shown_box(window.lo, window.hi)}: element {at} differs, "
                    f"as do {wrong - 1} more of the {mine.numel()} compared with it"
                )
            seen += mine.numel()
    if seen < window.num_elements:
        raise VerifyError(
            f"verification on rank {rank}: of tensor {window.tensor!r}, piece {shown_box(window.lo, window.hi)}, "
            f"only {seen} of {window.num_elements} elements could be compared"
        )
    return window.num_elements


def verify_padding(rank: int, storage: RankStorage, buffer: Tensor) -> None:
    """Check that what belongs to no tensor is zero, where the document wants it so. Raises VerifyError."""
    if not storage.has_padding or storage.keep_padding:
        return
    padding = torch.ones(storage.num_elements, dtype=torch.bool, device=buffer.device)
    for window in storage.windows:
        sizes = [b - a for a, b in zip(window.lo, window.hi, strict=True)]
        torch.as_strided(padding, sizes, window.strides, window.offset).fill_(False)
    data = as_bytes(buffer.contiguous()).view(storage.num_elements, -1)
    if bool(data[padding].any()):
        raise VerifyError(
            f"verification failed on rank {rank}: padding of storage {storage.name!r} is not zero "
            f"({int(padding.sum())} padding elements)"
        )


def shown_box(lo: Corner, hi: Corner) -> str:
    """Return a box for a message, as [0:4, 8:16]."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(lo, hi, strict=True)) + "]"
