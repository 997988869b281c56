// Where the page is: how far the training has come, and which phase of the step in flight is shown.

import { SERVER } from "./reduction.js";
import { SIMULATED } from "./settings.js";
import { Training } from "./training.js";

/** Numbers of workers whose weights are compared with those on show. */
export const COMPARED = [1, 2, 3, 4, 8, 16];

const SECONDS = { deal: 1.1, compute: 1.5, sum: 1.5, update: 0.9 };
const REDUCED_RING_SECONDS = 7;

export class Player {
  constructor(state) {
    this.ghost = [];
    /** Hashes of the weights on show, by worker. */
    this.shownHashes = new Map();
    this.begin(state);
  }

  /** Go to a state { settings, events, steps }: the training is done anew, in slices (see catchUp). */
  begin({ settings, events, steps }, { isNew = false } = {}) {
    if (isNew) this.ghost = this.history = [];
    const isSame = this.settings && Object.keys(settings).every((key) => SIMULATED.has(key) || settings[key] === this.settings[key]);
    const isSameEvents = this.events && JSON.stringify(events) === JSON.stringify(this.events);
    this.settings = settings;
    if (isSame && isSameEvents && steps === this.steps && !isNew) return;
    if (!isSame && this.history?.length > 1) this.ghost = this.history;
    this.events = events;
    this.training = new Training(settings, events);
    this.others = new Map();
    this.history = [];
    this.target = steps;
    this.rest();
  }

  /** How many steps have taken effect on show. */
  get steps() {
    return this.step && !this.isCommitted ? this.training.steps - 1 : this.training.steps;
  }

  get isBehind() {
    return this.training.steps < this.target;
  }

  /** Train for about so many milliseconds towards the state that was asked for; true when it is reached. */
  catchUp(budget) {
    const until = performance.now() + budget;
    while (this.isBehind && performance.now() < until) this.#train(this.training.steps + 1 === this.target);
    if (this.isBehind) return false;
    this.training.applyEvents();
    return true;
  }

  /** Train the same on other numbers of workers, in slices; true when all have come as far. */
  compare(budget) {
    const until = performance.now() + budget;
    for (const workers of COMPARED) {
      if (!this.others.has(workers)) this.others.set(workers, new Training({ ...this.settings, workers }));
      const other = this.others.get(workers);
      while (other.steps < this.steps) {
        if (performance.now() > until) return false;
        other.step(false);
      }
    }
    return true;
  }

  /** Between two steps. */
  rest() {
    this.step = null;
    this.phases = [];
    this.place = 0;
    this.time = 0;
    this.isCommitted = false;
  }

  /** Let so many seconds pass; returns whether the weights on show have changed. */
  advance(seconds) {
    let changed = false;
    let left = seconds;
    if (!this.step) this.#beginStep();
    while (left > 0) {
      const phase = this.phases[this.place];
      const takes = Math.min(left, phase.seconds - this.time);
      this.time += takes;
      left -= takes;
      if (phase.name === "update") changed = this.#commit() || changed;
      if (this.time < phase.seconds) break;
      if (this.place + 1 === this.phases.length) {
        this.rest();
        if (left <= 0) break;
        this.#beginStep();
      } else {
        this.place += 1;
        this.time = 0;
      }
    }
    return changed;
  }

  /** To the end of this phase, and into the next. */
  nextPhase() {
    if (!this.step) return this.advance(1e-6);
    return this.advance(this.phases[this.place].seconds - this.time + 1e-6);
  }

  /** To the end of the step in flight, or a whole one. */
  wholeStep() {
    if (!this.step) this.#train();
    this.rest();
  }

  get phase() {
    return this.step ? this.phases[this.place] : null;
  }

  /** How much of the phase is over, from 0 to 1. */
  get progress() {
    return this.step ? Math.min(1, this.time / this.phases[this.place].seconds) : 0;
  }

  #train(isMeasured = true) {
    const step = this.training.step(isMeasured);
    this.history.push({ samples: this.training.samples, loss: step.loss });
    return step;
  }

  #beginStep() {
    this.step = this.#train();
    this.phases = phasesOf(this.step, this.settings);
    this.holds = holdsAfterRounds(this.step, this.training.workers);
    this.place = 0;
    this.time = 0;
    this.isCommitted = false;
  }

  #commit() {
    const changed = !this.isCommitted;
    this.isCommitted = true;
    return changed;
  }
}

/** What a worker's passes take, next to those of a worker of usual speed with an equal part. */
export function costsOf(step, settings, workers) {
  const mean = step.samples.length / workers.length;
  const costs = {};
  for (const worker of workers) {
    const size = step.parts.reduce((sum, part) => sum + (part.worker === worker ? part.end - part.begin : 0), 0);
    costs[worker] = (size / mean) * (worker === settings.workers - 1 ? settings.slow : 1);
  }
  return costs;
}

function phasesOf(step, settings) {
  const workers = [...new Set(step.parts.map((part) => part.worker))];
  const slowest = Math.max(...Object.values(costsOf(step, settings, workers)));
  const phases = [{ name: "deal", seconds: SECONDS.deal }, { name: "compute", seconds: SECONDS.compute * Math.min(4, Math.max(1, slowest)) }];
  const isRing = step.kind === "ring";
  step.rounds.forEach((round, index) => {
    const inAll = isRing ? REDUCED_RING_SECONDS / step.rounds.length : step.kind === "async" ? 0.55 : 1.7;
    phases.push({ name: "round", index, seconds: Math.min(1.25, Math.max(0.3, inAll)) * (isRing ? 1 : 1.2) });
    if (index === 0 && ["tree", "owners", "server", "naive"].includes(step.kind)) phases.push({ name: "sum", index, seconds: SECONDS.sum });
  });
  phases.push({ name: "update", seconds: SECONDS.update });
  return phases;
}

/** What every worker holds of every chunk, as bits of the workers in it: before the first round and after each. */
function holdsAfterRounds(step, workers) {
  const rows = workers.length;
  let held = new Map([...workers, SERVER].map((worker) => [worker, Array(rows).fill(worker === SERVER ? 0 : 1 << worker)]));
  const after = [held];
  for (const { messages } of step.rounds) {
    held = new Map([...held].map(([worker, chunks]) => [worker, [...chunks]]));
    for (const { from, to, chunk, holds, adds } of messages) {
      const isWhole = step.kind === "naive" || step.kind === "server" || step.kind === "async";
      const all = isWhole ? held.get(to).keys() : [chunk];
      for (const row of all) held.get(to)[row] = adds ? held.get(to)[row] | holds : holds;
      if (step.kind === "async" && from !== SERVER) held.get(from).fill(0);
      if (step.kind === "async" && from === SERVER) held.get(to).fill(0);
    }
    after.push(held);
  }
  return after;
}
