"""Starts the ranks of one job that joins another, on this machine, for people who do not use torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from reshard_cli.errors import TransferError

__all__ = ["launch_job"]

_END_GRACE = (
    2.5  # seconds between the first rank that failed and the end of the last one, which may be stopped
)


def launch_job(num_ranks: int, run: Callable[[int, Callable[[], bool]], int]) -> int:
    """Fork the ranks, each of which runs `run` with its number; return the first failure's exit code, or 0.

    The other argument of `run` says True to the first rank that asks, of all of them. Signals are passed on. The
    ranks tell each other of failures by the gate; those that are left are ended.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    claims, one_claim = os.pipe()
    os.write(one_claim, b"1")
    os.set_blocking(claims, False)

    def claim() -> bool:
        try:
            return bool(os.read(claims, 1))
        except BlockingIOError:
            return False

    children: dict[int, int] = {}
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _end_with(parent)
                code = run(rank, claim)
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # no interpreter teardown: a group with work in flight would abort there
        children[pid] = rank

    def forward(number: int, _: object) -> None:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _supervise(children)
    finally:
        os.close(claims)
        os.close(one_claim)
        for number, handler in previous.items():
            signal.signal(number, handler)
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


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
                for one in children:
                    os.kill(one, signal.SIGKILL)
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
