"""The style sheet of a plan's page: light and dark, from narrow to wide."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --panel: #ffffff; --text: #1b1f24; --muted: #5b6570; --line: #dde1e6; --faint: #eef0f3;
  --accent: #1f6feb; --bar: #4b8fdb; --bar-hover: #1b4f8f; --best: #b45309; --marked: #e8f0fe;
  --none: #f0f2f4; --ramp-0: #d3e5f5; --ramp-1: #5b9fd6; --ramp-2: #0b3a75; --edge: #8a94a0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #101317; --panel: #181c21; --text: #e4e7eb; --muted: #9aa4af; --line: #2d333b; --faint: #22272e;
    --accent: #6cb0ff; --bar: #4f8fd6; --bar-hover: #a9d0ff; --best: #f0a64b; --marked: #1d2b40;
    --none: #1f242a; --ramp-0: #1c3a5a; --ramp-1: #3d86cc; --ramp-2: #d8ecff; --edge: #6b7682;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1240px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 4px; }
h3 { font-size: 14px; margin: 0 0 6px; }
p { margin: 0 0 12px; }
.muted, .note { color: var(--muted); }
.note { max-width: 110ch; }
section { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 18px 20px; margin-top: 16px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 12px; margin-top: 20px; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; }
.tile h2 { font-size: 13px; font-weight: 600; color: var(--muted); margin: 0; }
.tile strong { display: block; font-size: 24px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile p { margin: 2px 0 0; font-size: 13px; overflow-wrap: anywhere; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 12px 40px; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 4px 16px; margin: 0; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
.parts { grid-template-columns: max-content max-content minmax(40px, 1fr); font-variant-numeric: tabular-nums; margin-top: 4px; }
.parts dd.number { text-align: right; }
.parts .share { align-self: center; margin: 0; max-width: 220px; }
code { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: left; vertical-align: baseline; border-bottom: 1px solid var(--faint); }
th { color: var(--muted); font-weight: 600; border-bottom-color: var(--line); white-space: nowrap; }
th.number, td.number { text-align: right; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
tr.chosen td { background: var(--marked); font-weight: 600; }
tr.chosen td:first-child, .compare td:first-child, .compare th:first-child { padding-left: 8px; }
.compare small { display: block; color: var(--muted); font-weight: 400; }
.compare td:last-child, .compare th:last-child { padding-right: 8px; }
.scroll { overflow-x: auto; }
.share { display: block; height: 4px; margin-top: 3px; background: var(--faint); border-radius: 2px; }
.share i { display: block; height: 100%; background: var(--bar); border-radius: 2px; }
.few { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 14px 32px; }
.few .drawing { margin-bottom: 0; }
.picture { display: flex; flex-wrap: wrap; gap: 16px 32px; align-items: flex-start; }
.picture > .drawing { flex: 1 1 560px; min-width: 0; }
.picture > aside { flex: 1 1 300px; min-width: 0; }
.drawing { min-width: 0; margin-bottom: 14px; }
.drawing:last-child { margin-bottom: 0; }
canvas { display: block; max-width: 100%; border-radius: 3px; }
canvas:focus-visible, button:focus-visible, input:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
fieldset { border: 0; padding: 0; margin: 0 0 12px; display: flex; flex-wrap: wrap; gap: 4px 18px; }
legend { float: left; padding: 0; margin-right: 2px; color: var(--muted); }
label { cursor: pointer; }
.ramp { height: 12px; border-radius: 3px; background: linear-gradient(to right, var(--ramp-0), var(--ramp-1), var(--ramp-2)); }
.ends { display: flex; justify-content: space-between; font-size: 12px; font-variant-numeric: tabular-nums; }
.legend { max-width: 340px; margin-bottom: 16px; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; vertical-align: -1px; margin-right: 6px; }
.swatch.none { background: var(--none); border: 1px solid var(--line); }
.swatch.best { height: 0; border-radius: 0; border-top: 2px dashed var(--best); vertical-align: 4px; width: 18px; }
.largest { font-size: 13px; }
.largest td { overflow-wrap: anywhere; }
#tip {
  position: fixed; z-index: 2; pointer-events: none; max-width: min(380px, 92vw); padding: 8px 10px; font-size: 13px;
  background: var(--panel); color: var(--text); border: 1px solid var(--edge); border-radius: 6px;
  box-shadow: 0 3px 12px rgb(0 0 0 / 22%); overflow-wrap: anywhere;
}
#tip strong { display: block; font-variant-numeric: tabular-nums; }
.tools { display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: center; margin-bottom: 8px; }
input[type="search"] {
  font: inherit; color: inherit; background: var(--page); border: 1px solid var(--edge); border-radius: 6px;
  padding: 5px 10px; width: 340px; max-width: 100%;
}
th button {
  font: inherit; color: inherit; background: none; border: 0; padding: 2px 0; cursor: pointer; white-space: nowrap;
}
th button:hover { color: var(--accent); }
th button::after { content: "↕"; opacity: 0.35; margin-left: 4px; }
th[aria-sort="ascending"] button::after { content: "↑"; opacity: 1; }
th[aria-sort="descending"] button::after { content: "↓"; opacity: 1; }
#tensors td.name { min-width: 260px; overflow-wrap: anywhere; }
#tensors td.layers { max-width: 190px; overflow-wrap: anywhere; }
#tensors td.shape, #tensors td.dtype { white-space: nowrap; }
#tensors tbody tr:hover td { background: var(--faint); }
#tensors tfoot td { font-weight: 600; border-bottom: 0; border-top: 1px solid var(--line); }
@media (max-width: 640px) {
  main { padding: 16px 10px 32px; }
  section { padding: 14px 12px; }
  h1 { font-size: 20px; }
  dl:not(.parts) { grid-template-columns: 1fr; gap: 0; }
  dl:not(.parts) dd { margin-bottom: 6px; }
  th, td { padding: 5px 7px; }
}
@media print { body { background: none; } section, .tile { break-inside: avoid; } }
"""
