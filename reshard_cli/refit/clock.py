"""Seconds by phase of one refit on one rank."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from reshard_cli.transport.control import Control

__all__ = ["Clock"]


@dataclass(slots=True)
class Clock:
    """Adds up seconds by phase, and tells the control plane which phase it is."""

    control: Control
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextlib.contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[None]:
        """Time what is done inside. A detail (as which round) is too frequent to be told at once."""
        self.control.phase(f"{name}{detail}", at_once=not detail)
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began
