// SHA-256 (FIPS 180-4) of bytes. The browser's own is asynchronous and absent from pages opened as files.

const ROUND_CONSTANTS = fractionsOfRoots(64, 1 / 3);
const FIRST_STATE = fractionsOfRoots(8, 1 / 2);

/** The first 32 bits of the fractions of the roots of the first primes. */
function fractionsOfRoots(count, power) {
  const words = [];
  for (let n = 2; words.length < count; n++) {
    let isPrime = true;
    for (let d = 2; d * d <= n && isPrime; d++) isPrime = n % d !== 0;
    if (isPrime) {
      const root = n ** power;
      words.push(Math.floor((root - Math.floor(root)) * 4294967296) | 0);
    }
  }
  return words;
}

const rotated = (x, by) => (x >>> by) | (x << (32 - by));

/** The digest of a Uint8Array, as 64 hexadecimal digits. */
export function sha256(bytes) {
  const padded = new Uint8Array(((bytes.length + 8) >> 6) * 64 + 64);
  padded.set(bytes);
  padded[bytes.length] = 0x80;
  const view = new DataView(padded.buffer);
  view.setUint32(padded.length - 4, bytes.length * 8);
  const state = Int32Array.from(FIRST_STATE);
  const w = new Int32Array(64);
  for (let block = 0; block < padded.length; block += 64) {
    for (let t = 0; t < 16; t++) w[t] = view.getInt32(block + 4 * t);
    for (let t = 16; t < 64; t++) {
      const s0 = rotated(w[t - 15], 7) ^ rotated(w[t - 15], 18) ^ (w[t - 15] >>> 3);
      const s1 = rotated(w[t - 2], 17) ^ rotated(w[t - 2], 19) ^ (w[t - 2] >>> 10);
      w[t] = (w[t - 16] + s0 + w[t - 7] + s1) | 0;
    }
    let [a, b, c, d, e, f, g, h] = state;
    for (let t = 0; t < 64; t++) {
      const t1 = (h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & f) ^ (~e & g)) + ROUND_CONSTANTS[t] + w[t]) | 0;
      const t2 = ((rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + t1) | 0, c, b, a, (t1 + t2) | 0];
    }
    [a, b, c, d, e, f, g, h].forEach((word, k) => (state[k] += word));
  }
  return Array.from(state, (word) => (word >>> 0).toString(16).padStart(8, "0")).join("");
}

/** The digest of the float32 numbers of several arrays, one after the other. */
export function hashOf(arrays) {
  const bytes = new Uint8Array(arrays.reduce((sum, array) => sum + array.byteLength, 0));
  let at = 0;
  for (const array of arrays) {
    bytes.set(new Uint8Array(array.buffer, array.byteOffset, array.byteLength), at);
    at += array.byteLength;
  }
  return sha256(bytes);
}
