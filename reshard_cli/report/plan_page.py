"""A plan as a page for the browser: one HTML file that needs nothing else, its data embedded as JSON."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

from reshard_cli.plan.build import Plan
from reshard_cli.refit.prepare import Jobs
from reshard_cli.report.page_document import page_document, page_text
from reshard_cli.report.page_script import SCRIPT
from reshard_cli.report.page_tensors import tensor_rows
from reshard_cli.report.page_traffic import NameOf, load_data, matrix_data, rounds_data
from reshard_cli.report.terminal import broadcast_facts, bytes_text

__all__ = ["page_data", "plan_page"]


def plan_page(report: dict[str, Any], plan: Plan, jobs: Jobs, colocated: bool) -> str:
    """Return the page of a plan; `report` is the plan's own, from `plan_report`."""

    def name_of(rank: int) -> str:
        return jobs.name_of(rank, colocated)

    title = page_text(f"Refit plan: {report['source']['name']} → {report['destination']['name']}")
    # only this very script may run, and nothing may be fetched: a second lock behind the escaping
    allowed = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    body = f"""<main>
{_header(report)}
{_tiles(report, name_of)}
{_facts(report)}
{_TRAFFIC}
{_LOADS}
{_ROUNDS}
{_TENSORS}
</main>
<div id="tip" role="status" hidden></div>
<script type="application/json" id="page-data">{_json(page_data(plan, name_of))}</script>
<script>{SCRIPT}</script>"""
    return page_document(title, body, scripts=f"; script-src 'sha256-{allowed}'")


def page_data(plan: Plan, name_of: NameOf) -> dict[str, Any]:
    """Return everything that the page's pictures and table show."""
    return {
        "source": plan.source.name,
        "destination": plan.destination.name,
        "network": plan.network_bytes,
        "matrix": matrix_data(plan, name_of),
        "loads": load_data(plan, name_of),
        "rounds": rounds_data(plan, name_of),
        "tensors": tensor_rows(plan),
    }


