"use strict";
// Charts as inline SVG. Every text goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 460, HEIGHT = 216, LEFT = 50, RIGHT = 12, TOP = 8, BOTTOM = 34;

function el(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function shape(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return (value / 1e6).toLocaleString("en", { maximumFractionDigits: 2 }) + "M";
  if (size >= 1e4) return (value / 1e3).toLocaleString("en", { maximumFractionDigits: 1 }) + "k";
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return value.toLocaleString("en", { maximumFractionDigits: size >= 100 ? 0 : size >= 1 ? 2 : 4 });
}

const percent = (value) => (value === null || value === undefined ? "–" : (100 * value).toFixed(1).replace(/\.0$/, "") + "%");

/** Round values from low to high, about `count` of them. */
function ticks(low, high, count, whole) {
  const span = high - low || 1, raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || 10 * power;
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * span; i++) found.push(i * step + 0); // + 0: no minus before a zero
  return found;
}

/** Powers of ten, or 1, 2 and 5 times them where there are few. */
function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), powers = [];
  for (let p = first; p <= last; p++) powers.push(10 ** p);
  const within = (list) => list.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  const tens = within(powers), every = Math.ceil(tens.length / 6);
  return tens.length > 2 ? tens.filter((_, i) => i % every === 0) : within(powers.flatMap((power) => [power, 2 * power, 5 * power]));
}

/** A frame: scales, axes, grid, title, legend. `options`: title, unit, x: [low, high], y: [low, high], log, format,
 *  whole (y ticks are whole numbers), start (a step to mark), xLabel, height. */
