"""What NCCL M2N carries of a refit, tensor after tensor, before the plan's own rounds.

M2N takes and gives contiguous shards of one dtype. Where a rank's shard lies in one piece of its storage, it goes
from or to there; else it is laid out in a buffer, with the casts that copies make.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reshard_cli.plan.build import Plan
from reshard_cli.spec.dtypes import item_size
from reshard_cli.transport.m2n import M2n
from reshard_cli.weights.tensors import copy_exact, typed
from reshard_cli.weights.windows import Corner, Source, within

__all__ = ["carry"]


def carry(
    plan: Plan,
    rank: int,
    source: Source | None,
    destination: Source | None,
    device: torch.device,
    m2n: M2n,
) -> int:
    """Move all tensors of the route `m2n`; return the bytes of the buffer that this rank needed for them.

    `source` and `destination`: what this world rank has to send from and to write to. Raises PeerLostError.
    """
    assert plan.m2n is not None
    buffer: list[Tensor] = []

    def room(shape: Corner, dtype: str) -> Tensor:
        if not buffer:
            assert plan.m2n is not None
            buffer.append(torch.empty(plan.m2n.buffer_bytes, dtype=torch.uint8, device=device))
        return typed(buffer[0][: math.prod(shape) * item_size(dtype)], dtype).view(shape)

    for one in plan.m2n.carried:
        have, want = one.source.box(rank, one.shape), one.destination.box(rank, one.shape)
        for index in one.tensors:
            name = plan.pairs[index].name
            outgoing = incoming = place = None
            if have is not None:
                assert source is not None
                outgoing = _in_place(source, name, *have, one.dtype, device)
                if outgoing is None:
                    outgoing = room(one.source.local_shape(one.shape), one.dtype)
                    for lo, hi, values in source.windows(name, *have):
                        copy_exact(within(outgoing, have[0], lo, hi), values)
            if want is not None:
                assert destination is not None
                place = _in_place(destination, name, *want, one.dtype, device)
                incoming = room(one.destination.local_shape(one.shape), one.dtype) if place is None else place
            m2n.reshard(name, one, outgoing, incoming)
            if want is not None and incoming is not None and place is None:
                assert destination is not None
                for lo, hi, values in destination.windows(name, *want):
                    copy_exact(values, within(incoming, want[0], lo, hi))
    m2n.wait()
    return sum(one.numel() for one in buffer)


def _in_place(
    held: Source, name: str, lo: Corner, hi: Corner, dtype: str, device: torch.device
) -> Tensor | None:
    """Return the box where it lies, or None where it is in parts, strided, of another dtype or elsewhere."""
    if not held.in_place(name):
        return None
    found = list(held.windows(name, lo, hi))
    if len(found) != 1 or found[0][:2] != (lo, hi):
        return None
    view = found[0][2]
    right = view.is_contiguous() and str(view.dtype) == f"torch.{dtype}" and view.device == device
    return view if right else None
