"""Chooses the tensors that NCCL M2N can carry (package nccl-extensions), and says why it declines the others.

M2N moves one tensor between two meshes of ranks in one collective call. What it can describe is little: each side is
a block of consecutive ranks as a mesh of two axes, of which one cuts one dim evenly and the other replicates. The
choice is made once a class of tensors that are cut alike, from the two layouts alone, and before anything is
intersected: what M2N carries has the route `m2n` and no part in the rest of the plan.

Limits as of nccl-extensions 0.1.0: its header `nccl_m2n.h` (dims, dtypes, one cut axis a side, disjoint meshes), its
sources' `reshard_limits.h` (fan-in and fan-out), and its default staging buffer (NCCL_RESHARD_PACK_BUFFSIZES, 2 GiB).
Replicas do not count in fan-out, as its default algorithm hands shards on from one to the next. The library holds
each call against its limits itself, and refuses alike on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from reshard_cli.layout.boxes import Ints, volumes
from reshard_cli.layout.holdings import Holdings
from reshard_cli.layout.job import JobLayout
from reshard_cli.plan.entries import classify
from reshard_cli.plan.pairs import TensorPair
from reshard_cli.plan.routes import Route
from reshard_cli.plan.topology import Topology
from reshard_cli.spec.dtypes import item_size

__all__ = ["Declined", "M2nChoice", "M2nClass", "M2nSide", "choose_m2n"]

_MAX_DIMS = 3
_MAX_SOURCES = 16  # source shards that a destination shard may take from
_MAX_TARGETS = 64  # destination shards that a source shard may go to
_MAX_SHARD = 2 << 30  # bytes
_DTYPES = frozenset(
    [
        *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
        *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
    ]
)


@dataclass(frozen=True, slots=True)
class M2nSide:
    """One side of a tensor: a mesh of two axes, row-major over the world ranks from `start`.

    Mesh axis `axis` cuts the tensor's dim `dim` into as many equal shards as it has coordinates; the other axis
    replicates. A tensor that is not cut has one shard, as M2N wants exactly one cut axis.
    """

    start: int
    mesh: tuple[int, int]
    axis: int
    dim: int

    @property
    def shards(self) -> int:
        """The number of shards."""
        return self.mesh[self.axis]

    @property
    def copies(self) -> int:
        """The number of ranks that hold each shard."""
        return self.mesh[1 - self.axis]

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of each shard of a tensor of this shape."""
        return (*shape[: self.dim], shape[self.dim] // self.shards, *shape[self.dim + 1 :])

    def box(self, rank: int, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the box (lo, hi) that a world rank holds of a tensor of this shape, None outside the mesh."""
        if not 0 <= rank - self.start < self.mesh[0] * self.mesh[1]:
            return None
        shard = divmod(rank - self.start, self.mesh[1])[self.axis]
        local = self.local_shape(shape)
        lo = tuple(shard * local[dim] if dim == self.dim else 0 for dim in range(len(shape)))
        return lo, tuple(start + size for start, size in zip(lo, local, strict=True))


@dataclass(frozen=True, slots=True)
class M2nClass:
    """Tensors that M2N carries alike, by their places in the plan's pairs; `dtype` is the one that travels."""

    tensors: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    source: M2nSide
    destination: M2nSide

    @property
    def shard_bytes(self) -> int:
        """The bytes of the larger side's shard."""
        sides = (self.source, self.destination)
        return max(math.prod(side.local_shape(self.shape)) for side in sides) * item_size(self.dtype)


@dataclass(slots=True)
class Declined:
    """How much M2N declines for one reason; the experts of a projection count one by one."""

    tensors: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class M2nChoice:
    """What M2N carries, in the order in which all ranks call it, and what it declines, by the reason.

    buffer_bytes: what a rank needs to lay out one shard, where the tensor does not lie there in one piece.
    """

    carried: list[M2nClass] = field(default_factory=list)
    declined: dict[str, Declined] = field(default_factory=dict)

    @property
    def buffer_bytes(self) -> int:
        """The bytes of the largest shard of any side."""
        return max((one.shard_bytes for one in self.carried), default=0)

    def totals(self, pairs: Sequence[TensorPair]) -> dict[str, int]:
        """Return how many `tensors` and `bytes` are carried, the experts of a projection one by one."""
        tensors = sum(pairs[index].num_names for one in self.carried for index in one.tensors)
        size = sum(len(one.tensors) * math.prod(one.shape) * item_size(one.dtype) for one in self.carried)
        return {"tensors": tensors, "bytes": size}


def choose_m2n(
    source: JobLayout,
    destination: JobLayout,
    topology: Topology,
    pairs: Sequence[TensorPair],
    routes: Sequence[Route],
    staging: int,
) -> M2nChoice:
    """Return the choice: a pure function of the plan's beginnings, the same on every rank.

    staging: bytes of extra memory a rank; a shard has to fit into half of it. Tensors without elements are in
    neither part, as nothing of them travels.
    """
    choice = M2nChoice()
    sides = (
        _Sides(source, int(topology.source[0])),
        _Sides(destination, int(topology.destination[0])),
    )
    for members in classify(pairs, routes).values():
        # a quantised tensor and its plain likes may share a class
        for quantised in (False, True):
            chosen = [one for one in members if (pairs[one].quantised is not None) == quantised]
            if not chosen:
                continue
            found = _choose(pairs[chosen[0]], routes[chosen[0]], topology, sides, staging)
            if isinstance(found, str):
                lost = choice.declined.setdefault(found, Declined())
                for one in chosen:
                    lost.tensors += pairs[one].num_names
                    lost.num_bytes += math.prod(pairs[one].shape) * item_size(pairs[one].wire_dtype)
            else:
                first = pairs[chosen[0]]
                choice.carried.append(M2nClass(tuple(chosen), first.shape, first.wire_dtype, *found))
    return choice


def _choose(
    pair: TensorPair, route: Route, topology: Topology, sides: tuple[_Sides, _Sides], staging: int
) -> tuple[M2nSide, M2nSide] | str:
    """Return both sides of the tensor, or why M2N declines it."""
    if topology.colocated:
        return "the jobs share ranks"
    if route != "reshard":
        return f"its route is {route}"
    if pair.quantised is not None:
        return "it is cast in blocks"
    if pair.wire_dtype not in _DTYPES:
        return f"its dtype is {pair.wire_dtype}"
    if not 1 <= len(pair.shape) <= _MAX_DIMS:
        return f"it has {len(pair.shape)} dims, not 1 to {_MAX_DIMS}"
    found = []
    geometries = (pair.source_geometries, pair.destination_geometries)
    for name, side, own in zip(("source", "destination"), sides, geometries, strict=True):
        described = "it is tied to another tensor" if len(own) > 1 else side.of(own[0], pair.shape)
        if isinstance(described, str):
            return f"{name}: {described}"
        found.append(described)
    have, want = found
    if _met(pair.shape, want, have) > _MAX_SOURCES:
        return f"more than {_MAX_SOURCES} source shards meet in a destination shard"
    if _met(pair.shape, have, want) > _MAX_TARGETS:
        return f"a source shard goes to more than {_MAX_TARGETS} destination shards"
    if M2nClass((), pair.shape, pair.wire_dtype, have, want).shard_bytes > min(_MAX_SHARD, staging // 2):
        return f"a shard is larger than half of --staging, or than {_MAX_SHARD >> 30} GiB"
    return have, want


class _Sides:
    """One job's tensors as meshes, each geometry worked out once."""

    def __init__(self, layout: JobLayout, first: int) -> None:
        """`first`: the world rank of the job's rank 0."""
        self._layout, self._first = layout, first
        self._known: dict[tuple[int, tuple[int, ...]], M2nSide | str] = {}

    def of(self, geometry: int, shape: tuple[int, ...]) -> M2nSide | str:
        """Return the tensor's mesh, or why M2N cannot describe it."""
        key = (geometry, shape)
        if key not in self._known:
            self._known[key] = _side(self._layout.geometries[geometry], shape, self._first)
        return self._known[key]


def _side(holdings: Holdings, shape: tuple[int, ...], first: int) -> M2nSide | str:
    ranks, lo, hi, whole = _boxes_of_ranks(holdings)
    if not whole:
        return "a rank holds parts that are not one box"
    if ranks[-1] - ranks[0] + 1 != len(ranks):
        return "its ranks do not follow each other"
    cut = np.nonzero(np.any(hi - lo != np.array(shape, np.int64), axis=0))[0].tolist()
    if len(cut) > 1:
        return "several dims are cut"
    start, count = first + int(ranks[0]), len(ranks)
    if not cut:
        return M2nSide(start, (count, 1), 1, 0)
    dim = cut[0]
    rows = int(hi[0, dim] - lo[0, dim])
    if shape[dim] % rows or np.any(hi[:, dim] - lo[:, dim] != rows) or np.any(lo[:, dim] % rows):
        return "its cut is uneven"
    shards, index = shape[dim] // rows, lo[:, dim] // rows
    for axis, order in ((1, np.arange(count) % shards), (0, np.arange(count) // max(1, count // shards))):
        if count % shards == 0 and np.array_equal(index, order):
            copies = count // shards
            return M2nSide(start, (copies, shards) if axis else (shards, copies), axis, dim)
    return "its ranks are no mesh of two axes"


def _boxes_of_ranks(holdings: Holdings) -> tuple[Ints, Ints, Ints, bool]:
    """Return (job rank, lo, hi) of the box around what each rank holds, and whether each holds all of its box.

    Pieces of one rank share no element, so their volumes add up to the box's where they fill it.
    """
    ranks, index = np.unique(holdings.rank, return_inverse=True)
    dims = holdings.lo.shape[1]
    lo = np.full((len(ranks), dims), np.iinfo(np.int64).max)
    hi = np.zeros((len(ranks), dims), np.int64)
    held = np.zeros(len(ranks), np.int64)
    np.minimum.at(lo, index, holdings.lo)
    np.maximum.at(hi, index, holdings.hi)
    np.add.at(held, index, volumes(holdings.lo, holdings.hi))
    return ranks, lo, hi, bool(len(ranks)) and np.array_equal(held, volumes(lo, hi))


def _met(shape: tuple[int, ...], side: M2nSide, other: M2nSide) -> int:
    """Return with how many of the other side's shards a shard of this side shares elements, at most."""
    if side.dim != other.dim or side.shards == 1:
        return other.shards
    rows, theirs = (one.local_shape(shape)[one.dim] for one in (side, other))
    starts = np.arange(side.shards, dtype=np.int64) * rows
    return int((-(-(starts + rows) // theirs) - starts // theirs).max())
