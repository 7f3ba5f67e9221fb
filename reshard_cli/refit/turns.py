"""What a loop refits next, the same on all ranks: the next version, or the next checkpoint of a watched folder."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from reshard_cli.refit.prepare import RefitOptions
from reshard_cli.refit.stopping import Stop
from reshard_cli.transport.control import Control
from reshard_cli.weights.watching import Watched

__all__ = ["Turn", "next_turn"]

_LOOK = 0.25  # seconds from one look for new checkpoints to the next


@dataclass(slots=True)
class Turn:
    """A version, and the folder that it comes from where one is watched."""

    version: int
    origin: str | None = None


def next_turn(
    control: Control, options: RefitOptions, watched: Watched | None, done: int, stop: Stop
) -> Turn | None:
    """Return what rank 0 decides for all ranks after so many refits; None: the loop is at its end.

    Any rank that was asked to stop says so to rank 0. Raises another rank's failure.
    """
    key = f"loop/{done + 1}"
    if stop.asked:
        control.store.set("stop", "1")
    control.phase("waiting for the next refit")
    if control.rank == 0:
        turn = _decided(control, options, watched, done, stop)
        control.share(key, None if turn is None else asdict(turn), "waiting for the next refit")
        control.store.delete_key(f"loop/{done - 1}")
        return turn
    if not control.wait_while_alive(key, 0, lambda: stop.asked):
        control.store.set("stop", "1")
    given = control.read_shared(key, 0)
    return None if given is None else Turn(**given)


def _decided(
    control: Control, options: RefitOptions, watched: Watched | None, done: int, stop: Stop
) -> Turn | None:
    if options.iterations is not None and done >= options.iterations:
        return None
    while not (stop.asked or control.store.check(["stop"])):
        control.check()
        if watched is None:
            return Turn(done + 1)
        found = watched.next()
        if found is not None:
            return Turn(found.version, str(found.path))
        time.sleep(_LOOK)
    return None
