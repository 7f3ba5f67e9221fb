"""Where values land that this side casts in blocks: in their own dtype, laid out as the storages are.

The blocks of a tensor may come from several senders, in several rounds, so the cast waits until all of its
values are there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reshard_cli.layout.storage import RankStorage
from reshard_cli.plan.build import Plan
from reshard_cli.spec.dtypes import item_size
from reshard_cli.weights.quantise import Made, QuantisingSource, made_of
from reshard_cli.weights.tensors import copy_exact
from reshard_cli.weights.windows import StorageWindows, within

__all__ = ["Landing"]


@dataclass(slots=True)
class Landing:
    """The storages in which values land, their bytes, and what is to be made of them."""

    storages: list[RankStorage]
    buffers: dict[str, Tensor]
    made: dict[str, Made]

    @classmethod
    def of(cls, plan: Plan, storages: Sequence[RankStorage], device: torch.device) -> Landing | None:
        """Return the landing of a rank with these storages, or None where it casts nothing in blocks."""
        made = made_of(plan.pairs, at=["receiver"])
        if not made:
            return None
        dtypes = {pair.name: pair.wire_dtype for pair in plan.pairs}
        landing = []
        for storage in storages:
            kept = [one for one in storage.windows if one.tensor in made and not made[one.tensor].scales]
            # operands of one storage may come in several dtypes: each has a place of its own
            for dtype in dict.fromkeys(dtypes[one.tensor] for one in kept):
                windows = tuple(one for one in kept if dtypes[one.tensor] == dtype)
                landing.append(
                    replace(storage, name=f"{storage.name} in {dtype}", dtype=dtype, windows=windows)
                )
        buffers = {
            one.name: torch.empty(
                math.prod(one.shape) * item_size(one.dtype), dtype=torch.uint8, device=device
            )
            for one in landing
        }
        return cls(landing, buffers, made)

    @property
    def num_bytes(self) -> int:
        """The bytes of memory that landing takes beside the storages."""
        return sum(buffer.numel() for buffer in self.buffers.values())

    def others(self, storages: Sequence[RankStorage]) -> list[RankStorage]:
        """Return the storages without what is made here, which nothing is received for."""
        return [
            replace(one, windows=tuple(window for window in one.windows if window.tensor not in self.made))
            for one in storages
        ]

    def cast(self, storages: Sequence[RankStorage], buffers: Mapping[str, Tensor]) -> None:
        """Fill the storages with what is made of the landed values."""
        landed = StorageWindows()
        landed.add(self.storages, self.buffers)
        source = QuantisingSource(landed, self.made)
        wanted = [
            replace(one, windows=tuple(window for window in one.windows if window.tensor in self.made))
            for one in storages
        ]
        target = StorageWindows()
        target.add(wanted, buffers)
        for name, lo, hi in {(w.tensor, w.lo, w.hi) for one in wanted for w in one.windows}:
            for part_lo, part_hi, values in source.windows(name, lo, hi):
                for own_lo, own_hi, view in target.windows(name, part_lo, part_hi):
                    copy_exact(view, within(values, part_lo, own_lo, own_hi))
