"""A refit, or a loop of them, as a page for the browser: one HTML file without scripts that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reshard_cli.report.page_document import page_document, page_text
from reshard_cli.report.page_parts import (
    CHART_STYLE,
    environment_facts,
    page_facts,
    page_section,
    page_table,
    page_tiles,
)
from reshard_cli.report.page_svg import Axis, Drawing, linear_axis, seconds_text
from reshard_cli.report.terminal import bytes_text

__all__ = ["refit_page"]

_WIDE, _LEFT = 1160, 96
_DRAWN = 200  # refits, or runs of refits, that a picture has room for
_LISTED = 200
_Refits = Sequence[dict[str, Any]]


def refit_page(report: dict[str, Any]) -> str:
    """Return the page of a refit; `report` is its own, from `refit_report`."""
    world, refits = report["world"], report["iterations"]
    parts = [_header(report)]
    if refits:
        parts.append(_tiles(report))
        if len(refits) > 1:
            parts.append(
                page_section(
                    "Every refit",
                    _course_note(len(refits)),
                    f'<div class="scroll"><div class="wide">{_course_chart(refits)}</div></div>',
                )
            )
        parts += [
            page_section(
                "Phases",
                "The bar is the median over the refits of the rank that was slowest in that phase, the stroke goes from "
                "the least to the most. Phases of one refit overlap, and what a rank waits for counts as network or domain.",
                f'<div class="scroll"><div class="wide">{_phase_chart(refits)}</div></div>',
            ),
            _table(refits),
        ]
    parts.append(_facts(report))
    title = page_text(f"Refit: {world['source']['name']} → {world['destination']['name']}")
    body = "\n".join(parts)
    return page_document(title, f"<main>\n{body}\n</main>", style=CHART_STYLE)


def _header(report: dict[str, Any]) -> str:
    source, destination = report["world"]["source"], report["world"]["destination"]
    hosts = report["world"].get("hosts")
    where = "" if hosts is None else f" on {hosts} host{'s' if hosts != 1 else ''}"
    shared = ", which share their devices" if report["world"].get("colocated") else ""
    return (
        f"<h1>{page_text(source['name'])} → {page_text(destination['name'])}</h1>\n"
        f'<p class="muted">{source["ranks"]:,} → {destination["ranks"]:,} ranks{shared}{where}, '
        f"mode {page_text(report['mode'])}, {page_text(report['backend'])}.</p>"
    )


def _tiles(report: dict[str, Any]) -> str:
    refits = report["iterations"]
    seconds = [one["seconds"] for one in refits]
    last = refits[-1]
    spread = f"From {seconds_text(min(seconds))} to {seconds_text(max(seconds))}; the first {seconds_text(seconds[0])}"
    verified = report["verified"]
    return page_tiles([
        ("Refits", f"{len(refits):,}", [f"The last version is {last['version']}"]),
        ("Median time", seconds_text(float(np.median(seconds))), [
            "Of the slowest rank, waiting included", spread if len(refits) > 1 else "",
        ]),
        ("Over the network, a refit", bytes_text(last["network_bytes"]), [
            f"{bytes_text(last['domain_bytes'])} inside domains",
        ]),
        ("Staging", bytes_text(report["peak_staging_bytes"]), ["Beside the weights, at most on a rank"]),
        ("Verified", "yes" if verified else "not asked for", [
            f"{report['verified_elements']:,} elements, all equal" if verified else "",
        ]),
    ])  # fmt: skip


def _course_note(count: int) -> str:
    note = "Seconds of each refit, in their order: a slope is drift, a far point a disturbance."
    if count <= _DRAWN:
        return note
    return f"{note} The line is the median of {-(-count // _DRAWN)} refits in a row, the band goes from their least to their most."


def _course_chart(refits: _Refits) -> str:
    """Return seconds over versions: marks, or, of many refits, medians of runs with bands from least to most."""
    top, bottom, right = 12, 232, _WIDE - 24
    run = -(-len(refits) // _DRAWN)
    runs = [refits[start : start + run] for start in range(0, len(refits), run)]
    seconds = [[one["seconds"] for one in part] for part in runs]
    axis = linear_axis([value for part in seconds for value in part], bottom, top, zero=True)
    places = Axis(-0.5, len(runs) - 0.5, _LEFT, right)
    drawing = Drawing(_WIDE, bottom + 42, "Seconds of every refit")
    drawing.upwards(axis, _LEFT, right, [(tick, seconds_text(tick)) for tick in axis.ticks(5)])
    drawing.line(_LEFT, bottom, right, bottom, "edge")
    for place in range(0, len(runs), -(-len(runs) // 16)):
        drawing.text(places.at(place), bottom + 16, str(runs[place][0]["version"]), "muted", anchor="middle")
    drawing.text((_LEFT + right) / 2, bottom + 36, "version", "muted", anchor="middle")
    points = []
    for place, (part, values) in enumerate(zip(runs, seconds, strict=True)):
        x, middle = places.at(place), float(np.median(values))
        points.append((x, axis.at(middle)))
        if run > 1:
            high = axis.at(max(values))
            drawing.box(x - 2, high, 4, axis.at(min(values)) - high, "soft mode-2")
            continue
        told = ", ".join(f"{name} {seconds_text(value)}" for name, value in part[0]["phases"].items())
        drawing.mark(
            x,
            axis.at(middle),
            0,
            "mark mode-2",
            f"Version {part[0]['version']}: {middle:.4f} s ({told})",
            3.5,
        )
    drawing.path(points, "thin mode-2")
    return drawing.svg()


def _phase_chart(refits: _Refits) -> str:
    """Return each phase's median, with a stroke from its least to its most, and the whole refit's."""
    names = list(dict.fromkeys(name for one in refits for name in one["phases"]))
    rows = {name: [one["phases"].get(name, 0.0) for one in refits] for name in names}
    rows["whole refit"] = [one["seconds"] for one in refits]
    row, top, right = 34, 8, _WIDE - 130
    bottom = top + row * len(rows)
    axis = linear_axis([value for values in rows.values() for value in values], _LEFT, right, zero=True)
    drawing = Drawing(_WIDE, bottom + 42, "Median seconds by phase")
    drawing.across(axis, top, bottom, [(tick, f"{tick:g}") for tick in axis.ticks(8)])
    drawing.text((_LEFT + right) / 2, bottom + 36, "seconds", "muted", anchor="middle")
    for index, (name, values) in enumerate(rows.items()):
        middle, median = top + row * (index + 0.5), float(np.median(values))
        drawing.text(_LEFT - 12, middle + 4, name, anchor="end")
        title = f"{name}: {seconds_text(min(values))} to {seconds_text(max(values))}"
        kind = "piece mode-2" if name == "whole refit" else "piece phase-0"
        drawing.box(_LEFT, middle - 9, max(1.0, axis.at(median) - _LEFT), 18, kind, title)
        if len(values) > 1:
            drawing.line(axis.at(min(values)), middle, axis.at(max(values)), middle, "median")
        drawing.text(axis.at(max(values)) + 10, middle + 4, seconds_text(median))
    return drawing.svg()


def _table(refits: _Refits) -> str:
    names = list(dict.fromkeys(name for one in refits for name in one["phases"]))
    heads = [(name, True) for name in ("version", "seconds", "over network", "in domains", *names)]
    rows = [
        [
            f"{one['version']}",
            f"{one['seconds']:.4f}",
            bytes_text(one["network_bytes"]),
            bytes_text(one["domain_bytes"]),
            *(f"{one['phases'][name]:.4f}" if name in one["phases"] else "–" for name in names),
        ]
        for one in refits[-_LISTED:]
    ]
    note = "Seconds of the slowest rank, by phase."
    if len(refits) > _LISTED:
        note = f"The last {_LISTED} of {len(refits):,} refits. {note}"
    return page_section("Figures", note, page_table(heads, rows, "dense"))


def _facts(report: dict[str, Any]) -> str:
    facts = environment_facts(report["environment"])
    what = [("digest of the plan", report["digest"])]
    if report["state_dict"]:
        what.append(("read", f"the state dict {report['state_dict']!r} of the checkpoint"))
    if report["casts"]:
        what.append(("cast", ", ".join(report["casts"])))
    if report["extra"]:
        what.append(("left out", ", ".join(report["extra"])))
    return (
        '<section><div class="columns">\n'
        f"<div><h2>Environment</h2>\n{page_facts(facts)}</div>\n"
        f"<div><h2>What was refitted</h2>\n{page_facts(what)}</div>\n</div></section>"
    )
