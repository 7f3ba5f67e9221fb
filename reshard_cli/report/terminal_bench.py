"""What a bench says on the terminal: nccl-tests' columns beside ours."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from reshard_cli.report.terminal import bytes_text

__all__ = ["print_bench"]

_WIDTH = 140  # of a table that goes into a file or a pipe


def print_bench(report: dict[str, Any]) -> None:
    """Print the table of modes, and what they are held against."""
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    table = Table(box=SIMPLE_HEAD)
    table.add_column("mode", no_wrap=True)
    for name in (
        "size",
        "time",
        "95 % of it",
        "algbw",
        "busbw",
        "planned",
        "counted",
        "of limit",
        "speed-up",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for one in report["modes"]:
        counted = one["network_bytes_measured"]
        low, high = one["ci95"]
        table.add_row(
            one["mode"],
            bytes_text(report["model_bytes"]),
            f"{one['median']:.4g} s",
            f"{low:.4g}–{high:.4g}",
            f"{bytes_text(round(one['algorithm_bandwidth']))}/s",
            f"{bytes_text(round(one['bus_bandwidth']))}/s",
            bytes_text(one["network_bytes_planned"]),
            "–" if counted is None else _beside(counted, one["network_bytes_planned"]),
            "–" if one["ratio_to_limit"] is None else f"{one['ratio_to_limit']:.3f} ×",
            "–" if one["speedup_over_broadcast"] is None else f"{one['speedup_over_broadcast']:.2f} ×",
        )
    console.print(table, highlight=False, markup=False)
    first = report["modes"][0]
    lines = [
        f"{first['repeats']} repeats of each mode in turn after {first['warmup']} warm-ups; time: the median of the "
        "slowest rank's, with its bootstrap interval",
    ]
    if report["limit_seconds"] is not None:
        least = report["network_lower_bound_of_a_domain"]
        lines.append(
            f"limit {report['limit_seconds']:.4g} s: {bytes_text(max(least.values()))} through the busiest domain's NICs, "
            f"at the {bytes_text(round(report['probe']['median']))}/s of a bare exchange in this run"
        )
    world = report["world"]
    lines.append(
        f"{world['source']['name']} ({world['source']['ranks']}) -> {world['destination']['name']} "
        f"({world['destination']['ranks']}) on {world['hosts']} host(s), {report['backend']}, torch "
        f"{report['environment']['torch']}, {report['environment']['cores']} cores"
    )
    verified = [one for one in report["modes"] if one["verified_elements"] is not None]
    if verified:
        lines.append(f"verified: {verified[0]['verified_elements']:,} elements of each mode, all equal")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _beside(counted: int, planned: int) -> str:
    return f"{counted / planned - 1:+.2%}" if planned else bytes_text(counted)
