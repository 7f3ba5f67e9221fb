"""Reports as tables for a terminal, on standard output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

__all__ = [
    "broadcast_facts",
    "bytes_text",
    "print_listing",
    "print_model",
    "print_plan",
    "print_refit",
    "print_tensors",
]


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
    """Print a plan's report: facts, modes, tensor classes, the largest tensors."""
    console = console or _console()
    traffic, balance, memory = report["traffic"], report["balance"], report["memory"]
    predicted = report["predicted"]
    console.print(
        _facts(
            [
                ("model", f"{report['model']['name']}, {report['model']['tensors']} tensors, "
                          f"{report['model']['parameters']:,} parameters, {bytes_text(report['model']['bytes'])}"),
                ("source", _side(report["source"])),
                ("destination", _side(report["destination"])),
                ("mode", report["mode"]),
                *((f"route {name}", f"{route['tensors']} tensors, {bytes_text(route['bytes'])} "
                                    f"({route['share']:.1%})"
                                    + ("; what follows is of the rest" if name == "m2n" else ""))
                  for name, route in report["routes"].items()),
                *_m2n(report.get("m2n")),
                ("network", f"{bytes_text(traffic['network_bytes'])}; the bound is "
                            f"{bytes_text(traffic['network_lower_bound'])}, broadcasting everything "
                            f"{bytes_text(traffic['conventional_network_bytes'])}"),
                ("domain / local", f"{bytes_text(traffic['domain_bytes'])} / {bytes_text(traffic['local_bytes'])}"),
                ("balance", f"busiest sender {balance['send_max_over_best']:.3f} x the best possible, "
                            f"busiest receiver {balance['receive_max_over_best']:.3f} x"),
                ("rounds", f"{report['rounds']} of at most {bytes_text(memory['staging_bytes'])} staging, "
                           f"{report['messages']} messages"),
                *_relays(report["relays"]),
                *broadcast_facts(report["broadcast"]),
                ("memory", f"weights of {bytes_text(memory['source_bytes'])} on the fullest source rank, "
                           f"{bytes_text(memory['destination_bytes'])} on the fullest destination rank"
                           + _landing(memory["landing_bytes"])),
                ("predicted", f"{predicted['seconds']:.4g} s on {predicted['hardware']} "
                              f"({predicted['bottleneck']}), not measured; the network's limit is "
                              f"{report['limit_seconds']:.4g} s"),
                ("digest", report["digest"][:16]),
            ]
        )
    )  # fmt: skip
    table = Table(box=SIMPLE_HEAD)
    for name, justify in (
        ("mode", "left"),
        ("network", "right"),
        ("predicted", "right"),
        ("bottleneck", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for one in report["compare"]:
        seconds = f"{one['predicted_seconds']:.4g} s"
        table.add_row(one["mode"], bytes_text(one["network_bytes"]), seconds, one["bottleneck"])
    console.print(table)
    _print_classes(report["classes"], console)
    _print_largest(report["largest"], console)
    if report["extra"]:
        console.print(f"left out, as only the source has them: {', '.join(report['extra'])}", highlight=False)


def _m2n(told: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the lines about what NCCL M2N declines and why, or none."""
    if told is None:
        return []
    return [
        (
            "" if number else "m2n declines",
            f"{one['tensors']} tensors, {bytes_text(one['bytes'])}: {one['reason']}",
        )
        for number, one in enumerate(told["declined"])
    ]


def _relays(relays: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the line about what destination domains pass on to each other, or none."""
    if not relays["network_bytes"]:
        return []
    told = f"{bytes_text(relays['network_bytes'])} of it from one destination domain to the next, up to "
    return [
        (
            "relays",
            f"{told}{relays['rounds_behind']} rounds behind: the source's NICs would be the bottleneck",
        )
    ]


def broadcast_facts(whole: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the line about what a plan gathers and broadcasts, or none."""
    if not whole["roots"]:
        return []
    gathered = whole["gather_network_bytes"], whole["gather_domain_bytes"]
    told = (
        f"gathered at {whole['roots']} roots ({bytes_text(gathered[0])} over the network, {bytes_text(gathered[1])} "
        f"inside domains), then {bytes_text(whole['network_bytes'])} down the destination's domains, up to "
        f"{whole['rounds_behind']} rounds behind"
    )
    return [("broadcast", told)]


def _landing(landing: int) -> str:
    """Return what a destination rank needs beside its weights for values that it casts itself."""
    return f", and {bytes_text(landing)} there for values to be cast" if landing else ""


def _print_classes(classes: list[dict[str, Any]], console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, title="tensor classes", title_justify="left")
    table.add_column("tensors", overflow="fold", min_width=44)
    for name in ("shape", "source", "destination", "route"):
        table.add_column(name, overflow="fold")
    table.add_column("number", justify="right")
    table.add_column("bytes", justify="right")
    for one in classes:
        dtype = one["source_dtype"]
        if dtype != one["destination_dtype"]:
            dtype += f" -> {one['destination_dtype']}, cast by the {one['cast_at']}"
        elif one["cast_at"]:
            dtype += f", made by the {one['cast_at']}"
        route = one["route"] + (f": {one['why']}" if one["why"] else "")
        table.add_row(
            _short(one["name"]), f"{one['shape']} {dtype}", one["source"], one["destination"], route,
            str(one["tensors"]), bytes_text(one["bytes"]),
        )  # fmt: skip
    console.print(table, highlight=False, markup=False)


def _short(template: str) -> str:
    """Return a class's name without the part that all layers share; the JSON report has it in full."""
    return template.replace("model.layers.{layer}.", "{layer}.").replace(
        "backbone.layers.{layer}.", "{layer}."
    )


def _print_largest(largest: list[dict[str, Any]], console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, title="largest tensors", title_justify="left")
    table.add_column("tensor", overflow="fold")
    table.add_column("shape")
    table.add_column("bytes", justify="right")
    table.add_column("route")
    for one in largest:
        table.add_row(one["name"], str(one["shape"]), bytes_text(one["bytes"]), one["route"])
    console.print(table, highlight=False, markup=False)


def print_tensors(tensors: list[dict[str, Any]]) -> None:
    """Print single tensors of a plan with both placements."""
    console = _console()
    table = Table(box=SIMPLE_HEAD)
    for name in ("tensor", "source", "destination", "route"):
        table.add_column(name, overflow="fold")
    table.add_column("bytes", justify="right")
    for one in tensors:
        table.add_row(
            f"{one['name']} {one['shape']} {one['dtype']}", one["source"], one["destination"], one["route"],
            bytes_text(one["bytes"]),
        )  # fmt: skip
    console.print(table, highlight=False, markup=False)


def _side(side: dict[str, Any]) -> str:
    return f"{side['name']}, {side['ranks']} ranks in {side['domains']} domain(s)"


_SHOWN_REFITS = 12  # of a longer loop, the first and the last ones


def print_refit(report: dict[str, Any], console: Console | None = None) -> None:
    """Print a refit's report."""
    console = console or _console()
    world = report["world"]
    table = Table(box=SIMPLE_HEAD)
    for name in ("version", "seconds", "network", "domain", "phases (slowest rank)"):
        table.add_column(name, justify="left" if name.startswith("phases") else "right")
    rounds = report["iterations"]
    left_out = len(rounds) - _SHOWN_REFITS
    for number, one in enumerate(rounds):
        if left_out > 0 and 3 <= number < 3 + left_out:
            if number == 3:
                table.add_row("...", "", "", "", f"{left_out} more")
            continue
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
    if report["state_dict"]:
        rows.append(("read", f"the state dict {report['state_dict']!r} of the checkpoint"))
    if report["m2n"] is not None:
        carried = f"{report['m2n']['tensors']} tensors, {bytes_text(report['m2n']['bytes'])} of the model"
        rows.append(("m2n", f"{carried}, not in the columns above"))
    if report["casts"]:
        rows.append(("cast", ", ".join(report["casts"])))
    if report["extra"]:
        rows.append(("left out", ", ".join(report["extra"])))
    console.print(_facts(rows))


def print_listing(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print names with a line about each, under a title."""
    console = _console()
    console.print(title, style="bold", highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, about in rows:
        table.add_row(f"  {name}", about)
    console.print(table, highlight=False, markup=False)
    console.print()


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
