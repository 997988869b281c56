// The cards beside the stage: what was learnt, whose weights are equal, what was sent, and the simulated machines.

import { MONO, SANS, fitted } from "./colours.js";
import { DEVICE, MODELS, efficiency, memoryOf, stepInputs } from "./machines.js";
import { NUM_SAMPLES } from "./network.js";
import { COMPARED } from "./player.js";
import { SERVER } from "./reduction.js";
import { simulate } from "./simulation.js";
import { signed } from "./stage.js";
import { bitsOf } from "./float32.js";
import { halves } from "./tree.js";

/** An element; text is set as text, never as markup. */
export function make(tag, properties = {}, ...children) {
  const { style, dataset, ...others } = properties;
  const element = Object.assign(document.createElement(tag), others);
  Object.assign(element.style, style ?? {});
  Object.assign(element.dataset, dataset ?? {});
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);
const dot = (colour) => make("i", { className: "dot", style: { background: colour } });

export function bytesInWords(bytes) {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["KB", 1e3]]) if (bytes >= size) return `${(bytes / size).toPrecision(3)} ${unit}`;
  return `${Math.round(bytes)} B`;
}

function secondsInWords(seconds) {
  if (seconds >= 1) return `${seconds.toPrecision(3)} s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toPrecision(3)} ms` : `${(seconds * 1e6).toPrecision(3)} µs`;
}

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

// --- What it has learnt ---

const FIELD = 40;
const field = { first: new Float32Array(32), second: new Float32Array(32), image: null };

export function drawField(player, colours) {
  const { context: c, width, height } = fitted(byId("field"));
  const { training, settings, step } = player;
  const worker = training.workers[0];
  const replica = training.replicas[worker];
  const statistics = settings.norm === "off" ? null : replica;
  field.image ??= make("canvas", { width: FIELD, height: FIELD });
  const small = field.image.getContext("2d");
  const pixels = small.createImageData(FIELD, FIELD);
  const [light, dark] = colours.isDark ? [[24, 27, 33], [88, 96, 110]] : [[250, 250, 248], [190, 196, 205]];
  for (let row = 0; row < FIELD; row++) {
    for (let column = 0; column < FIELD; column++) {
      const x0 = (2.3 * (column + 0.5)) / FIELD - 1.15;
      const x1 = 1.15 - (2.3 * (row + 0.5)) / FIELD;
      const p = 1 / (1 + Math.exp(-training.network.logit(replica.weights, statistics, x0, x1, field.first, field.second)));
      const at = 4 * (row * FIELD + column);
      for (let k = 0; k < 3; k++) pixels.data[at + k] = light[k] + (dark[k] - light[k]) * p;
      pixels.data[at + 3] = 255;
    }
  }
  small.putImageData(pixels, 0, 0);
  c.imageSmoothingQuality = "high";
  c.drawImage(field.image, 0, 0, width, height);
  const owner = new Map();
  for (const { worker: who, samples } of step?.parts ?? []) for (const sample of samples) owner.set(sample, who);
  for (let sample = 0; sample < NUM_SAMPLES; sample += 2) {
    for (const k of [sample, sample + 1]) {
      const who = owner.get(k);
      if (who === undefined && k % 4 > 1) continue;
      const x = ((training.data.x[2 * k] + 1.15) / 2.3) * width;
      const y = ((1.15 - training.data.x[2 * k + 1]) / 2.3) * height;
      c.beginPath();
      c.arc(x, y, who === undefined ? 1.4 : 2.6, 0, 2 * Math.PI);
      c.fillStyle = c.strokeStyle = who === undefined ? (colours.isDark ? "#aab2be" : "#4a505a") : colours.worker[who];
      c.lineWidth = who === undefined ? 0.8 : 1.5;
      if (training.data.y[k]) c.fill();
      else c.stroke();
    }
  }
  byId("field").setAttribute("aria-label", `The plane of the data: what worker ${worker} takes for one spiral or the other, after ${player.steps} steps.`);
}

