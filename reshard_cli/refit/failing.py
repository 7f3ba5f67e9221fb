"""Who reports a failure: the first one tells, everybody ends with its exit code, and echoes are silent."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback

from reshard_cli.errors import PeerLostError, ReshardError, TransferError
from reshard_cli.transport.control import Control
from reshard_cli.transport.launcher import World

__all__ = ["report_failure", "settled", "wrapped"]

_OUTLAST = 6.0  # seconds that the store's server waits for the others to read the failure


def report_failure(control: Control | None, error: Exception, world: World, *, debug: bool) -> int:
    """Settle who was first, print the message on one rank only, and return the exit code for all.

    Anything but a ReshardError is a fault of this program or of a library: it is told with this rank's
    name and phase, and ends the refit like any other, as the peers must not wait.
    """
    first = world.rank == 0
    told = error if isinstance(error, ReshardError) else wrapped(control, error, world.rank)
    if control is not None:
        with contextlib.suppress(RuntimeError):  # the store itself may be what was lost
            told = settled(control, told)
            first = control.fail(told)
            failure = control.failure()
            if failure is not None and not first:
                control.ended()
                if world.serves_store:
                    control.outlast(_OUTLAST)
                return failure.exit_code
    if first:
        _record_for_torchrun(told)
        print(f"error: {told}", file=sys.stderr, flush=True)
        if debug:
            traceback.print_exception(error)
    if control is not None:
        with contextlib.suppress(RuntimeError):
            control.ended()
            if world.serves_store:
                control.outlast(_OUTLAST)
    return told.exit_code


def _record_for_torchrun(error: ReshardError) -> None:
    """Leave the message where torchrun looks for a worker's first error, so that its summary shows it."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def wrapped(
    control: Control | None, error: BaseException, rank: int, name: str | None = None
) -> TransferError:
    """Return any exception as the failure of this rank; `name` is for people, where no control plane knows it."""
    doing = ""
    if name is None:
        name = f"rank {rank}" if control is None else control.name_of(rank)
    with contextlib.suppress(RuntimeError):
        doing = "" if control is None else f" (last: {control.phase_of(rank)})"
    return TransferError(f"{name} raised {type(error).__name__}: {error}{doing}", rank)


def settled(control: Control, error: ReshardError) -> ReshardError:
    """Return the error to report: another rank's where this one is its echo, with the guilty rank's phase."""
    if not isinstance(error, PeerLostError):
        return error
    # the guilty rank's own account, or its will, may come after its connections closed
    silent = control.silent_ranks()
    failure = control.failure()
    if failure is not None:
        return failure.error()
    guilty = error.rank
    if silent and guilty not in silent:
        guilty = silent[0]
    if guilty is None:
        return error
    name = control.name_of(guilty)
    what = "is not running any more, or is stopped" if guilty in silent else "did not do its part"
    return TransferError(f"{name} {what} (last: {control.phase_of(guilty)}); {error}", guilty)
