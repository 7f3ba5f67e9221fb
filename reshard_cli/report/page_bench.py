"""The pictures of a bench's page: every repeat, the course of the run, phases, bytes, the limit, curves over sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from reshard_cli.plan.routes import Mode
from reshard_cli.report.page_svg import Axis, Drawing, linear_axis, log_axis, seconds_text
from reshard_cli.report.terminal import bytes_text

__all__ = [
    "bytes_chart",
    "course_chart",
    "hue_of",
    "limit_chart",
    "phase_chart",
    "phases_of",
    "repeat_chart",
    "sweep_chart",
]

# in the order in which a refit goes through them
_PHASES = ("pack", "network", "domain", "unpack", "cast")
_MODES: tuple[str, ...] = get_args(Mode)
_WIDE, _HALF = 1160, 560
_LEFT = 96
_Modes = Sequence[dict[str, Any]]


def hue_of(mode: str) -> int:
    """Return the number of a mode's colour and mark: the same on every page, whichever modes it has."""
    return _MODES.index(mode)


def repeat_chart(modes: _Modes, limit: float | None) -> str:
    """Return every repeat's seconds by mode: dots, the box of the middle half, median, interval, and the limit."""
    row, top = 64, 8
    bottom = top + row * len(modes)
    values = [value for one in modes for value in one["seconds"]]
    right = _WIDE - 190
    axis = linear_axis(values if limit is None else [*values, limit], _LEFT, right)
    drawing = Drawing(_WIDE, bottom + 42, "Seconds of every repeat, by mode")
    drawing.across(axis, top, bottom, [(tick, _short(tick, axis)) for tick in axis.ticks(8)])
    drawing.text((_LEFT + right) / 2, bottom + 36, "seconds of the slowest rank", "muted", anchor="middle")
    for index, one in enumerate(modes):
        middle, hue = top + row * (index + 0.5), hue_of(one["mode"])
        quarters = np.percentile(one["seconds"], [25, 75])
        low, high = (axis.at(float(value)) for value in quarters)
        drawing.text(_LEFT - 12, middle + 4, one["mode"], anchor="end")
        drawing.box(low, middle - 12, max(1.0, high - low), 24, f"soft mode-{hue}")
        interval = [axis.at(value) for value in one["ci95"]]
        drawing.line(interval[0], middle + 21, interval[1], middle + 21, f"interval mode-{hue}")
        for end in interval:
            drawing.line(end, middle + 17, end, middle + 25, f"interval mode-{hue}")
        for nth, seconds in enumerate(one["seconds"]):
            # the same spread at each time: golden steps keep neighbours apart
            y = middle + (nth * 0.618 % 1 - 0.5) * 18
            drawing.mark(
                axis.at(seconds),
                y,
                hue,
                f"mark mode-{hue}",
                f"{one['mode']}, repeat {nth + 1}: {seconds:.4f} s",
            )
        at = axis.at(one["median"])
        drawing.line(at, middle - 17, at, middle + 17, "median")
        drawing.text(right + 14, middle - 2, seconds_text(one["median"]), "strong")
        drawing.text(right + 14, middle + 14, f"{one['ci95'][0]:.4g}–{one['ci95'][1]:.4g} s", "muted")
    if limit is not None:
        drawing.line(axis.at(limit), top, axis.at(limit), bottom, "limit")
    return drawing.svg()


