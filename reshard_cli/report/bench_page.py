"""A bench as a page for the browser: one HTML file without scripts that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from reshard_cli.report.page_svg import Drawing, seconds_text
from reshard_cli.report.terminal import bytes_text

__all__ = ["bench_page"]

# Okabe and Ito's colours, which people with any colour vision can tell apart, lighter on dark ground
_STYLE = """
:root {
  --mode-0: #d55e00; --mode-1: #b8860b; --mode-2: #0072b2; --mode-3: #008a64;
  --phase-0: #56b4e9; --phase-1: #0072b2; --phase-2: #e69f00; --phase-3: #009e73; --phase-4: #cc79a7;
  --on-light: #10151b; --on-dark: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root { --mode-0: #ff8a3d; --mode-1: #f0c44c; --mode-2: #5ab8f0; --mode-3: #3fd0a4; --phase-1: #2f8fd0; }
}
svg { display: block; width: 100%; height: auto; font: 12.5px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
.wide { min-width: 720px; }
svg text { fill: var(--text); font-variant-numeric: tabular-nums; }
svg text.muted { fill: var(--muted); }
svg text.strong { font-weight: 600; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .edge { stroke: var(--edge); stroke-width: 1; }
svg .median { stroke: var(--text); stroke-width: 2; }
svg .limit { stroke: var(--best); stroke-width: 2; stroke-dasharray: 6 4; fill: none; }
svg .mark { fill: var(--own); stroke: var(--panel); stroke-width: 0.8; }
svg .soft { fill: var(--own); opacity: 0.22; }
svg .interval { stroke: var(--own); stroke-width: 2; }
svg .thin { fill: none; stroke: var(--own); stroke-width: 1.5; opacity: 0.75; }
svg .piece { fill: var(--own); stroke: var(--panel); stroke-width: 1; }
svg text.on { fill: var(--on-light); font-size: 11.5px; }
svg text.on.phase-1 { fill: var(--on-dark); }
svg .planned { fill: var(--bar); opacity: 0.5; }
svg .counted { fill: var(--bar); }
.mode-0 { --own: var(--mode-0); } .mode-1 { --own: var(--mode-1); }
.mode-2 { --own: var(--mode-2); } .mode-3 { --own: var(--mode-3); }
.phase-0 { --own: var(--phase-0); } .phase-1 { --own: var(--phase-1); } .phase-2 { --own: var(--phase-2); }
.phase-3 { --own: var(--phase-3); } .phase-4 { --own: var(--phase-4); }
.keys { display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 0 0 8px; padding: 0; list-style: none; font-size: 13px; }
.keys svg { display: inline-block; width: 14px; height: 14px; vertical-align: -2px; margin-right: 6px; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; vertical-align: -1px; margin-right: 6px;
  background: var(--own, var(--bar)); }
.key.half { opacity: 0.5; }
.pairs { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 20px 32px; }
.pairs > div { min-width: 0; }
.dense { font-size: 13px; margin-top: 16px; }
.dense th, .dense td { padding: 4px 7px; }
"""


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
    return page_document(title, f"<main>\n{body}\n</main>", style=_STYLE)


def _section(title: str, note: str, *content: str) -> str:
    inner = "\n".join(content)
    return (
        f'<section>\n<h2>{page_text(title)}</h2>\n<p class="note">{page_text(note)}</p>\n{inner}\n</section>'
    )


def _table(heads: Sequence[tuple[str, bool]], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table; heads: (text, whether it is a column of numbers)."""
    kinds = [' class="number"' if number else "" for _, number in heads]
    head = "".join(
        f'<th scope="col"{kind}>{page_text(text)}</th>' for (text, _), kind in zip(heads, kinds, strict=True)
    )
    lines = [
        "<tr>"
        + "".join(f"<td{one}>{page_text(cell)}</td>" for cell, one in zip(row, kinds, strict=True))
        + "</tr>"
        for row in rows
    ]
    named = f' class="{kind}"' if kind else ""
    body = "\n".join(lines)
    return f'<div class="scroll"><table{named}><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    listed = "\n".join(f"<dt>{page_text(name)}</dt><dd>{page_text(value)}</dd>" for name, value in rows)
    return f"<dl>\n{listed}\n</dl>"


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
        ("Bus bandwidth", _rate(best["bus_bandwidth"]), [
            "Network bytes of the busiest rank and direction over time",
            f"Algorithm bandwidth {_rate(best['algorithm_bandwidth'])}",
        ]),
        ("Repeats", f"{best['repeats']}", [
            f"of each mode in turn, after {best['warmup']} warm-ups each",
            "Every element verified" if best["verified_elements"] is not None else "Not verified",
        ]),
    ]  # fmt: skip
    made = [
        f'<div class="tile"><h2>{page_text(title)}</h2><strong>{page_text(value)}</strong>'
        + "".join(f'<p class="muted">{page_text(line)}</p>' for line in lines if line)
        + "</div>"
        for title, value, lines in tiles
    ]
    return f'<div class="tiles">\n{chr(10).join(made)}\n</div>'


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{bytes_text(value)}/s"


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
            _rate(one["algorithm_bandwidth"]),
            _rate(one["bus_bandwidth"]),
            bytes_text(one["network_bytes_planned"]),
            "–" if one["network_bytes_measured"] is None else bytes_text(one["network_bytes_measured"]),
            _times(one["ratio_to_limit"], 3),
            _times(one["speedup_over_broadcast"], 2),
            f"{one['rounds']:,}",
        ]
        for one in report["modes"]
    ]
    note = "Medians of the slowest rank's time with bootstrap intervals; speed-up is over mode broadcast."
    return _section("Modes", note, _table([("mode", False), *((head, True) for head in heads)], rows))


