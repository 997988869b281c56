// What is simulated: a model on many devices, in the numbers that the planner's simulation takes; and what fits.

import { simulate } from "./simulation.js";

/** Trained under autocast: parameters and gradients in 4 bytes, products in bf16, Adam's state in 8.
 *
 * blocks: how many equal blocks; outside: parameters before the first one, whose gradient comes last. flops: of the
 * forward pass for one sample. activations: bytes that one sample keeps, every block checkpointed where it is a large
 * language model. micro: samples of a worker in one pass. rate: the share of the device's peak that is reached.
 */
export const MODELS = {
  resnet50: { name: "ResNet-50", params: 25.6e6, blocks: 16, outside: 0.01e6, flops: 8.2e9, activations: 90e6, micro: 64, rate: 0.17 },
  vgg16: { name: "VGG-16", params: 138e6, blocks: 16, outside: 0.04e6, flops: 31e9, activations: 120e6, micro: 64, rate: 0.3 },
  bert: { name: "BERT large", params: 335e6, blocks: 24, outside: 32e6, flops: 344e9, activations: 700e6, micro: 16, rate: 0.4 },
  gpt2: { name: "GPT-2 124M", params: 124e6, blocks: 12, outside: 39e6, flops: 292e9, activations: 900e6, micro: 16, rate: 0.4 },
  gpt2xl: { name: "GPT-2 1.5B", params: 1.56e9, blocks: 48, outside: 82e6, flops: 3.5e12, activations: 1.2e9, micro: 4, rate: 0.45 },
  "llama-8b": { name: "Llama 8B", params: 8.0e9, blocks: 32, outside: 0.53e9, flops: 34e12, activations: 3.6e9, micro: 1, rate: 0.5 },
  "llama-13b": { name: "Llama 13B", params: 13.0e9, blocks: 40, outside: 0.16e9, flops: 56e12, activations: 4.4e9, micro: 1, rate: 0.5 },
};

export const DEVICE = { name: "a GPU of 312 Tflop/s and 80 GB", flops: 312e12, memory: 80e9, bandwidth: 2.0e12 };

const GRADIENT_BYTES = 4;
const WIRE_FACTORS = { fp32: 1, bf16: 0.5, int8: 0.25 + 1 / 64, top10: 0.15 };
/** Encoding and decoding go through memory a few times. */
const WIRE_PASSES = { fp32: 0, bf16: 1.5, int8: 3, top10: 8 };
const FIRST_BUCKET = 1e6;

/** What the planner's simulation is asked, for the settings of the page on so many workers. */
export function stepInputs(settings, workers = settings.workers) {
  const model = MODELS[settings.model];
  const forward_s = (model.micro * model.flops) / (DEVICE.flops * model.rate);
  const { bytes, ready } = buckets(model, settings.bucket * 1e6);
  const link = (settings.gbits * 1e9) / 8;
  return {
    workers, per_host: 1, forward_s, backward_s: 2 * forward_s,
    optimizer_s: (28 * model.params) / DEVICE.bandwidth,
    bucket_bytes: bytes, bucket_ready: ready, gather_bytes: bytes,
    accumulation: settings.accumulation,
    zero: Number(settings.zero),
    algorithm: { ring: "ring", tree: "auto", naive: "naive", server: "naive" }[settings.reduction],
    inter_latency_s: settings.latency * 1e-6, inter_bytes_per_s: link,
    message_s: 2e-5, launch_s: 2e-5,
    wire_factor: WIRE_FACTORS[settings.wire],
    wire_s_per_byte: WIRE_PASSES[settings.wire] / DEVICE.bandwidth,
    contention: 0.04, jitter: 0.01, straggler: settings.slow,
  };
}

/** Gradients in the order in which they come, in buckets: the first one small, the others of at least this size. */
function buckets(model, atLeast) {
  const perBlock = (model.params - model.outside) / model.blocks;
  const bytes = [];
  const ready = [];
  let filled = 0;
  for (let piece = 1; piece <= 4 * model.blocks; piece++) {
    filled += (perBlock / 4) * GRADIENT_BYTES;
    if (filled >= (bytes.length ? atLeast : Math.min(FIRST_BUCKET, atLeast))) {
      bytes.push(filled);
      ready.push((0.98 * piece) / (4 * model.blocks));
      filled = 0;
    }
  }
  bytes.push(filled + model.outside * GRADIENT_BYTES);
  ready.push(1);
  return { bytes, ready };
}

/** Samples per second and worker, against one worker alone; null in what cannot be compared. */
export function efficiency(settings, workers) {
  const alone = simulate(stepInputs({ ...settings, slow: 1 }, 1)).step_s;
  return alone / simulate(stepInputs(settings, workers)).step_s;
}

/** Bytes of one worker by what they hold: parameters, gradients, optimizer state, activations. */
export function memoryOf(settings, zero = Number(settings.zero), workers = settings.workers) {
  const { params, activations, micro, blocks } = MODELS[settings.model];
  const split = (from) => (zero >= from ? workers : 1);
  // What is split must be whole for a moment: two blocks of parameters, one of gradients.
  const whole = workers > 1 ? params / blocks : 0;
  const parameters = (4 * params) / split(3) + (zero >= 3 ? 8 * whole : 0);
  const gradients = (4 * params) / split(2) + (zero >= 2 ? 4 * whole : 0);
  return { parameters, gradients, optimizer: (8 * params) / split(1), activations: activations * micro };
}
