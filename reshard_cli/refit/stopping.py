"""SIGINT and SIGTERM in a loop: the first one ends it after the running refit, the second one at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

__all__ = ["Stop"]


_SAME = 1.0  # seconds in which a second signal is the first one again: from the terminal, and from a launcher


class Stop:
    """Whether somebody asked this process to stop. Used around a loop, on the main thread."""

    def __init__(self) -> None:
        self.asked = False
        self._since = 0.0
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._since = True, time.monotonic()
        elif time.monotonic() - self._since > _SAME:
            raise KeyboardInterrupt