export function drawLoss(player, colours) {
  const { context: c, width, height } = fitted(byId("loss"));
  const { history, ghost, training } = player;
  const shown = history.slice(0, player.steps);
  const most = Math.max(NUM_SAMPLES, shown.at(-1)?.samples ?? 0, ghost.at(-1)?.samples ?? 0);
  const [left, right, top, bottom] = [26, width - 4, 8, height - 18];
  const x = (samples) => left + ((right - left) * samples) / most;
  const y = (loss) => bottom - (bottom - top) * Math.min(1, loss);
  c.font = `10px ${SANS}`;
  c.textBaseline = "middle";
  for (const loss of [0, 0.5, 1]) {
    c.strokeStyle = colours.line;
    c.lineWidth = 1;
    c.beginPath();
    c.moveTo(left, y(loss));
    c.lineTo(right, y(loss));
    c.stroke();
    c.fillStyle = colours.faint;
    c.textAlign = "right";
    c.fillText(loss.toFixed(1), left - 5, y(loss));
  }
  c.textAlign = "left";
  c.fillText("loss", left + 3, top + 5);
  c.textAlign = "right";
  c.fillText(`${(most / NUM_SAMPLES).toFixed(1)} epochs`, right, bottom + 11);
  for (const [points, colour, thick] of [[ghost, colours.faint, 1], [shown, colours.ink, 1.6]]) {
    c.beginPath();
    let mean = points[0]?.loss ?? 0;
    points.forEach(({ samples, loss }, k) => {
      const share = Math.min(1, (samples - (points[k - 1]?.samples ?? 0)) / 256 + 0.12);
      mean += (loss - mean) * share;
      c[k ? "lineTo" : "moveTo"](x(samples), y(mean));
    });
    c.strokeStyle = colour;
    c.lineWidth = thick;
    c.lineJoin = "round";
    c.stroke();
  }
  const last = shown.at(-1);
  byId("loss").setAttribute("aria-label", last ? `Loss over epochs: ${last.loss.toFixed(4)} after ${player.steps} steps.` : "Loss over epochs: no step yet.");
  const stale = player.step?.stalenesses;
  const rate = `rate ${training.rate.toPrecision(3)}`;
  byId("learning-says").textContent = last
    ? `Loss ${last.loss.toFixed(4)}, ${rate}${stale ? `; gradients ${Math.min(...stale)} to ${Math.max(...stale)} updates old` : ""}. ${ghost.length > 1 ? "Grey: before the last change." : ""}`
    : `No step yet; ${rate}.`;
}

// --- The same weights? ---

export function showHashes(player, colours) {
  const { training, settings } = player;
  const hashes = new Map(training.workers.map((worker) => [worker, training.hash(worker)]));
  player.shownHashes = hashes;
  const [first] = training.workers;
  const items = Array.from({ length: settings.workers }, (_, worker) => {
    const hash = hashes.get(worker);
    const text = make("span", { textContent: hash ? hash.slice(0, 7) : "lost", className: hash && hash !== hashes.get(first) ? "differs" : "" });
    return make("li", { className: hash ? "" : "dead", title: hash ?? "" }, dot(colours.worker[worker]), text);
  });
  byId("hashes").replaceChildren(...items);
  const isEqual = [...hashes.values()].every((hash) => hash === hashes.get(first));
  const chip = byId("same-chip");
  chip.textContent = hashes.size === 1 ? "one worker" : isEqual ? `equal on all ${hashes.size}` : "they differ";
  chip.className = isEqual ? "chip" : "chip bad";
  showError(player, isEqual);
}

function showError(player, isEqual) {
  const { training, settings } = player;
  const error = training.last?.error;
  const says = [];
  if (!isEqual && settings.mode === "sync" && settings.norm === "own") says.push("Weights are equal, running statistics are not: each worker has seen only its own parts.");
  else if (!isEqual && settings.mode === "async") says.push("Each has the weights that the server had when it last asked.");
  else if (!isEqual) says.push(`Each trains by itself until the next mean, after step ${Math.ceil((player.steps + 0.5) / settings.every) * settings.every}.`);
  if (error !== null && error !== undefined && training.workers.length > 1) {
    const wrong = error > 1e-4;
    says.push(`The gradient is ${wrong ? percent(error) : error.toExponential(0)} off that of the whole batch${wrong ? "" : ": rounding"}.`);
  }
  byId("error").textContent = says.join(" ");
  byId("error").classList.toggle("differs", (error ?? 0) > 1e-4);
}

