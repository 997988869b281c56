// Arithmetic that comes to the same bits in every browser and in Python.
//
// Weights, activations and gradients are float32: every product and every sum is rounded by Math.fround. Functions that
// browsers and C libraries round differently (exp, log, tanh, cosine) are made here of +, -, * and / on doubles, which
// IEEE 754 defines to the bit, and rounded to float32 at the end.

export const f32 = Math.fround;

const LN2 = 0.6931471805599453;
const LOG2E = 1.4426950408889634;
const TWO_PI = 6.283185307179586;

const POWERS_OF_TWO = powersOfTwo(200);

function powersOfTwo(most) {
  const powers = new Float64Array(2 * most + 1);
  powers[most] = 1;
  for (let k = 1; k <= most; k++) {
    powers[most + k] = powers[most + k - 1] * 2;
    powers[most - k] = powers[most - k + 1] / 2;
  }
  return powers;
}

/** e to the x, as a double; x is held between -120 and 120. */
export function exponential(x) {
  const bounded = Math.min(120, Math.max(-120, x));
  const k = Math.floor(bounded * LOG2E + 0.5);
  const r = bounded - k * LN2;
  let sum = 1;
  for (let n = 14; n >= 1; n--) sum = 1 + (r / n) * sum;
  return sum * POWERS_OF_TWO[200 + k];
}

/** The natural logarithm of a double between 1 and 2. */
export function logarithm(y) {
  const s = (y - 1) / (y + 1);
  const square = s * s;
  let sum = 0;
  for (let n = 35; n >= 1; n -= 2) sum = sum * square + 1 / n;
  return 2 * s * sum;
}

export function tanh32(x) {
  const e = exponential(-2 * Math.abs(x));
  const t = (1 - e) / (1 + e);
  return f32(x < 0 ? -t : t);
}

export function sigmoid32(x) {
  const e = exponential(-Math.abs(x));
  return f32(x < 0 ? e / (1 + e) : 1 / (1 + e));
}

/** Binary cross-entropy of a logit and a target of 0 or 1. */
export function crossEntropy32(logit, target) {
  return f32(Math.max(logit, 0) - logit * target + logarithm(1 + exponential(-Math.abs(logit))));
}

/** The cosine of an angle given in turns. */
export function cosineOfTurns(turns) {
  const x = (turns - Math.floor(turns + 0.5)) * TWO_PI;
  const square = x * x;
  let sum = 1;
  for (let n = 26; n >= 2; n -= 2) sum = 1 - (square / (n * (n - 1))) * sum;
  return sum;
}

/** Random numbers that are a function of a seed: xorshift on 32 bits. */
export class RandomStream {
  constructor(seed) {
    this.state = Math.imul(seed + 1, 0x9e3779b1) | 0 || 1;
    for (let k = 0; k < 8; k++) this.next();
  }

  /** An integer from 0 to before 2**32. */
  next() {
    let x = this.state;
    x ^= x << 13;
    x ^= x >>> 17;
    x ^= x << 5;
    this.state = x;
    return x >>> 0;
  }

  /** From 0 to before 1. */
  uniform() {
    return this.next() / 4294967296;
  }

  /** About normal, with mean 0 and deviation 1: the sum of twelve uniform numbers. */
  normal() {
    let sum = -6;
    for (let k = 0; k < 12; k++) sum += this.uniform();
    return sum;
  }

  /** Numbers from 0 to before `count` in a random order. */
  permutation(count) {
    const order = Int32Array.from({ length: count }, (_, k) => k);
    for (let k = count - 1; k > 0; k--) {
      const other = Math.floor(this.uniform() * (k + 1));
      [order[k], order[other]] = [order[other], order[k]];
    }
    return order;
  }
}

const oneNumber = new Float32Array(1);
const itsBits = new Uint32Array(oneNumber.buffer);

/** The 32 bits of a float32, as an integer. */
export function bitsOf(x) {
  oneNumber[0] = x;
  return itsBits[0];
}

/** The float32 nearest to x that has only the 8 leading bits of a mantissa: a bfloat16. */
export function bfloat16(x) {
  oneNumber[0] = x;
  const bits = itsBits[0];
  itsBits[0] = (bits + 0x7fff + ((bits >>> 16) & 1)) & 0xffff0000;
  return oneNumber[0];
}

/** Where two arrays of float32 first differ: { index, bit, left, right }, the bit counted from the sign down; or null. */
export function firstDifference(left, right) {
  for (let index = 0; index < left.length; index++) {
    const a = bitsOf(left[index]);
    const b = bitsOf(right[index]);
    if (a !== b) return { index, bit: Math.clz32(a ^ b), left: a, right: b };
  }
  return null;
}