def _json(value: Any) -> str:
    """Return JSON that is safe inside a script element: no character of it can end the element."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _seconds(value: float) -> str:
    return f"{value:.4g} s"


def _times(value: float, whole: float) -> str:
    return f"{value / whole:.3f} ×" if whole else "–"


def _header(report: dict[str, Any]) -> str:
    model = report["model"]
    return (
        f"<h1>{page_text(report['source']['name'])} → {page_text(report['destination']['name'])}</h1>\n"
        f'<p class="muted">Refit plan of {page_text(model["name"])}: {model["tensors"]:,} tensors, '
        f"{model['parameters']:,} parameters, {bytes_text(model['bytes'])}. Everything here is computed from "
        "the two layouts; nothing was run.</p>"
    )


def _tiles(report: dict[str, Any], name_of: NameOf) -> str:
    predicted, traffic, balance = report["predicted"], report["traffic"], report["balance"]
    network, bound = traffic["network_bytes"], traffic["network_lower_bound"]
    conventional = traffic["conventional_network_bytes"]
    bottleneck = re.sub(r"rank (\d+)$", lambda found: name_of(int(found[1])), predicted["bottleneck"])
    rounds = report["rounds"]
    share = f" ({network / conventional:.1%} of it)" if conventional else ""
    tiles = [
        ("Predicted, not measured", _seconds(predicted["seconds"]), [
            f"Bottleneck: {bottleneck}",
            f"On {predicted['hardware']}; the network's limit is {_seconds(report['limit_seconds'])}",
        ]),
        ("Network", bytes_text(network), [
            f"{_times(network, bound)} the bound of {bytes_text(bound)}",
            f"Broadcasting everything: {bytes_text(conventional)}{share}",
        ]),
        ("Balance", f"{max(balance.values()):.3f} ×", [
            f"Busiest sender {balance['send_max_over_best']:.3f} ×, busiest receiver "
            f"{balance['receive_max_over_best']:.3f} × the best possible",
        ]),
        ("Rounds", f"{rounds:,}", [
            f"{report['messages']:,} messages",
            f"At most {bytes_text(report['memory']['staging_bytes'])} staging on a rank",
        ]),
    ]  # fmt: skip
    made = [
        f'<div class="tile"><h2>{page_text(title)}</h2><strong>{page_text(value)}</strong>'
        + "".join(f'<p class="muted">{page_text(line)}</p>' for line in lines)
        + "</div>"
        for title, value, lines in tiles
    ]
    return f'<div class="tiles">\n{chr(10).join(made)}\n</div>'


def _facts(report: dict[str, Any]) -> str:
    traffic, memory = report["traffic"], report["memory"]
    rows = [
        ("source", _side(report["source"])),
        ("destination", _side(report["destination"])),
        ("mode", report["mode"]),
        *(
            (
                f"route {name}",
                f"{route['tensors']:,} tensors, {bytes_text(route['bytes'])} ({route['share']:.1%})",
            )
            for name, route in report["routes"].items()
        ),
        ("weights of a rank", f"{bytes_text(memory['source_bytes'])} on the fullest source rank, "
                              f"{bytes_text(memory['destination_bytes'])} on the fullest destination rank"),
        *(
            [("relays", f"{bytes_text(report['relays']['network_bytes'])} from one destination domain to the next")]
            if report["relays"]["network_bytes"]
            else []
        ),
        *broadcast_facts(report["broadcast"]),
        ("inside domains", bytes_text(traffic["domain_bytes"])),
        ("kept on a rank", bytes_text(traffic["local_bytes"])),
        ("digest", report["digest"][:16]),
    ]  # fmt: skip
    if report["extra"]:
        rows.append(("left out", _some(report["extra"]) + ", which only the source has"))
    listed = "\n".join(f"<dt>{page_text(name)}</dt><dd>{page_text(value)}</dd>" for name, value in rows)
    return (
        f'<section><div class="columns">\n<div><h2>Facts</h2>\n<dl>\n{listed}\n</dl></div>\n'
        f'<div><h2>Modes compared</h2>\n<div class="scroll">{_compare(report)}</div>\n{_parts(report)}</div>\n'
        "</div></section>"
    )


def _side(side: dict[str, Any]) -> str:
    domains = side["domains"]
    return (
        f"{side['name']}, {side['ranks']:,} ranks in {domains:,} NVLink domain{'s' if domains != 1 else ''}"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 20:,} more" if len(names) > 20 else ""
    return ", ".join(names[:20]) + more


def _compare(report: dict[str, Any]) -> str:
    bound = report["traffic"]["network_lower_bound"]
    most = max((one["predicted_seconds"] for one in report["compare"]), default=0.0)
    rows = []
    for one in report["compare"]:
        chosen = one["mode"] == report["mode"]
        width = 100 * one["predicted_seconds"] / most if most else 0.0
        cells = [
            f"<td>{page_text(one['mode'])}{' (this plan)' if chosen else ''}"
            f"<small>{page_text(one['bottleneck'])}</small></td>",
            *_numbers([bytes_text(one["network_bytes"]), _times(one["network_bytes"], bound)]),
            f'<td class="number">{_seconds(one["predicted_seconds"])}'
            f'<span class="share"><i style="width: {width:.1f}%"></i></span></td>',
        ]
        style = ' class="chosen"' if chosen else ""
        rows.append(f"<tr{style}>{''.join(cells)}</tr>")
    heads = "".join(
        f'<th scope="col" class="number">{name}</th>' for name in ("network", "over bound", "predicted")
    )
    return (
        f'<table class="compare"><thead><tr><th scope="col">mode</th>{heads}</tr></thead>\n'
        f"<tbody>\n{chr(10).join(rows)}\n</tbody></table>"
    )


def _parts(report: dict[str, Any]) -> str:
    """Return the seconds of each resource, in the order in which they matter."""
    parts = sorted(report["predicted"]["parts"].items(), key=lambda part: -part[1])
    most = max((seconds for _, seconds in parts), default=0.0)
    rows = [
        f'<dt>{page_text(name)}</dt><dd class="number">{_seconds(seconds)}</dd>'
        f'<dd class="share"><i style="width: {100 * seconds / most if most else 0:.1f}%"></i></dd>'
        for name, seconds in parts
    ]
    return (
        '<h3 style="margin-top: 14px">What keeps this plan busy, where it is busiest</h3>\n'
        f'<dl class="parts">{chr(10).join(rows)}</dl>'
    )


def _numbers(values: Iterable[str]) -> list[str]:
    return [f'<td class="number">{page_text(value)}</td>' for value in values]


_TRAFFIC = """<section>
<h2>Who sends what to whom</h2>
<p class="note">A byte enters each destination domain once, over the network, and is passed on inside it over NVLink.</p>
<div class="picture">
<div class="drawing"><p class="muted" id="matrix-axes"></p><canvas id="matrix" role="img"></canvas></div>
<aside>
<fieldset><legend>Show</legend>
<label><input type="radio" name="matrix" value="network" checked> network</label>
<label><input type="radio" name="matrix" value="inside"> inside domains (NVLink)</label>
</fieldset>
<fieldset><label><input type="checkbox" id="logarithmic"> logarithmic colours</label></fieldset>
<div class="legend">
<div class="ramp"></div>
<div class="ends"><span id="ramp-low"></span><span id="ramp-middle"></span><span id="ramp-high"></span></div>
<div><span class="swatch none"></span>no traffic</div>
</div>
<p class="muted" id="matrix-total"></p>
<h3>Largest cells</h3>
<div class="scroll"><table class="largest">
<thead><tr><th scope="col">from</th><th scope="col">to</th><th scope="col" class="number">bytes</th></tr></thead>
<tbody id="largest"></tbody></table></div>
</aside>
</div>
</section>"""

_LOADS = """<section>
<h2>Load of each rank</h2>
<p class="note">The busiest NIC sets the pace. The line is the least that any division of the bytes among the ranks
that hold or want them could give the busiest one. Short strokes under the axis separate NVLink domains.</p>
<div class="tools">
<fieldset style="margin: 0"><legend>Show</legend>
<label><input type="radio" name="loads" value="nic" checked> network (NIC)</label>
<label><input type="radio" name="loads" value="nvlink"> inside domains (NVLink)</label>
</fieldset>
<span id="best-legend"><span class="swatch best"></span>best possible maximum</span>
</div>
<div id="loads"></div>
</section>"""

_ROUNDS = """<section>
<h2>Rounds</h2>
<p class="note">A refit goes in rounds, so that what a rank packs and receives fits its staging memory.</p>
<div id="rounds"></div>
</section>"""

_TENSORS = """<section>
<h2>Tensors</h2>
<p class="note">Tensors that differ only in their layer are one row. Count is how many a checkpoint would hold, bytes are
one copy of them as they travel, network is what crosses between domains for them, and share is their part of it.</p>
<div class="tools">
<input type="search" id="filter" placeholder="Filter: name, dtype, route …" aria-label="Filter tensors">
<span class="muted" id="found" role="status"></span>
</div>
<div class="scroll"><table id="tensors">
<thead><tr id="tensor-head"></tr></thead>
<tbody id="tensor-rows"></tbody>
<tfoot><tr id="tensor-foot"></tr></tfoot>
</table></div>
</section>
<noscript><section>The pictures and the table of tensors need JavaScript.</section></noscript>"""
