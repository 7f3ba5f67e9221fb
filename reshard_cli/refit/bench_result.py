"""What a bench is asked for, and what it measured: plain values, without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from reshard_cli.errors import DocumentError
from reshard_cli.plan.bound import DomainBound
from reshard_cli.plan.routes import Mode

__all__ = ["BenchOptions", "BenchResult", "Measured", "ModeResult", "SweepSize", "sweep_sizes"]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_MOST_SIZES = 64


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure: modes in turn, so many refits of each; the first `warmup` of them do not count.

    `sweep`: sizes in bytes of one tensor, to be measured instead of the model.
    """

    modes: tuple[Mode, ...]
    warmup: int = 2
    repeats: int = 7
    probe_bytes: int = 32 << 20
    sweep: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What a refit took: seconds and phases of the slowest rank, bytes that the interfaces sent (None without any)."""

    seconds: float
    phases: dict[str, float]
    sent: int | None


@dataclass(slots=True)
class ModeResult:
    """What was measured of one mode: seconds and interface bytes (None without a NIC) of every repeat.

    `order` says which measurement of its run each repeat was; `refits` how many refits one measurement is made of.
    """

    mode: Mode
    digest: str
    network_bytes: int
    busiest_bytes: int
    rounds: int
    seconds: list[float] = field(default_factory=list)
    measured: list[int | None] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    verified: int | None = None
    order: list[int] = field(default_factory=list)
    refits: int = 1

    def add(self, one: Measured, order: int) -> None:
        """Add a repeat, which was the `order`-th measurement that counts."""
        self.seconds.append(one.seconds)
        self.measured.append(one.sent)
        self.phases.append(one.phases)
        self.order.append(order)


@dataclass(slots=True)
class SweepSize:
    """One size of a sweep: the tensor, and what was measured, or why nothing was."""

    num_bytes: int
    shape: tuple[int, int]
    dtype: str
    results: list[ModeResult] = field(default_factory=list)
    bound: DomainBound | None = None
    skipped: str | None = None


@dataclass(slots=True)
class BenchResult:
    """All that rank 0 knows: results by mode, the bare exchange's rate by domain, the network's bound."""

    results: list[ModeResult]
    probe_rates: list[float]
    bound: DomainBound | None
    model_bytes: int
    world: dict[str, Any]
    backend: str
    warmup: int
    environment: dict[str, Any]
    layouts: dict[str, str]
    sweep: list[SweepSize] = field(default_factory=list)


def sweep_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in bytes of `MIN:MAX[:FACTOR]`, as 1K:1G:4; MAX is among them where the factor meets it.

    Raises DocumentError.
    """
    parts = text.strip().lower().split(":")
    sizes = [re.fullmatch(r"(\d+)([kmgt]?)(?:i?b)?", part.strip()) for part in parts[:2]]
    factor = parts[2].strip() if len(parts) > 2 else "4"
    if len(parts) not in (2, 3) or None in sizes or not factor.isdecimal():
        raise DocumentError(
            f"--sweep: {text!r}: write MIN:MAX or MIN:MAX:FACTOR, as 1K:1G:4; a bare --sweep goes behind the documents"
        )
    low, high = (int(one[1]) * _UNITS[one[2]] for one in sizes if one is not None)
    if not 64 <= low <= high or high > 1 << 50 or int(factor) < 2:
        raise DocumentError(
            f"--sweep: {text!r}: sizes go upwards from 64 bytes or more, by a factor of 2 or more"
        )
    found: list[int] = []
    while low <= high and len(found) < _MOST_SIZES:
        found.append(low)
        low *= int(factor)
    return tuple(found)
