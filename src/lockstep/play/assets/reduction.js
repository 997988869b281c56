// How workers come to a common sum: around a ring, along the tree of shards, everyone to everyone, or by a server.
//
// Every reduction really adds float32 numbers in the order in which they would arrive, and tells what it did: rounds of
// messages { from, to, chunk, begin, end, bytes, values, holds, adds }, which are counted and drawn. `holds` is what is in
// the sum so far: a bit for each contribution's worker. Worker SERVER is the parameter server.

import { bfloat16, f32 } from "./float32.js";
import { runOf, rootsWithin, sumAlong } from "./tree.js";

export const SERVER = -1;

const BLOCK = 64;
const KEPT = 0.1;

/** How gradients are encoded: decode(values, kept) returns what arrives; `kept` is the error that stays behind, for later. */
export const WIRES = {
  fp32: { bytes: (n) => 4 * n, decode: (values) => values },
  bf16: { bytes: (n) => 2 * n, decode: (values) => values.map(bfloat16) },
  int8: { bytes: (n) => n + 4 * Math.ceil(n / BLOCK), decode: withFeedback(eightBits) },
  top10: { bytes: (n) => 6 * Math.ceil(n * KEPT), decode: withFeedback(largest) },
};

/** How a finished sum is encoded: as its parts were, but that what was the largest of each worker all counts. */
function ofSums(encoding) {
  if (encoding.name !== "top10") return encoding;
  const bytes = (n, values) => Math.min(4 * n, 6 * values.reduce((count, value) => count + (value !== 0), 0));
  return { ...encoding, bytes, decode: (values) => values };
}

/** Whether sums on the way can be encoded as well, so that a ring can carry them. */
const addsOnTheWay = (wire) => wire === "fp32" || wire === "bf16";

function withFeedback(encode) {
  return (values, kept) => {
    const wanted = kept ? values.map((value, k) => value + kept[k]) : values;
    const decoded = encode(wanted);
    if (kept) for (let k = 0; k < values.length; k++) kept[k] = f32(wanted[k] - decoded[k]);
    return decoded;
  };
}

function eightBits(values) {
  const decoded = new Float32Array(values.length);
  for (let begin = 0; begin < values.length; begin += BLOCK) {
    const block = values.subarray(begin, begin + BLOCK);
    const scale = f32(block.reduce((most, value) => Math.max(most, Math.abs(value)), 0) / 127);
    for (let k = 0; k < block.length; k++) decoded[begin + k] = scale ? f32(Math.floor(f32(block[k] / scale) + 0.5) * scale) : 0;
  }
  return decoded;
}

function largest(values) {
  const decoded = new Float32Array(values.length);
  const order = Array.from(values.keys()).sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]) || a - b);
  for (const k of order.slice(0, Math.ceil(values.length * KEPT))) decoded[k] = values[k];
  return decoded;
}

/** Sum what workers contribute.
 *
 * contributions: [{ worker, node, values }] in order; `node` is [first, last-but-one leaf] of the tree. With "tree" a
 * worker may have several. kept: by worker, what its encoding has left behind. Returns { sums: by worker, rounds, kind }.
 */
export function reduce(kind, contributions, workers, wire, kept) {
  if (workers.length === 1) {
    const sum = kind === "tree" ? treeSum(contributions, 0, contributions[0].values.length) : contributions[0].values;
    return { sums: { [workers[0]]: sum }, rounds: [], kind };
  }
  const encoding = { ...WIRES[wire], name: wire };
  const sent = contributions.map((each) => ({ ...each, values: encoding.decode(each.values, kept?.[each.worker]) }));
  if (kind === "naive") return naive(sent, workers, encoding);
  if (kind === "server") return byServer(sent, workers, encoding);
  if (kind === "ring" && addsOnTheWay(wire)) return ring(sent, workers, encoding);
  return byOwners(kind, sent, workers, encoding);
}

/** Cuts of `size` numbers into chunks, the first ones longer by one where they do not divide. */
export function chunksOf(size, count) {
  return Array.from({ length: count }, (_, c) => runOf(size, count, c));
}

function message(from, to, chunk, [begin, end], values, holds, encoding, adds) {
  return { from, to, chunk, begin, end, values: values.slice(0), holds, adds, bytes: encoding.bytes(end - begin, values) };
}