/** The same training on other numbers of workers; `isReady` once all have come as far. */
export function showOthers(player, isReady) {
  const place = byId("alone");
  const { training, settings } = player;
  const mine = training.hash(training.workers[0]);
  if (!isReady) {
    byId("bits").replaceChildren();
    place.replaceChildren(make("p", { textContent: "On other numbers of workers: computed when the run pauses." }));
    return;
  }
  const chips = COMPARED.map((workers) => {
    const other = player.others.get(workers);
    const hash = other.hash(0);
    return make("span", { className: hash === mine ? "match" : "other", textContent: `N=${workers} ${hash.slice(0, 5)}`, title: hash });
  });
  const equal = COMPARED.filter((workers) => player.others.get(workers).hash(0) === mine).length;
  const text = equal === COMPARED.length ? "The same on any number of workers:" : settings.mode === "sync" ? "The same settings on N workers: other sums, other bits." : "The same settings on N workers:";
  place.replaceChildren(make("p", { textContent: text }), ...chips);
  showBits(player);
}

function showBits(player) {
  const { training } = player;
  const alone = player.others.get(1);
  const place = byId("bits");
  const found = training.differenceTo(alone);
  if (!found) {
    place.replaceChildren();
    return;
  }
  const row = (bits, who) => {
    const text = bits.toString(2).padStart(32, "0");
    const line = make("div", {});
    [...text].forEach((digit, k) => {
      const kind = k === 0 ? "sign" : k < 9 ? "exponent" : "mantissa";
      line.append(make(k === found.bit ? "mark" : "i", { className: kind, textContent: digit }), k === 0 || k === 8 ? " " : "");
    });
    line.append(` ${who}`);
    return line;
  };
  const kind = found.bit === 0 ? "the sign" : found.bit < 9 ? "the exponent" : `bit ${found.bit - 8} of 23 of the mantissa`;
  place.replaceChildren(
    make("p", { textContent: `First difference from one worker alone: ${found.name}, ${kind}.` }),
    row(found.left, `${training.workers.length} workers`), row(found.right, "1 alone"),
  );
}

// --- Bytes ---

export function showBytes(player, colours) {
  const { training, settings } = player;
  const step = player.step ?? training.last;
  const alive = training.workers;
  const size = 4 * training.network.size;
  const sentBy = (who) => step?.bytes[who] ?? 0;
  const everyone = [...(SERVER in (step?.bytes ?? {}) ? [SERVER] : []), ...alive];
  const most = Math.max(1, ...everyone.map(sentBy));
  const rows = everyone.flatMap((who) => [
    make("span", { className: "who", textContent: who === SERVER ? "server" : String(who) }),
    make("span", {}, make("i", { className: "bar", style: { display: "block", width: `${(100 * sentBy(who)) / most}%`, background: who === SERVER ? colours.soft : colours.worker[who] } })),
    make("span", { textContent: sentBy(who).toLocaleString("en") }),
  ]);
  const shown = everyone.length > 9 ? rows.slice(0, 24) : rows;
  const bars = make("div", { className: "bars" }, ...shown);
  byId("bytes").replaceChildren(bars);
  const total = Object.values(training.totalBytes).reduce((sum, bytes) => sum + bytes, 0);
  const count = alive.length;
  const way = settings.mode === "async" ? "Each pass sends a gradient and fetches the weights."
    : count === 1 ? "One worker has nobody to send to."
    : { ring: `2(N−1)/N × ${size} B of gradient = ${Math.round((2 * (count - 1) * size) / count)} B for each, in ${2 * (count - 1)} messages.`,
        tree: `As a ring: ${Math.round((2 * (count - 1) * size) / count)} B for each; more for who sends two sums of shards.`,
        naive: `(N−1) × ${size} B of gradient = ${(count - 1) * size} B for each.`,
        server: `${size} B of gradient from each, and the server sends N times that.` }[settings.reduction];
  const hidden = shown.length < rows.length ? ` The other ${(rows.length - shown.length) / 3} as many.` : "";
  byId("bytes-says").textContent = `${settings.wire === "fp32" ? way : `Encoded as ${settings.wire === "top10" ? "the largest tenth" : settings.wire}.`}${hidden} ${bytesInWords(total)} since the start.`;
}

// --- One number of the gradient ---

const coloured = (text, colour, className = "") => make("b", { textContent: text, className, style: { color: colour } });
const plain = (text) => make("span", { className: "op", textContent: text });

