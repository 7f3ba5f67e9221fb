"""Verification where only the source can know the values: checksums of pieces, taken on both sides.

Every box that a source rank and a destination rank share has a sum over its elements of a number mixed of the
element's bits and its place in the tensor. A source rank that holds the box says its sum, the destination rank adds
up its own, and they are compared. The boxes come of the two layouts alone, not of the plan, and the sums do not
depend on how a side cuts, so a value in a wrong place, or twice in a right one, does not pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reshard_cli.errors import VerifyError
from reshard_cli.layout.job import JobLayout
from reshard_cli.plan.build import Plan
from reshard_cli.plan.pairs import TensorPair
from reshard_cli.refit.verify import CHUNK, shown_box
from reshard_cli.weights.tensors import raw, torch_dtype
from reshard_cli.weights.windows import Corner, Source, intersection, parts_of

__all__ = ["SharedBox", "Sums", "compare_sums", "shared_boxes", "source_sums"]

Sums = dict[str, int]

_PLACE = -7046029254386353131  # odd numbers without a pattern, as whole numbers of 64 bits wrap around
_MIX = -4658895280553007687


@dataclass(frozen=True, slots=True)
class SharedBox:
    """A box of a tensor, the source rank that answers for it, and the destination ranks that want it."""

    pair: int
    lo: Corner
    hi: Corner
    holder: int
    wanters: tuple[int, ...]

    @property
    def key(self) -> str:
        """The box as a key of a table."""
        return f"{self.pair}:{','.join(map(str, self.lo))}:{','.join(map(str, self.hi))}"

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return math.prod(b - a for a, b in zip(self.lo, self.hi, strict=True))


Boxes = list[tuple[Corner, Corner, tuple[int, ...]]]


def shared_boxes(plan: Plan) -> Iterator[SharedBox]:
    """Yield every box that a distinct box of the source shares with one of the destination.

    Of the ranks that hold a box, another one answers for each tensor in turn; of a tied tensor, which may lie
    elsewhere under its other name, all of them answer.
    """
    known: dict[object, Boxes] = {}

    def boxes(layout: JobLayout, geometries: tuple[int, ...]) -> Boxes:
        key = (id(layout), geometries)
        if key not in known:
            found = layout.distinct_boxes(geometries)
            known[key] = [
                (tuple(lo), tuple(hi), ranks)
                for lo, hi, ranks in zip(found.lo.tolist(), found.hi.tolist(), found.ranks, strict=True)
            ]
        return known[key]

    for index, pair in enumerate(plan.pairs):
        for lo, hi, holders in boxes(plan.source, pair.source_geometries):
            for other_lo, other_hi, wanters in boxes(plan.destination, pair.destination_geometries):
                shared = intersection(lo, hi, other_lo, other_hi) if lo else ((), ())
                if shared is None:
                    continue
                tied = len(pair.source_geometries) > 1
                for holder in holders if tied else [holders[index % len(holders)]]:
                    yield SharedBox(index, *shared, holder, wanters)


def _dtype(pair: TensorPair) -> str:
    """Return the dtype in which both sides can show the same bits."""
    return pair.wire_dtype if pair.quantised == "receiver" else pair.destination_dtype


def source_sums(plan: Plan, rank: int, source: Source) -> dict[int, Sums]:
    """Return, by destination rank, the sums of the boxes for which this rank of the source answers."""
    found: dict[int, Sums] = {}
    for box in shared_boxes(plan):
        if box.holder != rank:
            continue
        pair = plan.pairs[box.pair]
        total = 0
        for lo, hi, values in source.windows(pair.name, box.lo, box.hi):
            cast = None if pair.quantised else (torch_dtype(pair.wire_dtype), torch_dtype(_dtype(pair)))
            part = _sum_of(values, lo, hi, pair.shape, cast)
            if (lo, hi) == (box.lo, box.hi):
                total = part
                break  # tied tensors hold the same values several times
            total += part
        for wanter in box.wanters:
            found.setdefault(wanter, {})[box.key] = _wrapped(total)
    return found


def compare_sums(
    plan: Plan, rank: int, name: str, held: Source, sums: Mapping[int, Sums], storage_of: Mapping[str, str]
) -> int:
    """Return the number of elements compared on a destination rank. Raises VerifyError.

    `held`: the windows of its storages, or of what lands before a cast. `sums`: what the source's ranks say, by
    rank. `storage_of`: the storage of each tensor, and `name` this rank's, for messages.
    """
    compared, seen = 0, set[str]()
    for box in shared_boxes(plan):
        if rank not in box.wanters:
            continue
        pair = plan.pairs[box.pair]
        told = sums[box.holder].get(box.key)
        total = count = 0
        for lo, hi, values in held.windows(pair.name, box.lo, box.hi):
            total += _sum_of(values, lo, hi, pair.shape, None)
            count += values.numel()
        # tied tensors hold the same values several times
        times, rest = divmod(count, max(1, box.num_elements))
        if (
            told is None
            or rest
            or (box.num_elements and not times)
            or _wrapped(told * times) != _wrapped(total)
        ):
            raise VerifyError(
                f"verification failed on {name}: tensor {pair.name!r} (storage {storage_of.get(pair.name, '?')!r}), "
                f"piece {shown_box(box.lo, box.hi)}: its checksum is not that of "
                f"{plan.source.name} {box.holder}, which holds it"
            )
        compared += 0 if box.key in seen else count
        seen.add(box.key)
    return compared


def _sum_of(
    values: Tensor, lo: Corner, hi: Corner, shape: Corner, cast: tuple[torch.dtype, torch.dtype] | None
) -> int:
    """Return the sum over a box of a tensor of this global shape; `cast`: through the first dtype to the second."""
    total = 0
    for part_lo, part_hi in parts_of(lo, hi, CHUNK):
        part = values
        for dim, (start, stop, at) in enumerate(zip(part_lo, part_hi, lo, strict=True)):
            part = part.narrow(dim, start - at, stop - start)
        if cast is not None:
            part = part.to(cast[0]).to(cast[1])
        place = torch.zeros((), dtype=torch.int64, device=part.device)
        step = 1
        for dim in reversed(range(len(shape))):
            along = torch.arange(part_lo[dim], part_hi[dim], dtype=torch.int64, device=part.device) * step
            place = place + along.view(-1, *[1] * (len(shape) - 1 - dim))
            step *= shape[dim]
        mixed = raw(part).to(torch.int64) + place * _PLACE
        mixed = (mixed ^ (mixed >> 29)) * _MIX
        mixed = mixed ^ (mixed >> 32)
        total += int(mixed.sum())
    return total


def _wrapped(value: int) -> int:
    return value & ((1 << 64) - 1)
