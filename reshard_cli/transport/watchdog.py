"""A thread that gives signs of life for a rank, and ends a process that is stuck after another rank failed.

A transport may wait for a peer that will never come. Where the process is this program's own, the thread ends it
with the failure's exit code; inside somebody's training job it only tells, as the transports' own timeouts
bring the main thread back.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from reshard_cli.errors import ReshardError, TransferError
from reshard_cli.transport.control import BEAT, Control, Failure
from reshard_cli.transport.store import Store

__all__ = ["Watchdog", "watch"]

_GRACE = 1.5  # seconds that a rank has to end by itself after another one's failure
_LOOK = 4  # beats from one look at what rank 0 does to the next: for a message, should the store be lost
_DECIDING = 20.0  # and more, where it is finding out whether a version was committed


class Watchdog:
    """Watches over some controls of one rank: all of its refits with the other jobs."""

    def __init__(
        self,
        connect: Callable[[], Store],
        *,
        parent: int | None,
        ends: bool,
        last_words: Callable[[Store | None, Failure | None], None] = lambda *_: None,
        silence: float | None = None,
        on_silence: Callable[[], None] = lambda: None,
    ) -> None:
        """`connect` gives this thread a store of its own; with `ends` it may end the process.

        The process also ends when its launcher, the process `parent`, is gone. `last_words` is called just before it
        ends, with the thread's store (None: it is lost) and the failure. `silence`: the seconds without an answer
        after which the store is lost, where it has no timeouts of its own; then the process ends after `on_silence`.
        """
        self._connect, self._parent, self._ends, self._last_words = connect, parent, ends, last_words
        self._silence, self._on_silence = silence, on_silence
        self._unanswered = 0  # beats
        self._watched: dict[
            int, tuple[Control, Callable[[Store], Store], Callable[[Failure], None] | None]
        ] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        if self._silence is not None:
            threading.Thread(target=self._listen, name="watchdog's watchdog", daemon=True).start()

    def _listen(self) -> None:
        """End the process when the other thread waits for the store in vain, as the main one then does."""
        assert self._silence is not None
        # counted in waits of this thread, as time also passes while the whole process is stopped
        while not self._stop.wait(BEAT):
            self._unanswered += 1
            if not self._thread.is_alive():
                return
            if self._unanswered * BEAT > max(self._silence, 2 * BEAT):
                self._on_silence()
                os._exit(TransferError.exit_code)

    def add(
        self,
        control: Control,
        within: Callable[[Store], Store] = lambda store: store,
        on_failure: Callable[[Failure], None] | None = None,
    ) -> None:
        """Watch this control too; `within` finds its keys in the thread's store.

        `on_failure` is called once, from the thread, instead of ending the process.
        """
        with self._lock:
            self._watched[id(control)] = (control, within, on_failure)

    def remove(self, control: Control) -> None:
        """Watch this control no more."""
        with self._lock:
            self._watched.pop(id(control), None)

    def end(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * _GRACE)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError, ReshardError):
            self._beat(self._connect())
            return
        # the store is gone, and with it whoever could say more
        if self._ends and not self._stopped(_GRACE):
            self._last_words(None, None)
            os._exit(TransferError.exit_code)

    def _beat(self, store: Store) -> None:
        beat = 0
        told: dict[int, str] = {}
        while not self._stop.wait(BEAT):
            beat += 1
            self._unanswered = 0
            if self._parent is not None and os.getppid() != self._parent:
                os._exit(TransferError.exit_code)
            with self._lock:
                watched = dict(self._watched)
            told = {key: phase for key, phase in told.items() if key in watched}
            for key, (control, within, on_failure) in watched.items():
                own = within(store)
                phase = control.told()
                if told.get(key) != phase:
                    told[key] = phase
                    own.set(f"phase/{control.rank}", phase)
                own.set(f"alive/{control.rank}", str(beat))
                if control.rank and beat % _LOOK == 1 and own.check(["phase/0"]):
                    control.first_phase = own.get("phase/0").decode()
                if not own.check(["failure"]):
                    continue
                failure = Control(own, control.rank, control.num_ranks, control.timeout).failure()
                assert failure is not None
                if on_failure is not None:
                    self.remove(control)
                    on_failure(failure)
                elif self._ends and not self._stopped(_GRACE):
                    self._last_words(store, failure)
                    os._exit(failure.exit_code)
                else:
                    return

    def _stopped(self, grace: float) -> bool:
        """Wait so long for the main thread to come to its end; longer where it is deciding about a version."""
        began = time.monotonic()
        while time.monotonic() - began < grace:
            if self._stop.wait(0.05):
                return True
            with self._lock:
                deciding = any(control.deciding for control, _, _ in self._watched.values())
            grace = max(grace, _DECIDING) if deciding else grace
        return False


def watch(
    control: Control,
    connect: Callable[[], Store],
    parent: int | None,
    on_silence: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Start a watchdog of a process that is this program's own; return how to stop it.

    It ends this process with the failure's exit code if the main thread has not ended by itself some seconds
    after another rank failed, if the store is gone, or if the launcher `parent` is. `on_silence` is called before that
    where the store has not answered for the timeout: the network to it is down.
    """
    watchdog = Watchdog(connect, parent=parent, ends=True, silence=control.timeout, on_silence=on_silence)
    watchdog.add(control)
    watchdog.start()
    return watchdog.end
