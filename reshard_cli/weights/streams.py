"""The order of copies on a device that works on its own: streams and marks on a GPU, nothing on the CPU.

On a GPU copies are given to streams and run when those come to them. Packing has one stream and unpacking
another; a mark is a point in a stream, which another stream, or the host, can wait for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

__all__ = ["CudaStreams", "HostStreams", "Mark", "Streams", "mark_on", "settle", "streams_of"]


class Mark(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Wait on the host until the stream has passed it."""
        ...


class Streams(Protocol):
    """Where copies run. What is given to one stream runs in order; `after` is a mark to pass first."""

    def begin(self) -> None:
        """Let both streams come after what the caller's own stream was given so far."""
        ...

    def packing(self, after: Mark | None = None) -> AbstractContextManager[None]:
        """Give what is started inside to the stream that packs."""
        ...

    def unpacking(self, after: Mark | None = None) -> AbstractContextManager[None]:
        """Give what is started inside to the stream that unpacks."""
        ...

    def mark(self) -> Mark:
        """Return the end of what the current stream was given so far."""
        ...

    def end(self) -> None:
        """Wait on the host until both streams are done."""
        ...


class _Passed:
    def wait(self) -> None:
        """Return at once: on the CPU everything is done when it is called."""


class HostStreams:
    """The CPU: a copy is done when its call returns."""

    def begin(self) -> None:
        """Do nothing."""

    def packing(self, after: Mark | None = None) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def unpacking(self, after: Mark | None = None) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mark(self) -> Mark:
        return _Passed()

    def end(self) -> None:
        """Do nothing."""


class _CudaMark:
    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class CudaStreams:
    """Two streams of one GPU. `cuda` is torch.cuda, but for tests."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._pack = cuda.Stream(device)
        self._unpack = cuda.Stream(device)

    def begin(self) -> None:
        caller = self._cuda.current_stream(self._device)
        self._pack.wait_stream(caller)
        self._unpack.wait_stream(caller)

    @contextlib.contextmanager
    def _on(self, stream: Any, after: Mark | None) -> Iterator[None]:
        if after is not None:
            assert isinstance(after, _CudaMark)
            stream.wait_event(after.event)
        with self._cuda.stream(stream):
            yield

    def packing(self, after: Mark | None = None) -> AbstractContextManager[None]:
        return self._on(self._pack, after)

    def unpacking(self, after: Mark | None = None) -> AbstractContextManager[None]:
        return self._on(self._unpack, after)

    def mark(self) -> Mark:
        return mark_on(self._device, self._cuda)

    def end(self) -> None:
        self._pack.synchronize()
        self._unpack.synchronize()


def mark_on(device: torch.device, cuda: Any = torch.cuda) -> Mark:
    """Return the end of what a GPU's current stream was given so far, whichever device the staging is on."""
    event = cuda.Event()
    event.record(cuda.current_stream(device))
    return _CudaMark(event)


def settle(device: torch.device) -> None:
    """Wait on the host for all that a device was given: others read and write by streams of their own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
