"""The storages of one rank, and where in them each logical box lies.

A window says: this logical box is in that storage at `offset`, and one step along logical dim d moves
`strides[d]` elements. Fusing, stacking, interleaving, transposing and padding are all windows; nothing
after this module knows how a storage came about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from reshard_cli.errors import DocumentError
from reshard_cli.layout.held import HeldTensor
from reshard_cli.layout.holdings import Holdings
from reshard_cli.layout.job import JobLayout
from reshard_cli.layout.storage_groups import StorageGroup, concat_dim, storage_name
from reshard_cli.spec.names import fill

__all__ = ["RankStorage", "Window", "rank_storages"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
Placed = tuple[HeldTensor, Box, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Window:
    """A box of a logical tensor inside a storage; offset and strides count the storage's elements."""

    tensor: str
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """The number of elements of the box."""
        return math.prod(stop - start for start, stop in zip(self.lo, self.hi, strict=True))


@dataclass(frozen=True, slots=True)
class RankStorage:
    """One tensor as a rank really holds it: its name, shape, dtype, and the windows into it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    windows: tuple[Window, ...]
    keep_padding: bool

    @property
    def num_elements(self) -> int:
        """The number of elements, padding included."""
        return math.prod(self.shape)

    @property
    def has_padding(self) -> bool:
        """Whether some elements belong to no logical tensor."""
        return sum(window.num_elements for window in self.windows) < self.num_elements


def rank_storages(layout: JobLayout, rank: int, tensor: str | None = None) -> list[RankStorage]:
    """Return the storages of one rank, in the order of the job's tensors; with `tensor`, only its own.

    Raises DocumentError where two of them would have one name.
    """
    pieces: dict[int, list[tuple[Box, tuple[int, ...]]]] = {}
    found: dict[str, RankStorage] = {}
    for group in layout.groups:
        members = [layout.tensors[position] for position in group.operands]
        if tensor is not None and all(member.logical != tensor for member in members):
            continue
        if not layout.geometries[members[0].geometry].present[rank]:
            continue
        for member in members:
            if member.geometry not in pieces:
                pieces[member.geometry] = _pieces_of(layout.geometries[member.geometry], rank)
        shapes = [tuple(layout.geometries[member.geometry].local_shape[rank].tolist()) for member in members]
        for storage in _storages(layout, rank, group, members, [pieces[m.geometry] for m in members], shapes):
            if storage.name in found:
                raise DocumentError(
                    f"{layout.name}: rank {rank} would hold two tensors named {storage.name!r}"
                )
            found[storage.name] = storage
    return list(found.values())


def _pieces_of(holdings: Holdings, rank: int) -> list[tuple[Box, tuple[int, ...]]]:
    mine = np.nonzero(holdings.rank == rank)[0]
    lo, hi, local = holdings.lo[mine].tolist(), holdings.hi[mine].tolist(), holdings.local_lo[mine].tolist()
    return [((tuple(a), tuple(b)), tuple(c)) for a, b, c in zip(lo, hi, local, strict=True)]


def _storages(
    layout: JobLayout,
    rank: int,
    group: StorageGroup,
    members: list[HeldTensor],
    pieces: list[list[tuple[Box, tuple[int, ...]]]],
    shapes: list[tuple[int, ...]],
) -> list[RankStorage]:
    """Return the group's storages on a rank: one, or one per expert where they are not stacked."""
    rule, first = group.rule, members[0]
    shape, placed = _concatenated(group, members, pieces, shapes)
    name = storage_name(group, layout.stages)
    keep = all(member.padding == "keep" for member in members)
    swap = rule is not None and rule.transpose
    stacked = not first.has_experts or (rule is not None and rule.stack == "expert")
    if stacked:
        windows = tuple(_window(member, box, at, shape, swap) for member, box, at in placed)
        return [RankStorage(name, _swapped(shape, swap), first.dtype, windows, keep)]
    holdings = layout.geometries[first.geometry]
    numbers = {int(holdings.first[rank] + holdings.step[rank] * i): i for i in range(shape[0])}
    if holdings.explicit:
        # of explicit pieces an expert has what its own pieces say, and nothing where there are none
        held = {expert for _, (lo, hi), _ in placed for expert in range(lo[0], hi[0])}
        numbers = {expert: i for expert, i in numbers.items() if expert in held}
    found = []
    for expert, local in numbers.items():
        own = [
            (member, ((expert, *lo[1:]), (expert + 1, *hi[1:])), (0, *at[1:]))
            for member, (lo, hi), at in placed
            if lo[0] <= expert < hi[0]
        ]
        inner = (1, *shape[1:])
        if holdings.explicit:
            inner, own = _around(own)
        windows = tuple(_window(member, box, at, inner, swap) for member, box, at in own)
        text = fill(name, expert=expert, local_expert=local)
        found.append(RankStorage(text, _swapped(inner[1:], swap), first.dtype, windows, keep))
    return found


