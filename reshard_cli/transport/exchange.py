"""Moves the messages of one phase between ranks: gloo on CPUs, NCCL (see `nccl`) on GPUs.

Both are thin: sizes, dtypes and order come proven from the plan, and a message is bytes. A transport gives
its messages numbers per ordered pair of ranks; gloo matches them by tag, NCCL by order.
"""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from reshard_cli.errors import DocumentError, PeerLostError, first_line
from reshard_cli.plan.entries import NETWORK
from reshard_cli.transport.m2n import M2n
from reshard_cli.transport.message import Message, Pending, Transport, chunks
from reshard_cli.transport.nccl import NcclTransport
from reshard_cli.transport.store import Store

__all__ = ["GlooTransport", "open_m2n", "open_transport"]

_SLACK = 1.0  # seconds beyond the timeout in which gloo itself says what went wrong
_LOOK = 0.5
_LEAST = 0.001  # seconds: gloo takes none for its own timeout


class _GlooPending:
    def __init__(self, works: list[tuple[int, str, dist.Work]], keep: list[Tensor]) -> None:
        self._works = works
        self._keep = keep  # gloo does not own the memory that it sends from

    def wait(self, seconds: float | None = None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        for peer, doing, work in self._works:
            try:
                if deadline is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=max(_LEAST, deadline - time.monotonic())))
            except RuntimeError as error:
                raise PeerLostError(f"{doing} rank {peer}: {_reason(error)}", peer) from error
        self._works.clear()


def _reason(error: RuntimeError) -> str:
    text = str(error)
    if "Timed out" in text or "timed out" in text:
        return "it did not answer in time"
    if "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        return "it closed the connection"
    return first_line(error)


def _within(seconds: float, make: Callable[[], Any], check: Callable[[], None]) -> Any:
    """Return what `make` does, within so many seconds; call `check` now and then.

    Gloo lets a rank that waits to be connected to wait for five times its timeout: then it is left to do so.
    """
    made: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            made.append(make())
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, name="connecting", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive():
        thread.join(_LOOK)
        if thread.is_alive():
            check()
            if time.monotonic() > deadline:
                raise RuntimeError("Timed out")
    if errors:
        raise errors[0]
    return made[0]


class GlooTransport:
    """Point-to-point over a gloo group of all ranks, made from the store; torch's default group is not used.

    One group serves both phases: two ranks share a domain or they do not, so a connection carries the
    messages of one phase only, and a second group would be as many sockets again, of which half are idle.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        timeout: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Connect to every rank. Raises PeerLostError where that fails within the timeout, or what `check` raises."""
        limit = timedelta(seconds=timeout)
        groups = store.for_groups("gloo")
        try:
            self._group: Any = _within(
                timeout + _SLACK, lambda: dist.ProcessGroupGloo(groups, rank, num_ranks, limit), check
            )
        except RuntimeError as error:
            found = re.search(r"remote=\[([^\]]+)\]", str(error))
            where = f" (at {found[1]})" if found else ""
            raise PeerLostError(f"connecting to the other ranks{where}: {_reason(error)}") from error
        self._sent: dict[int, int] = defaultdict(int)
        self._received: dict[int, int] = defaultdict(int)

    def start(self, sends: Sequence[Message], receives: Sequence[Message], phase: int = NETWORK) -> Pending:
        works: list[tuple[int, str, dist.Work]] = []
        keep = []
        for chosen, counts, post, doing in (
            (receives, self._received, self._group.recv, "receiving from"),
            (sends, self._sent, self._group.send, "sending to"),
        ):
            for message in chunks(chosen):
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

    def abort(self) -> None:
        """Leave the connections to the end of the process: closing them with work in flight would abort it."""


def open_transport(
    backend: str,
    store: Store,
    rank: int,
    num_ranks: int,
    timeout: float,
    *,
    domains: Sequence[int] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Transport:
    """Return the transport of this backend, connected to all ranks; NCCL uses the current CUDA device.

    domains: the domain of each rank; without them, all traffic is as between domains. `check` is called now
    and then while a GPU, or a connection of gloo's, is waited for: it raises another rank's failure.
    """
    if backend == "nccl":
        return NcclTransport(store, rank, num_ranks, timeout, domains, check)
    return GlooTransport(store, rank, num_ranks, timeout, check)


def open_m2n(transport: Transport, device: torch.device, timeout: float, check: Callable[[], None]) -> M2n:
    """Return NCCL M2N on this transport's communicator. Raises DocumentError where it has none."""
    communicator = getattr(transport, "communicator", None)
    if communicator is None:
        raise DocumentError("--m2n: NCCL M2N needs --backend nccl")
    return M2n(communicator, device, timeout, check)
