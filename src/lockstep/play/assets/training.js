// Training by several workers, really: forward, backward, reduction and update of every one of them.
//
// What comes out is a function of the settings, the events (who died or came when) and the number of steps. So a page's
// address is enough to come to the same weights again.

import { RandomStream, f32, firstDifference } from "./float32.js";
import { Network, NUM_SAMPLES, globalBatch, spirals } from "./network.js";
import { SERVER, addAlong, bytesSent, chunksOf, reduce, rootsOf, WIRES } from "./reduction.js";
import { hashOf } from "./sha256.js";
import { runOf } from "./tree.js";

export const SHARDS = 16;
/** The batch for which learning rates are taken to be tuned. */
export const BASE_BATCH = 32;
const MOMENTUM = f32(0.9);
const STATISTICS_MOMENTUM = f32(0.1);

export class Training {
  /** events: [{ step, worker, alive }], in order of their steps. */
  constructor(settings, events = []) {
    this.settings = settings;
    this.events = events;
    this.data = spirals(settings.seed);
    this.network = new Network(settings.width, settings.norm);
    this.steps = 0;
    this.samples = 0;
    this.totalBytes = {};
    this.workers = Array.from({ length: settings.workers }, (_, worker) => worker);
    const first = this.network.initialWeights(settings.seed);
    this.replicas = this.workers.map(() => new Replica(first, settings.width));
    this.server = new Replica(first, settings.width);
    this.clock = this.workers.map(() => 0);
    this.started = this.workers.map(() => 0);
    this.jitter = new RandomStream(77 + settings.seed);
  }

  /** The learning rate of the coming step: lockstep.scale_lr's. */
  get rate() {
    const { rate, scaling, warmup, batch } = this.settings;
    const ratio = batch / BASE_BATCH;
    const scale = { none: 1, sqrt: Math.sqrt(ratio), linear: ratio }[scaling];
    const done = warmup ? Math.min(1, this.steps / warmup) : 1;
    return rate * (1 + (scale - 1) * done);
  }

  get epoch() {
    return this.samples / NUM_SAMPLES;
  }

  /** One update from one global batch; returns what happened, for the eye. `isMeasured`: with the gradient's error. */
  step(isMeasured = true) {
    this.isMeasured = isMeasured;
    this.applyEvents();
    const samples = globalBatch(this.settings.seed, this.settings.batch, this.steps);
    const happened = this.settings.mode === "async" ? this.#asynchronous(samples) : this.#together(samples);
    Object.assign(happened, {
      number: this.steps,
      samples,
      rate: this.rate,
      lost: this.events.filter(({ step, alive }) => step === this.steps && !alive).map(({ worker }) => worker),
      bytes: bytesSent(happened.rounds),
    });
    for (const [worker, bytes] of Object.entries(happened.bytes)) this.totalBytes[worker] = (this.totalBytes[worker] ?? 0) + bytes;
    this.steps += 1;
    this.samples += samples.length;
    this.last = happened;
    return happened;
  }

  /** SHA-256 of a worker's weights, and of its running statistics if it has them. */
  hash(worker) {
    const { weights, mean, variance } = this.replicas[worker];
    return hashOf(this.settings.norm === "off" ? [weights] : [weights, mean, variance]);
  }

  /** Whether every worker holds the same weights. */
  get isEqual() {
    const [first, ...others] = this.workers;
    return others.every((worker) => this.hash(worker) === this.hash(first));
  }

  /** Where the weights of two replicas first differ, in words and bits; null if nowhere. */
  differenceTo(other, mine = this.workers[0], theirs = other.workers[0]) {
    const found = firstDifference(this.replicas[mine].weights, other.replicas[theirs].weights);
    return found && { ...found, name: this.network.nameOf(found.index) };
  }

  /** Who is lost or joins at the coming step. */
  applyEvents() {
    for (const { step, worker, alive } of this.events) {
      if (step !== this.steps || worker >= this.settings.workers) continue;
      if (alive && !this.workers.includes(worker)) {
        this.replicas[worker].copyFrom(this.replicas[this.workers[0]]);
        this.workers = [...this.workers, worker].sort((a, b) => a - b);
      } else if (!alive && this.workers.length > 1) {
        this.workers = this.workers.filter((each) => each !== worker);
      }
    }
  }

