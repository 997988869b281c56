// The network that is trained, and what it learns: two spirals in a square.
//
//     2 numbers -> width, tanh -> width, tanh -> 1 logit        (with batch norm: before the first tanh)
//
// Weights of a replica lie in one Float32Array. Gradients are worked out part by part: a part is what one worker puts
// through the network at once. Parts only meet in batch norm over the global batch, which is why all of them are given
// to `gradients` together.

import { RandomStream, cosineOfTurns, crossEntropy32, f32, sigmoid32, tanh32 } from "./float32.js";

export const NUM_SAMPLES = 512;
const NOISE = 0.035;
const TURNS = 0.95;
const EPSILON = f32(1e-5);

/** The data set: { x: two numbers a sample, y: 0 or 1 }. */
export function spirals(seed) {
  const random = new RandomStream(1000 + seed);
  const x = new Float32Array(2 * NUM_SAMPLES);
  const y = new Float32Array(NUM_SAMPLES);
  for (let k = 0; k < NUM_SAMPLES; k++) {
    const arm = k % 2;
    const along = 0.12 + 0.88 * random.uniform();
    const turns = along * TURNS + arm / 2;
    x[2 * k] = along * cosineOfTurns(turns) + NOISE * random.normal();
    x[2 * k + 1] = along * cosineOfTurns(turns - 0.25) + NOISE * random.normal();
    y[k] = arm;
  }
  return { x, y };
}

/** The samples of global batch `number`, a function of the seed and the number alone. */
export function globalBatch(seed, batch, number) {
  const perEpoch = Math.ceil(NUM_SAMPLES / batch);
  const epoch = Math.floor(number / perEpoch);
  const begin = (number % perEpoch) * batch;
  return new RandomStream(7919 * (seed + 1) + epoch).permutation(NUM_SAMPLES).subarray(begin, begin + batch);
}

export class Network {
  /** norm: "off", "own" (statistics of each part) or "all" (of all parts together). */
  constructor(width, norm) {
    this.width = width;
    this.norm = norm;
    const shapes = [["first.weight", width, 2], ["first.bias", width, 0]];
    if (norm !== "off") shapes.push(["norm.weight", width, 0], ["norm.bias", width, 0]);
    shapes.push(["second.weight", width, width], ["second.bias", width, 0], ["last.weight", 1, width], ["last.bias", 1, 0]);
    this.at = {};
    this.params = [];
    let begin = 0;
    for (const [name, rows, columns] of shapes) {
      const count = rows * (columns || 1);
      this.at[name] = begin;
      this.params.push({ name, rows, columns, begin, end: begin + count });
      begin += count;
    }
    this.size = begin;
  }

  initialWeights(seed) {
    const random = new RandomStream(seed);
    const weights = new Float32Array(this.size);
    for (const { name, columns, begin, end } of this.params) {
      const bound = Math.sqrt(3 / (columns || 1));
      for (let k = begin; k < end; k++) {
        if (name === "norm.weight") weights[k] = 1;
        else if (columns) weights[k] = (2 * random.uniform() - 1) * bound;
      }
    }
    return weights;
  }

  /** Name and place of a weight, in words. */
  nameOf(index) {
    const { name, columns, begin } = this.params.find((param) => index < param.end);
    const at = index - begin;
    return columns ? `${name}[${Math.floor(at / columns)}, ${at % columns}]` : `${name}[${at}]`;
  }

  /** Forward and backward of parts { weights, samples, scale }: sets grad, loss (a sum), mean and variance of each.
   *
   * scale: what the gradient of each sample counts. addUp: adds one array a part, in the order of the reduction; used by
   * batch norm over all parts.
   */
  gradients(parts, data, addUp) {
    for (const part of parts) this.#enter(part, data);
    if (this.norm !== "off") this.#normalise(parts, addUp);
    for (const part of parts) this.#leave(part, data);
    if (this.norm !== "off") this.#normaliseBack(parts, addUp);
    for (const part of parts) this.#arrive(part, data);
  }

  /** The logit for one point, with `statistics` for batch norm: { mean, variance }. */
  logit(weights, statistics, x0, x1, first, second) {
    const { width, at } = this;
    for (let j = 0; j < width; j++) {
      let h = weights[at["first.bias"] + j] + weights[at["first.weight"] + 2 * j] * x0 + weights[at["first.weight"] + 2 * j + 1] * x1;
      if (statistics) {
        h = ((h - statistics.mean[j]) / Math.sqrt(statistics.variance[j] + EPSILON)) * weights[at["norm.weight"] + j] + weights[at["norm.bias"] + j];
      }
      first[j] = Math.tanh(h);
    }
    let logit = weights[at["last.bias"]];
    for (let j = 0; j < width; j++) {
      let h = weights[at["second.bias"] + j];
      for (let i = 0; i < width; i++) h += weights[at["second.weight"] + j * width + i] * first[i];
      second[j] = Math.tanh(h);
      logit += weights[at["last.weight"] + j] * second[j];
    }
    return logit;
  }

