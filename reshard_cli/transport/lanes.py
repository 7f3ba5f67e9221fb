"""Runs calls side by side, each on a thread with a connection to the gate of its own: one waits there while others ask."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from reshard_cli.errors import TransferError
from reshard_cli.transport.gate_client import GateStore

__all__ = ["LaneStore", "Lanes"]

Result = TypeVar("Result")


class LaneStore:
    """The gate as a store: the calling thread's own connection where it has one, else the one that all share."""

    def __init__(self, gate: GateStore) -> None:
        self._gate = gate
        self._own = threading.local()

    def connect(self) -> GateStore:
        """Give the calling thread a connection of its own; return it. Raises TransferError."""
        self._own.gate = self._gate.another()
        return self._here()

    def _here(self) -> GateStore:
        found: GateStore = getattr(self._own, "gate", self._gate)
        return found

    def set(self, key: str, value: str) -> None:
        self._here().set(key, value)

    def get(self, key: str) -> bytes:
        return self._here().get(key)

    def check(self, keys: list[str]) -> bool:
        return self._here().check(keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._here().compare_set(key, expected, value)

    def delete_key(self, key: str) -> bool:
        return self._here().delete_key(key)

    def wait_keys(self, keys: Sequence[str], unless: Sequence[str], seconds: float) -> list[str]:
        return self._here().wait_keys(keys, unless, seconds)

    def for_groups(self, prefix: str) -> Any:
        return self._here().for_groups(prefix)


class Lanes:
    """Threads that live as long as this; they are made when calls first come several at once."""

    def __init__(self, gate: GateStore, most: int) -> None:
        """`most`: the calls that run at once; others follow them, in order. 1: all on the calling thread."""
        self.store = LaneStore(gate)
        self._gate, self._most = gate, most
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._connections: list[GateStore] = []

    def run(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run calls; return what each returned, when all have. A call alone runs on the calling thread.

        Raises the first exception that one of them raised, when all have ended; an interrupt of the calling thread at
        once: then the gate is given up, so that neither the calls nor this rank's peers wait for what does not come.
        """
        wanted = min(len(calls), self._most)
        while wanted > 1 and len(self._connections) < wanted and self._start():
            pass
        if wanted == 1 or not self._connections:  # without the gate each call finds out for itself
            return [call() for call in calls]
        results: dict[int, Result] = {}
        raised: dict[int, BaseException] = {}
        ended: queue.SimpleQueue[None] = queue.SimpleQueue()

        def running(number: int, call: Callable[[], Result]) -> Callable[[], None]:
            def run() -> None:
                try:
                    results[number] = call()
                except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
                    raised[number] = error
                ended.put(None)

            return run

        for number, call in enumerate(calls):
            self._calls.put(running(number, call))
        try:
            for _ in calls:
                ended.get()
        except BaseException as error:
            self._gate.give_up(type(error).__name__)
            raise
        if raised:
            raise raised[min(raised)]
        return [results[number] for number in range(len(calls))]

    def _start(self) -> bool:
        """Start one more thread; return whether the gate took its connection."""
        connected: queue.SimpleQueue[GateStore | None] = queue.SimpleQueue()

        def work() -> None:
            try:
                connected.put(self.store.connect())
            except TransferError:
                connected.put(None)
                return
            while (call := self._calls.get()) is not None:
                call()

        threading.Thread(target=work, name=f"lane {len(self._connections)}", daemon=True).start()
        found = connected.get()
        if found is None:
            return False
        self._connections.append(found)
        return True

    def close(self) -> None:
        """End the threads that have nothing to do, and their connections."""
        for _ in self._connections:
            self._calls.put(None)
        for one in self._connections:
            one.close()
        self._connections.clear()
