"""The pictures of a plan's page, as parts of its script: the matrix of who sends whom, and charts of bars."""

from __future__ import annotations

__all__ = ["BARS", "MATRIX"]

MATRIX = r"""
/* The matrix */

function ramp() {
  const stops = ["ramp-0", "ramp-1", "ramp-2"].map((name) => {
    const text = colour(name);
    return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  });
  return (part) => {
    const place = Math.min(1, Math.max(0, part)) * 2;
    const low = Math.min(1, Math.floor(place));
    const mixed = stops[low].map((value, index) => Math.round(value + (stops[low + 1][index] - value) * (place - low)));
    return "rgb(" + mixed.join(",") + ")";
  };
}

function matrixChart() {
  let shown;
  let values;
  let biggest;
  let smallest;
  let logarithmic = false;
  let place = null;
  const select = (name) => {
    shown = data.matrix[name];
    values = new Map(shown.cells.map((cell, index) => [cell, shown.bytes[index]]));
    biggest = shown.bytes.reduce((one, other) => Math.max(one, other), 0);
    smallest = shown.bytes.reduce((one, other) => Math.min(one, other), Infinity);
  };
  const layout = (width) => {
    const rows = shown.rows.names.length;
    const columns = shown.columns.names.length;
    const left = 12 + 7 * Math.max(...shown.rows.marks.map((mark) => mark.length));
    const side = Math.min((width - left - 4) / columns, 560 / rows, 64);
    // a few wide rows or columns may be stretched, so that they can be seen
    const high = Math.max(side, Math.min(14, 560 / rows));
    return {rows, columns, left, top: 20, wide: side, high};
  };
  const part = (value) => {
    if (!logarithmic) return value / biggest;
    return biggest === smallest ? 1 : Math.log(value / smallest) / Math.log(biggest / smallest);
  };
  const chart = {
    canvas: byId("matrix"),
    select,
    scale(on) { logarithmic = on; },
    about: () => ({shown, biggest, smallest, logarithmic}),
    height(width) {
      const at = layout(width);
      return Math.ceil(at.top + at.rows * at.high + 4);
    },
    draw(pen, width) {
      place = layout(width);
      const {rows, columns, left, top, wide, high} = place;
      const x = (column) => Math.round(left + column * wide);
      const y = (row) => Math.round(top + row * high);
      const paint = ramp();
      pen.fillStyle = colour("none");
      pen.fillRect(left, top, x(columns) - left, y(rows) - top);
      const gap = Math.min(wide, high) >= 7 ? 1 : 0;
      for (const [cell, value] of values) {
        const row = Math.floor(cell / columns);
        const column = cell % columns;
        pen.fillStyle = paint(part(value));
        pen.fillRect(x(column), y(row), x(column + 1) - x(column) - gap, y(row + 1) - y(row) - gap);
      }
      pen.strokeStyle = colour("edge");
      pen.lineWidth = 1;
      pen.strokeRect(left - 0.5, top - 0.5, x(columns) - left + 1, y(rows) - top + 1);
      pen.beginPath();
      for (const column of shown.columns.boundaries) {
        pen.moveTo(x(column) - 0.5, top);
        pen.lineTo(x(column) - 0.5, y(rows));
      }
      for (const row of shown.rows.boundaries) {
        pen.moveTo(left, y(row) - 0.5);
        pen.lineTo(x(columns), y(row) - 0.5);
      }
      pen.stroke();
      pen.fillStyle = colour("muted");
      pen.textBaseline = "middle";
      pen.textAlign = "right";
      const all = (axis) => axis.boundaries.length ? [0, ...axis.boundaries] : axis.marks.map((_, index) => index);
      for (const row of spacedMarks(shown.rows.marks, all(shown.rows), rows * high, 14)) {
        pen.fillText(shown.rows.marks[row], left - 5, (y(row) + y(row + 1)) / 2);
      }
      pen.textAlign = "center";
      const longest = 10 + 7 * Math.max(...shown.columns.marks.map((mark) => mark.length));
      for (const column of spacedMarks(shown.columns.marks, all(shown.columns), columns * wide, longest)) {
        pen.fillText(shown.columns.marks[column], (x(column) + x(column + 1)) / 2, top - 9);
      }
      if (chart.mark !== null) {
        const row = Math.floor(chart.mark / columns);
        const column = chart.mark % columns;
        pen.strokeStyle = colour("best");
        pen.lineWidth = 2;
        pen.strokeRect(x(column), y(row), x(column + 1) - x(column), y(row + 1) - y(row));
      }
    },
    at(x, y) {
      const column = Math.floor((x - place.left) / place.wide);
      const row = Math.floor((y - place.top) / place.high);
      const inside = column >= 0 && row >= 0 && column < place.columns && row < place.rows;
      return inside ? row * place.columns + column : null;
    },
    step(mark, dx, dy) {
      if (mark === null) return 0;
      const column = mark % place.columns + dx;
      const row = Math.floor(mark / place.columns) + dy;
      const inside = column >= 0 && row >= 0 && column < place.columns && row < place.rows;
      return inside ? row * place.columns + column : mark;
    },
    lines(mark) {
      const value = values.get(mark) || 0;
      return [
        value ? bytesText(value) + ", " + shareText(value, sum(shown.bytes)) + " of the whole" : "no bytes",
        "from " + shown.rows.names[Math.floor(mark / place.columns)],
        "to " + shown.columns.names[mark % place.columns],
      ];
    },
    centre: (mark) => [
      place.left + (mark % place.columns + 0.5) * place.wide,
      place.top + (Math.floor(mark / place.columns) + 0.5) * place.high,
    ],
  };
  select("network");
  addChart(chart);
  return chart;
}

function describeMatrix(chart) {
  const {shown, biggest, smallest, logarithmic} = chart.about();
  const inside = shown === data.matrix.inside;
  const unit = shown.rows.unit;
  const columns = shown.columns.names.length;
  byId("matrix-axes").textContent = "Rows: " + (inside ? "who passes on or sends inside a domain" : "senders, " + data.source)
    + "; columns: receivers, " + data.destination + "; by " + unit + (unit === shown.columns.unit ? "" : " and " + shown.columns.unit)
    + (unit !== "rank" && inside ? ", added up over all domains" : "")
    + (unit === "rank" ? "; numbers are world ranks, lines separate NVLink domains." : ".");
  const middle = logarithmic ? Math.sqrt(biggest * smallest) : biggest / 2;
  const empty = !shown.bytes.length;
  byId("ramp-low").textContent = empty ? "" : bytesText(logarithmic ? smallest : 0);
  byId("ramp-middle").textContent = empty ? "" : bytesText(middle);
  byId("ramp-high").textContent = empty ? "no bytes" : bytesText(biggest);
  const total = sum(shown.bytes);
  byId("matrix-total").textContent = bytesText(total) + (inside ? " inside domains, " : " over the network, ")
    + shown.cells.length.toLocaleString("en") + " of "
    + (shown.rows.names.length * columns).toLocaleString("en") + " cells with traffic.";
  const order = shown.cells.map((_, index) => index).sort((a, b) => shown.bytes[b] - shown.bytes[a]).slice(0, 8);
  // of a domain its number: the tip has its ranks
  const short = (name) => unit === "rank" ? name : name.split(":")[0];
  byId("largest").replaceChildren(...order.map((index) => {
    const row = element("tr");
    row.append(
      element("td", short(shown.rows.names[Math.floor(shown.cells[index] / columns)])),
      element("td", short(shown.columns.names[shown.cells[index] % columns])),
      element("td", bytesText(shown.bytes[index]), "number"),
    );
    return row;
  }));
  chart.canvas.setAttribute("aria-label", byId("matrix-axes").textContent + " " + byId("matrix-total").textContent);
}

function startMatrix() {
  const chart = matrixChart();
  const again = () => {
    // browsers keep what was chosen when a page is loaded again
    chart.select(document.querySelector("input[name=matrix]:checked").value);
    chart.scale(byId("logarithmic").checked);
    chart.mark = null;
    describeMatrix(chart);
    redraw(chart);
  };
  for (const input of document.querySelectorAll("input[name=matrix], #logarithmic")) {
    input.addEventListener("change", again);
  }
  again();
}
"""

