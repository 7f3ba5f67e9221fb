"""What a bench says on the terminal: nccl-tests' columns beside ours."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from reshard_cli.report.terminal import bytes_text

__all__ = ["print_bench"]

_WIDTH = 140  # of a table that goes into a file or a pipe
_BANDWIDTHS = "algbw: size over time; busbw: the network bytes of the busiest rank and direction over time, to be held against its NIC"


def print_bench(report: dict[str, Any]) -> None:
    """Print the table of modes or of sizes, what they are held against, and what `--scale` changed."""
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    if report["scaled"] is not None:
        console.print(_scaled_table(report["scaled"]), highlight=False, markup=False)
    if report["sweep"]:
        table = _sweep_table(report["sweep"])
        if not console.is_terminal:
            console.width = max(
                console.width, Measurement.get(console, console.options.update(width=1000), table).maximum
            )
        console.print(table, highlight=False, markup=False)
        lines = _sweep_notes(report)
    else:
        console.print(_mode_table(report), highlight=False, markup=False)
        lines = _mode_notes(report)
    world = report["world"]
    lines.append(
        f"{world['source']['name']} ({world['source']['ranks']}) -> {world['destination']['name']} "
        f"({world['destination']['ranks']}) on {world['hosts']} host(s), {report['backend']}, torch "
        f"{report['environment']['torch']}, {report['environment']['cores']} cores"
    )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _table(left: str, *names: str) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column(left, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _mode_table(report: dict[str, Any]) -> Table:
    table = _table(
        "mode", "size", "time", "95 % of it", "algbw", "busbw", "planned", "counted", "of limit", "speed-up"
    )
    for one in report["modes"]:
        low, high = one["ci95"]
        table.add_row(
            one["mode"],
            bytes_text(report["model_bytes"]),
            f"{one['median']:.4g} s",
            f"{low:.4g}–{high:.4g}",
            *_rates(one),
            bytes_text(one["network_bytes_planned"]),
            _counted(one),
            _times(one["ratio_to_limit"], 3),
            _times(one["speedup_over_broadcast"], 2),
        )
    return table


def _mode_notes(report: dict[str, Any]) -> list[str]:
    first = report["modes"][0]
    lines = [
        f"{first['repeats']} repeats of each mode in turn after {first['warmup']} warm-ups; time: the median of the "
        "slowest rank's, with its bootstrap interval",
        _BANDWIDTHS,
    ]
    if report["limit_seconds"] is not None:
        least = report["network_lower_bound_of_a_domain"]
        lines.append(
            f"limit {report['limit_seconds']:.4g} s: {bytes_text(max(least.values()))} through the busiest domain's NICs, "
            f"at the {bytes_text(round(report['probe']['median']))}/s of a bare exchange in this run"
        )
    verified = [one for one in report["modes"] if one["verified_elements"] is not None]
    if verified:
        lines.append(f"verified: {verified[0]['verified_elements']:,} elements of each mode, all equal")
    return lines


def _sweep_table(sweep: list[dict[str, Any]]) -> Table:
    """Return nccl-tests' columns (size in bytes, count, type, time in microseconds, bandwidths, #wrong) and ours."""
    table = _table(
        "size (B)", "count", "type", "mode", "time (us)", "95 % of it", "algbw", "busbw", "#wrong", "network (B)",
        "of limit", "refits",
    )  # fmt: skip
    table.columns[2].justify = table.columns[3].justify = "left"
    for size in sweep:
        start = [f"{size['bytes']:,}", f"{size['count']:,}", size["type"]]
        for one in size["modes"]:
            low, high = one["ci95"]
            table.add_row(
                *start,
                one["mode"],
                f"{1e6 * one['median']:.1f}",
                f"{1e6 * low:.0f}–{1e6 * high:.0f}",
                *_rates(one),
                "N/A" if one["verified_elements"] is None else "0",
                f"{one['network_bytes_planned']:,}",
                _times(one["ratio_to_limit"], 2 if (one["ratio_to_limit"] or 0) < 100 else 0),
                f"{one['refits_per_measurement']} x {one['repeats']}",
            )
            start = ["", "", ""]
    return table


def _sweep_notes(report: dict[str, Any]) -> list[str]:
    measured = [size for size in report["sweep"] if size["modes"]]
    lines = [
        f"{size['bytes']:,} bytes: left out, {size['skipped']}" for size in report["sweep"] if size["skipped"]
    ]
    if measured:
        first = measured[0]["modes"][0]
        lines.append(
            f"one tensor, its rows over the source's ranks, its columns over the destination's; modes in turn, "
            f"{first['repeats']} repeats of each after {max(1, first['warmup'])} warm-up(s)"
        )
        lines.append(
            "time: wall clock of the slowest rank for the refits of one repeat, back to back between two barriers, over "
            "their number (refits: so many x repeats); the median, with its bootstrap interval"
        )
        lines.append(_BANDWIDTHS)
    rate = report["probe"]["median"]
    if rate is not None:
        lines.append(
            f"limit: the busiest domain's least bytes at the {bytes_text(round(rate))}/s of a bare exchange in this run; "
            "it knows no latency"
        )
    return lines


def _scaled_table(scaled: dict[str, Any]) -> Table:
    """Return the table of what `--scale` changed."""
    table = _table(f"--scale {scaled['factor']:g}", "original", "scaled", "")
    table.columns[3].justify = "left"
    for one in scaled["changes"]:
        shown = [_amount(one["what"], one[side]) for side in ("original", "scaled")]
        table.add_row(f"{one['where']}: {one['what']}", *shown, one["note"])
    return table


def _amount(what: str, value: object) -> str:
    if not isinstance(value, int):
        return str(value)
    return bytes_text(value) if what == "bytes" else f"{value:,}"


def _rates(one: dict[str, Any]) -> list[str]:
    return [f"{bytes_text(round(one[name]))}/s" for name in ("algorithm_bandwidth", "bus_bandwidth")]


def _times(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f} ×"


def _counted(one: dict[str, Any]) -> str:
    counted, planned = one["network_bytes_measured"], one["network_bytes_planned"]
    if counted is None:
        return "–"
    return f"{counted / planned - 1:+.2%}" if planned else bytes_text(counted)
