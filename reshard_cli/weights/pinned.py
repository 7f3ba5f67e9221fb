"""Copies between a GPU and pageable memory (mapped files), through two pinned buffers that take turns.

While the GPU fetches one buffer, the host fills the other, and the other way round on the way out. Without
pinned memory each copy would stop the host and run at a fraction of the bus's rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from reshard_cli.weights.streams import Mark
from reshard_cli.weights.tensors import copy_exact

__all__ = ["PinnedBuffers"]

_LARGEST = 32 << 20  # bytes of a buffer; more does not make the bus faster
_LEAST = 64 << 10  # bytes of a buffer below which it is not worth it
_ALIGN = 16


def _non_blocking(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


class PinnedBuffers:
    """Two buffers in pinned host memory, and the copies that go through them."""

    def __init__(
        self,
        num_bytes: int,
        mark: Callable[[torch.device], Mark],
        *,
        pin: bool = True,
        start: Callable[[Tensor, Tensor], None] = _non_blocking,
    ) -> None:
        """num_bytes: of one buffer. `mark` gives the end of what a GPU's current stream was given."""
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self._mark, self._start = mark, start
        # of each buffer, by direction: copies off the GPU and onto it may be in streams of their own
        self._marks: list[dict[bool, Mark]] = [{}, {}]
        # what is to be copied out of each buffer once the GPU has filled it
        self._landed: list[list[tuple[Tensor, Tensor]]] = [[], []]
        self._turn = 0
        self._used = 0

    @staticmethod
    def size_within(room: int) -> int:
        """Return the bytes of one of two buffers in so much room, 0 where that is too little."""
        size = min(_LARGEST, room // 2) // _ALIGN * _ALIGN
        return size if size >= _LEAST else 0

    @property
    def num_bytes(self) -> int:
        """The bytes of both buffers."""
        return sum(buffer.numel() for buffer in self._buffers)

    def run(self, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy each (target, source) of one shape, bit for bit or with torch's cast; one of them is on the CPU.

        Returns when the sources on the CPU may change and the targets on the CPU are there; targets on a GPU
        are there for what the current stream is given next.
        """
        for target, source in copies:
            for part, piece in _parts(target, source, self._buffers[0].numel()):
                self._one(part, piece, out=target.device.type == "cpu")
        for turn in (1 - self._turn, self._turn):
            self._empty(turn, land_only=True)
        if not self._marks[self._turn]:
            self._used = 0

    def _one(self, target: Tensor, source: Tensor, *, out: bool) -> None:
        dtype = source.dtype if out else target.dtype
        size = source.numel() * dtype.itemsize
        if self._used + size > self._buffers[0].numel():
            self._next()
        pinned = self._buffers[self._turn][self._used : self._used + size].view(dtype).view(source.shape)
        self._used += -(-size // _ALIGN) * _ALIGN
        if out:
            self._start(pinned, source)
            self._landed[self._turn].append((target, pinned))
        else:
            copy_exact(pinned, source)  # a cast is made here, by the CPU
            self._start(target, pinned)
        self._marks[self._turn][out] = self._mark(source.device if out else target.device)

    def _next(self) -> None:
        """Go on with the other buffer, once the GPU is done with it."""
        self._turn, self._used = 1 - self._turn, 0
        self._empty(self._turn)

    def _empty(self, turn: int, *, land_only: bool = False) -> None:
        marks, landed = self._marks[turn], self._landed[turn]
        for out in (True,) if land_only else (True, False):
            if out in marks:
                marks.pop(out).wait()
        for target, pinned in landed:
            copy_exact(target, pinned)
        landed.clear()


def _parts(target: Tensor, source: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut a copy along its first dims into parts of at most so many bytes."""
    size = source.numel() * max(target.element_size(), source.element_size())
    if size <= most or not source.dim():
        if size:
            yield target, source
        return
    rows = source.shape[0]
    step = max(1, most // (size // rows))
    for start in range(0, rows, step):
        part, piece = target[start : start + step], source[start : start + step]
        if rows == 1 or step * (size // rows) > most:
            for row in range(len(piece)):
                yield from _parts(part[row], piece[row], most)
        else:
            yield part, piece
