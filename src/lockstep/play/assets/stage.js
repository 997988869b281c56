// The stage: workers in a circle, the batch above them, and what travels between them.

import { MONO, SANS, fitted } from "./colours.js";
import { costsOf } from "./player.js";
import { SERVER } from "./reduction.js";
import { SHARDS } from "./training.js";
import { halves, runOf } from "./tree.js";

const STRIP_TOP = 6;
const STRIP_HEIGHT = 14;
const MOST_PILLS = 8;

export const signed = (value, digits = 5) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;
const ease = (t) => (t < 0.5 ? 4 * t * t * t : 1 - (2 - 2 * t) ** 3 / 2);
const mix = (a, b, t) => a + (b - a) * t;

export class Stage {
  constructor(canvas) {
    this.canvas = canvas;
    this.spots = new Map();
  }

  /** Draw what the player shows; returns whether something still moves by itself. */
  draw(player, colours, follow, seconds, isStill) {
    const { context, width, height } = fitted(this.canvas);
    Object.assign(this, { c: context, width, height, colours, player, follow });
    this.workers = player.training.workers;
    const isMoving = this.#place(seconds, isStill);
    this.phase = player.phase?.name ?? "rest";
    this.t = isStill && this.phase !== "compute" ? (player.progress > 0.02 ? 1 : 0) : player.progress;
    this.#path();
    this.#centre();
    for (let worker = 0; worker < player.settings.workers; worker++) this.#worker(worker);
    if (this.hasServer) this.#server();
    this.#strip();
    if (this.phase === "round") this.#messages(player.step.rounds[player.phase.index].messages);
    return isMoving;
  }

  /** The worker at a point of the canvas, or null. */
  workerAt(x, y) {
    for (const [worker, spot] of this.spots) if (worker >= 0 && Math.hypot(spot.x - x, spot.y - y) < this.radius + 6) return worker;
    return null;
  }

  get hasServer() {
    const { mode, reduction, workers } = this.player.settings;
    return workers > 1 && (mode === "async" || reduction === "server");
  }

  get hasTree() {
    const { mode, reduction } = this.player.settings;
    return mode === "sync" && reduction === "tree";
  }

  // --- Where everything is ---

  #place(seconds, isStill) {
    const count = this.player.settings.workers;
    const top = STRIP_TOP + STRIP_HEIGHT + 26;
    this.cx = this.width / 2;
    this.cy = (top + this.height - 8) / 2;
    const room = this.height - top;
    const most = Math.min(room * (count > 5 ? 0.115 : 0.14), this.width * 0.12, 46);
    // Nodes take at most two thirds of the way around.
    const around = Math.PI * (this.width * 0.34 + room * 0.32);
    this.radius = Math.max(13, Math.min(most, (0.33 * around) / count));
    this.rx = Math.min(this.width / 2 - this.radius - 24, room * 0.95);
    this.ry = (room - 8) / 2 - this.radius - 14;
    if (count === 1) this.rx = this.ry = 0;
    this.start = count === 2 ? Math.PI : -Math.PI / 2;
    const share = isStill ? 1 : 1 - Math.exp(-seconds * 9);
    let isMoving = false;
    for (const worker of [...this.spots.keys()]) if (worker >= count) this.spots.delete(worker);
    for (let worker = 0; worker < count; worker++) {
      const goal = { ...this.#onPath(this.#angle(worker)), alive: this.workers.includes(worker) ? 1 : 0, radius: this.radius };
      const spot = this.spots.get(worker) ?? { ...goal, x: this.cx, y: this.cy, radius: 0 };
      for (const key of Object.keys(goal)) {
        if (Math.abs(goal[key] - spot[key]) > 0.01) isMoving = true;
        spot[key] = mix(spot[key], goal[key], share);
      }
      this.spots.set(worker, spot);
    }
    this.spots.set(SERVER, { x: this.cx, y: this.cy, alive: 1, radius: this.radius });
    return isMoving;
  }

