"use strict";
// Draws the charts (with uPlot) and the timeline from the numbers in #data. Text from the run only ever becomes
// textContent, never markup. A live page asks its server for a newer one now and then, and takes over what it says.
let data;

// Charts. All are over the same steps, so they are zoomed together: `zoom` is the first and the last step shown, or null.

let zoom = null, drawn = [];

const setZoom = steps => {
  zoom = steps;
  const bar = document.querySelector(".zoomed");
  bar.hidden = zoom === null;
  if (zoom) {
    const [from, to] = zoom.map(step => Math.round(step).toLocaleString("en"));
    bar.querySelector("output").textContent = "steps " + from + " to " + to;
  }
  for (const chart of drawn) chart.setScale("x", {});
};

// What a zoomed chart has to show, with some room; a logarithmic one stays as it is.
const zoomedRange = chart => {
  const low = [], high = [];
  chart.x.forEach((step, place) => {
    if (step < zoom[0] || step > zoom[1]) return;
    low.push((chart.low ?? chart.mean)[place]);
    high.push((chart.high ?? chart.mean)[place]);
  });
  if (chart.log || !low.length) return chart.range;
  const least = Math.min(...low), most = Math.max(...high), room = (most - least || Math.abs(most) || 1) / 20;
  return [least - room, most + room];
};

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
    cursor: {y: false, drag: {x: true, y: false, setScale: false, dist: 8}, bind: {dblclick: () => () => setZoom(null)}},
    scales: {
      x: {time: false, range: () => zoom ?? chart.steps},
      y: {distr: chart.log ? 3 : 1, range: () => zoom ? zoomedRange(chart) : chart.range},
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
          const top = u.valToPos(value, "y");
          element.hidden = zoom !== null && (element.className === "end" || top < 0 || top > u.over.clientHeight);
          element.style.top = Math.min(u.over.clientHeight, Math.max(0, top)) + "px";
        }
      }],
      setSelect: [u => {
        if (u.select.width < 8) return;
        const steps = [u.select.left, u.select.left + u.select.width].map(place => u.posToVal(place, "x"));
        u.setSelect({left: 0, width: 0}, false);
        setZoom(steps);
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

const drawCharts = () => {
  for (const chart of drawn) chart.destroy();
  drawn = [...document.querySelectorAll(".plot")].map(drawChart);
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
addEventListener("resize", () => {
  for (const chart of drawn) chart.setSize({width: chart.root.parentElement.clientWidth, height: chart.height});
});

// The timeline of a step: a track per worker, its buckets beneath, and the reductions that all of them wait for. Places are in
// per cent of the width and heights in pixels, so that text keeps its size.

const TOP = 24, NAME = 17, BAR = 22, LANE = 9, GAP = 12, REDUCTION = 18;
let figure, svg, wide = 1; // How many times as wide as there is room for.

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
    const text = width * wide >= 14 ? kind + " " + took : width * wide >= 9 ? kind : "";
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
    if ((end - x) * wide > 9) put("text", {class: "in-hidden", x: x + "%", dx: 6, y: y + 12}, "bucket " + place);
    else if (end > 91) put("text", {class: "tick", x: x + "%", dx: -5, y: y + 12, "text-anchor": "end"}, place);
    else if (free > 3) put("text", {class: "tick", x: end + "%", dx: 4, y: y + 12}, free > 9 ? "bucket " + place : place);
    room[row] = x;
  }
};

const drawStep = step => {
  svg.style.width = "calc(" + wide + " * max(100%, 660px))";
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

  const every = roundStep(step.ms / 6 / wide);
  for (let tick = 0; tick * every <= step.ms; tick++) {
    const x = 100 * tick * every / step.ms;
    put("line", {class: "grid", x1: x + "%", x2: x + "%", y1: 16, y2: height});
    const anchor = x < 3 ? "start" : x > 96 ? "end" : "middle";
    put("text", {class: "tick", x: x + "%", y: 11, "text-anchor": anchor}, +(tick * every).toPrecision(6) + " ms");
  }
  for (const worker of step.workers) drawTrack(worker, tops[worker.rank]);
  if (step.reductions.length) drawReductions(step, tops, below);
};

const drawTimeline = () => {
  figure = document.querySelector(".step");
  if (!figure) return;
  svg = figure.querySelector("svg");
  const pick = document.getElementById("pick"), scroll = figure.querySelector(".scroll");
  const [narrower, wider] = document.querySelectorAll(".pick button");
  const keepNames = () => svg.querySelectorAll(".name").forEach(name => name.setAttribute("x", scroll.scrollLeft));
  scroll.addEventListener("scroll", keepNames);
  const show = () => {
    const middle = (scroll.scrollLeft + scroll.clientWidth / 2) / scroll.scrollWidth;
    drawStep(data.timelines[pick.selectedIndex]);
    scroll.scrollLeft = middle * scroll.scrollWidth - scroll.clientWidth / 2;
    keepNames();
    narrower.disabled = wide === 1;
    wider.disabled = wide === 32;
  };
  pick.addEventListener("change", show);
  narrower.addEventListener("click", () => { wide /= 2; show(); });
  wider.addEventListener("click", () => { wide *= 2; show(); });
  show();
};

const draw = () => {
  data = JSON.parse(document.getElementById("data").textContent);
  drawCharts();
  drawTimeline();
};
draw();
document.querySelector(".zoomed button").addEventListener("click", () => setZoom(null));

// A live page. What the reader has chosen stays: the step, the zoom, which tables are open.

const takeOver = text => {
  const newer = new DOMParser().parseFromString(text, "text/html");
  const pick = document.getElementById("pick");
  const picked = pick && pick.selectedIndex > 0 ? pick.value : null, hadFocus = pick && document.activeElement === pick;
  const name = details => (details.closest("section")?.querySelector("h2")?.textContent ?? "") + "/"
    + (details.closest("figure")?.querySelector("h3")?.textContent ?? "") + "/" + details.querySelector("summary").textContent;
  const opened = new Map([...document.querySelectorAll("details")].map(each => [name(each), each.open]));
  for (const part of ["header", "main", "footer", "#data"]) {
    document.querySelector(part).replaceWith(document.adoptNode(newer.querySelector(part)));
  }
  for (const each of document.querySelectorAll("details")) each.open = opened.get(name(each)) ?? each.open;
  const now = document.getElementById("pick");
  if (now && picked !== null && [...now.options].some(option => option.value === picked)) now.value = picked;
  if (now && hadFocus) now.focus();
  document.title = newer.title;
  document.body.dataset.version = newer.body.dataset.version;
  for (const chart of drawn.splice(0)) chart.destroy();
  draw();
};

const follow = async () => {
  let said = "live";
  try {
    if (!document.hidden) {
      const answer = await fetch("?since=" + document.body.dataset.version, {cache: "no-store"});
      if (answer.status === 200) takeOver(await answer.text());
    }
  } catch {
    said = "no longer live: lockstep report has ended, and this is the last that it said";
  }
  document.querySelector(".live").textContent = said;
  setTimeout(follow, 1000);
};
if (document.body.dataset.version) follow();
