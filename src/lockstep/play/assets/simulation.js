// The planner's simulation of one step: src/lockstep/plan/simulation.py, line by line. A test holds the two together.

const ALL_REDUCE = "all_reduce";
const REDUCE_SCATTER = "reduce_scatter";
const ALL_GATHER = "all_gather";
const SIMULATED_PASSES = 3;

/** The fields of StepInputs with their defaults; those that are undefined must be given. */
export const STEP_INPUTS = {
  workers: undefined, per_host: undefined, forward_s: undefined, backward_s: undefined, optimizer_s: undefined,
  bucket_bytes: undefined, bucket_ready: undefined, gather_bytes: [], accumulation: 1, reduces_each: false, zero: 0,
  regathers: true, algorithm: "auto", intra_latency_s: 0, intra_bytes_per_s: 1e30, inter_latency_s: 0,
  inter_bytes_per_s: 1e30, message_s: 0, launch_s: 0, wire_factor: 1, wire_s_per_byte: 0, contention: 0, jitter: 0,
  spread: 0, straggler: 1, loader_s: 0, between_s: 0,
};

/** One step: { compute_s, wait_s, exposed_s, optimizer_s, data_s, step_s, network_s, sent_bytes, spans }. */
export function simulate(inputs) {
  const given = { ...STEP_INPUTS, ...inputs };
  const passes = given.accumulation;
  if (passes <= SIMULATED_PASSES) return simulatePasses(given);
  if (!(given.zero === 3 || given.reduces_each)) return simulatePasses(given);
  const [full, less] = [0, 1].map((each) => simulatePasses({ ...given, accumulation: SIMULATED_PASSES - each }));
  const more = passes - SIMULATED_PASSES;
  const compute_s = (given.forward_s + given.backward_s) * passes;
  const wait_s = compute_s * (slowest(given) - 1);
  const exposed_s = Math.max(0, full.exposed_s + more * (full.exposed_s - less.exposed_s));
  const busy = compute_s + wait_s + exposed_s + full.optimizer_s;
  const data_s = Math.max(0, given.loader_s * passes - busy);
  return {
    compute_s, wait_s, exposed_s, optimizer_s: full.optimizer_s, data_s, step_s: busy + data_s,
    network_s: full.network_s + more * (full.network_s - less.network_s),
    sent_bytes: full.sent_bytes + more * (full.sent_bytes - less.sent_bytes),
    spans: full.spans,
  };
}

