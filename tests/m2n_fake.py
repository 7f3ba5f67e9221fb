"""A module that stands for `nccl.m2n`: it does what each call says, by nothing but the call's arguments.

It knows meshes, placements and local shapes as the library's header defines them, refuses what that refuses, and
moves every overlap of a source shard with a destination shard from the source replica whose turn it is. Nothing of
the package's planning is used. Calls of all ranks have to be the same, in the same order, or it fails.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import types
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64",
    "float8_e4m3fn", "float8_e5m2",
}  # fmt: skip


@dataclass(frozen=True)
class Mesh:
    dims: tuple[int, ...]
    start_rank: int = 0

    def __post_init__(self):
        assert 1 <= len(self.dims) <= 2
        assert all(type(size) is int and size > 0 for size in self.dims)
        assert type(self.start_rank) is int
        assert self.start_rank >= 0

    @property
    def ranks(self) -> range:
        return range(self.start_rank, self.start_rank + math.prod(self.dims))


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Shard:
    dim: int


@dataclass(frozen=True)
class Side:
    """One side of a call, as every rank has to give it."""

    mesh: Mesh
    placements: tuple[object, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def axis(self) -> int:
        (found,) = [axis for axis, one in enumerate(self.placements) if isinstance(one, Shard)]
        return found

    @property
    def dim(self) -> int:
        return self.placements[self.axis].dim

    @property
    def shards(self) -> int:
        return self.mesh.dims[self.axis]

    def check(self, size: int, rank: int, buffer: torch.Tensor | None) -> None:
        refuse(len(self.placements) != len(self.mesh.dims), "placements must match the mesh")
        kinds = [type(one) for one in self.placements]
        refuse(kinds.count(Shard) != 1, "exactly one SHARD placement")
        refuse(not 1 <= len(self.shape) <= 3, "1 to 3 dims")
        refuse(not 0 <= self.dim < len(self.shape), "SHARD outside the tensor's dims")
        refuse(min(self.shape) < 1, "local shape must be positive")
        refuse(self.dtype not in DTYPES, "unsupported data type")
        refuse(self.mesh.ranks.stop > size, "mesh exceeds the communicator")
        if rank in self.mesh.ranks:
            refuse(buffer is None, "buffer of an active rank")
            refuse(not buffer.is_contiguous(), "contiguous buffers")
            refuse(tuple(buffer.shape) != self.shape, "the buffer's shape is the local shape")
            refuse(str(buffer.dtype) != f"torch.{self.dtype}", "the buffer's dtype")
        else:
            assert buffer is None

    def whole(self) -> tuple[int, ...]:
        return tuple(n * self.shards if d == self.dim else n for d, n in enumerate(self.shape))

    def owners(self) -> list[tuple[int, int, int]]:
        """Return (world rank, shard, replica) by the mesh's row-major order."""
        found = []
        for number, at in enumerate(itertools.product(*(range(size) for size in self.mesh.dims))):
            replica = at[1 - self.axis] if len(at) == 2 else 0
            found.append((self.mesh.start_rank + number, at[self.axis], replica))
        return found

    def start(self, shard: int) -> list[int]:
        return [shard * n if d == self.dim else 0 for d, n in enumerate(self.shape)]


class Refused(Exception):
    """As the library's own errors, a kind of no built-in error but this."""


def refuse(fault: bool, what: str) -> None:
    if fault:
        raise Refused(f"invalid argument: {what}")


