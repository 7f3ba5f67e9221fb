"""Who reports a failure: the first one tells, everybody ends with its exit code, and echoes are silent."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback

from reshard_cli.errors import ReshardError, TransferError
from reshard_cli.transport.control import Control
from reshard_cli.transport.launcher import World

__all__ = ["report_failure"]


def report_failure(control: Control | None, error: ReshardError, world: World, debug: bool) -> int:
    """Settle who was first, print the message on one rank only, and return the exit code for all."""
    first = world.rank == 0
    if control is not None:
        with contextlib.suppress(RuntimeError):  # the store itself may be what was lost
            error = _settled(control, error)
            first = control.fail(error)
            failure = control.failure()
            if failure is not None and not first:
                return failure.exit_code
    if first:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if debug:
            traceback.print_exception(error)
    return error.exit_code


def _settled(control: Control, error: ReshardError) -> ReshardError:
    """Return the error to report: another rank's where this one is its echo, with the guilty rank's phase."""
    if not isinstance(error, TransferError) or error.rank == control.rank:
        return error
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        failure = control.failure()
        if failure is not None:
            return failure.error()
        time.sleep(0.02)
    silent = control.silent_ranks()
    guilty = error.rank
    if silent and guilty not in silent:
        guilty = silent[0]
    if guilty is None:
        return error
    name = control.name_of(guilty)
    what = "is not running any more, or is stopped" if guilty in silent else "did not do its part"
    return TransferError(f"{name} {what} (last: {control.phase_of(guilty)}); {error}", guilty)
