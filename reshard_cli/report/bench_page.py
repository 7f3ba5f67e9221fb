"""A bench as a page for the browser: one HTML file without scripts that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reshard_cli.report.page_bench import (
    bytes_chart,
    course_chart,
    hue_of,
    limit_chart,
    phase_chart,
    phases_of,
    repeat_chart,
    sweep_chart,
)
from reshard_cli.report.page_document import page_document, page_text
from reshard_cli.report.page_parts import (
    CHART_STYLE,
    environment_facts,
    page_facts,
    page_section,
    page_table,
    page_tiles,
    rate_text,
)
from reshard_cli.report.page_svg import Drawing, seconds_text
from reshard_cli.report.terminal import bytes_text

__all__ = ["bench_page"]


def bench_page(report: dict[str, Any]) -> str:
    """Return the page of a bench; `report` is the bench's own, from `bench_report`."""
    world = report["world"]
    title = page_text(f"Refit bench: {world['source']['name']} → {world['destination']['name']}")
    parts = [_header(report)]
    if report["modes"]:
        parts += [_tiles(report), _modes_table(report), *_pictures(report)]
    if report["sweep"]:
        parts.append(_sweep(report))
    if report["scaled"] is not None:
        parts.append(_scaled(report["scaled"]))
    parts.append(_environment(report))
    body = "\n".join(parts)
    return page_document(title, f"<main>\n{body}\n</main>", style=CHART_STYLE)


def _where(report: dict[str, Any]) -> str:
    hosts = report["world"]["hosts"]
    emulated = report["environment"].get("emulated")
    if emulated is not None:
        return f"on an emulated cluster of {emulated['cluster']} ranks with NICs of {emulated['nic']}"
    return f"on {hosts} host{'s' if hosts != 1 else ''}"


def _header(report: dict[str, Any]) -> str:
    source, destination = report["world"]["source"], report["world"]["destination"]
    what = "one tensor of growing size" if report["sweep"] else bytes_text(report["model_bytes"])
    smaller = (
        ""
        if report["scaled"] is None
        else f" Both jobs were scaled down by {report['scaled']['factor']:g}; see below."
    )
    return (
        f"<h1>{page_text(source['name'])} → {page_text(destination['name'])}</h1>\n"
        f'<p class="muted">Measured refits of {page_text(what)}, synthetic weights in memory, {source["ranks"]:,} → '
        f"{destination['ranks']:,} ranks {page_text(_where(report))}, {page_text(report['backend'])}.{page_text(smaller)}</p>"
    )


def _tiles(report: dict[str, Any]) -> str:
    best = min(report["modes"], key=lambda one: one["median"])
    low, high = best["ci95"]
    tiles = [
        ("Fastest mode", best["mode"], [
            f"Median {seconds_text(best['median'])}, 95 % interval {low:.4g}–{high:.4g} s",
            "" if best["speedup_over_broadcast"] is None
            else f"{best['speedup_over_broadcast']:.2f} × as fast as broadcast",
        ]),
        ("Over the network's limit",
         "–" if best["ratio_to_limit"] is None else f"{best['ratio_to_limit']:.3f} ×", [
            "Nothing crosses domains" if report["limit_seconds"] is None
            else f"The limit is {seconds_text(report['limit_seconds'])}, by a bare exchange of this run",
        ]),
        ("Bus bandwidth", rate_text(best["bus_bandwidth"]), [
            "Network bytes of the busiest rank and direction over time",
            f"Algorithm bandwidth {rate_text(best['algorithm_bandwidth'])}",
        ]),
        ("Repeats", f"{best['repeats']}", [
            f"of each mode in turn, after {best['warmup']} warm-ups each",
            "Every element verified" if best["verified_elements"] is not None else "Not verified",
        ]),
    ]  # fmt: skip
    return page_tiles(tiles)


def _times(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f} ×"


def _modes_table(report: dict[str, Any]) -> str:
    heads = (
        "size",
        "time",
        "95 % of it",
        "algbw",
        "busbw",
        "planned",
        "counted",
        "of limit",
        "speed-up",
        "rounds",
    )
    rows = [
        [
            one["mode"],
            bytes_text(report["model_bytes"]),
            seconds_text(one["median"]),
            f"{one['ci95'][0]:.4g}–{one['ci95'][1]:.4g}",
            rate_text(one["algorithm_bandwidth"]),
            rate_text(one["bus_bandwidth"]),
            bytes_text(one["network_bytes_planned"]),
            "–" if one["network_bytes_measured"] is None else bytes_text(one["network_bytes_measured"]),
            _times(one["ratio_to_limit"], 3),
            _times(one["speedup_over_broadcast"], 2),
            f"{one['rounds']:,}",
        ]
        for one in report["modes"]
    ]
    note = "Medians of the slowest rank's time with bootstrap intervals; speed-up is over mode broadcast."
    return page_section("Modes", note, page_table([("mode", False), *((head, True) for head in heads)], rows))


