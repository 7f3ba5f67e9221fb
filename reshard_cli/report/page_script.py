"""The script of a plan's page: it draws the embedded data, and sorts and filters the table of tensors.

Texts reach the page as text nodes only, so that no name can become markup.
"""

from __future__ import annotations

from reshard_cli.report.page_charts import BARS, MATRIX

__all__ = ["SCRIPT"]

_BASICS = r"""
const data = JSON.parse(document.getElementById("page-data").textContent);
const charts = [];
const byId = (id) => document.getElementById(id);

function bytesText(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(count) < 1000) return (unit === "B" ? count.toFixed(0) : count.toFixed(2)) + " " + unit;
    count /= 1000;
  }
  return count.toFixed(2) + " TB";
}

function shareText(part, whole) {
  if (!whole) return "0.0%";
  const percent = 100 * part / whole;
  return percent > 0 && percent < 0.05 ? "< 0.1%" : percent.toFixed(1) + "%";
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

/* The tip */

const tip = byId("tip");

function showTip(lines, x, y) {
  tip.replaceChildren(element("strong", lines[0]), ...lines.slice(1).map((line) => element("div", line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth - 6 ? x - 14 - box.width : x + 14;
  const top = y + 14 + box.height > innerHeight - 6 ? y - 14 - box.height : y + 14;
  tip.style.left = Math.max(6, Math.min(left, innerWidth - box.width - 6)) + "px";
  tip.style.top = Math.max(6, top) + "px";
}

/* A chart is {canvas, height, draw(pen, width), at(x, y), step(mark, dx, dy), lines(mark), centre(mark)} */

function addChart(chart) {
  chart.mark = null;
  charts.push(chart);
  const canvas = chart.canvas;
  canvas.tabIndex = 0;
  const mark = (found, x, y) => {
    if (found !== chart.mark) {
      chart.mark = found;
      redraw(chart);
    }
    if (found === null) tip.hidden = true;
    else showTip(chart.lines(found), x, y);
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    mark(chart.at(event.clientX - box.left, event.clientY - box.top), event.clientX, event.clientY);
  });
  for (const name of ["pointerleave", "blur"]) canvas.addEventListener(name, () => mark(null));
  canvas.addEventListener("keydown", (event) => {
    const moves = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
    if (event.key === "Escape") mark(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    const found = chart.step(chart.mark, ...moves[event.key]);
    if (found === null) return;
    const box = canvas.getBoundingClientRect();
    const [x, y] = chart.centre(found);
    mark(found, box.left + x, box.top + y);
  });
}

function redraw(chart) {
  const canvas = chart.canvas;
  const width = Math.max(200, canvas.parentElement.clientWidth);
  const height = chart.height(width);
  const ratio = window.devicePixelRatio || 1;
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px " + getComputedStyle(document.body).fontFamily;
  chart.draw(pen, width, height);
}

function redrawAll() {
  charts.forEach(redraw);
}

/* Marks along an axis, as many as there is room for; begin: where each group begins, end: where the last ends */
function spacedMarks(marks, wanted, room, size) {
  const every = Math.max(1, Math.ceil(size * marks.length / Math.max(1, room)));
  if (wanted.length * size <= room) return wanted;
  const nice = [1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 40, 50, 64, 100, 128, 200, 256].find((one) => one >= every) || every;
  return marks.map((_, index) => index).filter((index) => index % nice === 0);
}
"""