function simulatePasses(given) {
  const slow = slowest(given);
  const lanes = new Lanes(given.contention);
  const isAlone = given.workers <= 1;
  const gathers = given.zero === 3 && !isAlone;
  let sent = 0;
  const passes = given.accumulation;
  const buckets = given.bucket_bytes.length;
  const shares = given.bucket_ready.map((end, place) => end - (place ? given.bucket_ready[place - 1] : 0));
  const rest = 1 - sumOf(shares);
  let firstPass = 0;
  if (!gathers && !given.reduces_each) {
    firstPass = passes - 1;
    if (firstPass > 0) lanes.compute("passes", -1, firstPass * (given.forward_s + given.backward_s) * slow, -1);
  }
  for (let number = firstPass; number < passes; number++) {
    const sends = !isAlone && (given.reduces_each || number === passes - 1);
    if (gathers) {
      const order = Array.from({ length: buckets }, (_, k) => buckets - 1 - k);
      const arrivals = gatherAhead(lanes, given, order, lanes.numStretches);
      order.forEach((bucket, place) => lanes.compute("forward", bucket, given.forward_s * shares[bucket] * slow, arrivals[place]));
      lanes.compute("forward", -1, given.forward_s * rest * slow, -1);
      sent += sumOf(order.map((bucket) => sentBytes(given, ALL_GATHER, given.gather_bytes[bucket])));
    } else {
      lanes.compute("forward", -1, given.forward_s * slow, -1);
    }
    let arrivals = Array(buckets).fill(-1);
    if (gathers && given.regathers) {
      const others = Array.from({ length: Math.max(0, buckets - 1) }, (_, k) => k + 1);
      arrivals = [-1, ...gatherAhead(lanes, given, others, lanes.numStretches + 1)];
      sent += sumOf(others.map((bucket) => sentBytes(given, ALL_GATHER, given.gather_bytes[bucket])));
    }
    for (let bucket = 0; bucket < buckets; bucket++) {
      const launch = sends ? given.launch_s : 0;
      lanes.compute("backward", bucket, given.backward_s * shares[bucket] * slow + launch, arrivals[bucket]);
      if (sends) {
        const numBytes = given.bucket_bytes[bucket];
        const kind = given.zero ? REDUCE_SCATTER : ALL_REDUCE;
        lanes.message("reduce", bucket, reduceSeconds(given, kind, numBytes));
        sent += sentBytes(given, kind, numBytes * given.wire_factor);
      }
    }
    lanes.compute("backward", -1, given.backward_s * rest * slow, -1);
  }
  lanes.run();
  const optimizer_s = given.optimizer_s / (given.zero ? given.workers : 1) + given.between_s;
  lanes.compute("update", -1, optimizer_s, -1);
  lanes.run();
  if ((given.zero === 1 || given.zero === 2) && !isAlone) {
    for (let bucket = 0; bucket < buckets; bucket++) {
      lanes.message("gather", bucket, messageSeconds(given, ALL_GATHER, given.gather_bytes[bucket]));
      sent += sentBytes(given, ALL_GATHER, given.gather_bytes[bucket]);
    }
    lanes.run();
  }
  const compute_s = (given.forward_s + given.backward_s) * passes;
  const wait_s = compute_s * (slow - 1);
  const exposed_s = Math.max(0, lanes.now - compute_s - wait_s - optimizer_s);
  const data_s = Math.max(0, given.loader_s * passes - lanes.now);
  return {
    compute_s, wait_s, exposed_s, optimizer_s, data_s, step_s: lanes.now + data_s, network_s: lanes.network_s,
    sent_bytes: sent, spans: lanes.spans,
  };
}

function gatherAhead(lanes, given, order, begin) {
  return order.map((bucket, place) =>
    lanes.messageAt(begin + place - 2, "gather", bucket, messageSeconds(given, ALL_GATHER, given.gather_bytes[bucket])),
  );
}

/** The two lanes of a worker: stretches of computing in order, messages in order of their launch. */
class Lanes {
  constructor(contention) {
    this.speed = 1 - contention;
    this.now = 0;
    this.network_s = 0;
    this.spans = [];
    this.work = [];
    this.messages = [];
    this.launches = new Map();
    this.arrived = new Set();
    this.done = 0;
  }

  get numStretches() {
    return this.work.length;
  }

  compute(name, bucket, seconds, needs) {
    this.work.push({ name, bucket, seconds, needs });
  }

  message(name, bucket, seconds) {
    return this.messageAt(this.work.length - 1, name, bucket, seconds);
  }

  messageAt(stretch, name, bucket, seconds) {
    this.messages.push({ name, bucket, seconds });
    const number = this.messages.length - 1;
    const when = Math.max(this.done, stretch + 1);
    this.launches.set(when, [...(this.launches.get(when) ?? []), number]);
    return number;
  }

  run() {
    const queue = this.#launched();
    let workLeft = this.done < this.work.length ? this.work[this.done].seconds : 0;
    let messageLeft = queue.length ? this.messages[queue[0]].seconds : 0;
    let workBegan = this.now;
    let messageBegan = this.now;
    while (this.done < this.work.length || queue.length) {
      const next = this.work[this.done];
      const computes = next !== undefined && (next.needs < 0 || this.arrived.has(next.needs));
      const speed = queue.length ? this.speed : 1;
      let workTakes = computes && speed > 0 ? workLeft / speed : Infinity;
      if (computes && workLeft <= 0) workTakes = 0;
      const messageTakes = queue.length ? messageLeft : Infinity;
      const takes = Math.min(workTakes, messageTakes);
      this.now += takes;
      if (computes) workLeft -= takes * speed;
      if (queue.length) {
        messageLeft -= takes;
        this.network_s += takes;
      }
      if (queue.length && messageTakes <= workTakes) {
        const { name, bucket } = this.messages[queue[0]];
        this.spans.push({ lane: "network", name, index: bucket, begin: messageBegan, end: this.now });
        this.arrived.add(queue.shift());
        if (queue.length) [messageLeft, messageBegan] = [this.messages[queue[0]].seconds, this.now];
        if (next !== undefined && !computes) workBegan = this.now;
      } else {
        if (next.seconds > 0) this.spans.push({ lane: "compute", name: next.name, index: next.bucket, begin: workBegan, end: this.now });
        this.done += 1;
        const launched = this.#launched();
        if (!queue.length && launched.length) [messageLeft, messageBegan] = [this.messages[launched[0]].seconds, this.now];
        queue.push(...launched);
        if (this.done < this.work.length) [workLeft, workBegan] = [this.work[this.done].seconds, this.now];
      }
    }
  }

