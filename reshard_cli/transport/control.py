"""The control plane of a refit: small facts through the rendezvous store, and one account of a failure.

Whatever goes wrong on any rank is written to the store once, by whoever is first. Everybody who waits for
anything looks there, and a watchdog thread ends a process whose main thread is stuck in a transport that
nobody will serve any more. So one rank reports, and all end. Values are JSON: nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from reshard_cli.errors import PeerLostError, ReshardError, TransferError, error_of_exit_code
from reshard_cli.transport.store import Store

__all__ = ["Control", "Failure"]

_FAILURE = "failure"
_POLL = 0.01
_WATCH = 0.5
_GRACE = 1.5  # seconds that a rank has to end by itself after another one's failure


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a refit: who wrote it, the exit code for all, the message for people."""

    reporter: int
    exit_code: int
    message: str
    rank: int | None = None

    def error(self) -> ReshardError:
        """Return the failure as the error of its exit code."""
        if self.exit_code == TransferError.exit_code:
            return TransferError(self.message, self.rank)
        return error_of_exit_code(self.exit_code, self.message)


class Control:
    """One rank's view of the control plane. `roles` names each rank for messages, as `rank 3 (infer 1)`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        timeout: float,
        name_of: Callable[[int], str] = lambda rank: f"rank {rank}",
    ) -> None:
        self.store = store
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout = timeout
        self.name_of = name_of
        self._phase = "starting"
        self._read: list[str] = []  # keys that every rank has read once a later gather is complete

    # ---- phases and failures ---------------------------------------------------------------------

    def phase(self, text: str, *, at_once: bool = True) -> None:
        """Tell what this rank is doing now, so that a message about it can say so.

        Inside a round there is no time to tell it `at_once`: the watchdog does so with its next beat.
        """
        if text != self._phase:
            self._phase = text
            if at_once:
                self.store.set(f"phase/{self.rank}", text)

    def phase_of(self, rank: int) -> str:
        """Return what a rank was doing last."""
        if rank == self.rank:
            return self._phase
        key = f"phase/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else "starting"

    def silent_ranks(self) -> list[int]:
        """Return the ranks whose watchdog has stopped beating: they are dead, stopped or cut off."""
        first = self._beats()
        time.sleep(3 * _WATCH)
        second = self._beats()
        return [rank for rank in range(self.num_ranks) if first[rank] == second[rank] is not None]

    def _beats(self) -> list[bytes | None]:
        keys = [f"alive/{rank}" for rank in range(self.num_ranks)]
        return [self.store.get(key) if self.store.check([key]) else None for key in keys]

    def ended(self) -> None:
        """Tell that this rank needs the store no more."""
        self.store.set(f"ended/{self.rank}", "1")

    def outlast(self, seconds: float) -> None:
        """Wait until the other ranks need the store no more, as it is this process that serves it."""
        waiting = {rank for rank in range(self.num_ranks) if rank != self.rank}
        deadline = time.monotonic() + seconds
        while waiting and time.monotonic() < deadline:
            waiting = {rank for rank in waiting if not self.store.check([f"ended/{rank}"])}
            time.sleep(_POLL)

    def failure(self) -> Failure | None:
        """Return the failure that some rank has written, if any."""
        if not self.store.check([_FAILURE]):
            return None
        return Failure(**json.loads(self.store.get(_FAILURE)))

    def fail(self, error: ReshardError) -> bool:
        """Write this failure unless there is one already; say whether this rank is the one to report it."""
        guilty = error.rank if isinstance(error, TransferError) else self.rank
        text = json.dumps(asdict(Failure(self.rank, error.exit_code, str(error), guilty)))
        return bool(self.store.compare_set(_FAILURE, "", text).decode() == text)

    def check(self) -> None:
        """Raise another rank's failure here too."""
        failure = self.failure()
        if failure is not None:
            raise failure.error()

    # ---- small exchanges --------------------------------------------------------------------------

    def wait(self, keys: dict[str, int | None], what: str, extra: float = 0.0) -> None:
        """Wait until all keys are there; their values name the rank that is to set each.

        Raises TransferError naming the ranks that did not within the timeout, or another rank's failure.
        """
        deadline = time.monotonic() + self.timeout + extra
        waiting = dict(keys)
        pause = 0.0002
        while True:
            waiting = {key: rank for key, rank in waiting.items() if not self.store.check([key])}
            if not waiting:
                return
            self.check()
            if time.monotonic() > deadline:
                ranks = sorted({rank for rank in waiting.values() if rank is not None})
                names = ", ".join(f"{self.name_of(rank)} (last: {self.phase_of(rank)})" for rank in ranks[:8])
                raise PeerLostError(
                    f"{what}: {names or 'a rank'} did not come within {self.timeout:g} s",
                    ranks[0] if ranks else None,
                )
            time.sleep(pause)
            pause = min(_POLL, pause * 2)

    def gather(self, key: str, value: Any, what: str) -> list[Any] | None:
        """Collect one value per rank on rank 0; the others get None at once."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        if self.rank != 0:
            return None
        keys = {f"{key}/{rank}": rank for rank in range(self.num_ranks)}
        self.wait(dict(keys), what)
        values = [json.loads(self.store.get(name)) for name in keys]
        for name in [*keys, *self._read]:
            self.store.delete_key(name)
        self._read.clear()
        return values

    def share(self, key: str, value: Any, what: str) -> Any:
        """Give rank 0's value to every rank. `value` counts on rank 0 only."""
        if self.rank == 0:
            self.store.set(key, json.dumps(value))
            self._read.append(key)
            return value
        self.wait({key: 0}, what, extra=2.0)
        return json.loads(self.store.get(key))

    def barrier(self, key: str, what: str) -> None:
        """Wait until every rank is here."""
        self.gather(f"{key}/in", 1, what)
        self.share(f"{key}/out", 1, what)

    # ---- the watchdog -----------------------------------------------------------------------------

    def watch(self, connect: Callable[[], Store], parent: int | None) -> Callable[[], None]:
        """Start the watchdog; return how to stop it.

        It ends this process with the failure's exit code if the main thread has not ended by itself some
        seconds after another rank failed, if the store is gone, or if the launcher `parent` is.
        """
        stop = threading.Event()

        def run() -> None:
            with contextlib.suppress(RuntimeError, TransferError):
                watcher = Control(connect(), self.rank, self.num_ranks, self.timeout, self.name_of)
                beat = 0
                told = ""
                while not stop.wait(_WATCH):
                    beat += 1
                    if self._phase != told:
                        told = self._phase
                        watcher.store.set(f"phase/{self.rank}", told)
                    watcher.store.set(f"alive/{self.rank}", str(beat))
                    if parent is not None and os.getppid() != parent:
                        os._exit(TransferError.exit_code)
                    failure = watcher.failure()
                    if failure is not None:
                        if not stop.wait(_GRACE):
                            os._exit(failure.exit_code)
                        return
                return
            if not stop.wait(_GRACE):
                os._exit(TransferError.exit_code)

        thread = threading.Thread(target=run, name="watchdog", daemon=True)
        thread.start()

        def end() -> None:
            stop.set()
            thread.join(timeout=2 * _GRACE)

        return end