def course_chart(modes: _Modes) -> str:
    """Return each repeat over its place in the run, in per cent of its mode's median: drift shows as a slope."""
    top, bottom, right = 12, 232, _WIDE - 24
    shifts = [[100 * (value / one["median"] - 1) for value in one["seconds"]] for one in modes]
    every = [value for shift in shifts for value in shift]
    axis = linear_axis([*every, 0.0], bottom, top, margin=0.1)
    last = max((place for one in modes for place in one["order"]), default=0)
    places = Axis(-0.5, last + 0.5, _LEFT, right)
    drawing = Drawing(
        _WIDE, bottom + 42, "Every repeat over the course of the run, against its mode's median"
    )
    drawing.upwards(axis, _LEFT, right, [(tick, f"{tick:+g}%" if tick else "0%") for tick in axis.ticks(5)])
    drawing.line(_LEFT, axis.at(0), right, axis.at(0), "edge")
    step = max(1, -(-(last + 1) // 16))
    for place in range(0, last + 1, step):
        drawing.text(places.at(place), bottom + 16, str(place + 1), "muted", anchor="middle")
    drawing.text((_LEFT + right) / 2, bottom + 36, "measurements in their order", "muted", anchor="middle")
    for one, shift in zip(modes, shifts, strict=True):
        hue = hue_of(one["mode"])
        points = sorted(
            (places.at(place), axis.at(value)) for place, value in zip(one["order"], shift, strict=True)
        )
        drawing.path(points, f"thin mode-{hue}")
        for nth, (place, value) in enumerate(zip(one["order"], shift, strict=True)):
            title = f"{one['mode']}, repeat {nth + 1}: {one['seconds'][nth]:.4f} s, {value:+.1f}%"
            drawing.mark(places.at(place), axis.at(value), hue, f"mark mode-{hue}", title)
    return drawing.svg()


def phase_chart(modes: _Modes) -> str:
    """Return the phases' medians stacked, by mode, and the median of the whole refit as a stroke."""
    row, top = 44, 8
    bottom = top + row * len(modes)
    names = phases_of(modes)
    totals = [sum(one["phases"].values()) for one in modes]
    right = _WIDE - 60
    axis = linear_axis([*totals, *(one["median"] for one in modes)], _LEFT, right, zero=True, margin=0.02)
    drawing = Drawing(_WIDE, bottom + 42, "Seconds by phase, stacked, by mode")
    drawing.across(axis, top, bottom, [(tick, _short(tick, axis)) for tick in axis.ticks(8)])
    drawing.text((_LEFT + right) / 2, bottom + 36, "seconds", "muted", anchor="middle")
    for index, one in enumerate(modes):
        middle = top + row * (index + 0.5)
        drawing.text(_LEFT - 12, middle + 4, one["mode"], anchor="end")
        begin = 0.0
        for name in names:
            seconds = one["phases"].get(name, 0.0)
            x, width = axis.at(begin), axis.at(seconds) - axis.at(0)
            kind = f"phase-{names.index(name)}"
            drawing.box(
                x, middle - 13, width, 26, f"piece {kind}", f"{one['mode']}, {name}: {seconds_text(seconds)}"
            )
            if width > 9 * len(name) + 8:
                drawing.text(x + width / 2, middle + 4, name, f"on {kind}", anchor="middle")
            begin += seconds
        at = axis.at(one["median"])
        drawing.line(at, middle - 19, at, middle + 19, "median")
    return drawing.svg()


def phases_of(modes: _Modes) -> list[str]:
    """Return the phases that any mode has, in their order."""
    found = {name for one in modes for name in one["phases"]}
    return [name for name in _PHASES if name in found] + sorted(found - set(_PHASES))


def bytes_chart(modes: _Modes) -> str:
    """Return planned and counted network bytes, by mode."""
    row, top, right = 56, 8, _HALF - 150
    bottom = top + row * len(modes)
    known = [one[name] or 0 for one in modes for name in ("network_bytes_planned", "network_bytes_measured")]
    axis = linear_axis(known, _LEFT, right, zero=True, margin=0.02)
    drawing = Drawing(_HALF, bottom + 24, "Network bytes planned and counted, by mode")
    drawing.across(axis, top, bottom, [(tick, bytes_text(tick).replace(".00", "")) for tick in axis.ticks(4)])
    for index, one in enumerate(modes):
        middle = top + row * (index + 0.5)
        planned, counted = one["network_bytes_planned"], one["network_bytes_measured"]
        drawing.text(_LEFT - 12, middle + 4, one["mode"], anchor="end")
        width = axis.at(planned) - _LEFT
        drawing.box(_LEFT, middle - 16, width, 14, "planned", f"{one['mode']}: planned {planned:,} bytes")
        drawing.text(right + 12, middle - 5, bytes_text(planned), "figure")
        if counted is None:
            drawing.text(right + 12, middle + 13, "not counted", "muted")
            continue
        width = axis.at(counted) - _LEFT
        drawing.box(_LEFT, middle + 2, width, 14, "counted", f"{one['mode']}: counted {counted:,} bytes")
        more = f" ({counted / planned - 1:+.2%})" if planned else ""
        drawing.text(right + 12, middle + 13, f"{bytes_text(counted)}{more}", "figure")
    return drawing.svg()


def limit_chart(modes: _Modes, limit: float) -> str:
    """Return each mode's median and interval over the network's limit, by mode."""
    row, top, right = 56, 8, _HALF - 90
    bottom = top + row * len(modes)
    ends = [value / limit for one in modes for value in (*one["ci95"], one["median"])]
    axis = linear_axis([1.0, *ends], _LEFT, right)
    drawing = Drawing(_HALF, bottom + 24, "Time over the network's limit, by mode")
    drawing.across(axis, top, bottom, [(tick, f"{tick:g} ×") for tick in axis.ticks(4)])
    drawing.line(axis.at(1), top, axis.at(1), bottom, "limit")
    for index, one in enumerate(modes):
        middle, hue = top + row * (index + 0.5), hue_of(one["mode"])
        low, high = (axis.at(value / limit) for value in one["ci95"])
        drawing.text(_LEFT - 12, middle + 4, one["mode"], anchor="end")
        drawing.line(low, middle, high, middle, f"interval mode-{hue}")
        for end in (low, high):
            drawing.line(end, middle - 5, end, middle + 5, f"interval mode-{hue}")
        title = f"{one['mode']}: {one['median'] / limit:.3f} × the limit"
        drawing.mark(axis.at(one["median"] / limit), middle, hue, f"mark mode-{hue}", title, 6)
        drawing.text(right + 12, middle + 4, f"{one['median'] / limit:.3f} ×", "strong")
    return drawing.svg()


def sweep_chart(sweep: Sequence[dict[str, Any]], value: str) -> str:
    """Return a curve for each mode over the tensor's size, both logarithmic. `value`: `time` or a bandwidth's key."""
    sizes = [size for size in sweep if size["modes"]]
    top, bottom, right, left = 10, 300, _HALF - 16, 84
    key = "median" if value == "time" else value
    shown = [one[key] for size in sizes for one in size["modes"] if one[key]]
    limits = [size["limit_seconds"] for size in sizes if size["limit_seconds"]] if value == "time" else []
    across = log_axis([size["bytes"] for size in sizes], left, right)
    # a limit far below the curve, where latency rules, would flatten it
    axis = log_axis([*shown, *(one for one in limits if one > min(shown) / 30)], bottom, top)
    drawing = Drawing(_HALF, bottom + 42, f"{value} over the tensor's size, by mode")
    read = seconds_text if value == "time" else _rate_text
    drawing.upwards(axis, left, right, [(tick, read(tick)) for tick in axis.ticks()])
    drawing.across(across, top, bottom, [(tick, text) for tick, text in _size_ticks(across)])
    drawing.text((left + right) / 2, bottom + 36, "size of the tensor", "muted", anchor="middle")
    within = [
        (across.at(size["bytes"]), axis.at(size["limit_seconds"]))
        for size in sizes
        if limits and size["limit_seconds"] and size["limit_seconds"] >= axis.low
    ]
    if within:
        drawing.path(within, "limit")
    names = [one["mode"] for one in sizes[0]["modes"]]
    for index, name in enumerate(names):
        points, hue = [], hue_of(name)
        for size in sizes:
            one = size["modes"][index]
            if one[key]:
                points.append((across.at(size["bytes"]), axis.at(one[key])))
                if value == "time":
                    low, high = (axis.at(end) for end in one["ci95"])
                    drawing.line(points[-1][0], low, points[-1][0], high, f"interval mode-{hue}")
                title = f"{name}, {size['bytes']:,} bytes: {read(one[key])}"
                drawing.mark(*points[-1], hue, f"mark mode-{hue}", title)
        drawing.path(points, f"thin mode-{hue}")
    return drawing.svg()


def _size_ticks(axis: Axis) -> list[tuple[float, str]]:
    """Return sizes to mark, in powers of 1024 and parts of them, as many as there is room for."""
    powers = [power for power in range(6, 51) if axis.low <= 2.0**power <= axis.high]
    step = next((step for step in (1, 2, 5, 10) if len(powers) / step <= 9), 10)
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    return [
        (2.0**power, f"{2 ** (power % 10)} {units[power // 10]}") for power in powers if power % step == 0
    ]


def _rate_text(value: float) -> str:
    return bytes_text(value).replace(".00", "") + "/s"


def _short(tick: float, axis: Axis) -> str:
    """Return an axis's seconds without more digits than its steps need."""
    return f"{tick:.6g}" if axis.high >= 1e-3 else f"{tick:.2e}"
