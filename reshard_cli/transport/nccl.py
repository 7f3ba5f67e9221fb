"""Moves messages between GPUs with NCCL: one communicator of all ranks, and one of each domain's.

NCCL runs what a communicator is given one after the other, so traffic inside a domain has a communicator of
its own and need not queue behind the network. It holds the domain's ranks only: fewer buffers and connections,
and NVLink alone. The messages of a phase are one group, which completes as a whole; both sides of a pair group
alike, as their schedules agree on rounds, order and sizes. All ranks launch their groups in one order (network
1, domain 0, network 2, …), so that they do not deadlock even where a GPU runs one of them at a time.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from reshard_cli.errors import PeerLostError, first_line
from reshard_cli.plan.entries import DOMAIN, NETWORK
from reshard_cli.transport.message import Message, Pending, chunks
from reshard_cli.transport.shared_gpu import check_shared_gpu
from reshard_cli.transport.store import Store

__all__ = ["NcclTransport", "wait_until"]

_POLL = 0.001  # longest pause, in seconds, between two looks at the GPU
_CHECK = 0.2  # seconds between two looks at the control plane
_ABORT = 5.0  # seconds that an abort may take before the process ends without
# torchrun sets the first to 1 in every worker. By the second torch gives a group no watchdog, which would also have the
# heartbeat monitor of the process's first group, the trainer's own, end the process on an error of ours
_OURS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}


def wait_until(done: Callable[[], bool], timeout: float, check: Callable[[], None]) -> bool:
    """Wait on the host until something is done; say whether it was in time. Raises what `check` raises."""
    deadline = time.monotonic() + timeout
    checked = time.monotonic()
    pause = 0.00002
    while not done():
        now = time.monotonic()
        if now > deadline:
            return False
        if now - checked > _CHECK:
            check()
            checked = now
        time.sleep(pause)
        pause = min(_POLL, 2 * pause)
    return True


class _NcclPending:
    def __init__(self, work: Any, peers: list[int], timeout: float, check: Callable[[], None]) -> None:
        self._work = work
        self._peers = peers
        self._timeout = timeout
        self._check = check

    def wait(self, seconds: float | None = None) -> None:
        """Wait on the host, and let what the current stream gets next come after the messages."""
        if self._work is None:
            return
        work, peers = self._work, ", ".join(str(peer) for peer in self._peers)
        guilty = self._peers[0] if len(self._peers) == 1 else None
        limit, check = (self._timeout, self._check) if seconds is None else (seconds, lambda: None)
        try:
            work.synchronize()  # orders the stream; does not block the host
            in_time = wait_until(work.is_completed, limit, check)
            if in_time:
                work.wait()  # raises where it completed by failing
        except RuntimeError as error:
            raise PeerLostError(f"exchanging with ranks {peers}: {first_line(error)}", guilty) from error
        if not in_time:
            raise PeerLostError(f"exchanging with ranks {peers}: not done in {limit:g} s", guilty)
        self._work = None


class NcclTransport:
    """Point-to-point over NCCL communicators; the messages of a phase are one grouped launch."""

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        timeout: float,
        domains: Sequence[int] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the communicators, on the current device. All ranks have to come.

        Raises DocumentError where ranks share a GPU and this NCCL cannot, PeerLostError where a rank is late.
        """
        self._timeout, self._check = timeout, check
        self._device = torch.device("cuda", torch.cuda.current_device())
        check_shared_gpu(store, rank)
        self._groups: list[Any] = []
        everybody = list(range(num_ranks))
        self._ranks = {NETWORK: {one: one for one in everybody}, DOMAIN: {one: one for one in everybody}}
        network = self._communicator(store, "nccl/network", rank, num_ranks)
        self._group = {NETWORK: network, DOMAIN: network}
        if domains is not None:
            members = [one for one in everybody if domains[one] == domains[rank]]
            self._ranks[DOMAIN] = {one: index for index, one in enumerate(members)}
            if len(members) > 1:
                name = f"nccl/domain/{domains[rank]}"
                self._group[DOMAIN] = self._communicator(store, name, members.index(rank), len(members))

    def _communicator(self, store: Store, name: str, rank: int, size: int) -> Any:
        """Return a communicator that is connected.

        torch would connect it at its first group, which then all ranks had to join, also those with no message
        in it; so it is done here.
        """
        options = dist.ProcessGroupNCCL.Options()
        # torch's own limit is not to come before ours, which tells who was late
        options._timeout = timedelta(seconds=2 * self._timeout + 60)
        with _left_to_us():
            group: Any = dist.ProcessGroupNCCL(store.for_groups(name), rank, size, options)
        self._groups.append(group)
        failed: list[BaseException] = []

        def connect() -> None:
            try:
                group.eager_connect_single_device(self._device)
            except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
                failed.append(error)

        thread = threading.Thread(target=connect, name="connecting", daemon=True)
        thread.start()
        # no look at the control plane: the store's client may be held by the thread, and the watchdog has its own
        in_time = wait_until(lambda: not thread.is_alive(), self._timeout, lambda: None)
        if failed:
            raise PeerLostError(f"connecting the GPUs: {first_line(failed[0])}") from failed[0]
        if not in_time:
            raise PeerLostError(f"connecting the GPUs: not done in {self._timeout:g} s")
        return group

    @property
    def communicator(self) -> int:
        """The communicator of all ranks, as NCCL's own handle."""
        return int(self._group[NETWORK]._comm_ptr())

    def start(self, sends: Sequence[Message], receives: Sequence[Message], phase: int = NETWORK) -> Pending:
        group, ranks = self._group[phase], self._ranks[phase]
        chosen = [(message, group.send) for message in chunks(sends)]
        chosen += [(message, group.recv) for message in chunks(receives)]
        peers = sorted({message.peer for message, _ in chosen})
        work = None
        if chosen:
            try:
                group._start_coalescing()
                for message, post in chosen:
                    post([message.data], ranks[message.peer], 0)
                work = group._end_coalescing()
            except RuntimeError as error:
                raise PeerLostError(f"starting an exchange: {first_line(error)}") from error
        return _NcclPending(work, peers, self._timeout, self._check)

    def close(self) -> None:
        # not `shutdown`, which waits for peers to do the same: they may be gone, or go on for long
        self.abort()

    def abort(self) -> None:
        """Abort the communicators, so that no kernel spins on; threads do it, as NCCL may block in it."""

        def run(group: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the failure itself has been told
                group.abort()

        # all at once: an abort frees memory, which waits for the kernels of the others
        groups, self._groups = self._groups, []
        threads = [threading.Thread(target=run, args=(one,), name="aborting", daemon=True) for one in groups]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _ABORT
        for thread in threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def _left_to_us() -> Iterator[None]:
    """Let torch not end the process on an error of a group made inside."""
    before = {name: os.environ.get(name) for name in _OURS}
    os.environ.update(_OURS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
