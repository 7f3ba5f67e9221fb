"""Who reports a failure: the first one tells, everybody ends with its exit code, and echoes are silent."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback

from reshard_cli.errors import PeerLostError, ReshardError, TransferError
from reshard_cli.transport.control import Control
from reshard_cli.transport.launcher import World

__all__ = ["cut_off", "report_failure", "report_silence", "settled", "wrapped"]

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


def report_silence(control: Control, world: World) -> None:
    """Tell that the network to the job's store is down, on one rank of this host: no rank can ask the others."""
    lost = TransferError(
        f"lost the job's store at {world.host}:{world.port}: no answer for {control.timeout:g} s; is the network down?"
    )
    told = cut_off(control, lost, lost)
    _record_for_torchrun(told)
    if world.local_rank == 0:
        print(f"error: {told}", file=sys.stderr, flush=True)


def cut_off(control: Control, error: ReshardError, lost: Exception) -> TransferError:
    """Return the error of a rank that `lost` the store: whom it lost, and what both were doing.

    Nobody can say more: the store is beside rank 0, or reached by the same network.
    """
    peer = error.rank if isinstance(error, TransferError) else None
    first = f"{control.name_of(0)} was heard last at: {control.first_phase}"
    own = f"{control.name_of(control.rank)} is cut off (last: {control.told()})"
    more = "" if str(lost) in str(error) else f"; {lost}"
    if peer is not None and peer != control.rank and control.name_of(peer) not in str(error):
        own = f"{own} from {control.name_of(peer)}"
    return TransferError(f"{own}: {error}{more}; {first}", 0 if peer is None else peer)


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
    own = control.name_of(control.rank)
    if guilty is None:
        return TransferError(f"{own} (last: {control.told()}): {error}")
    name = control.name_of(guilty)
    what = "is not running any more, is stopped, or is cut off"
    if guilty not in silent:  # what it should have sent may have been lost on the way
        what = f"did not do its part for {own}, or the network between them is down"
    return TransferError(f"{name} {what} (last: {control.phase_of(guilty)}); {error}", guilty)
