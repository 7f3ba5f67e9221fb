"""Moves the messages of one phase between ranks: gloo on CPUs, NCCL on GPUs.

Both are thin: sizes, dtypes and order come proven from the plan, and a message is bytes. A transport gives
its messages numbers per ordered pair of ranks; gloo matches them by tag, NCCL by order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from reshard_cli.errors import PeerLostError
from reshard_cli.plan.schedule import MAX_MESSAGE
from reshard_cli.transport.message import Message
from reshard_cli.transport.store import Store, prefixed

__all__ = ["GlooTransport", "NcclTransport", "Pending", "Transport", "open_transport"]


class Pending(Protocol):
    """Messages on their way."""

    def wait(self) -> None:
        """Wait for all of them. Raises PeerLostError naming the peer that failed."""
        ...


class Transport(Protocol):
    """Sends and receives the messages of a phase."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start all of them."""
        ...

    def close(self) -> None:
        """Close the connections; nothing may be in flight."""
        ...


def _chunks(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with none above MAX_MESSAGE bytes, as transports count in 32 bits."""
    chunks = []
    for message in messages:
        size = message.data.numel()
        if size <= MAX_MESSAGE:
            chunks.append(message)
            continue
        for start in range(0, size, MAX_MESSAGE):
            chunks.append(Message(message.peer, message.data[start : start + MAX_MESSAGE]))
    return chunks


class _GlooPending:
    def __init__(self, works: list[tuple[int, str, dist.Work]], keep: list[Tensor]) -> None:
        self._works = works
        self._keep = keep  # gloo does not own the memory that it sends from

    def wait(self) -> None:
        for peer, doing, work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLostError(f"{doing} rank {peer}: {_reason(error)}", peer) from error
        self._works.clear()


def _reason(error: RuntimeError) -> str:
    text = str(error)
    if "Timed out" in text or "timed out" in text:
        return "it did not answer in time"
    if "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        return "it closed the connection"
    return text.splitlines()[0]


class GlooTransport:
    """Point-to-point over a gloo group of all ranks, made from the store; torch's default group is not used."""

    def __init__(self, store: Store, rank: int, num_ranks: int, timeout: float) -> None:
        """Connect to every rank. Raises PeerLostError where that fails within the timeout."""
        limit = timedelta(seconds=timeout)
        try:
            self._group: Any = dist.ProcessGroupGloo(prefixed("gloo", store), rank, num_ranks, limit)
        except RuntimeError as error:
            raise PeerLostError(f"connecting the ranks: {_reason(error)}") from error
        self._sent: dict[int, int] = defaultdict(int)
        self._received: dict[int, int] = defaultdict(int)

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        works: list[tuple[int, str, dist.Work]] = []
        keep = []
        for chosen, counts, post, doing in (
            (receives, self._received, self._group.recv, "receiving from"),
            (sends, self._sent, self._group.send, "sending to"),
        ):
            for message in _chunks(chosen):
                tag = counts[message.peer] % (1 << 30)
                counts[message.peer] += 1
                try:
                    works.append((message.peer, doing, post([message.data], message.peer, tag)))
                except RuntimeError as error:
                    raise PeerLostError(
                        f"{doing} rank {message.peer}: {_reason(error)}", message.peer
                    ) from error
                keep.append(message.data)
        return _GlooPending(works, keep)

    def close(self) -> None:
        del self._group


class _NcclPending:
    def __init__(self, work: dist.Work | None, peers: list[int], timeout: float) -> None:
        self._work = work
        self._peers = peers
        self._timeout = timeout

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            self._work.wait(timedelta(seconds=self._timeout))
            torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            peers = ", ".join(str(peer) for peer in self._peers)
            raise PeerLostError(f"exchanging with ranks {peers}: {str(error).splitlines()[0]}") from error


class NcclTransport:
    """Point-to-point over an NCCL communicator; the messages of a phase are one grouped launch."""

    def __init__(self, store: Store, rank: int, num_ranks: int, timeout: float) -> None:
        """Make the communicator, on the current device. It is built lazily by NCCL: the first exchange of a pair is slow."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        self._group: Any = dist.ProcessGroupNCCL(prefixed("nccl", store), rank, num_ranks, options)
        self._timeout = timeout

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        chosen = [(message, self._group.send) for message in _chunks(sends)]
        chosen += [(message, self._group.recv) for message in _chunks(receives)]
        if not chosen:
            return _NcclPending(None, [], self._timeout)
        try:
            self._group._start_coalescing()
            for message, post in chosen:
                post([message.data], message.peer, 0)
            work = self._group._end_coalescing()
        except RuntimeError as error:
            raise PeerLostError(f"starting an exchange: {str(error).splitlines()[0]}") from error
        return _NcclPending(work, sorted({message.peer for message, _ in chosen}), self._timeout)

    def close(self) -> None:
        self._group.shutdown()


def open_transport(backend: str, store: Store, rank: int, num_ranks: int, timeout: float) -> Transport:
    """Return the transport of this backend, connected to all ranks; NCCL uses the current CUDA device."""
    kind = NcclTransport if backend == "nccl" else GlooTransport
    return kind(store, rank, num_ranks, timeout)