  #launched() {
    const found = this.launches.get(this.done) ?? [];
    this.launches.delete(this.done);
    return found;
  }
}

function reduceSeconds(given, kind, numBytes) {
  return messageSeconds(given, kind, numBytes * given.wire_factor) + numBytes * given.wire_s_per_byte;
}

function messageSeconds(given, kind, numBytes) {
  if (given.workers <= 1) return 0;
  const ways = given.algorithm === "auto" ? ["ring", "tree", "hierarchical"] : [given.algorithm];
  return given.message_s + Math.min(...ways.map((way) => collective(given, way, kind, numBytes)));
}

function collective(given, algorithm, kind, numBytes) {
  const size = given.workers;
  const local = Math.min(size, given.per_host);
  const hosts = Math.ceil(size / given.per_host);
  const rounds = kind === ALL_REDUCE ? 2 : 1;
  const intra_s = numBytes / given.intra_bytes_per_s;
  const inter_s = numBytes / given.inter_bytes_per_s;
  if (algorithm === "shm" && hosts === 1) {
    const moved = { [ALL_REDUCE]: 1, [REDUCE_SCATTER]: 0.5 + 0.5 / size, [ALL_GATHER]: 0 }[kind];
    return 2 * given.intra_latency_s + moved * intra_s;
  }
  if (algorithm === "naive") {
    if (hosts === 1) return given.intra_latency_s + (size - 1) * intra_s;
    return given.inter_latency_s + local * (size - local) * inter_s;
  }
  if (algorithm === "tree" && kind === ALL_REDUCE) {
    const depth = hosts > 1 ? Math.ceil(Math.log2(hosts)) : 0;
    const latency = 2 * (depth * given.inter_latency_s + (local - 1) * given.intra_latency_s);
    return latency + 2 * (hosts > 1 ? Math.max(intra_s, inter_s) : intra_s);
  }
  if (algorithm === "hierarchical" && hosts > 1) {
    const inside = (local - 1) * given.intra_latency_s + ((local - 1) / local) * intra_s;
    const between = (hosts - 1) * given.inter_latency_s + ((hosts - 1) / hosts) * inter_s;
    return rounds * (inside + between);
  }
  const latency = hosts > 1 ? given.inter_latency_s : given.intra_latency_s;
  const slowest_s = hosts > 1 ? Math.max(intra_s, inter_s) : intra_s;
  return rounds * ((size - 1) * latency + ((size - 1) / size) * slowest_s);
}

function sentBytes(given, kind, numBytes) {
  const size = given.workers;
  if (given.algorithm === "naive") return (size - 1) * numBytes;
  return (((kind === ALL_REDUCE ? 2 : 1) * (size - 1)) / size) * numBytes;
}

/** How many times as long as a usual worker the slowest one is expected to compute. */
function slowest(given) {
  const deviation = Math.sqrt((given.jitter * given.jitter) / Math.max(1, given.accumulation) + given.spread * given.spread);
  const byChance = 1 + expectedMax(given.workers) * deviation;
  return Math.max(byChance, given.workers > 1 ? given.straggler : 1);
}

function expectedMax(count) {
  if (count <= 1) return 0;
  const p = (count - 0.375) / (count + 0.25);
  const t = Math.sqrt(-2 * Math.log(1 - p));
  const over = 2.515517 + t * (0.802853 + t * 0.010328);
  const under = 1 + t * (1.432788 + t * (0.189269 + t * 0.001308));
  return t - over / under;
}

function sumOf(numbers) {
  return numbers.reduce((sum, number) => sum + number, 0);
}