def _pictures(report: dict[str, Any]) -> list[str]:
    modes, limit = report["modes"], report["limit_seconds"]
    strokes = "The box holds the middle half of the repeats, the upright stroke is the median, the bar below its 95 % interval"
    sections = [
        page_section(
            "Every repeat",
            strokes
            + (
                "."
                if limit is None
                else "; the dashed line is the network's limit. The axis does not begin at 0."
            ),
            f'<div class="scroll"><div class="wide">{repeat_chart(modes, limit)}</div></div>',
        ),
        page_section(
            "Over the run",
            "Modes take turns, so that whatever drifts hits all alike. A slope is drift, a far point a disturbance.",
            _mode_keys(modes),
            f'<div class="scroll"><div class="wide">{course_chart(modes)}</div></div>',
        ),
        page_section(
            "Phases",
            "Each phase's median of the slowest rank; the stroke is the median of the whole refit. What a rank waits for "
            "counts as network or domain. Ranks are slowest in different phases, so the sum may exceed the whole.",
            _phase_keys(phases_of(modes)),
            f'<div class="scroll"><div class="wide">{phase_chart(modes)}</div></div>',
        ),
    ]
    pair = [
        '<div><h3>Network bytes</h3><ul class="keys"><li><span class="key half"></span>planned</li>'
        '<li><span class="key"></span>counted at the interfaces, headers included</li></ul>'
        f"{bytes_chart(modes)}</div>"
    ]
    if limit is not None:
        pair.append(
            '<div><h3>Time over the limit</h3><p class="muted">Median and interval; the dashed line is the limit.</p>'
            f"{limit_chart(modes, limit)}</div>"
        )
    return [*sections, f'<section><div class="pairs">{"".join(pair)}</div></section>']


def _mode_keys(modes: Sequence[dict[str, Any]]) -> str:
    keys = []
    for one in modes:
        drawing, hue = Drawing(14, 14, one["mode"]), hue_of(one["mode"])
        drawing.mark(7, 7, hue, f"mark mode-{hue}", size=5)
        keys.append(f"<li>{drawing.svg()}{page_text(one['mode'])}</li>")
    return f'<ul class="keys">{"".join(keys)}</ul>'


def _phase_keys(names: Sequence[str]) -> str:
    keys = [
        f'<li><span class="key phase-{index}"></span>{page_text(name)}</li>'
        for index, name in enumerate(names)
    ]
    return f'<ul class="keys">{"".join(keys)}</ul>'


def _sweep(report: dict[str, Any]) -> str:
    sweep = report["sweep"]
    measured = [size for size in sweep if size["modes"]]
    told = [f"{size['bytes']:,} bytes: left out, {size['skipped']}" for size in sweep if size["skipped"]]
    left_out = "".join(f'<p class="note">{page_text(line)}</p>' for line in told)
    note = (
        "One tensor, its rows over the source's ranks, its columns over the destination's. The time is the slowest rank's "
        "for several refits back to back, over their number; bars are 95 % intervals, the dashed line is the network's limit, "
        "which knows no latency."
    )
    if not measured:
        return page_section("Sweep over sizes", note, left_out)
    heads = [("size (B)", True), ("count", True), ("type", False), ("mode", False), ("time (µs)", True)]
    heads += [
        (name, True) for name in ("95 % of it", "algbw", "busbw", "#wrong", "network", "of limit", "refits")
    ]
    rows = [
        [
            f"{size['bytes']:,}",
            f"{size['count']:,}",
            size["type"],
            one["mode"],
            f"{1e6 * one['median']:,.1f}",
            f"{1e6 * one['ci95'][0]:,.0f}–{1e6 * one['ci95'][1]:,.0f}",
            rate_text(one["algorithm_bandwidth"]),
            rate_text(one["bus_bandwidth"]),
            "N/A" if one["verified_elements"] is None else "0",
            bytes_text(one["network_bytes_planned"]),
            _times(one["ratio_to_limit"], 2 if (one["ratio_to_limit"] or 0) < 100 else 0),
            f"{one['refits_per_measurement']} x {one['repeats']}",
        ]
        for size in measured
        for one in size["modes"]
    ]
    # inside one domain nothing crosses the network
    crossing = any(one["bus_bandwidth"] for size in measured for one in size["modes"])
    rate = ("Bus bandwidth", "bus_bandwidth") if crossing else ("Algorithm bandwidth", "algorithm_bandwidth")
    pictures = "".join(
        f"<div><h3>{title}</h3>{sweep_chart(sweep, value)}</div>" for title, value in (("Time", "time"), rate)
    )
    return page_section(
        "Sweep over sizes",
        note,
        left_out,
        _mode_keys(measured[0]["modes"]),
        f'<div class="pairs">{pictures}</div>',
        page_table(heads, rows, "dense"),
    )


def _scaled(scaled: dict[str, Any]) -> str:
    def amount(one: dict[str, Any], side: str) -> str:
        value = one[side]
        if not isinstance(value, int):
            return str(value)
        return bytes_text(value) if one["what"] == "bytes" else f"{value:,}"

    heads = [("", False), ("original", True), ("scaled", True), ("lost by it", False)]
    rows = [
        [f"{one['where']}: {one['what']}", amount(one, "original"), amount(one, "scaled"), one["note"]]
        for one in scaled["changes"]
    ]
    note = f"Everything that --scale {scaled['factor']:g} changed. Kinds of layers, heads and groups are as they were."
    return page_section("What was scaled down", note, page_table(heads, rows))


def _environment(report: dict[str, Any]) -> str:
    facts, probe = environment_facts(report["environment"]), report["probe"]
    if probe["median"] is not None:
        rates = ", ".join(rate_text(rate) for rate in probe["bytes_per_second_of_a_domain"])
        facts.append(("bare exchange, by domain", rates))
    digests = [(f"layout of the {side}", digest) for side, digest in report["layouts"].items()]
    digests += [(f"plan, {one['mode']}", one["digest"]) for one in report["modes"]]
    return (
        '<section><div class="columns">\n'
        f"<div><h2>Environment</h2>\n{page_facts(facts)}</div>\n"
        f"<div><h2>Digests</h2>\n{page_facts(digests)}</div>\n</div></section>"
    )
