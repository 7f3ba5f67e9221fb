"""What pages of measurements are built of: sections, tiles, tables, lists of facts, and the style of their charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reshard_cli.report.page_document import page_text
from reshard_cli.report.terminal import bytes_text

__all__ = [
    "CHART_STYLE",
    "environment_facts",
    "page_facts",
    "page_section",
    "page_table",
    "page_tiles",
    "rate_text",
]

# Okabe and Ito's colours, which people with any colour vision can tell apart, lighter on dark ground
CHART_STYLE = """
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


def page_section(title: str, note: str, *content: str) -> str:
    """Return a section of a page: its title and note are texts, its content is HTML."""
    inner = "\n".join(content)
    return (
        f'<section>\n<h2>{page_text(title)}</h2>\n<p class="note">{page_text(note)}</p>\n{inner}\n</section>'
    )


def page_table(heads: Sequence[tuple[str, bool]], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table of texts; heads: (text, whether it is a column of numbers)."""
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


def page_facts(rows: Iterable[tuple[str, str]]) -> str:
    """Return a list of names and values."""
    listed = "\n".join(f"<dt>{page_text(name)}</dt><dd>{page_text(value)}</dd>" for name, value in rows)
    return f"<dl>\n{listed}\n</dl>"


def environment_facts(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is known of a report's environment, its settings behind the rest."""
    facts = [
        (name, str(value))
        for name, value in environment.items()
        if name not in ("settings", "emulated") and value not in (None, "")
    ]
    return facts + [(name, str(value)) for name, value in environment.get("settings", {}).items()]


def page_tiles(tiles: Iterable[tuple[str, str, Sequence[str]]]) -> str:
    """Return tiles of (title, figure, lines below it)."""
    made = [
        f'<div class="tile"><h2>{page_text(title)}</h2><strong>{page_text(value)}</strong>'
        + "".join(f'<p class="muted">{page_text(line)}</p>' for line in lines if line)
        + "</div>"
        for title, value, lines in tiles
    ]
    return f'<div class="tiles">\n{chr(10).join(made)}\n</div>'


def rate_text(value: float | None) -> str:
    """Return bytes in a second, or a dash."""
    return "–" if value is None else f"{bytes_text(value)}/s"