/** The sum of one number, in the order in which it comes about. */
export function showSum(player, colours, follow) {
  const { step, training } = player;
  const count = training.workers.length;
  const title = byId("sum-title");
  const place = byId("sum-text");
  if (!step || player.phase.name === "deal" || step.kind === "async" || !step.rounds.length) {
    title.textContent = count === 1 ? "One worker has the whole gradient" : "One number of the gradient";
    place.replaceChildren(plain(step?.kind === "async" ? "Each worker's gradient is used by itself." : !step?.rounds.length && step ? "Nothing is sent in this step." : "comes with the backward pass"));
    return;
  }
  const chunk = Math.min(follow, step.chunks.length - 1);
  const index = step.chunks[chunk][0];
  const { phase } = player;
  const added = phase.name === "compute" ? 0 : phase.name === "update" ? Infinity
    : step.kind === "ring" ? phase.index + (player.progress > 0.95 ? 1 : 0) : phase.name === "sum" || phase.index > 0 ? Infinity : 0;
  const terms = step.contributions.map(({ worker, node, values }) => ({ worker, node, value: values[index] }));
  const [expression, sum] = step.kind === "tree" ? alongTree(terms, colours) : inTurn(step.kind === "ring" ? [...terms.slice(chunk), ...terms.slice(0, chunk)] : terms, colours, added);
  title.textContent = `${training.network.nameOf(index)}, first of chunk ${chunk}${step.kind === "tree" ? ", along the tree" : step.kind === "ring" ? ", around the ring" : ", by rank"}`;
  const exact = player.settings.wire === "fp32" ? sum : step.sums[training.workers[0]][index];
  const isDone = added >= terms.length - 1;
  place.replaceChildren(...expression, plain(" = "), make("b", { className: isDone ? "" : "later", textContent: `${exact.toPrecision(8).replace("-", "−")}  0x${bitsOf(exact).toString(16).padStart(8, "0")}` }));
}

function inTurn(terms, colours, added) {
  const shown = [plain("(".repeat(Math.max(0, terms.length - 2)))];
  let sum = terms[0].value;
  terms.forEach(({ worker, value }, k) => {
    if (k) {
      shown.push(plain(" + "));
      sum = Math.fround(sum + value);
    }
    shown.push(coloured(signed(value), colours.worker[worker], k <= added || added === Infinity ? "" : "later"));
    if (k && k < terms.length - 1) shown.push(plain(")"));
  });
  return [shown, sum];
}

function alongTree(terms, colours) {
  const given = new Map(terms.map((term) => [term.node.join(), term]));
  const visit = (node, isOuter) => {
    const term = given.get(node.join());
    if (term) return [[coloured(signed(term.value), colours.worker[term.worker])], term.value];
    const [left, right] = halves(node).map((half) => visit(half, false));
    const sum = Math.fround(left[1] + right[1]);
    return [[plain(isOuter ? "" : "("), ...left[0], plain(" + "), ...right[0], plain(isOuter ? "" : ")")], sum];
  };
  return visit([0, terms.at(-1).node[1]], true);
}

// --- Real machines ---