  #angle(worker) {
    return this.start + (2 * Math.PI * worker) / this.player.settings.workers;
  }

  #onPath(angle) {
    return { x: this.cx + this.rx * Math.cos(angle), y: this.cy + this.ry * Math.sin(angle) };
  }

  // --- What is drawn ---

  #path() {
    if (this.player.settings.workers < 2 || this.player.settings.mode === "async") return;
    const { c, colours } = this;
    c.strokeStyle = colours.line;
    c.lineWidth = 1.5;
    c.beginPath();
    if (this.player.settings.reduction === "ring") {
      c.ellipse(this.cx, this.cy, this.rx, this.ry, 0, 0, 2 * Math.PI);
    } else if (this.player.settings.reduction === "server") {
      for (const worker of this.workers) this.#line(this.spots.get(worker), this.spots.get(SERVER));
    } else if (this.phase === "round" && this.workers.length <= 8) {
      for (const a of this.workers) for (const b of this.workers) if (a < b) this.#line(this.spots.get(a), this.spots.get(b));
      c.globalAlpha = 0.6;
    }
    c.stroke();
    c.globalAlpha = 1;
  }

  #line(a, b) {
    this.c.moveTo(a.x, a.y);
    this.c.lineTo(b.x, b.y);
  }

  #text(text, x, y, size, colour, { weight = 400, align = "center", font = SANS } = {}) {
    const { c } = this;
    c.font = `${weight} ${size}px ${font}`;
    c.fillStyle = colour;
    c.textAlign = align;
    c.textBaseline = "middle";
    c.fillText(text, x, y);
  }

  #box(x, y, width, height, radius) {
    this.c.beginPath();
    this.c.roundRect(x, y, width, height, radius);
  }

  /** The global batch, each sample in the colour of who takes it. */
  #strip() {
    const { c, colours, player } = this;
    const count = player.step ? player.step.samples.length : player.settings.batch;
    const left = 2;
    const cell = (this.width - 2 * left) / count;
    const parts = player.step?.parts ?? [];
    const isTree = this.hasTree;
    const leaving = (k) => (0.55 * k) / Math.max(1, parts.length);
    c.fillStyle = colours.fill;
    this.#box(left, STRIP_TOP, this.width - 2 * left, STRIP_HEIGHT, 4);
    c.fill();
    parts.forEach((part, k) => {
      const since = this.phase === "deal" ? (this.t - leaving(k)) / 0.45 : 1;
      if (since <= 0 || part.begin === part.end) return;
      c.fillStyle = colours.worker[part.worker];
      const [from, to] = [left + part.begin * cell, left + part.end * cell];
      const gap = cell > 3.2 ? 1 : 0;
      c.globalAlpha = 0.9;
      if (gap) for (let s = part.begin; s < part.end; s++) c.fillRect(left + s * cell + 0.5, STRIP_TOP, cell - gap, STRIP_HEIGHT);
      else c.fillRect(from, STRIP_TOP, to - from - 0.5, STRIP_HEIGHT);
      c.globalAlpha = 1;
      if (this.phase === "deal" && since < 1) this.#chip(part, (from + to) / 2, since);
    });
    if (isTree) {
      c.fillStyle = colours.card;
      for (let shard = 1; shard < SHARDS; shard++) c.fillRect(left + runOf(count, SHARDS, shard)[0] * cell - 1, STRIP_TOP - 1, 2, STRIP_HEIGHT + 2);
    }
    const epoch = player.training.epoch;
    const what = isTree ? `global batch of ${count}, in ${SHARDS} shards` : `global batch of ${count}`;
    this.#text(what, left, STRIP_TOP + STRIP_HEIGHT + 12, 11.5, colours.soft, { align: "left" });
    this.#text(`epoch ${epoch.toFixed(1)}`, this.width - left, STRIP_TOP + STRIP_HEIGHT + 12, 11.5, colours.soft, { align: "right" });
  }

  /** A part of the batch on its way to its worker. */
  #chip(part, from, since) {
    const { c, colours } = this;
    const to = this.spots.get(part.worker);
    const t = ease(since);
    const size = 9;
    c.fillStyle = colours.worker[part.worker];
    c.globalAlpha = 1 - Math.max(0, since - 0.85) / 0.15;
    this.#box(mix(from, to.x, t) - size / 2, mix(STRIP_TOP + STRIP_HEIGHT / 2, to.y, t) - size / 2, size, size, 3);
    c.fill();
    c.globalAlpha = 1;
  }

  /** How far a worker is with its passes, from 0 to 1. */
  #passed(worker) {
    const { player } = this;
    if (this.phase === "rest" || this.phase === "deal") return 0;
    if (this.phase !== "compute") return 1;
    const costs = costsOf(player.step, player.settings, this.workers);
    return Math.min(1, (this.t * Math.max(...Object.values(costs))) / Math.max(costs[worker], 1e-9));
  }

  #worker(worker) {
    const { c, colours, player } = this;
    const { x, y, alive, radius } = this.spots.get(worker);
    const hue = colours.worker[worker];
    const isAlive = this.workers.includes(worker);
    const passed = isAlive ? this.#passed(worker) : 0;
    c.globalAlpha = mix(0.3, 1, alive);
    const pulse = this.phase === "update" && isAlive ? Math.sin(Math.PI * this.t) : 0;
    if (pulse > 0) {
      c.beginPath();
      c.arc(x, y, radius + 3 + 7 * this.t, 0, 2 * Math.PI);
      c.strokeStyle = hue;
      c.globalAlpha = pulse * 0.5;
      c.lineWidth = 2;
      c.stroke();
      c.globalAlpha = 1;
    }
    c.beginPath();
    c.arc(x, y, Math.max(0, radius), 0, 2 * Math.PI);
    c.fillStyle = colours.card;
    c.fill();
    c.lineWidth = 3;
    c.strokeStyle = hue;
    c.globalAlpha *= 0.22;
    c.stroke();
    c.globalAlpha = mix(0.3, 1, alive);
    if (passed > 0) {
      // A third of the passes is forward, the rest backward.
      const begin = -Math.PI / 2;
      const forward = Math.min(passed, 1 / 3);
      c.lineCap = "round";
      c.beginPath();
      c.arc(x, y, radius, begin, begin + 2 * Math.PI * forward);
      c.globalAlpha = 0.55;
      c.stroke();
      c.globalAlpha = 1;
      if (passed > 1 / 3) {
        c.beginPath();
        c.arc(x, y, radius, begin + (2 * Math.PI) / 3, begin + 2 * Math.PI * passed);
        c.stroke();
      }
      c.lineCap = "butt";
    }
    if (isAlive) {
      this.#fingerprint(worker, x, y, radius, passed);
      this.#matrix(worker, x, y, radius, Math.max(0, (passed - 1 / 3) * 1.5));
    }
    if (!isAlive) this.#text("lost", x, y, 12, colours.soft);
    this.#name(worker, x, y, radius, passed);
    c.globalAlpha = 1;
  }

  #name(worker, x, y, radius, passed) {
    const { colours, player } = this;
    const away = radius + 11;
    const alone = player.settings.workers === 1;
    const angle = alone ? -Math.PI / 2 : this.#angle(worker);
    const [nx, ny] = [x + away * Math.cos(angle), y + away * Math.sin(angle)];
    this.#text(String(worker), nx, ny, 12, colours.worker[worker], { weight: 700 });
    const waits = this.phase === "compute" && passed >= 1 && this.t < 0.97 && this.workers.length > 1;
    if (waits && this.workers.some((other) => this.#passed(other) < 0.9)) this.#text("waits", x, y, Math.min(11, radius / 2.4), colours.soft);
  }

  /** The hash of a worker's weights as a pattern: replicas that are equal look alike. */
  #fingerprint(worker, x, y, radius, passed) {
    const hash = this.player.shownHashes.get(worker);
    const shown = this.phase === "update" ? Math.max(0, 2 * this.t - 1) : this.phase === "compute" || passed > 0 ? Math.max(0, 1 - 3 * passed) : 1;
    if (!hash || shown <= 0) return;
    const { c, colours } = this;
    const cell = (radius * 1.0) / 5;
    const first = this.player.shownHashes.get(this.workers[0]);
    c.fillStyle = hash === first ? colours.soft : colours.bad;
    const before = c.globalAlpha;
    c.globalAlpha = before * shown * 0.8;
    for (let row = 0; row < 5; row++) {
      for (let column = 0; column < 5; column++) {
        const digit = parseInt(hash[3 * row + Math.min(column, 4 - column)], 16);
        if (digit & 1) c.fillRect(x + (column - 2.5) * cell, y + (row - 2.5) * cell, cell - 0.6, cell - 0.6);
      }
    }
    c.globalAlpha = before;
  }

  /** What a worker holds: a row for each chunk of the gradient, a column for each worker whose part is in the sum. */
  #matrix(worker, x, y, radius, done) {
    if (!done || !this.player.step) return;
    const { c, colours, player } = this;
    const count = this.workers.length;
    const side = radius * 1.24;
    const cell = side / count;
    const [left, top] = [x - side / 2, y - side / 2];
    const place = player.phase.name === "round" ? player.phase.index : player.phase.name === "sum" ? player.phase.index + 1 : this.phase === "update" ? player.holds.length - 1 : 0;
    const rows = player.holds[place].get(worker);
    const fade = this.phase === "update" ? 1 - this.t : this.phase === "compute" && done >= 1 && this.t < 0.97 ? 0.25 : 1;
    const gap = cell > 5 ? 1 : 0;
    c.globalAlpha = fade;
    for (let row = 0; row < count; row++) {
      // Gradients come from the last layer on.
      if (this.phase === "compute" && done < (count - row) / count) continue;
      for (let column = 0; column < count; column++) {
        if (!((rows[row] >> this.workers[column]) & 1)) continue;
        c.fillStyle = colours.worker[this.workers[column]];
        c.fillRect(left + column * cell, top + row * cell, cell - gap, cell - gap);
      }
    }
    if (this.phase !== "compute" && count > 1 && player.step.kind !== "async") {
      c.strokeStyle = colours.ink;
      c.lineWidth = 1;
      c.globalAlpha = 0.55 * fade;
      const row = Math.min(this.follow, count - 1);
      c.strokeRect(left - 1.5, top + row * cell - 1.5, side + 3 - gap, cell + 3 - gap);
    }
    c.globalAlpha = 1;
  }

  #server() {
    const { c, colours, player } = this;
    const { x, y } = this.spots.get(SERVER);
    const size = Math.min(this.radius, 30) * 1.7;
    this.#box(x - size / 2, y - size / 2, size, size, 10);
    c.fillStyle = colours.card;
    c.fill();
    c.strokeStyle = colours.soft;
    c.lineWidth = 2;
    c.stroke();
    this.#text("server", x, y + size / 2 + 12, 12, colours.soft, { weight: 600 });
    if (!player.step || player.step.kind === "async") return;
    const place = player.phase.name === "sum" ? 1 : player.phase.name === "round" ? player.phase.index : 0;
    const held = player.holds[place].get(SERVER)[0];
    const bar = (size * 0.7) / this.workers.length;
    this.workers.forEach((worker, k) => {
      if (!((held >> worker) & 1)) return;
      c.fillStyle = colours.worker[worker];
      c.fillRect(x - size * 0.35 + k * bar, y - size * 0.3, bar - (bar > 3 ? 1 : 0), size * 0.6);
    });
  }

  /** What goes from worker to worker in a round. */
  #messages(messages) {
    const { player } = this;
    const isRing = player.step.kind === "ring";
    const t = ease(this.t);
    const count = this.workers.length;
    const dots = [];
    const pills = [];
    for (const message of messages) {
      const isFollowed = player.step.kind === "async" || message.chunk === Math.min(this.follow, count - 1);
      (isFollowed && (isRing || count <= MOST_PILLS) ? pills : isRing && count <= MOST_PILLS ? pills : dots).push(message);
    }
    for (const message of dots) this.#dot(message, this.#between(message, t, isRing));
    for (const message of pills) this.#pill(message, this.#between(message, t, isRing), isRing && message.chunk === this.follow);
  }

  #between({ from, to }, t, isRing) {
    if (isRing && this.player.settings.workers > 1) {
      const begin = this.#angle(from);
      let end = this.#angle(to);
      if (end <= begin) end += 2 * Math.PI;
      return this.#onPath(mix(begin, end, t));
    }
    const [a, b] = [this.spots.get(from), this.spots.get(to)];
    return { x: mix(a.x, b.x, t), y: mix(a.y, b.y, t) };
  }

  #dot({ from }, { x, y }) {
    const { c, colours } = this;
    c.beginPath();
    c.arc(x, y, this.workers.length > 8 ? 3 : 4.5, 0, 2 * Math.PI);
    c.fillStyle = from === SERVER ? colours.soft : colours.worker[from];
    c.fill();
  }

  #pill({ from, holds, values }, { x, y }, isFollowed) {
    const { c, colours } = this;
    const [width, height] = [74, 22];
    this.#box(x - width / 2, y - height / 2, width, height, 7);
    c.fillStyle = colours.card;
    c.fill();
    c.strokeStyle = isFollowed ? colours.ink : from === SERVER ? colours.soft : colours.worker[from];
    c.lineWidth = 1.5;
    c.stroke();
    const inside = this.workers.filter((worker) => (holds >> worker) & 1);
    const part = (width - 12) / Math.max(1, this.workers.length);
    this.workers.forEach((worker, k) => {
      c.fillStyle = inside.includes(worker) ? colours.worker[worker] : colours.line;
      c.fillRect(x - width / 2 + 6 + k * part, y + height / 2 - 6, part - (part > 3 ? 1 : 0), 3);
    });
    this.#text(signed(values[0]), x, y - 2, 11, colours.ink, { font: MONO, weight: 500 });
  }

  // --- The middle ---

  #centre() {
    const { colours, player } = this;
    if (player.settings.workers === 1 || this.hasServer) return;
    const small = this.width < 440;
    const [x, y] = [this.cx, this.cy];
    if (this.hasTree) {
      const wide = player.settings.workers < 3 ? this.width - 60 : 2 * (this.rx - this.radius) - 36;
      const high = player.settings.workers < 3 ? 112 : 2 * (this.ry - this.radius) - 46;
      if (wide < 170 && this.phase === "round") return; // There is room for one or the other.
      this.c.globalAlpha = this.phase === "round" ? 0.45 : 1;
      this.#tree(x, y - 6, Math.min(wide * 0.85, 300), Math.max(48, Math.min(high, 112)));
      this.c.globalAlpha = 1;
      return;
    }
    if (this.phase !== "round" || player.step.kind !== "ring") return;
    const { index } = player.phase;
    const { rounds } = player.step;
    const half = rounds.length / 2;
    this.#text(rounds[index].title, x, y - 12, small ? 14 : 17, colours.ink, { weight: 600 });
    this.#text(`${index + 1} of ${rounds.length}`, x, y + 9, 12, colours.soft);
    const gap = Math.min(10, (this.rx * 0.9) / rounds.length);
    for (let k = 0; k < rounds.length; k++) {
      this.c.beginPath();
      this.c.arc(x + (k - (rounds.length - 1) / 2) * gap + (k < half ? -3 : 3), y + 28, Math.min(2.5, gap / 3), 0, 2 * Math.PI);
      this.c.fillStyle = k <= index ? colours.ink : colours.line;
      this.c.fill();
    }
  }

  /** The tree over the shards: leaves in the colours of who has them; nodes light up as the owner of a chunk adds. */
  #tree(x, y, width, height) {
    const { c, colours, player } = this;
    const owner = [];
    for (const { worker, node } of player.step?.parts ?? []) for (let leaf = node[0]; leaf < node[1]; leaf++) owner[leaf] = worker;
    if (!player.step) this.workers.forEach((worker, place) => {
      const [begin, end] = runOf(SHARDS, this.workers.length, place);
      for (let leaf = begin; leaf < end; leaf++) owner[leaf] = worker;
    });
    const levels = 4;
    const isOwn = (node) => owner.slice(...node).every((worker) => worker === owner[node[0]]);
    const isDone = (node, level) => {
      if (this.phase === "update" || (this.phase === "round" && player.phase.index > 0)) return true;
      if (this.phase === "sum") return this.t * (levels + 0.5) > level || isOwn(node);
      return this.phase === "round" && isOwn(node);
    };
    const leafX = (leaf) => x - width / 2 + (width * leaf) / (SHARDS - 1);
    const levelOf = (node) => Math.round(Math.log2(node[1] - node[0]));
    const at = (node) => ({ x: (leafX(node[0]) + leafX(node[1] - 1)) / 2, y: y + height / 2 - (height * levelOf(node)) / levels });
    const visit = (node) => {
      const here = at(node);
      const level = levelOf(node);
      const colour = isOwn(node) ? colours.worker[owner[node[0]]] : colours.ink;
      if (level > 0) {
        for (const half of halves(node)) {
          const there = at(half);
          c.beginPath();
          c.moveTo(there.x, there.y);
          c.lineTo(there.x, here.y + 5);
          c.lineTo(here.x, here.y + 5);
          c.lineTo(here.x, here.y);
          c.lineWidth = 1.5;
          c.strokeStyle = isDone(node, level) ? colour : colours.line;
          c.stroke();
          visit(half);
        }
      }
      c.beginPath();
      if (level) c.arc(here.x, here.y, 3.5, 0, 2 * Math.PI);
      else c.roundRect(here.x - 4.5, here.y - 4.5, 9, 9, 2.5);
      c.fillStyle = level === 0 || isDone(node, level) ? colour : colours.line;
      c.fill();
    };
    visit([0, SHARDS]);
    if (width > 150) this.#text(this.phase === "sum" ? "each owner adds along it" : "one tree over 16 shards", x, y + height / 2 + 17, 11, colours.soft);
  }
}