def _around(own: list[Placed]) -> tuple[tuple[int, ...], list[Placed]]:
    """Return the shape of the smallest box around these pieces, and the pieces with where they lie in it."""
    corners = [at for _, _, at in own]
    least = tuple(min(column) for column in zip(*corners, strict=True))
    ends = [
        tuple(a + stop - start for a, start, stop in zip(at, lo, hi, strict=True)) for _, (lo, hi), at in own
    ]
    most = tuple(max(column) for column in zip(*ends, strict=True))
    moved = [(member, box, tuple(a - b for a, b in zip(at, least, strict=True))) for member, box, at in own]
    return tuple(b - a for a, b in zip(least, most, strict=True)), moved


def _concatenated(
    group: StorageGroup,
    members: list[HeldTensor],
    pieces: list[list[tuple[Box, tuple[int, ...]]]],
    shapes: list[tuple[int, ...]],
) -> tuple[tuple[int, ...], list[Placed]]:
    """Return the storage's shape in logical dims, and each piece with where it starts in it."""
    rule = group.rule
    if rule is None or not rule.concat or rule.interleave is not None:
        placed = [(m, box, at) for m, own in zip(members, pieces, strict=True) for box, at in own]
        return shapes[0], placed
    dim = concat_dim(rule, members[0].has_experts)
    placed = []
    offset = 0
    for index, (member, own, local) in enumerate(zip(members, pieces, shapes, strict=True)):
        for box, at in own:
            if rule.block is None:
                placed.append((member, box, (*at[:dim], at[dim] + offset, *at[dim + 1 :])))
            else:
                placed += _in_blocks(member, box, at, dim, rule.block, index, len(members))
        offset += local[dim]
    return (*shapes[0][:dim], offset, *shapes[0][dim + 1 :]), placed


def _in_blocks(
    member: HeldTensor, box: Box, at: tuple[int, ...], dim: int, block: int, index: int, num_operands: int
) -> list[Placed]:
    """Cut a piece where its local rows pass from one block to the next."""
    lo, hi = box
    found = []
    row, end = at[dim], at[dim] + hi[dim] - lo[dim]
    while row < end:
        stop = min(end, (row // block + 1) * block)
        start = lo[dim] + row - at[dim]
        part = ((*lo[:dim], start, *lo[dim + 1 :]), (*hi[:dim], start + stop - row, *hi[dim + 1 :]))
        place = (row // block * num_operands + index) * block + row % block
        found.append((member, part, (*at[:dim], place, *at[dim + 1 :])))
        row = stop
    return found


def _window(member: HeldTensor, box: Box, at: tuple[int, ...], shape: tuple[int, ...], swap: bool) -> Window:
    strides = list(_row_major(_swapped(shape, swap)))
    if swap:
        strides[-1], strides[-2] = strides[-2], strides[-1]
    offset = sum(position * stride for position, stride in zip(at, strides, strict=True))
    return Window(member.logical, box[0], box[1], offset, tuple(strides))


def _swapped(shape: tuple[int, ...], swap: bool) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2]) if swap else shape


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)
