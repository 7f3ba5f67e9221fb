"""The control plane of a refit: small facts through the rendezvous store, and one account of a failure.

Whatever goes wrong on any rank is written to the store once, by whoever is first. Everybody who waits for
anything looks there (and see `watchdog`). So one rank reports, and all end. Values are JSON: nothing is unpickled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from reshard_cli.errors import PeerLostError, ReshardError, TransferError, error_of_exit_code
from reshard_cli.transport.store import Store

__all__ = ["BEAT", "Control", "Failure"]

_FAILURE = "failure"
_POLL = 0.01
BEAT = 0.5  # seconds from one sign of life to the next


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
        self.first_phase = "starting"  # what rank 0 was doing when the store was last heard
        self.deciding = False  # between "all is there" and "committed": not to be ended from outside
        self._posted: list[str] = []
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

    def told(self) -> str:
        """Return what this rank is doing, for the next sign of life."""
        return self._phase

    def phase_of(self, rank: int) -> str:
        """Return what a rank was doing last."""
        if rank == self.rank:
            return self._phase
        key = f"phase/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else "starting"

    def silent_ranks(self) -> list[int]:
        """Return the ranks whose watchdog does not beat: they are dead, stopped or cut off.

        Those that beat before come first. Empty where somebody writes a failure meanwhile, which says more.
        """
        first = self._beats()
        if not self.store.wait_keys([_FAILURE], [], 3 * BEAT):
            return []
        second = self._beats()
        silent = [one for one in range(self.num_ranks) if one != self.rank and first[one] == second[one]]
        return sorted(silent, key=lambda one: second[one] is None)

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
        lacking = self.store.wait_keys(list(keys), [_FAILURE], self.timeout + extra)
        if not lacking:
            return
        self.check()
        ranks = sorted({rank for key in lacking if (rank := keys[key]) is not None})
        names = ", ".join(f"{self.name_of(rank)} (last: {self.phase_of(rank)})" for rank in ranks[:8])
        raise PeerLostError(
            f"{what}: {names or 'a rank'} did not come within {self.timeout:g} s", ranks[0] if ranks else None
        )

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

    def post(self, key: str, value: Any) -> None:
        """Leave this rank's value for whoever reads it, until it leaves the next one.

        There has to be a barrier between the two.
        """
        for earlier in self._posted:
            self.store.delete_key(earlier)
        name = f"{key}/{self.rank}"
        self.store.set(name, json.dumps(value))
        self._posted = [name]

    def read(self, key: str, rank: int, what: str) -> Any:
        """Return the value that a rank left, when it is there."""
        name = f"{key}/{rank}"
        self.wait({name: rank}, what)
        return json.loads(self.store.get(name))

    def decide(self, key: str, wish: str) -> str:
        """Return what is decided under this key: the wish of whoever decided first, perhaps this one's."""
        decided = self.store.compare_set(key, "", wish).decode()
        if self.rank == 0 and key not in self._read:
            self._read.append(key)
        return decided

    def decision(self, key: str, what: str) -> str:
        """Return what rank 0, or somebody before it, decided, when it is there."""
        self.wait({key: 0}, what, extra=2.0)
        return self.store.get(key).decode()

    def alive(self) -> bool:
        """Say whether the store still answers."""
        try:
            self.store.check([_FAILURE])
        except (RuntimeError, TransferError):
            return False
        return True

    def read_shared(self, key: str, rank: int, stop: Callable[[], bool] = lambda: False) -> Any:
        """Return what a rank shares, however long that takes while it lives; None where `stop` says so before."""
        if not self.wait_while_alive(key, rank, stop):
            return None
        return json.loads(self.store.get(key))

    def wait_while_alive(self, key: str, rank: int, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait for what a rank sets when it is time, however long that takes while it lives.

        Returns False where `stop` says so before. Raises PeerLostError when the rank has given no sign of life
        for the timeout, or another rank's failure.
        """
        seen, since = self._beats()[rank], time.monotonic()
        while self.store.wait_keys([key], [_FAILURE], BEAT):
            self.check()
            if stop():
                return False
            beat = self._beats()[rank]
            if beat != seen:
                seen, since = beat, time.monotonic()
            if time.monotonic() - since > self.timeout:
                raise PeerLostError(
                    f"waiting for {self.name_of(rank)} (last: {self.phase_of(rank)}): no sign of life for "
                    f"{self.timeout:g} s",
                    rank,
                )
        return True

    def barrier(self, key: str, what: str) -> None:
        """Wait until every rank is here."""
        self.gather(f"{key}/in", 1, what)
        self.share(f"{key}/out", 1, what)