function frame(options) {
  const height = options.height || HEIGHT, width = options.width || WIDTH;
  const [x0, x1] = options.x, [y0, y1] = options.y;
  const toY = options.log ? Math.log10 : (value) => value;
  const left = LEFT, innerWidth = width - left - RIGHT, innerHeight = height - TOP - BOTTOM;
  const x = (value) => left + ((value - x0) / (x1 - x0 || 1)) * innerWidth;
  const y = (value) => TOP + innerHeight - ((toY(value) - toY(y0)) / (toY(y1) - toY(y0) || 1)) * innerHeight;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.label || options.title });
  const format = options.format || number;
  for (const value of options.log ? logTicks(y0, y1) : ticks(y0, y1, options.yTicks || 4, options.whole)) {
    svg.append(shape("line", { class: "gridline", x1: left, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(shape("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)));
  }
  for (const value of ticks(x0, x1, options.xTicks || 6, true)) {
    svg.append(shape("text", { x: x(value), y: height - BOTTOM + 15, "text-anchor": "middle" }, String(value)));
  }
  svg.append(shape("text", { x: left + innerWidth / 2, y: height - 4, "text-anchor": "middle" }, options.xLabel || "step"));
  svg.append(shape("line", { class: "axis", x1: left, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM }));
  if (options.start !== null && options.start !== undefined && options.start > x0) {
    svg.append(shape("line", { class: "start", x1: x(options.start), x2: x(options.start), y1: TOP, y2: height - BOTTOM }));
  }
  const legend = el("div", { class: "legend" });
  const unit = options.unit ? el("span", { class: "unit" }, ` (${options.unit})`) : null;
  const figure = el("figure", { class: "chart" }, el("figcaption", {}, options.title, unit), legend, svg);
  const step = (clientX) => {
    const box = svg.getBoundingClientRect();
    return x0 + (((clientX - box.left) / box.width) * width - left) / innerWidth * (x1 - x0);
  };
  return { svg, figure, legend, x, y, step, left, width, height, bottom: height - BOTTOM };
}

function legendEntry(legend, name, color, kind) {
  const swatch = el("i", { class: kind || "" });
  swatch.style.background = color;
  swatch.style.borderColor = color;
  legend.append(el("span", {}, swatch, name));
}

function tip(event, title, rows) {
  const box = document.getElementById("tip");
  box.replaceChildren(el("b", {}, title), ...rows.map(([name, value, color]) => {
    const swatch = el("i", {});
    swatch.style.background = color || "transparent";
    return el("div", {}, swatch, `${name}: ${value}`);
  }));
  box.hidden = false;
  const right = event.clientX + 16 + box.offsetWidth > window.innerWidth;
  box.style.left = `${right ? event.clientX - 12 - box.offsetWidth : event.clientX + 16}px`;
  box.style.top = `${Math.min(event.clientY + 12, window.innerHeight - box.offsetHeight - 8)}px`;
}

const hideTip = () => { document.getElementById("tip").hidden = true; };

/** Index of the entry of `steps` (ascending) nearest to `wanted`. */
function nearest(steps, wanted) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && Math.abs(steps[low - 1] - wanted) <= Math.abs(steps[low] - wanted) ? low - 1 : low;
}

function extent(series, log) {
  let low = Infinity, high = -Infinity;
  for (const one of series) {
    for (const list of [one.values, one.low, one.high]) {
      for (const value of list || []) {
        if (value === null || (log && value <= 0)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
  }
  return low <= high ? [low, high] : null;
}

function path(one, x, y, log) {
  let text = "", pen = false;
  one.steps.forEach((step, i) => {
    const value = one.values[i];
    if (value === null || (log && value <= 0)) { pen = false; return; }
    text += `${pen ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = true;
  });
  return text;
}

function drawSeries(f, one, log) {
  if (one.low) {
    const points = one.steps.map((step, i) => [step, one.low[i], one.high[i]]).filter((p) => p[1] !== null && p[2] !== null && (!log || p[1] > 0));
    const up = points.map((p) => `${f.x(p[0]).toFixed(1)} ${f.y(p[2]).toFixed(1)}`);
    const down = points.map((p) => `${f.x(p[0]).toFixed(1)} ${f.y(p[1]).toFixed(1)}`).reverse();
    if (points.length) f.svg.append(shape("path", { d: `M${up.concat(down).join("L")}Z`, fill: one.color, opacity: 0.22 }));
    return;
  }
  const line = { d: path(one, f.x, f.y, log), fill: "none", stroke: one.color, "stroke-width": one.thin ? 1 : 1.8, opacity: one.thin ? 0.45 : 1, "stroke-linejoin": "round" };
  if (one.dash) line["stroke-dasharray"] = "5 4";
  if (!one.dotsOnly) f.svg.append(shape("path", line));
  if (one.dots || one.dotsOnly || one.steps.length === 1) {
    one.steps.forEach((step, i) => {
      const value = one.values[i];
      if (value === null || (log && value <= 0)) return;
      f.svg.append(shape("circle", { cx: f.x(step), cy: f.y(value), r: one.dotsOnly ? 1.6 : 3, fill: one.color }));
    });
  }
}

function stepRange(series) {
  let low = Infinity, high = -Infinity;
  for (const one of series) {
    if (!one.steps.length) continue;
    low = Math.min(low, one.steps[0]);
    high = Math.max(high, one.steps[one.steps.length - 1]);
  }
  return low === high ? [low - 1, high + 1] : [low, high];
}

function emptyChart(title, reason) {
  return el("figure", { class: "chart" }, el("figcaption", {}, title), el("div", { class: "empty" }, reason));
}

/** Lines and bands. `options`: title, unit, series: [{name, color, steps, values | low and high, dash, dots, thin}],
 *  lines: [{y, name, color}], y: [low | null, high | null], log, format, start, empty. */
function lineChart(options) {
  const series = options.series.filter((one) => one && one.steps.length);
  const range = extent(series, options.log);
  if (!range) return emptyChart(options.title, options.empty || "nothing recorded");
  const lines = options.lines || [];
  let [low, high] = range;
  for (const line of lines) { low = Math.min(low, line.y); high = Math.max(high, line.y); }
  if (options.log) { low /= 1.3; high *= 1.3; } else { high += 0.06 * (high - low || 1); if (!options.free) low = Math.min(0, low); }
  const given = options.y || [null, null];
  const label = `${options.title}. ` + series.filter((one) => one.values).map((one) => {
    const shown = options.format || number;
    return `${one.name}: ${shown(one.values[0])} at step ${one.steps[0]}, ${shown(one.values[one.values.length - 1])} at step ${one.steps[one.steps.length - 1]}`;
  }).join("; ");
  const f = frame({ ...options, label, x: stepRange(series), y: [given[0] ?? low, given[1] ?? high] });
  for (const line of lines) {
    f.svg.append(shape("line", { x1: f.left, x2: f.width - RIGHT, y1: f.y(line.y), y2: f.y(line.y), stroke: line.color, "stroke-dasharray": "4 4", "stroke-width": 1.2 }));
    legendEntry(f.legend, line.name, line.color, "dash");
  }
  for (const one of series) {
    drawSeries(f, one, options.log);
    if (one.name && !one.thin) legendEntry(f.legend, one.name, one.color, one.low ? "box" : one.dash ? "dash" : "");
  }
  hover(f, series, options.format || number);
  return f.figure;
}

function hover(f, series, format) {
  const cursor = shape("line", { class: "cursor", y1: TOP, y2: f.bottom, visibility: "hidden" });
  f.svg.append(cursor);
  const longest = series.reduce((a, b) => (b.steps.length > a.steps.length ? b : a));
  f.svg.addEventListener("pointermove", (event) => {
    const step = longest.steps[nearest(longest.steps, f.step(event.clientX))];
    const rows = [];
    for (const one of series) {
      const i = nearest(one.steps, step);
      if (one.steps[i] !== step || one.thin) continue;
      rows.push([one.name, one.low ? `${format(one.low[i])} to ${format(one.high[i])}` : format(one.values[i]), one.color]);
    }
    cursor.setAttribute("x1", f.x(step));
    cursor.setAttribute("x2", f.x(step));
    cursor.setAttribute("visibility", "visible");
    tip(event, `step ${step}`, rows);
  });
  f.svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); hideTip(); });
}

/** Stacked areas of series with the same steps. */
function stackChart(options) {
  const series = options.series.filter((one) => one && one.steps.length && one.values.some((value) => value));
  if (!series.length) return emptyChart(options.title, options.empty || "nothing recorded");
  const steps = series[0].steps, base = steps.map(() => 0), layers = [];
  for (const one of series) {
    const low = base.slice();
    one.values.forEach((value, i) => { base[i] += value || 0; });
    layers.push({ ...one, low, high: base.slice() });
  }
  const high = options.y ? options.y[1] : 1.04 * Math.max(...base);
  const f = frame({ ...options, x: stepRange(series), y: [0, high || 1] });
  for (const layer of layers) {
    if (steps.length === 1) {
      f.svg.append(shape("rect", { x: f.x(steps[0]) - 20, width: 40, y: f.y(layer.high[0]), height: f.y(layer.low[0]) - f.y(layer.high[0]), fill: layer.color }));
    } else {
      const up = steps.map((step, i) => `${f.x(step).toFixed(1)} ${f.y(layer.high[i]).toFixed(1)}`);
      const down = steps.map((step, i) => `${f.x(step).toFixed(1)} ${f.y(layer.low[i]).toFixed(1)}`).reverse();
      f.svg.append(shape("path", { d: `M${up.concat(down).join("L")}Z`, fill: layer.color }));
    }
    legendEntry(f.legend, layer.name, layer.color, "box");
  }
  hover(f, series, options.format || number);
  return f.figure;
}

/** Rows of cells over steps. `rows`: [{name, values}]; columns are joined where there are many. */
function heatChart(options) {
  const steps = options.steps, most = 220, every = Math.max(1, Math.ceil(steps.length / most));
  const chosen = steps.map((_, i) => i).filter((i) => (steps.length - 1 - i) % every === 0);
  const largest = Math.max(1, ...options.rows.map((row) => row.values.reduce((a, b) => Math.max(a, b || 0), 0)));
  const f = frame({ ...options, x: [steps[0], steps[steps.length - 1] + 1], y: [0.5, options.rows.length + 0.5], whole: true, format: String, yTicks: Math.min(12, options.rows.length) });
  chosen.forEach((i, column) => {
    const from = column ? steps[chosen[column - 1]] + 1 : steps[0], x = f.x(from), width = f.x(steps[i] + 1) - x + 0.4;
    options.rows.forEach((row, k) => {
      const share = (row.values[i] || 0) / largest;
      const cell = shape("rect", { x, width, y: f.y(k + 1.5), height: f.y(k + 0.5) - f.y(k + 1.5) + 0.4 });
      cell.style.fill = share ? `color-mix(in oklab, var(--accent) ${Math.round(8 + 92 * Math.sqrt(share))}%, var(--panel))` : "var(--panel)";
      f.svg.append(cell);
    });
  });
  f.legend.append(el("span", {}, `empty: none; full colour: ${number(largest)} questions (square-root scale)`));
  f.svg.addEventListener("pointermove", (event) => {
    const i = nearest(steps, Math.floor(f.step(event.clientX)));
    tip(event, `step ${steps[i]}`, options.rows.map((row) => [row.name, number(row.values[i])]).reverse());
  });
  f.svg.addEventListener("pointerleave", hideTip);
  if (options.onstep) f.svg.addEventListener("click", (event) => options.onstep(nearest(steps, Math.floor(f.step(event.clientX)))));
  return f.figure;
}

/** Bars by k that `update(values)` changes. */
function barChart(options) {
  const count = options.count;
  const f = frame({ ...options, x: [0.4, count + 0.6], y: [0, 1.08 * Math.max(1, options.largest)], xTicks: count > 16 ? 8 : 2 * count });
  const bars = Array.from({ length: count }, (_, i) => {
    const bar = shape("rect", { x: f.x(i + 0.65), width: f.x(i + 1.35) - f.x(i + 0.65), fill: "var(--orange)", rx: 2 });
    const text = shape("text", { x: f.x(i + 1), "text-anchor": "middle" });
    f.svg.append(bar, text);
    return [bar, text];
  });
  const update = (values) => bars.forEach(([bar, text], i) => {
    const top = f.y(values[i] || 0);
    bar.setAttribute("y", top);
    bar.setAttribute("height", Math.max(0, f.bottom - top));
    text.setAttribute("y", top - 4);
    text.textContent = number(values[i] || 0);
  });
  return { figure: f.figure, legend: f.legend, update };
}
