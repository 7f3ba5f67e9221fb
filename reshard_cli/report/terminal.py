"""Reports as tables for a terminal, on standard output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

__all__ = ["bytes_text", "print_model", "print_plan", "print_refit"]


def bytes_text(count: float) -> str:
    """Return a byte count as people read it: 1.50 GB (decimal, as network rates are)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def _console() -> Console:
    """Return standard output; what is no terminal has no width, and gets one that breaks no name."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def _facts(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def print_plan(report: dict[str, Any], console: Console | None = None) -> None:
    """Print a plan's report."""
    console = console or _console()
    traffic, balance = report["traffic"], report["balance"]
    console.print(
        _facts(
            [
                ("model", f"{report['model']['name']}, {report['model']['tensors']} tensors, "
                          f"{report['model']['parameters']:,} parameters, {bytes_text(report['model']['bytes'])}"),
                ("source", _side(report["source"])),
                ("destination", _side(report["destination"])),
                ("mode", report["mode"]),
                *((f"route {name}", f"{route['tensors']} tensors, {bytes_text(route['bytes'])} "
                                    f"({route['share']:.1%})")
                  for name, route in report["routes"].items()),
                ("network", f"{bytes_text(traffic['network_bytes'])}; the bound is "
                            f"{bytes_text(traffic['network_lower_bound'])}, broadcasting everything "
                            f"{bytes_text(traffic['conventional_network_bytes'])}"),
                ("domain / local", f"{bytes_text(traffic['domain_bytes'])} / {bytes_text(traffic['local_bytes'])}"),
                ("balance", f"busiest sender {balance['send_max_over_best']:.3f} x the best possible, "
                            f"busiest receiver {balance['receive_max_over_best']:.3f} x"),
                ("rounds", f"{report['rounds']} of at most {bytes_text(report['memory']['staging_bytes'])} staging, "
                           f"{report['messages']} messages"),
                ("predicted", f"{report['predicted']['seconds']:.4g} s on {report['predicted']['hardware']} "
                              f"({report['predicted']['bottleneck']}); the network's limit is "
                              f"{report['limit_seconds']:.4g} s"),
                ("digest", report["digest"][:16]),
            ]
        )
    )  # fmt: skip
    table = Table(box=SIMPLE_HEAD)
    table.add_column("mode")
    table.add_column("network", justify="right")
    table.add_column("predicted", justify="right")
    for one in report["compare"]:
        table.add_row(one["mode"], bytes_text(one["network_bytes"]), f"{one['predicted_seconds']:.4g} s")
    console.print(table)
    if report["extra"]:
        console.print(f"left out, as only the source has them: {', '.join(report['extra'])}", highlight=False)


def _side(side: dict[str, Any]) -> str:
    return f"{side['name']}, {side['ranks']} ranks in {side['domains']} domain(s)"


def print_refit(report: dict[str, Any], console: Console | None = None) -> None:
    """Print a refit's report."""
    console = console or _console()
    world = report["world"]
    table = Table(box=SIMPLE_HEAD)
    for name in ("version", "seconds", "network", "domain", "phases (slowest rank)"):
        table.add_column(name, justify="left" if name.startswith("phases") else "right")
    for one in report["iterations"]:
        phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in one["phases"].items())
        table.add_row(
            str(one["version"]), f"{one['seconds']:.3f}", bytes_text(one["network_bytes"]),
            bytes_text(one["domain_bytes"]), phases,
        )  # fmt: skip
    console.print(table)
    verified = (
        f"{report['verified_elements']:,} elements, all equal" if report["verified"] else "not asked for"
    )
    rows = [
        ("jobs", f"{world['source']['name']} ({world['source']['ranks']}) -> "
                 f"{world['destination']['name']} ({world['destination']['ranks']}), {report['backend']}"),
        ("mode", report["mode"]),
        ("verified", verified),
        ("staging", f"{bytes_text(report['peak_staging_bytes'])} at most on a rank"),
        ("digest", report["digest"][:16]),
    ]  # fmt: skip
    if report["casts"]:
        rows.append(("cast", ", ".join(report["casts"])))
    if report["extra"]:
        rows.append(("left out", ", ".join(report["extra"])))
    console.print(_facts(rows))


def print_model(tensors: Iterable[tuple[str, str, str, int, int]], totals: str) -> None:
    """Print a model's tensors: (name, shape, dtype, how many, bytes) each, then the totals."""
    console = _console()
    table = Table(box=SIMPLE_HEAD)
    for name, justify in (("tensor", "left"), ("shape", "left"), ("dtype", "left")):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    table.add_column("number", justify="right")
    table.add_column("bytes", justify="right")
    for name, shape, dtype, number, size in tensors:
        table.add_row(name, shape, dtype, str(number), bytes_text(size))
    console.print(table)
    console.print(totals, highlight=False)
