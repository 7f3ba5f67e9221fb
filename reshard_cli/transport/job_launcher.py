"""Starts the ranks of one job that joins another, on this machine, for people who do not use torchrun."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from reshard_cli.errors import TransferError
from reshard_cli.transport.forking import ended_with, fork_ranks, send_all

__all__ = ["launch_job"]

# seconds between the first rank that failed and the end of the last one, which may be stopped
_END_GRACE = 2.5


def launch_job(num_ranks: int, run: Callable[[int, Callable[[], bool]], int]) -> int:
    """Fork the ranks, each of which runs `run` with its number; return the first failure's exit code, or 0.

    The other argument of `run` says True to the first rank that asks, of all of them. Signals are passed on. The
    ranks tell each other of failures by the gate; those that are left are ended.
    """
    parent = os.getpid()
    claims, one_claim = os.pipe()
    os.write(one_claim, b"1")
    os.set_blocking(claims, False)

    def claim() -> bool:
        try:
            return bool(os.read(claims, 1))
        except BlockingIOError:
            return False

    def rank_of(rank: int) -> int:
        _end_with(parent)
        return run(rank, claim)

    children = fork_ranks(num_ranks, rank_of)
    try:
        with ended_with(children):
            return _supervise(children)
    finally:
        os.close(claims)
        os.close(one_claim)


def _end_with(parent: int) -> None:
    """Have this process ended when its launcher is (Linux's PR_SET_PDEATHSIG)."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(TransferError.exit_code)


def _supervise(children: dict[int, int]) -> int:
    deadline: float | None = None
    code = 0
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if deadline is not None and time.monotonic() > deadline:
                send_all(children, signal.SIGKILL)
                deadline = time.monotonic() + _END_GRACE
            time.sleep(0.01)
            continue
        if pid not in children:
            continue
        children.pop(pid)
        ended = os.waitstatus_to_exitcode(status)
        if ended:
            code = code or (ended if ended > 0 else TransferError.exit_code)
            deadline = deadline or time.monotonic() + _END_GRACE
    return code