export function drawTimeline(settings, colours) {
  const { context: c, width, height } = fitted(byId("timeline"));
  const inputs = stepInputs(settings);
  const times = simulate(inputs);
  const model = MODELS[settings.model];
  const [left, right, top] = [72, width - 2, 4];
  const row = Math.min(34, (height - 26) / 2 - 8);
  const begin = settings.accumulation > 1 ? Math.max(0, (times.spans.find((span) => span.name === "passes")?.end ?? 0) * 0.96) : 0;
  const x = (seconds) => left + ((right - left) * Math.max(0, seconds - begin)) / (times.step_s - begin || 1);
  const tones = tonesOf(colours);
  const rows = { compute: top, network: top + row + 10 };
  c.textBaseline = "middle";
  c.font = `12px ${SANS}`;
  for (const [lane, name] of [["compute", "computing"], ["network", "network"]]) {
    c.fillStyle = colours.soft;
    c.textAlign = "left";
    c.fillText(name, 0, rows[lane] + row / 2);
    c.fillStyle = colours.fill;
    c.beginPath();
    c.roundRect(left, rows[lane], right - left, row, 5);
    c.fill();
  }
  const computed = Math.max(0, ...times.spans.filter(({ lane, name }) => lane === "compute" && name !== "update").map(({ end }) => end));
  const bar = (lane, from, to, colour) => {
    const gap = x(to) - x(from) > 3 ? 1 : 0;
    c.fillStyle = colour;
    if (x(to) - x(from) >= 0.05) c.fillRect(x(from), rows[lane], Math.max(0.5, x(to) - x(from) - gap), row);
  };
  const busy = times.spans.filter(({ lane, name }) => lane === "compute" && name !== "update");
  for (const { lane, name, index, begin: from, end } of times.spans) {
    const shade = index & 1;
    if (lane === "compute") bar(lane, from, end, tones[name][shade]);
    else {
      // What no computing hides is exposed.
      bar(lane, from, end, tones.exposed[shade]);
      for (const other of busy) if (other.begin < end && from < other.end) bar(lane, Math.max(from, other.begin), Math.min(end, other.end), tones.network[shade]);
    }
    if (x(end) - x(from) > 18 && index >= 0) {
      c.fillStyle = colours.isDark ? "#101216" : "#ffffff";
      c.font = `10px ${MONO}`;
      c.textAlign = "center";
      c.fillText(String(index), (x(from) + x(end)) / 2, rows[lane] + row / 2);
    }
  }
  if (times.exposed_s > 0 && x(computed) < right - 1) {
    c.strokeStyle = colours.bad;
    c.setLineDash([3, 3]);
    c.beginPath();
    c.moveTo(x(computed), top - 2);
    c.lineTo(x(computed), rows.network + row + 4);
    c.stroke();
    c.setLineDash([]);
  }
  c.fillStyle = colours.faint;
  c.font = `10.5px ${SANS}`;
  for (let tick = 0; tick <= 4; tick++) {
    const seconds = begin + ((times.step_s - begin) * tick) / 4;
    c.textAlign = tick === 0 ? "left" : tick === 4 ? "right" : "center";
    c.fillText(seconds ? secondsInWords(seconds) : "0", x(seconds), rows.network + row + 16);
  }
  const hidden = times.network_s > 0 ? Math.max(0, 1 - times.exposed_s / times.network_s) : 1;
  const other = { sync: "", async: " Drawn for a synchronous step.", local: ` Drawn for a step in which all meet: one of ${settings.every}.` }[settings.mode];
  byId("timeline-what").textContent = `${model.name} on ${settings.workers} × ${DEVICE.name}, simulated`;
  byId("timeline-says").textContent = settings.workers === 1 ? `${secondsInWords(times.step_s)}; one worker has nobody to send to.`
    : `${secondsInWords(times.step_s)} a step: computing ${secondsInWords(times.compute_s)}, waiting for the slowest ${secondsInWords(times.wait_s)}, ` +
      `exposed communication ${secondsInWords(times.exposed_s)}, update ${secondsInWords(times.optimizer_s)}. ` +
      `${inputs.bucket_bytes.length} buckets, ${percent(hidden)} of ${secondsInWords(times.network_s)} on the network hidden; a worker sends ${bytesInWords(times.sent_bytes)}.${other}`;
  byId("timeline").setAttribute("aria-label", `Timeline of a simulated step. ${byId("timeline-says").textContent}`);
  const names = [["forward", tones.forward[0]], ["backward, a bucket each", tones.backward[0]], ["sent meanwhile", tones.network[0]], ["exposed", tones.exposed[0]], ["update", tones.update[0]]];
  byId("timeline-legend").replaceChildren(...names.map(([name, colour]) => make("span", {}, dot(colour), name)));
  return times;
}

function tonesOf(colours) {
  return colours.isDark
    ? { passes: ["#3a404a", "#3a404a"], forward: ["#6d7684", "#5f6875"], backward: ["#a9b2bf", "#949eac"], update: ["#d8dde4", "#d8dde4"], network: ["#5b8def", "#4a7be0"], exposed: ["#ff8573", "#ec7160"] }
    : { passes: ["#d4d7dc", "#d4d7dc"], forward: ["#9ba2ad", "#8c94a0"], backward: ["#5c6470", "#4c545f"], update: ["#1a1d23", "#1a1d23"], network: ["#4d7fe0", "#3a6bcb"], exposed: ["#d9553f", "#c2452f"] };
}

