// What can be set, how it is asked for, and how a state of the page is written into its address.

const range = (first, last) => Array.from({ length: last - first + 1 }, (_, k) => first + k);
const times = (value) => `${value}×`;

/** kind "slider": one of many values in a row; kind "choice": one of a few, by name. */
export const CONTROLS = [
  { group: "Training", key: "workers", label: "Workers", kind: "slider", values: range(1, 16), start: 4, help: "processes with one device each" },
  { group: "Training", key: "batch", label: "Global batch", kind: "slider", values: [16, 24, 32, 50, 64, 96, 128, 192, 256], start: 64, say: (v) => `${v} samples`, help: "what one update is computed from" },
  { group: "Training", key: "accumulation", label: "Accumulation", kind: "slider", values: [1, 2, 4, 8], start: 1, say: (v) => (v === 1 ? "off" : `${v} passes`), help: "passes of a worker in one update; it communicates once" },
  { group: "Training", key: "width", label: "Network", kind: "slider", values: [4, 8, 12, 16, 24, 32], start: 16, say: (v) => `2–${v}–${v}–1`, help: "units of the two hidden layers" },
  { group: "Training", key: "rate", label: "Learning rate", kind: "slider", values: [0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6], start: 0.2, help: "tuned for a batch of 32" },
  { group: "Training", key: "scaling", label: "Scaled with the batch", kind: "choice", values: { none: "no", sqrt: "√", linear: "linear" }, start: "none", help: "rate × batch / 32, or its square root" },
  { group: "Training", key: "warmup", label: "Warm-up", kind: "slider", values: [0, 10, 20, 50, 100], start: 0, say: (v) => (v ? `${v} steps` : "none"), help: "steps from the tuned rate to the scaled one" },

  { group: "Together", key: "mode", label: "Who waits", kind: "choice", values: { sync: "all", async: "nobody", local: "now and then" }, start: "sync", help: "synchronous, asynchronous, or local steps" },
  { group: "Together", key: "staleness", label: "Staleness", kind: "slider", values: range(0, 8), start: 4, say: (v) => (v ? `≤ ${v} passes ahead` : "0: wait for all"), help: "how far a worker may run ahead of the slowest", shown: (s) => s.mode === "async" },
  { group: "Together", key: "every", label: "Meet every", kind: "slider", values: [2, 4, 8, 16, 32], start: 8, say: (v) => `${v} steps`, help: "local steps between two means of the weights", shown: (s) => s.mode === "local" },
  { group: "Together", key: "reduction", label: "Gradients travel", kind: "choice", values: { ring: "ring", tree: "tree", naive: "naive", server: "server" }, start: "ring", shown: (s) => s.mode !== "async", help: "around a ring, added along one tree of 16 shards, everyone to everyone, or by a parameter server" },
  { group: "Together", key: "wire", label: "Compression", kind: "choice", values: { fp32: "fp32", bf16: "bf16", int8: "int8", top10: "top 10 %" }, start: "fp32", help: "how a gradient is encoded while it travels" },
  { group: "Together", key: "weighting", label: "Gradients count", kind: "choice", values: { samples: "by samples", means: "alike" }, start: "samples", shown: (s) => s.mode === "sync" && s.reduction !== "tree", help: "alike: the mean of the workers' means" },
  { group: "Together", key: "cut", label: "Parts", kind: "choice", values: { even: "even", ragged: "one short" }, start: "even", help: "one short: the last worker has a quarter of what the others have" },
  { group: "Together", key: "norm", label: "Batch norm", kind: "choice", values: { off: "none", own: "each its own", all: "global" }, start: "off", help: "statistics of each part, or of the global batch" },

  { group: "Trouble", key: "slow", label: "Last worker slower", kind: "slider", values: [1, 1.25, 1.5, 2, 3, 4], start: 1, say: (v) => (v === 1 ? "no" : times(v)), help: "a straggler" },

  { group: "Real machines, simulated", key: "model", label: "Model", kind: "select", values: {}, start: "gpt2", help: "what the simulated devices train" },
  { group: "Real machines, simulated", key: "gbits", label: "Bandwidth", kind: "slider", values: [1, 10, 25, 50, 100, 200, 400, 800, 1600, 3200], start: 100, say: (v) => `${v} Gbit/s`, help: "of one worker, one way" },
  { group: "Real machines, simulated", key: "latency", label: "Latency", kind: "slider", values: [1, 3, 10, 30, 100, 300, 1000, 3000], start: 10, say: (v) => (v < 1000 ? `${v} µs` : `${v / 1000} ms`), help: "of one message" },
  { group: "Real machines, simulated", key: "bucket", label: "Bucket", kind: "slider", values: [1, 2, 5, 10, 25, 50, 100, 200, 1000], start: 25, say: (v) => `${v} MB`, help: "gradients that travel as one message" },
  { group: "Real machines, simulated", key: "zero", label: "ZeRO", kind: "choice", values: { 0: "0", 1: "1", 2: "2", 3: "3" }, start: "0", help: "what is split over the workers: 1 optimizer state, 2 gradients as well, 3 parameters as well" },
];

/** Changes of these change only what is simulated, and not the training. */
export const SIMULATED = new Set(["model", "gbits", "latency", "bucket", "zero"]);

export const START = Object.fromEntries([...CONTROLS.map(({ key, start }) => [key, start]), ["seed", 0]]);

const valuesOf = (control) => (Array.isArray(control.values) ? control.values : Object.keys(control.values));

/** The settings in words of an address: only what differs from the start. */
export function toFragment({ settings, events, steps, lesson, follow }) {
  const words = new URLSearchParams();
  if (lesson) words.set("lesson", lesson);
  for (const [key, start] of Object.entries(START)) if (settings[key] !== start) words.set(key, settings[key]);
  if (events.length) words.set("events", events.map(({ step, worker, alive }) => `${step}${alive ? "+" : "-"}${worker}`).join("."));
  if (steps) words.set("steps", steps);
  if (follow) words.set("chunk", follow);
  return words.toString().replaceAll("%2B", "+");
}

/** What an address says; anything that is not a value of a control is left out. */
export function fromFragment(text) {
  const words = new URLSearchParams(text.replace(/^#/, "").replaceAll("+", "%2B"));
  const settings = {};
  for (const control of CONTROLS) {
    const found = valuesOf(control).find((value) => String(value) === words.get(control.key));
    if (found !== undefined) settings[control.key] = found;
  }
  const whole = (name, most) => Math.min(most, Math.max(0, Math.floor(Number(words.get(name)) || 0)));
  if (words.has("seed")) settings.seed = whole("seed", 9999);
  const events = [...(words.get("events") ?? "").matchAll(/(\d{1,5})([+-])(\d{1,2})/g)].map(([, step, sign, worker]) => ({
    step: Number(step), worker: Number(worker), alive: sign === "+",
  }));
  return { settings, events, steps: whole("steps", 2000), lesson: whole("lesson", 10), follow: whole("chunk", 15) };
}