  /** Which of `total` things each worker has: as equal as can be, or ragged, where the last one has a quarter as many. */
  #cuts(total) {
    const count = this.workers.length;
    if (this.settings.cut === "even" || count === 1) return this.workers.map((_, place) => runOf(total, count, place));
    const last = Math.max(1, Math.round(total / (4 * count - 3)));
    const others = this.workers.slice(1).map((_, place) => runOf(total - last, count - 1, place));
    return [...others, [total - last, total]];
  }

  /** What every worker puts through the network, pass by pass. */
  #parts(samples) {
    const { reduction, weighting, accumulation } = this.settings;
    const total = samples.length;
    const parts = [];
    this.#cuts(reduction === "tree" ? SHARDS : total).forEach(([begin, end], place) => {
      const worker = this.workers[place];
      const { weights } = this.replicas[worker];
      const mine = reduction === "tree" ? [runOf(total, SHARDS, begin)[0], runOf(total, SHARDS, end - 1)[1]] : [begin, end];
      const size = mine[1] - mine[0];
      const scale = f32(weighting === "samples" ? 1 / total : 1 / (this.workers.length * Math.max(1, size)));
      const passes = reduction === "tree" ? end - begin : accumulation;
      for (let pass = 0; pass < passes; pass++) {
        const [from, to] = reduction === "tree" ? runOf(total, SHARDS, begin + pass) : runOf(size, passes, pass).map((at) => at + begin);
        const node = reduction === "tree" ? [begin + pass, begin + pass + 1] : [place, place + 1];
        parts.push({ worker, node, begin: from, end: to, samples: samples.subarray(from, to), weights, scale });
      }
    });
    return parts;
  }

  /** Sum one array for each part, in the order of the reduction. */
  #addParts(parts, arrays) {
    if (this.settings.reduction === "tree") {
      return addAlong([0, SHARDS], parts.map(({ node }, k) => ({ node, values: arrays[k] })));
    }
    return this.workers.map((worker) => sumInTurn(arrays.filter((_, k) => parts[k].worker === worker))).reduce(plus);
  }

  /** What each worker contributes to the sum of gradients. */
  #contributions(parts) {
    return this.workers.flatMap((worker) => {
      const own = parts.filter((part) => part.worker === worker);
      if (this.settings.reduction !== "tree") return [{ worker, node: own[0].node, values: sumInTurn(own.map(({ grad }) => grad)) }];
      const run = [own[0].node[0], own[own.length - 1].node[1]];
      const leaves = own.map(({ node, grad }) => ({ node, values: grad }));
      return rootsOf(SHARDS, run, leaves).map((root) => ({ worker, ...root }));
    });
  }

  #keptBy(worker) {
    const replica = this.replicas[worker];
    replica.kept ??= new Float32Array(this.network.size);
    return replica.kept;
  }

  /** Synchronous steps, and local ones. */
  #together(samples) {
    const { mode, reduction, wire, every } = this.settings;
    const parts = this.#parts(samples);
    const isLocal = mode === "local" && this.workers.length > 1;
    if (isLocal) for (const part of parts) part.scale = f32((part.scale * samples.length) / Math.max(1, this.#sizeOf(parts, part.worker)));
    const add = (arrays) => this.#addParts(parts, arrays);
    this.network.gradients(parts, this.data, add);
    const loss = parts.reduce((sum, part) => sum + part.loss, 0) / samples.length;
    let contributions = this.#contributions(parts);
    let reduced = { sums: {}, rounds: [], kind: reduction };
    let error = null;
    if (!isLocal) {
      // Each of several contributions of a worker has its own error feedback only if there is one; else none is kept.
      const kept = reduction === "tree" ? null : Object.fromEntries(this.workers.map((worker) => [worker, this.#keptBy(worker)]));
      reduced = reduce(reduction, contributions, this.workers, wire, kept);
      error = this.isMeasured ? this.#errorOf(reduced.sums[this.workers[0]], samples) : null;
      for (const worker of this.workers) this.replicas[worker].update(reduced.sums[worker], this.rate);
    } else {
      for (const worker of this.workers) {
        const own = contributions.filter((each) => each.worker === worker).map(({ values }) => values);
        this.replicas[worker].update(sumInTurn(own), this.rate);
      }
      if ((this.steps + 1) % every === 0) {
        const share = f32(1 / this.workers.length);
        contributions = this.workers.map((worker, place) => ({
          worker, node: [place, place + 1], values: this.replicas[worker].weights.map((value) => value * share),
        }));
        reduced = reduce(reduction, contributions, this.workers, wire === "bf16" ? wire : "fp32", null);
        for (const worker of this.workers) this.replicas[worker].weights.set(reduced.sums[worker]);
      }
    }
    this.#learnStatistics(parts);
    return { parts, contributions, ...reduced, loss, error, chunks: chunksOf(this.network.size, this.workers.length) };
  }

  #sizeOf(parts, worker) {
    return parts.reduce((sum, part) => sum + (part.worker === worker ? part.samples.length : 0), 0);
  }

  /** How far a gradient is from that of the whole batch at once, relative to its length. */
  #errorOf(sum, samples) {
    const { weights } = this.replicas[this.workers[0]];
    const whole = { weights, samples, scale: f32(1 / samples.length) };
    this.network.gradients([whole], this.data, ([only]) => only);
    let apart = 0;
    let length = 0;
    for (let k = 0; k < sum.length; k++) {
      apart += (sum[k] - whole.grad[k]) ** 2;
      length += whole.grad[k] ** 2;
    }
    return Math.sqrt(apart / Math.max(length, 1e-30));
  }

  /** Running statistics of batch norm. */
  #learnStatistics(parts) {
    if (this.settings.norm === "off") return;
    const learn = (worker, mean, variance) => this.replicas[worker].learnStatistics(mean, variance);
    const total = parts.reduce((sum, part) => sum + part.samples.length, 0);
    const unbiased = ({ variance, count }) => variance.map((value) => f32((value * count) / Math.max(1, count - 1)));
    if (this.settings.norm === "own" && this.settings.reduction === "tree" && this.settings.mode === "sync") {
      // As Trainer does: what the shards see counts by their share, added along the tree.
      const shared = (of) => this.#addParts(parts, parts.map((part) => of(part).map((value) => f32(value * f32(part.samples.length / total)))));
      const mean = shared((part) => part.mean);
      const variance = shared(unbiased);
      for (const worker of this.workers) learn(worker, mean, variance);
    } else if (this.settings.norm === "all") {
      for (const worker of this.workers) learn(worker, parts[0].mean, unbiased(parts[0]));
    } else {
      for (const part of parts) if (part.samples.length) learn(part.worker, part.mean, unbiased(part));
    }
  }

  /** As many passes as there are workers, each on the weights that its worker fetched when it began. */
  #asynchronous(samples) {
    const { slow, staleness, wire } = this.settings;
    const rounds = [];
    const parts = [];
    const stalenesses = [];
    let loss = 0;
    const [begins, count] = [this.#cuts(samples.length), this.workers.length];
    for (let pass = 0; pass < count; pass++) {
      const least = Math.min(...this.workers.map((worker) => this.started[worker]));
      const free = this.workers.filter((worker) => this.started[worker] - least <= staleness);
      const worker = free.reduce((best, each) => (this.clock[each] < this.clock[best] ? each : best));
      const replica = this.replicas[worker];
      const mine = samples.subarray(...begins[pass]);
      const part = { worker, node: [pass, pass + 1], begin: begins[pass][0], end: begins[pass][1], samples: mine, weights: replica.weights, scale: f32(1 / samples.length) };
      this.network.gradients([part], this.data, ([only]) => only);
      const grad = WIRES[wire].decode(part.grad, this.#keptBy(worker));
      const age = (this.server.version ?? 0) - (replica.version ?? 0);
      this.server.update(grad, this.rate);
      this.server.version = (this.server.version ?? 0) + 1;
      replica.copyFrom(this.server);
      replica.version = this.server.version;
      if (this.settings.norm !== "off") replica.learnStatistics(part.mean, part.variance);
      const whole = { chunk: 0, begin: 0, end: grad.length, bytes: WIRES[wire].bytes(grad.length) };
      rounds.push({ title: `worker ${worker} sends`, messages: [{ ...whole, from: worker, to: SERVER, values: grad, holds: 1 << worker, adds: true }] });
      rounds.push({ title: `worker ${worker} fetches`, messages: [{ ...whole, bytes: 4 * grad.length, from: SERVER, to: worker, values: replica.weights.slice(0), holds: 1 << worker, adds: false }] });
      this.clock[worker] += (worker === this.settings.workers - 1 ? slow : 1) * (0.9 + 0.2 * this.jitter.uniform());
      this.started[worker] += 1;
      stalenesses.push(age);
      parts.push(part);
      loss += part.loss;
    }
    const contributions = parts.map(({ worker, node, grad }) => ({ worker, node, values: grad }));
    return { parts, contributions, rounds, kind: "async", loss: loss / samples.length, error: null, stalenesses, chunks: [[0, this.network.size]] };
  }
}

/** The weights of one worker, and what its optimizer and its batch norm remember. */
class Replica {
  constructor(weights, width) {
    this.weights = weights.slice(0);
    this.momentum = new Float32Array(weights.length);
    this.mean = new Float32Array(width);
    this.variance = new Float32Array(width).fill(1);
  }

  /** A step of SGD with momentum, as torch takes it. */
  update(grad, rate) {
    const lr = f32(rate);
    for (let k = 0; k < grad.length; k++) {
      this.momentum[k] = f32(f32(MOMENTUM * this.momentum[k]) + grad[k]);
      this.weights[k] = f32(this.weights[k] - f32(lr * this.momentum[k]));
    }
  }

  learnStatistics(mean, variance) {
    for (let j = 0; j < mean.length; j++) {
      this.mean[j] += f32(STATISTICS_MOMENTUM * f32(mean[j] - this.mean[j]));
      this.variance[j] += f32(STATISTICS_MOMENTUM * f32(variance[j] - this.variance[j]));
    }
  }

  copyFrom(other) {
    this.weights.set(other.weights);
    this.momentum.set(other.momentum);
    this.mean.set(other.mean);
    this.variance.set(other.variance);
  }
}

const plus = (a, b) => a.map((value, k) => value + b[k]);

function sumInTurn(arrays) {
  return arrays.length > 1 ? arrays.reduce(plus) : arrays[0];
}