export function showMemory(settings, colours) {
  const kinds = [["parameters", colours.worker[0]], ["gradients", colours.worker[2]], ["optimizer", colours.worker[4]], ["activations", colours.faint]];
  const all = [0, 1, 2, 3].map((zero) => memoryOf(settings, zero));
  const totals = all.map((memory) => Object.values(memory).reduce((sum, bytes) => sum + bytes, 0));
  const most = Math.max(DEVICE.memory * 1.05, ...totals);
  const rows = all.map((memory, zero) => {
    const parts = kinds.map(([kind, colour]) => make("i", { title: `${kind}: ${bytesInWords(memory[kind])}`, style: { width: `${(100 * memory[kind]) / most}%`, background: colour } }));
    const stack = make("div", { className: "stack" }, ...parts, make("b", { className: "limit", style: { left: `${(100 * DEVICE.memory) / most}%` } }));
    const total = make("span", { className: totals[zero] > DEVICE.memory ? "total over" : "total", textContent: `${Math.round(totals[zero] / 1e9)} GB` });
    return make("div", { className: Number(settings.zero) === zero ? "row on" : "row" }, make("span", { className: "name", textContent: `zero=${zero}` }), stack, total);
  });
  byId("memory").className = "stacks";
  byId("memory").replaceChildren(...rows);
  byId("memory-legend").replaceChildren(...kinds.map(([kind, colour]) => make("span", {}, dot(colour), kind)));
  const model = MODELS[settings.model];
  byId("memory-what").textContent = `${model.name}, Adam, ${settings.workers} ${settings.workers === 1 ? "worker" : "workers"}`;
  const total = totals[Number(settings.zero)];
  const fits = totals.findIndex((bytes) => bytes <= DEVICE.memory);
  byId("memory-says").textContent = total <= DEVICE.memory ? `Fits with zero=${settings.zero}: ${bytesInWords(total)} of ${bytesInWords(DEVICE.memory)}.`
    : fits < 0 ? `Does not fit: ${bytesInWords(total)}, and a device has ${bytesInWords(DEVICE.memory)} (the line). More workers, or a smaller part.`
    : `Does not fit with zero=${settings.zero}: ${bytesInWords(total)}, and a device has ${bytesInWords(DEVICE.memory)} (the line). zero=${fits} would.`;
}

const MOST_WORKERS = 1024;

export function drawEfficiency(settings, published, colours) {
  const { context: c, width, height } = fitted(byId("efficiency"));
  const [left, right, top, bottom] = [34, width - 10, 10, height - 22];
  const x = (workers) => left + ((right - left) * Math.log2(workers)) / Math.log2(MOST_WORKERS);
  const y = (share) => bottom - (bottom - top) * share;
  c.font = `10.5px ${SANS}`;
  c.textBaseline = "middle";
  c.lineWidth = 1;
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    c.strokeStyle = colours.line;
    c.beginPath();
    c.moveTo(left, y(share));
    c.lineTo(right, y(share));
    c.stroke();
    c.fillStyle = colours.faint;
    c.textAlign = "right";
    c.fillText(`${100 * share} %`, left - 5, y(share));
  }
  c.textAlign = "center";
  for (let workers = 1; workers <= MOST_WORKERS; workers *= 4) {
    c.textAlign = workers === MOST_WORKERS ? "right" : "center";
    c.fillText(workers.toLocaleString("en"), x(workers) + (workers === MOST_WORKERS ? 8 : 0), bottom + 12);
  }
  for (const { workers, efficiency: share, label } of published) {
    c.beginPath();
    c.arc(x(workers), y(share), 3, 0, 2 * Math.PI);
    c.strokeStyle = colours.soft;
    c.lineWidth = 1.5;
    c.fillStyle = colours.card;
    c.fill();
    c.stroke();
    if (!label || width < 340) continue;
    c.fillStyle = colours.faint;
    c.textAlign = "center";
    c.fillText(label, x(workers), y(share) - 11);
  }
  c.beginPath();
  const points = 40;
  for (let k = 0; k <= points; k++) {
    const workers = Math.round(2 ** ((Math.log2(MOST_WORKERS) * k) / points));
    c[k ? "lineTo" : "moveTo"](x(workers), y(efficiency(settings, workers)));
  }
  c.strokeStyle = colours.ink;
  c.lineWidth = 2;
  c.stroke();
  const here = efficiency(settings, settings.workers);
  c.beginPath();
  c.arc(x(settings.workers), y(here), 5, 0, 2 * Math.PI);
  c.fillStyle = colours.worker[0];
  c.fill();
  byId("efficiency-says").textContent = `${percent(here)} on ${settings.workers}, ${percent(efficiency(settings, 64))} on 64, ${percent(efficiency(settings, MOST_WORKERS))} on ${MOST_WORKERS.toLocaleString("en")} workers. Circles: published by others, for other models and machines.`;
  byId("efficiency").setAttribute("aria-label", `Efficiency by number of workers. ${byId("efficiency-says").textContent}`);
}