def moves(src: Side, dst: Side) -> list[tuple[int, int, tuple[slice, ...], tuple[slice, ...]]]:
    """Return (source rank, destination rank, part of the source's buffer, part of the destination's)."""
    refuse(src.whole() != dst.whole(), "global shapes differ")
    refuse(src.dtype != dst.dtype, "dtypes differ")
    refuse(bool(set(src.mesh.ranks) & set(dst.mesh.ranks)), "meshes must be disjoint")
    copies = len(src.mesh.ranks) // src.shards
    found = []
    sources: dict[int, set[int]] = {}
    targets: dict[int, set[int]] = {}
    for target, want, turn in dst.owners():
        for origin, have, replica in src.owners():
            if replica != turn % copies:
                continue
            begins, wanted = src.start(have), dst.start(want)
            low = [max(a, b) for a, b in zip(begins, wanted, strict=True)]
            high = [
                min(a + n, b + m) for a, n, b, m in zip(begins, src.shape, wanted, dst.shape, strict=True)
            ]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            sources.setdefault(want, set()).add(have)
            targets.setdefault(have, set()).add(want)
            parts = [
                tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origins, strict=True))
                for origins in (begins, wanted)
            ]
            found.append((origin, target, *parts))
    refuse(max(map(len, sources.values())) > 16, "more than MAX_SOURCES")
    refuse(max(map(len, targets.values())) > 64, "more than MAX_TARGETS")
    return found


class Handle:
    """A live handle; calls without one are refused."""

    def __init__(self):
        self.live = True

    def destroy(self):
        self.live = False


def reshard(
    src, dst, comm: Any, stream=None, *, src_mesh, src_placements, src_local_shape, src_dtype, dst_mesh,
    dst_placements, dst_local_shape, dst_dtype, handle,
):  # fmt: skip
    """Move one tensor between the ranks of `comm` (see ThreadComm, GlooComm)."""
    assert handle.live
    assert stream is None
    one = Side(src_mesh, tuple(src_placements), tuple(src_local_shape), src_dtype)
    other = Side(dst_mesh, tuple(dst_placements), tuple(dst_local_shape), dst_dtype)
    one.check(comm.size, comm.rank, src)
    other.check(comm.size, comm.rank, dst)
    comm.move((one, other), moves(one, other), src, dst)


def bits(part: torch.Tensor) -> torch.Tensor:
    """Return a view of whole numbers, which are copied as they are."""
    return part.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()])


def as_bytes(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().reshape(-1).view(torch.uint8)


class ThreadWorld:
    """Ranks that are threads of one process: each call waits for the other ranks' ones."""

    def __init__(self, size: int):
        self.size, self.calls = size, 0
        self.given: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, action=self._together, timeout=30)
        self.after = threading.Barrier(size, timeout=30)

    def _together(self):
        assert len({repr(metadata) for metadata, *_ in self.given}) == 1, "ranks make different calls"
        for origin, target, part, place in self.given[0][1]:
            source, destination = self.given[origin][2], self.given[target][3]
            bits(destination[place]).copy_(bits(source[part]))
        self.calls += 1


@dataclass
class ThreadComm:
    world: ThreadWorld
    rank: int

    @property
    def size(self):
        return self.world.size

    def move(self, metadata, found, src, dst):
        self.world.given[self.rank] = (metadata, found, src, dst)
        self.world.barrier.wait()
        self.world.after.wait()


class GlooComm:
    """Ranks that are processes, over a gloo group; overlaps go one after the other, as bytes."""

    def __init__(self, group: Any):
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def move(self, metadata, found, src, dst):
        for origin, target, part, place in found:
            if self.rank == origin:
                self.group.send([as_bytes(src[part])], target, 1 << 29).wait()
            if self.rank == target:
                got = torch.empty_like(dst[place].contiguous())
                self.group.recv([as_bytes(got)], origin, 1 << 29).wait()
                bits(dst[place]).copy_(bits(got))


def install() -> types.ModuleType:
    """Put the module where `import nccl.m2n` finds it; return it."""
    module: Any = types.ModuleType("nccl.m2n")
    module.Mesh, module.Shard, module.Replicate = Mesh, Shard, Replicate
    module.init, module.reshard, module.Handle = Handle, reshard, Handle
    parent: Any = types.ModuleType("nccl")
    parent.m2n = module
    sys.modules["nccl"], sys.modules["nccl.m2n"] = parent, module
    return module