BARS = r"""
/* Bars: loads and rounds */

const FEW_BARS = 64; // up to which two charts stand side by side

function ticksUpTo(top) {
  if (!top) return [0];
  const rough = top / 4;
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
  const found = [];
  for (let value = 0; value <= top * 1.0001; value += step) found.push(value);
  return found;
}

function barChart(canvas, bars) {
  const {values, marks, boundaries, best, lines} = bars;
  const top = Math.max(best || 0, values.reduce((one, other) => Math.max(one, other), 0)) * 1.06;
  const left = 70;
  const base = 150;
  let wide = 1;
  let used = 0;
  const chart = {
    canvas,
    height: () => base + 24,
    draw(pen, width) {
      wide = Math.min(56, (width - left - 4) / Math.max(1, values.length));
      used = wide * values.length;
      const x = (index) => left + index * wide;
      const y = (value) => Math.round(base - (top ? value / top : 0) * (base - 8));
      pen.textBaseline = "middle";
      pen.textAlign = "right";
      pen.lineWidth = 1;
      for (const tick of ticksUpTo(top)) {
        pen.strokeStyle = colour("line");
        pen.beginPath();
        pen.moveTo(left, y(tick) + 0.5);
        pen.lineTo(left + used, y(tick) + 0.5);
        pen.stroke();
        pen.fillStyle = colour("muted");
        pen.fillText(bytesText(tick).replace(/\.0+ /, " "), left - 7, y(tick));
      }
      const gap = wide >= 4 ? Math.min(6, wide * 0.2) : 0;
      values.forEach((value, index) => {
        pen.fillStyle = colour(index === chart.mark ? "bar-hover" : "bar");
        const begin = gap ? x(index) + gap / 2 : Math.round(x(index));
        const end = gap ? x(index + 1) - gap / 2 : Math.max(begin + 1, Math.round(x(index + 1)));
        if (value) pen.fillRect(begin, Math.min(y(value), base - 1), end - begin, Math.max(1, base - y(value)));
      });
      if (best) {
        pen.strokeStyle = colour("best");
        pen.lineWidth = 2;
        pen.setLineDash([6, 4]);
        pen.beginPath();
        pen.moveTo(left, y(best));
        pen.lineTo(left + used, y(best));
        pen.stroke();
        pen.setLineDash([]);
      }
      pen.strokeStyle = colour("edge");
      pen.lineWidth = 1;
      pen.beginPath();
      for (const index of boundaries) {
        const at = Math.round(x(index)) + 0.5;
        pen.moveTo(at, base);
        pen.lineTo(at, base + 6);
      }
      pen.moveTo(left, base + 0.5);
      pen.lineTo(left + used, base + 0.5);
      pen.stroke();
      pen.fillStyle = colour("muted");
      pen.textAlign = "center";
      const longest = 12 + 7 * Math.max(...marks.map((mark) => mark.length));
      const all = boundaries.length ? [0, ...boundaries] : marks.map((_, index) => index);
      for (const index of spacedMarks(marks, all, used, longest)) {
        pen.fillText(marks[index], (x(index) + x(index + 1)) / 2, base + 14);
      }
    },
    at(x, y) {
      const index = Math.floor((x - left) / wide);
      return index >= 0 && index < values.length && y <= base + 20 ? index : null;
    },
    step: (mark, dx) => values.length ? (mark === null ? 0 : Math.min(values.length - 1, Math.max(0, mark + dx))) : null,
    lines,
    centre: (mark) => [left + (mark + 0.5) * wide, base / 2],
  };
  addChart(chart);
}

function drawing(parent, title, description) {
  const frame = element("div", undefined, "drawing");
  const canvas = element("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", title + ". " + description);
  frame.append(element("h3", title), element("div", description, "muted"), canvas);
  parent.append(frame);
  return canvas;
}

function loadLines(one, index) {
  if (one.unit === "rank") {
    const lines = [bytesText(one.busiest[index]), one.names[index]];
    if (one.best) lines.push((one.busiest[index] / one.best).toFixed(3) + " × the best possible maximum");
    return lines;
  }
  return [
    bytesText(one.busiest[index]) + " at most",
    "busiest: " + one.who[index],
    "least: " + bytesText(one.least[index]) + "; together " + bytesText(one.total[index]),
    one.names[index],
  ];
}

function showLoads(kind) {
  const parent = byId("loads");
  for (const canvas of parent.querySelectorAll("canvas")) {
    charts.splice(charts.findIndex((chart) => chart.canvas === canvas), 1);
  }
  parent.replaceChildren();
  parent.classList.toggle("few", data.loads[kind].every((one) => one.names.length <= FEW_BARS));
  for (const one of data.loads[kind]) {
    const top = one.busiest.reduce((a, b) => Math.max(a, b), 0);
    const total = sum(one.total || one.busiest);
    const group = one.unit === "domain" ? "one domain" : one.unit;
    const text = (one.unit === "rank" ? "By world rank" : "The busiest rank of each bar; a bar is " + group)
      + ". Busiest " + bytesText(top) + (one.best ? ", best possible maximum " + bytesText(one.best) : "")
      + ", together " + bytesText(total) + ".";
    const canvas = drawing(parent, one.title, text);
    barChart(canvas, {values: one.busiest, marks: one.marks, boundaries: one.boundaries, best: one.best,
      lines: (index) => loadLines(one, index)});
  }
  byId("best-legend").hidden = !data.loads[kind].some((one) => one.best);
}

function startLoads() {
  showLoads(document.querySelector("input[name=loads]:checked").value);
  for (const input of document.querySelectorAll("input[name=loads]")) {
    input.addEventListener("change", () => { showLoads(input.value); redrawAll(); });
  }
}

function startRounds() {
  const rounds = data.rounds;
  const parent = byId("rounds");
  const grouped = rounds.per > 1 ? " A bar is " + rounds.per + " rounds together." : "";
  if (rounds.count === 1) {
    const busiest = rounds.busiest[0] ? "; the busiest NIC is that of " + rounds.who[0] + ", with " + bytesText(rounds.busiest[0]) : "";
    parent.append(element("p", "Everything fits into one round: " + bytesText(rounds.total[0]) + " over the network" + busiest + "."));
    return;
  }
  parent.classList.toggle("few", rounds.marks.length <= FEW_BARS);
  const lines = (index) => [
    bytesText(rounds.total[index]) + " in all",
    (rounds.marks[index].includes("–") ? "rounds " : "round ") + rounds.marks[index] + " of " + rounds.count,
    "busiest NIC: " + bytesText(rounds.busiest[index]) + ", " + rounds.who[index],
  ];
  for (const [name, title, text] of [
    ["busiest", "Busiest NIC of each round", "The larger of what one rank sends and takes; it may be another rank in each round."],
    ["total", "All ranks together", "Network bytes of all ranks."],
  ]) {
    const canvas = drawing(parent, title, text + grouped);
    barChart(canvas, {values: rounds[name], marks: rounds.marks, boundaries: [], best: null, lines});
  }
}
"""
