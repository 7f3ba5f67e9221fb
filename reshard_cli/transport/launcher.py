"""Starts the ranks of a refit on this machine, for people who do not use torchrun.

The launcher imports torch once, serves the store, and forks the ranks, so that eight ranks start as fast
as one. It outlives them all: it knows first when a rank is killed, and takes every rank with it when it
ends. Where torchrun started the process, nothing of this is used.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reshard_cli.errors import DocumentError, TransferError
from reshard_cli.transport.control import Control
from reshard_cli.transport.forking import ended_with, fork_ranks, send_all
from reshard_cli.transport.store import serve_store

__all__ = ["World", "launch", "world_of_environment"]

_LOOPBACK = "127.0.0.1"
_END_GRACE = 2.0  # seconds between the first failure and the end of the last rank


@dataclass(frozen=True, slots=True)
class World:
    """This process's place: its rank, the world's size, the store's address, and who started it."""

    rank: int
    num_ranks: int
    local_rank: int
    host: str
    port: int
    serves_store: bool
    launcher: int | None = None


def world_of_environment(environment: Mapping[str, str]) -> World:
    """Return the world that torchrun (or a scheduler in its manner) describes.

    Raises DocumentError where only a part of it is there.
    """
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    there = [name for name in needed if name in environment]
    if len(there) < len(needed):
        lacking = ", ".join(name for name in needed if name not in there)
        raise DocumentError(f"environment: {', '.join(there)} set, but not {lacking}; start with torchrun")
    try:
        rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local = int(environment.get("LOCAL_RANK", "0"))
    except ValueError as error:
        raise DocumentError(
            f"environment: RANK, WORLD_SIZE and MASTER_PORT are whole numbers: {error}"
        ) from error
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return World(rank, size, local, environment["MASTER_ADDR"], port, rank == 0 and not agent)


def launch(
    num_ranks: int,
    timeout: float,
    run: Callable[[World], int],
    *,
    host: str = _LOOPBACK,
    enter: Callable[[int], None] = lambda rank: None,
) -> int:
    """Fork `num_ranks` processes that each run `run`; return the exit code of the first failure, or 0.

    `host` is this process's address as the ranks reach it, `enter` what each one calls first, with its rank.
    """
    listener = socket.socket()
    # the launcher itself reaches its store by loopback, so any other address means all of them
    listener.bind((_LOOPBACK if host == _LOOPBACK else "0.0.0.0", 0))
    listener.listen(max(128, 2 * num_ranks))
    port = listener.getsockname()[1]
    launcher = os.getpid()

    def rank_of(rank: int) -> int:
        listener.close()
        enter(rank)
        return run(World(rank, num_ranks, rank, host, port, False, launcher))

    children = fork_ranks(num_ranks, rank_of)
    control = Control(serve_store(listener.detach(), port, timeout), -1, num_ranks, timeout)
    with ended_with(children):
        return _supervise(children, control)


def _supervise(children: dict[int, int], control: Control) -> int:
    """Wait for all ranks; report one that was killed; end those that do not end by themselves."""
    deadline: float | None = None
    code = 0
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if deadline is None and control.failure() is not None:
                deadline = time.monotonic() + _END_GRACE
            if deadline is not None and time.monotonic() > deadline:
                send_all(children, signal.SIGKILL)
                deadline = time.monotonic() + _END_GRACE
            time.sleep(0.01)
            continue
        if pid not in children:
            continue  # another child of this process: the guard of an emulated cluster
        rank = children.pop(pid)
        ended = os.waitstatus_to_exitcode(status)
        if ended < 0 and control.failure() is None:
            name = signal.Signals(-ended).name
            error = TransferError(f"rank {rank} was ended by {name} (last: {control.phase_of(rank)})", rank)
            if control.fail(error):
                print(f"error: {error}", file=sys.stderr, flush=True)
        code = code or (ended if ended > 0 else TransferError.exit_code if ended < 0 else 0)
    failure = control.failure()
    return failure.exit_code if failure is not None else code
