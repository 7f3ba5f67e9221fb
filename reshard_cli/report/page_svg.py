"""Pictures for pages without a script: axes, marks and labels as SVG elements, coloured by the page's style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Axis", "Drawing", "linear_axis", "log_axis", "nice_ticks", "seconds_text"]

_SHAPES = ("circle", "square", "triangle", "diamond")


def seconds_text(value: float) -> str:
    """Return seconds in the unit that suits them."""
    if not value:
        return "0"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value * 1e6:.4g} µs"


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return round values between low and high, about so many."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(one * power for one in (1, 2, 2.5, 5, 10) if one * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high` along pixels from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = (math.log10(max(one, 1e-300)) for one in (value, low, high))
        part = (value - low) / (high - low) if high > low else 0.5
        return self.start + part * (self.stop - self.start)

    def ticks(self, count: int = 6) -> list[float]:
        """Return the values to mark."""
        if not self.logarithmic:
            return nice_ticks(self.low, self.high, count)
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return [10.0**power for power in range(first, last + 1)]


def linear_axis(
    values: Iterable[float], start: float, stop: float, *, zero: bool = False, margin: float = 0.06
) -> Axis:
    """Return the axis that shows all these values with some room around them; `zero`: from 0."""
    listed = list(values)
    low, high = min(listed, default=0.0), max(listed, default=1.0)
    room = (high - low) * margin or abs(high) * margin or 1.0
    return Axis(0.0 if zero else low - room, high + room, start, stop)


def log_axis(values: Iterable[float], start: float, stop: float) -> Axis:
    """Return the logarithmic axis that shows all these positive values."""
    listed = [one for one in values if one > 0] or [1.0]
    return Axis(min(listed) / 1.3, max(listed) * 1.3, start, stop, logarithmic=True)


@dataclass(slots=True)
class Drawing:
    """One SVG picture that grows by elements; colours are classes of the style sheet, texts are escaped."""

    width: float
    height: float
    label: str
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Draw a straight line."""
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>')

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a line through the points."""
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{drawn}" class="{kind}"/>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, title: str = "") -> None:
        """Draw a filled rectangle."""
        size = f'width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"'
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} class="{kind}">{_title(title)}</rect>')

    def text(self, x: float, y: float, text: str, kind: str = "", *, anchor: str = "start") -> None:
        """Write a text, its baseline at y."""
        named = f' class="{kind}"' if kind else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{html.escape(text)}</text>'
        )

    def mark(self, x: float, y: float, shape: int, kind: str, title: str = "", size: float = 4.5) -> None:
        """Draw a mark: which shape it has tells modes apart without their colours."""
        drawn = _SHAPES[shape % len(_SHAPES)]
        if drawn == "circle":
            element = f'circle cx="{x:.1f}" cy="{y:.1f}" r="{size}"'
            self.parts.append(f'<{element} class="{kind}">{_title(title)}</circle>')
            return
        corners = {
            "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
            "triangle": ((0, -1.15), (1.1, 0.85), (-1.1, 0.85)),
            "diamond": ((0, -1.25), (1.1, 0), (0, 1.25), (-1.1, 0)),
        }[drawn]
        points = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in corners)
        self.parts.append(f'<polygon points="{points}" class="{kind}">{_title(title)}</polygon>')

    def across(self, axis: Axis, top: float, bottom: float, texts: Sequence[tuple[float, str]]) -> None:
        """Draw upright grid lines with their texts below."""
        for value, text in texts:
            x = axis.at(value)
            self.line(x, top, x, bottom, "grid")
            self.text(x, bottom + 16, text, "muted", anchor="middle")

    def upwards(self, axis: Axis, left: float, right: float, texts: Sequence[tuple[float, str]]) -> None:
        """Draw level grid lines with their texts on the left."""
        for value, text in texts:
            y = axis.at(value)
            self.line(left, y, right, y, "grid")
            self.text(left - 8, y + 4, text, "muted", anchor="end")

    def svg(self) -> str:
        """Return the picture as an element."""
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{html.escape(self.label)}">'
            f"{''.join(self.parts)}</svg>"
        )


def _title(text: str) -> str:
    return f"<title>{html.escape(text)}</title>" if text else ""