  /** The first layer, before batch norm and tanh. */
  #enter(part, data) {
    const { width, at } = this;
    const { weights, samples } = part;
    part.h1 = new Float32Array(samples.length * width);
    part.grad = new Float32Array(this.size);
    for (let s = 0; s < samples.length; s++) {
      const x0 = data.x[2 * samples[s]];
      const x1 = data.x[2 * samples[s] + 1];
      for (let j = 0; j < width; j++) {
        const row = at["first.weight"] + 2 * j;
        part.h1[s * width + j] = f32(f32(weights[at["first.bias"] + j] + f32(weights[row] * x0)) + f32(weights[row + 1] * x1));
      }
    }
  }

  /** The rest of the forward pass, and the backward pass to where the first layer's output is. */
  #leave(part, data) {
    const { width, at } = this;
    const { weights, samples, scale, grad } = part;
    const a1 = new Float32Array(width);
    const a2 = new Float32Array(width);
    const d2 = new Float32Array(width);
    const entered = part.normed ?? part.h1;
    part.d1 = new Float32Array(samples.length * width);
    part.loss = 0;
    for (let s = 0; s < samples.length; s++) {
      for (let j = 0; j < width; j++) a1[j] = tanh32(entered[s * width + j]);
      let logit = weights[at["last.bias"]];
      for (let j = 0; j < width; j++) {
        let h = weights[at["second.bias"] + j];
        const row = at["second.weight"] + j * width;
        for (let i = 0; i < width; i++) h = f32(h + f32(weights[row + i] * a1[i]));
        a2[j] = tanh32(h);
        logit = f32(logit + f32(weights[at["last.weight"] + j] * a2[j]));
      }
      const target = data.y[samples[s]];
      part.loss = f32(part.loss + crossEntropy32(logit, target));
      const d = f32(f32(sigmoid32(logit) - target) * scale);
      grad[at["last.bias"]] += d;
      for (let j = 0; j < width; j++) {
        grad[at["last.weight"] + j] += f32(d * a2[j]);
        d2[j] = f32(f32(d * weights[at["last.weight"] + j]) * f32(1 - f32(a2[j] * a2[j])));
        grad[at["second.bias"] + j] += d2[j];
        const row = at["second.weight"] + j * width;
        for (let i = 0; i < width; i++) grad[row + i] += f32(d2[j] * a1[i]);
      }
      for (let i = 0; i < width; i++) {
        let d1 = 0;
        for (let j = 0; j < width; j++) d1 = f32(d1 + f32(d2[j] * weights[at["second.weight"] + j * width + i]));
        part.d1[s * width + i] = f32(d1 * f32(1 - f32(a1[i] * a1[i])));
      }
    }
  }

  /** The gradient of the first layer. */
  #arrive(part, data) {
    const { width, at } = this;
    const { samples, grad, d1 } = part;
    for (let s = 0; s < samples.length; s++) {
      const x0 = data.x[2 * samples[s]];
      const x1 = data.x[2 * samples[s] + 1];
      for (let j = 0; j < width; j++) {
        const d = d1[s * width + j];
        const row = at["first.weight"] + 2 * j;
        grad[row] += f32(d * x0);
        grad[row + 1] += f32(d * x1);
        grad[at["first.bias"] + j] += d;
      }
    }
  }

  /** Batch norm: mean and variance, in two sums, and what comes of them. */
  #normalise(parts, addUp) {
    const { width, at } = this;
    this.#shared(parts, addUp, "sum", (part, sum, s, j) => (sum[j] = f32(sum[j] + part.h1[s * width + j])));
    for (const part of parts) part.mean = part.sum.map((sum) => f32(sum / part.count));
    this.#shared(parts, addUp, "sum", (part, sum, s, j) => {
      const from = f32(part.h1[s * width + j] - part.mean[j]);
      sum[j] = f32(sum[j] + f32(from * from));
    });
    for (const part of parts) {
      part.variance = part.sum.map((sum) => f32(sum / part.count));
      part.rootInverse = part.variance.map((variance) => f32(1 / Math.sqrt(f32(variance + EPSILON))));
      part.unit = new Float32Array(part.h1.length);
      part.normed = new Float32Array(part.h1.length);
      for (let k = 0; k < part.h1.length; k++) {
        const j = k % width;
        part.unit[k] = f32(f32(part.h1[k] - part.mean[j]) * part.rootInverse[j]);
        part.normed[k] = f32(f32(part.unit[k] * part.weights[at["norm.weight"] + j]) + part.weights[at["norm.bias"] + j]);
      }
    }
  }

  #normaliseBack(parts, addUp) {
    const { width, at } = this;
    for (const part of parts) {
      for (let k = 0; k < part.d1.length; k++) {
        const j = k % width;
        part.grad[at["norm.bias"] + j] += part.d1[k];
        part.grad[at["norm.weight"] + j] += f32(part.d1[k] * part.unit[k]);
        part.d1[k] = f32(part.d1[k] * part.weights[at["norm.weight"] + j]);
      }
    }
    this.#shared(parts, addUp, "sum", (part, sum, s, j) => (sum[j] = f32(sum[j] + part.d1[s * width + j])));
    for (const part of parts) part.first = part.sum;
    this.#shared(parts, addUp, "sum", (part, sum, s, j) => {
      sum[j] = f32(sum[j] + f32(part.d1[s * width + j] * part.unit[s * width + j]));
    });
    for (const part of parts) {
      for (let k = 0; k < part.d1.length; k++) {
        const j = k % width;
        const means = f32(f32(part.first[j] + f32(part.unit[k] * part.sum[j])) / part.count);
        part.d1[k] = f32(f32(part.d1[k] - means) * part.rootInverse[j]);
      }
    }
  }

  /** Sum something over the samples of each part, or of all of them; sets part[name], and part.count. */
  #shared(parts, addUp, name, add) {
    for (const part of parts) {
      const sum = new Float32Array(this.width);
      for (let s = 0; s < part.samples.length; s++) for (let j = 0; j < this.width; j++) add(part, sum, s, j);
      part[name] = sum;
      part.count = Math.max(1, part.samples.length);
    }
    if (this.norm !== "all") return;
    const total = addUp(parts.map((part) => part[name]));
    const count = parts.reduce((sum, part) => sum + part.samples.length, 0);
    for (const part of parts) Object.assign(part, { [name]: total, count });
  }
}
