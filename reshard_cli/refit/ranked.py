"""One process's life as a rank: it connects, does its part, and ends, whatever happens, with everybody else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial

from reshard_cli.errors import TransferError
from reshard_cli.refit.failing import report_failure, report_silence
from reshard_cli.transport.control import Control
from reshard_cli.transport.launcher import World
from reshard_cli.transport.store import connect_store
from reshard_cli.transport.watchdog import watch

__all__ = ["Body", "run_ranked"]

Body = Callable[[Control, list[Callable[[], None]]], tuple[Callable[[], None], Callable[[], None]]]


def run_ranked(world: World, timeout: float, body: Body, *, debug: bool) -> int:
    """Run `body` on this rank; return the process's exit code.

    `body` gets the control plane and a list to which it adds what undoes its work after a failure; it returns
    how to close what it opened, which is done when all ranks are done, and how to tell its result. One rank
    prints the message of a failure; all ranks then end with its exit code.
    """
    control: Control | None = None
    undo: list[Callable[[], None]] = []
    rank = world.rank
    try:
        store = connect_store(world.host, world.port, timeout, serve=world.serves_store)
        control = Control(store, rank, world.num_ranks, timeout)
        stop_watching = watch(
            control,
            lambda: connect_store(world.host, world.port, timeout),
            world.launcher,
            partial(report_silence, control, world),
        )
        close, tell = body(control, undo)
        control.phase("closing")
        control.barrier("end", "closing")
        close()
        stop_watching()
        tell()
        control.ended()
        if world.serves_store:
            control.outlast(timeout)
        return 0
    except KeyboardInterrupt:
        code = report_failure(
            control, TransferError(f"rank {rank} was interrupted", rank), world, debug=debug
        )
    except Exception as error:  # noqa: BLE001 - reported, and the process ended: no peer is left waiting
        code = report_failure(control, error, world, debug=debug)
    for one in undo:
        one()
    sys.stderr.flush()
    os._exit(code)  # no teardown: groups may have work in flight, and would abort the process