def _pictures(report: dict[str, Any]) -> list[str]:
    modes, limit = report["modes"], report["limit_seconds"]
    strokes = "The box holds the middle half of the repeats, the upright stroke is the median, the bar below its 95 % interval"
    sections = [
        _section(
            "Every repeat",
            strokes
            + (
                "."
                if limit is None
                else "; the dashed line is the network's limit. The axis does not begin at 0."
            ),
            f'<div class="scroll"><div class="wide">{repeat_chart(modes, limit)}</div></div>',
        ),
        _section(
            "Over the run",
            "Modes take turns, so that whatever drifts hits all alike. A slope is drift, a far point a disturbance.",
            _mode_keys(modes),
            f'<div class="scroll"><div class="wide">{course_chart(modes)}</div></div>',
        ),
        _section(
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
        return _section("Sweep over sizes", note, left_out)
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
            _rate(one["algorithm_bandwidth"]),
            _rate(one["bus_bandwidth"]),
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
    return _section(
        "Sweep over sizes",
        note,
        left_out,
        _mode_keys(measured[0]["modes"]),
        f'<div class="pairs">{pictures}</div>',
        _table(heads, rows, "dense"),
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
    return _section("What was scaled down", note, _table(heads, rows))


def _environment(report: dict[str, Any]) -> str:
    environment, probe = report["environment"], report["probe"]
    facts = [
        (name, str(value))
        for name, value in environment.items()
        if name not in ("settings", "emulated") and value not in (None, "")
    ]
    facts += [(name, value) for name, value in environment.get("settings", {}).items()]
    if probe["median"] is not None:
        rates = ", ".join(_rate(rate) for rate in probe["bytes_per_second_of_a_domain"])
        facts.append(("bare exchange, by domain", rates))
    digests = [(f"layout of the {side}", digest) for side, digest in report["layouts"].items()]
    digests += [(f"plan, {one['mode']}", one["digest"]) for one in report["modes"]]
    return (
        '<section><div class="columns">\n'
        f"<div><h2>Environment</h2>\n{_facts(facts)}</div>\n"
        f"<div><h2>Digests</h2>\n{_facts(digests)}</div>\n</div></section>"
    )
