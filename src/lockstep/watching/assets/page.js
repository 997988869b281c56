"use strict";
// Draws the charts (with uPlot) and the timeline from the numbers in #data. Text from the run only ever becomes
// textContent, never markup.
const data = JSON.parse(document.getElementById("data").textContent);

// Charts

const css = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

const tell = value => {
  const size = Math.abs(value);
  if (size >= 1e7) return value.toExponential(1);
  if (size >= 100) return Math.round(value).toLocaleString("en");
  return size === 0 || size >= 1e-4 ? String(+value.toPrecision(3)) : value.toExponential(1);
};

const inside = (parent, tag, className, text) => {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  parent.append(made);
  return made;
};

const drawChart = plot => {
  const chart = data.charts[plot.dataset.chart];
  const at = plot.closest("figure").querySelector(".at");
  const say = value => chart.percent ? tell(100 * value) + " %" : tell(value);
  const unseen = {stroke: "transparent", width: 0, points: {show: false}};
  const font = "12px system-ui, sans-serif";
  const overlays = [];

  const options = {
    width: plot.clientWidth,
    height: 176,
    padding: [8, 52, 0, 0],
    legend: {show: false},
    cursor: {y: false, drag: {x: false, y: false}},
    scales: {
      x: {time: false, range: chart.steps},
      y: {distr: chart.log ? 3 : 1, range: chart.range},
    },
    series: [{}],
    bands: [],
    axes: [
      {stroke: css("soft"), font, size: 28, gap: 7, space: 70, grid: {show: false}, ticks: {show: false},
        values: (_, steps) => steps.map((step, place) =>
          step % 1 ? null : (place ? "" : "step ") + step.toLocaleString("en"))},
      {stroke: css("soft"), font, size: 58, gap: 4, space: 36, grid: {stroke: css("faint"), width: 1}, ticks: {show: false},
        values: (_, values) => values.map(value => value === null ? null : say(value))},
    ],
    hooks: {
      ready: [u => {
        overlays.push([inside(u.over, "b", "end", chart.end), chart.mean.at(-1)]);
        if (chart.reference) {
          const [value, name] = chart.reference;
          const line = inside(u.over, "div", "ref", "");
          // On the side where the curve is not, if there is room for it.
          const isUnder = chart.mean.at(-1) > value || u.valToPos(value, "y") < 20;
          inside(line, "span", isUnder ? "under" : "over", name);
          overlays.push([line, value]);
        }
      }],
      draw: [u => {
        for (const [element, value] of overlays) {
          element.style.top = Math.min(u.over.clientHeight, Math.max(0, u.valToPos(value, "y"))) + "px";
        }
      }],
      setCursor: [u => {
        const place = u.cursor.idx;
        at.textContent = place === null || place === undefined
          ? "" : "step " + Math.round(chart.x[place]).toLocaleString("en") + ": " + say(chart.mean[place]);
      }],
    },
  };
  const columns = [chart.x];
  if (chart.high) { // The band is drawn first, the line over it.
    columns.push(chart.high, chart.low);
    options.series.push(unseen, unseen);
    options.bands.push({series: [1, 2], fill: css("band")});
  }
  columns.push(chart.mean);
  options.series.push({stroke: css("line"), width: 1.6, points: {show: chart.x.length <= 20, size: 6, fill: css("line")}});
  const u = new uPlot(options, columns, plot);
  // The hook `ready` runs after the first drawing.
  u.redraw();
  return u;
};

let drawn = [];
const drawCharts = () => {
  for (const chart of drawn) chart.destroy();
  drawn = [...document.querySelectorAll(".plot")].map(drawChart);
};
drawCharts();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
addEventListener("resize", () => {
  for (const chart of drawn) chart.setSize({width: chart.root.parentElement.clientWidth, height: chart.height});
});

// The timeline of a step: a track per worker, its buckets beneath, and the reductions that all of them wait for. Places are in
// per cent of the width and heights in pixels, so that text keeps its size.

const TOP = 24, NAME = 17, BAR = 22, LANE = 9, GAP = 12, REDUCTION = 18;
const figure = document.querySelector(".step");
const svg = figure && figure.querySelector("svg");

