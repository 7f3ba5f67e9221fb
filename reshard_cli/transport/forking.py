"""Forks the ranks of a job on this machine, and passes signals on to them: what both launchers do."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping

__all__ = ["ended_with", "fork_ranks", "send_all"]


def fork_ranks(num_ranks: int, run: Callable[[int], int]) -> dict[int, int]:
    """Fork processes that each run `run` with their rank, and end with its result; return the ranks by pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    children: dict[int, int] = {}
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = run(rank)
            except Exception:
                traceback.print_exc()
                raise
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                # no interpreter teardown: a group with work in flight would abort the process there
                os._exit(code)
        children[pid] = rank
    return children


def send_all(children: Mapping[int, int], number: int) -> None:
    """Send a signal to all children that were not waited for."""
    for pid in children:
        os.kill(pid, number)


@contextlib.contextmanager
def ended_with(children: Mapping[int, int]) -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the children; take those that are left with it at the end."""
    previous = {
        number: signal.signal(number, lambda got, _: send_all(children, got))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        send_all(children, signal.SIGKILL)