/** Chunk c starts at worker c, is added to by the next ones, and is complete at worker c-1; then it goes around again. */
function ring(contributions, workers, encoding) {
  const size = contributions[0].values.length;
  const count = workers.length;
  const chunks = chunksOf(size, count);
  const held = contributions.map(({ values }) => values.slice(0));
  const holds = contributions.map((_, place) => chunks.map(() => 1 << workers[place]));
  const rounds = [];
  const around = (number) => ((number % count) + count) % count;
  for (let step = 0; step < 2 * (count - 1); step++) {
    const adds = step < count - 1;
    const leaving = (place) => around(adds ? place - step : place + 1 - (step - count + 1));
    const messages = workers.map((worker, place) => {
      const c = leaving(place);
      return message(worker, workers[around(place + 1)], c, chunks[c], held[place].subarray(...chunks[c]), holds[place][c], encoding, adds);
    });
    for (let place = 0; place < count; place++) {
      const { chunk, begin, end, values, holds: brought } = messages[around(place - 1)];
      for (let k = begin; k < end; k++) {
        const value = adds ? f32(held[place][k] + values[k - begin]) : values[k - begin];
        held[place][k] = encoding.name === "bf16" ? bfloat16(value) : value;
      }
      holds[place][chunk] |= brought;
    }
    rounds.push({ title: adds ? "adding" : "handing on", messages });
  }
  return { sums: byWorker(workers, held), rounds, kind: "ring" };
}

/** Worker c owns chunk c: it gets that chunk from all, adds in a fixed order, and sends the sum to all. */
function byOwners(kind, contributions, workers, encoding) {
  const size = contributions[0].values.length;
  const chunks = chunksOf(size, workers.length);
  const gather = [];
  const hand = [];
  const sum = new Float32Array(size);
  const everybody = workers.reduce((bits, worker) => bits | (1 << worker), 0);
  workers.forEach((owner, c) => {
    const [begin, end] = chunks[c];
    if (begin === end) return;
    for (const { worker, values } of contributions) {
      if (worker !== owner) gather.push(message(worker, owner, c, chunks[c], values.subarray(begin, end), 1 << worker, encoding, true));
    }
    const total = kind === "tree" ? treeSum(contributions, begin, end) : rankSum(contributions, begin, end);
    sum.set(ofSums(encoding).decode(total, null), begin);
    for (const worker of workers) {
      if (worker !== owner) hand.push(message(owner, worker, c, chunks[c], sum.subarray(begin, end), everybody, ofSums(encoding), false));
    }
  });
  const rounds = [{ title: "to the owners", messages: gather }, { title: "sums to all", messages: hand }];
  return { sums: byWorker(workers, workers.map(() => sum.slice(0))), rounds, kind: kind === "tree" ? "tree" : "owners" };
}

/** Everyone sends everything to everyone, and adds in the order of the ranks. */
function naive(contributions, workers, encoding) {
  const whole = [0, contributions[0].values.length];
  const sum = rankSum(contributions, ...whole);
  const messages = [];
  for (const { worker, values } of contributions) {
    for (const to of workers) if (to !== worker) messages.push(message(worker, to, 0, whole, values, 1 << worker, encoding, true));
  }
  return { sums: byWorker(workers, workers.map(() => sum.slice(0))), rounds: [{ title: "all to all", messages }], kind: "naive" };
}

/** The server gets everything, adds in the order of the ranks, and sends the sum to all. */
function byServer(contributions, workers, encoding) {
  const whole = [0, contributions[0].values.length];
  const sum = ofSums(encoding).decode(rankSum(contributions, ...whole), null);
  const everybody = workers.reduce((bits, worker) => bits | (1 << worker), 0);
  const push = contributions.map(({ worker, values }) => message(worker, SERVER, 0, whole, values, 1 << worker, encoding, true));
  const pull = workers.map((worker) => message(SERVER, worker, 0, whole, sum, everybody, ofSums(encoding), false));
  const rounds = [{ title: "to the server", messages: push }, { title: "back to all", messages: pull }];
  return { sums: byWorker(workers, workers.map(() => sum.slice(0))), rounds, kind: "server" };
}

function rankSum(contributions, begin, end) {
  const sum = contributions[0].values.slice(begin, end);
  for (const { values } of contributions.slice(1)) for (let k = begin; k < end; k++) sum[k - begin] += values[k];
  return sum;
}

function treeSum(contributions, begin, end) {
  const leaves = contributions[contributions.length - 1].node[1];
  return addAlong([0, leaves], contributions.map(({ node, values }) => ({ node, values: values.subarray(begin, end) })));
}

/** Add arrays along the tree, from the nodes that are given up to `root`. */
export function addAlong(root, given) {
  const found = new Map(given.map(({ node, values }) => [node.join(), values]));
  return sumAlong(root, (node) => found.get(node.join()), (a, b) => a.map((value, k) => value + b[k])).slice(0);
}

/** What a worker with these shards sends: its roots, with their sums. */
export function rootsOf(shards, mine, leaves) {
  return rootsWithin([0, shards], mine).map((node) => {
    const within = leaves.filter((leaf) => node[0] <= leaf.node[0] && leaf.node[1] <= node[1]);
    return { node, values: addAlong(node, within) };
  });
}

function byWorker(workers, sums) {
  return Object.fromEntries(workers.map((worker, place) => [worker, sums[place]]));
}

/** Bytes that each worker (and the server) has sent in these rounds. */
export function bytesSent(rounds) {
  const sent = {};
  for (const { messages } of rounds) for (const { from, bytes } of messages) sent[from] = (sent[from] ?? 0) + bytes;
  return sent;
}