_TABLE = r"""
/* The table of tensors */

const COLUMNS = [
  {title: "tensor", kind: "name", text: (row) => row.name, key: (row) => row.name},
  {title: "count", kind: "number", text: (row) => row.count.toLocaleString("en"), key: (row) => row.count},
  {title: "layers", kind: "layers", text: (row) => row.layers, key: (row) => parseInt(row.layers || "-1", 10)},
  {title: "shape", kind: "shape", text: (row) => row.shape ? "[" + row.shape.join(", ") + "]" : "various",
    key: (row) => row.shape ? row.shape.reduce((product, length) => product * length, 1) : 0},
  {title: "dtype", kind: "dtype", text: (row) => row.dtype, key: (row) => row.dtype},
  {title: "route", kind: "route", text: (row) => row.route, key: (row) => row.route},
  {title: "bytes", kind: "number", text: (row) => bytesText(row.size), key: (row) => row.size},
  {title: "network", kind: "number", text: (row) => bytesText(row.network), key: (row) => row.network},
  {title: "share", kind: "number share", text: (row) => shareText(row.network, data.network), key: (row) => row.network},
];
const FIELDS = ["name", "count", "layers", "shape", "dtype", "route", "size", "network"];

function tensorRow(values) {
  const row = Object.fromEntries(FIELDS.map((field, index) => [field, values[index]]));
  row.line = element("tr");
  for (const column of COLUMNS) {
    const cell = element("td", undefined, column.kind.replace(" share", ""));
    if (column.kind === "name") cell.append(element("code", column.text(row)));
    else cell.textContent = column.text(row);
    if (column.title === "share") {
      const bar = element("span", undefined, "share");
      const length = element("i");
      length.style.width = (data.network ? 100 * row.network / data.network : 0) + "%";
      bar.append(length);
      cell.append(bar);
    }
    row.line.append(cell);
  }
  row.searched = COLUMNS.slice(0, 6).map((column) => column.text(row)).join(" ").toLowerCase();
  return row;
}

function startTable() {
  const rows = data.tensors.map(tensorRow);
  const body = byId("tensor-rows");
  const head = byId("tensor-head");
  const footer = byId("tensor-foot");
  const filter = byId("filter");
  let sorted = 6;
  let falling = true;
  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => words.every((word) => row.searched.includes(word)));
    const key = COLUMNS[sorted].key;
    const compare = (one, other) => one < other ? -1 : one > other ? 1 : 0;
    found.sort((one, other) => (falling ? -1 : 1) * compare(key(one), key(other)) || compare(one.name, other.name));
    body.replaceChildren(...found.map((row) => row.line));
    [...head.children].forEach((cell, index) => {
      cell.setAttribute("aria-sort", index !== sorted ? "none" : falling ? "descending" : "ascending");
    });
    const count = sum(found.map((row) => row.count));
    const network = sum(found.map((row) => row.network));
    byId("found").textContent = found.length.toLocaleString("en") + " of " + rows.length.toLocaleString("en")
      + " rows, " + count.toLocaleString("en") + " tensors";
    const totals = {tensor: "together", count: count.toLocaleString("en"), bytes: bytesText(sum(found.map((row) => row.size))),
      network: bytesText(network), share: shareText(network, data.network)};
    footer.replaceChildren(...COLUMNS.map((column) => element("td", totals[column.title] || "",
      column.kind.startsWith("number") ? "number" : "")));
  };
  COLUMNS.forEach((column, index) => {
    const cell = element("th", undefined, column.kind.startsWith("number") ? "number" : "");
    cell.scope = "col";
    const button = element("button", column.title);
    button.type = "button";
    button.addEventListener("click", () => {
      falling = index === sorted ? !falling : column.kind.startsWith("number");
      sorted = index;
      show();
    });
    cell.append(button);
    head.append(cell);
  });
  filter.addEventListener("input", show);
  show();
}
"""

_START = r"""
startMatrix();
startLoads();
startRounds();
startTable();
redrawAll();
let waiting = false;
function redrawSoon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; redrawAll(); });
}
window.addEventListener("resize", redrawSoon);
window.addEventListener("scroll", () => { tip.hidden = true; }, {passive: true});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawSoon);
"""

SCRIPT = f'(function () {{\n"use strict";\n{_BASICS}{MATRIX}{BARS}{_TABLE}{_START}}})();\n'