const put = (tag, attributes, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  svg.append(made);
  return made;
};

// 1, 2 or 5 times a power of ten, not below `least`.
const roundStep = least => {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find(factor => power * factor >= least * (1 - 1e-9));
};

const bar = (kind, x, width, y, height, title, rx = 0) => {
  const rect = put("rect", {class: kind, x: x + "%", y, width: Math.max(width, 0.1) + "%", height, rx});
  rect.append(document.createElementNS("http://www.w3.org/2000/svg", "title"));
  rect.firstChild.textContent = title;
};

const drawTrack = (worker, top) => {
  put("text", {class: "name", x: 0, y: top + 12}, worker.name);
  for (const [kind, x, width, took, title] of worker.spans) {
    bar("k-" + kind, x, width, top + NAME, BAR, title);
    const text = width >= 14 ? kind + " " + took : width >= 9 ? kind : "";
    if (text) put("text", {class: "in-" + kind, x: x + "%", dx: 6, y: top + NAME + 15}, text);
  }
  const below = top + NAME + BAR + 3;
  for (const [row, ready, launched, reduced, title] of worker.flights) {
    const y = below + row * LANE;
    if (launched - ready > 0.05) bar("held", ready, launched - ready, y + 2, 3, title);
    bar("k-hidden", launched, reduced - launched, y, 7, title, 2);
  }
};

const drawReductions = (step, tops, top) => {
  put("text", {class: "name", x: 0, y: top + 12}, "reductions of all workers");
  const room = {}; // Where the next reduction of a row begins.
  for (const [row, place, x, end, rank, title] of [...step.reductions].reverse()) {
    const y = top + NAME + 4 + row * REDUCTION;
    if (rank in tops) {
      put("line", {class: "arrow", x1: x + "%", x2: x + "%", y1: tops[rank] + NAME + BAR, y2: y, "marker-end": "url(#head)"});
    }
    bar("k-hidden", x, end - x, y, 15, title, 2);
    const free = (room[row] ?? 100) - end;
    if (end - x > 9) put("text", {class: "in-hidden", x: x + "%", dx: 6, y: y + 12}, "bucket " + place);
    else if (end > 91) put("text", {class: "tick", x: x + "%", dx: -5, y: y + 12, "text-anchor": "end"}, place);
    else if (free > 3) put("text", {class: "tick", x: end + "%", dx: 4, y: y + 12}, free > 9 ? "bucket " + place : place);
    room[row] = x;
  }
};

const drawStep = step => {
  figure.dataset.step = step.step;
  figure.querySelector(".note").textContent = step.note;
  figure.querySelector(".scroll").setAttribute("aria-label", "Timeline of step " + step.step + ", scrolls sideways");
  svg.setAttribute("aria-label", step.label);
  svg.replaceChildren();
  const head = put("marker", {id: "head", markerUnits: "userSpaceOnUse", markerWidth: 8, markerHeight: 8, refX: 7, refY: 4,
    orient: "auto"});
  head.append(put("path", {d: "M0 0L8 4L0 8Z"}));

  const tops = {};
  let height = TOP;
  for (const worker of step.workers) {
    tops[worker.rank] = height;
    height += NAME + BAR + 3 + LANE * worker.num_lanes + GAP;
  }
  const below = height;
  if (step.reductions.length) height += NAME + 4 + REDUCTION * step.num_lanes;
  svg.setAttribute("height", height);

  const every = roundStep(step.ms / 6);
  for (let tick = 0; tick * every <= step.ms; tick++) {
    const x = 100 * tick * every / step.ms;
    put("line", {class: "grid", x1: x + "%", x2: x + "%", y1: 16, y2: height});
    const anchor = x < 3 ? "start" : x > 96 ? "end" : "middle";
    put("text", {class: "tick", x: x + "%", y: 11, "text-anchor": anchor}, +(tick * every).toPrecision(6) + " ms");
  }
  for (const worker of step.workers) drawTrack(worker, tops[worker.rank]);
  if (step.reductions.length) drawReductions(step, tops, below);
};

if (figure) {
  const pick = document.getElementById("pick");
  const show = () => drawStep(data.timelines[pick.selectedIndex]);
  pick.addEventListener("change", show);
  show();
}
