// The page: controls, lessons, keys, the address, and one loop that draws what has changed.

import { makeColours, watchSize } from "./colours.js";
import { LESSONS } from "./lessons.js";
import { MODELS, stepInputs } from "./machines.js";
import { byId, drawEfficiency, drawField, drawLoss, drawTimeline, make, showBytes, showHashes, showMemory, showOthers, showSum } from "./panels.js";
import { Player } from "./player.js";
import { CONTROLS, START, fromFragment, toFragment } from "./settings.js";
import { simulate } from "./simulation.js";
import { Stage } from "./stage.js";
import { Training } from "./training.js";

const SPEEDS = [0.25, 0.5, 1, 2, 4, 12, Infinity];
const SPEED_NAMES = ["¼×", "½×", "1×", "2×", "4×", "12×", "max"];
const SLICE_MS = 9;
/** Up to this width everything is in one column, the lesson above. */
const NARROW = 760;

const isStill = matchMedia("(prefers-reduced-motion: reduce)");
const isDark = matchMedia("(prefers-color-scheme: dark)");
const published = JSON.parse(byId("published").textContent || "[]");

CONTROLS.find(({ key }) => key === "model").values = Object.fromEntries(Object.entries(MODELS).map(([key, { name }]) => [key, name]));

const page = { lesson: 0, follow: 0, speed: 2, isPlaying: false, hasChanged: true, needsMachines: true, comparedAt: "", colours: makeColours(isDark.matches) };
const player = new Player({ settings: { ...START }, events: [], steps: 0 });
const stage = new Stage(byId("scene"));
const inputs = new Map();

// --- States ---

/** Change settings; the training is done anew with them, as far as it had come or to step `to`. */
function set(patch, { events = player.events, to = player.steps } = {}) {
  player.begin({ settings: { ...player.settings, ...patch }, events, steps: to });
  player.catchUp(0);
  changed();
}

function changed() {
  page.hasChanged = page.needsMachines = true;
  refreshControls();
  writeAddress();
  wake();
}

function writeAddress() {
  const text = toFragment({ settings: player.settings, events: player.events, steps: player.isBehind ? player.target : player.steps, lesson: page.lesson, follow: page.follow });
  if (text !== location.hash.slice(1)) history.replaceState(null, "", `#${text}`);
}

function readAddress() {
  const { settings, events, steps, lesson, follow } = fromFragment(location.hash);
  page.lesson = lesson;
  page.follow = follow;
  page.isPlaying = false;
  player.begin({ settings: { ...START, ...settings }, events, steps }, { isNew: true });
  showLesson();
  changed();
}

function say(text) {
  byId("heard").textContent = text;
}

// --- Lessons ---

function openLesson(number) {
  const lesson = LESSONS[number - 1];
  page.lesson = number;
  player.begin({ settings: { ...START, ...lesson.settings }, events: [], steps: lesson.steps ?? 0 }, { isNew: true });
  page.isPlaying = !isStill.matches;
  page.speed = 2;
  showLesson();
  changed();
  look(lesson.look);
}

function look(name) {
  for (const card of document.querySelectorAll("[data-look]")) card.classList.toggle("looked", Boolean(name) && card.matches(`[data-look~="${name}"]`));
  if (name && innerWidth > NARROW) show(name);
}

/** Bring a card into sight. */
function show(name) {
  const card = document.querySelector(`[data-look~="${name}"]`);
  card.scrollIntoView({ block: innerWidth > NARROW ? "nearest" : "start", behavior: isStill.matches ? "auto" : "smooth" });
}

function showLesson() {
  const lesson = LESSONS[page.lesson - 1];
  byId("lesson-number").textContent = lesson ? `Lesson ${page.lesson} of ${LESSONS.length}` : "Explore";
  byId("lesson-title").textContent = lesson?.title ?? "Data-parallel training, computed as you watch";
  byId("lesson-text").replaceChildren(...(lesson?.text ?? ["A small network is really trained by as many workers as you set. Change anything; every state has an address of its own. Or take the tour: ten short lessons."]).map(paragraph));
  byId("lesson-tries").replaceChildren(...(lesson?.tries ?? []).map(tryButton));
  byId("lesson-back").disabled = page.lesson <= 1;
  byId("lesson-next").textContent = page.lesson ? (page.lesson === LESSONS.length ? "Explore →" : "Next →") : "Start the tour →";
  for (const button of byId("lessons").querySelectorAll("button")) {
    if (Number(button.dataset.lesson) === page.lesson) button.setAttribute("aria-current", "step");
    else button.removeAttribute("aria-current");
  }
}

/** A paragraph in which <em> is all the markup there is. */
function paragraph(text) {
  return make("p", {}, ...text.split(/<\/?em>/).map((piece, k) => (k % 2 ? make("em", { textContent: piece }) : piece)));
}

function tryButton(each) {
  const button = make("button", { type: "button", textContent: each.label });
  button.addEventListener("click", () => {
    for (const other of byId("lesson-tries").children) other.setAttribute("aria-pressed", String(other === button));
    if (each.kill !== undefined) lose(each.kill);
    else if (each.join !== undefined) bring(each.join);
    else set(each.set ?? {}, { to: each.to ?? player.steps + (each.steps ?? 0) });
    if (each.to !== undefined || each.steps) page.isPlaying = false;
    else if (!isStill.matches) page.isPlaying = true;
    say(`${each.label}.`);
    if (innerWidth <= NARROW) show(LESSONS[page.lesson - 1]?.look ?? "stage");
  });
  return button;
}

// --- Workers that are lost and come back ---

function lose(worker) {
  if (player.training.workers.length < 2 || !player.training.workers.includes(worker)) return;
  const step = player.steps;
  set({}, { events: [...player.events.filter((event) => event.step <= step), { step, worker, alive: false }], to: step });
  say(`Worker ${worker} is lost. Step ${step} is done again by the others.`);
}

function bring(worker) {
  const step = player.steps;
  set({}, { events: [...player.events.filter((event) => event.step <= step), { step, worker, alive: true }], to: step });
  say(`Worker ${worker} joins at step ${step}.`);
}

/** Workers that are there at the coming step. */
function aliveNow() {
  const alive = new Set(Array.from({ length: player.settings.workers }, (_, worker) => worker));
  for (const event of player.events.filter(({ step }) => step <= player.steps)) {
    if (event.alive) alive.add(event.worker);
    else alive.delete(event.worker);
  }
  return alive;
}

// --- Controls ---

function makeControls() {
  const groups = new Map();
  for (const control of CONTROLS) {
    if (!groups.has(control.group)) {
      const inside = make("div", { className: "inside" });
      const details = make("details", { open: groups.size < 2 }, make("summary", { textContent: control.group }), inside);
      groups.set(control.group, inside);
      byId("controls").append(details);
    }
    groups.get(control.group).append(makeControl(control));
  }
  const people = make("div", { className: "people", id: "people", role: "group", ariaLabel: "Workers that are there" });
  groups.get("Trouble").append(make("div", { className: "control" }, make("div", { className: "head", textContent: "Lose a worker, or bring it back" }), people));
}

function makeControl(control) {
  const id = `set-${control.key}`;
  const help = make("small", { className: "help", id: `${id}-help`, textContent: control.help });
  if (control.kind === "slider") {
    const input = make("input", { type: "range", id, min: 0, max: control.values.length - 1, step: 1 });
    const output = make("output", { htmlFor: id });
    input.setAttribute("aria-describedby", help.id);
    input.addEventListener("input", () => set({ [control.key]: control.values[Number(input.value)] }));
    inputs.set(control.key, { control, input, output });
    const head = make("div", { className: "head" }, make("label", { htmlFor: id, textContent: control.label }), output);
    return make("div", { className: "control", dataset: { key: control.key } }, head, input, help);
  }
  if (control.kind === "select") {
    const options = Object.entries(control.values).map(([value, text]) => make("option", { value, textContent: text }));
    const input = make("select", { id }, ...options);
    input.addEventListener("change", () => set({ [control.key]: input.value }));
    inputs.set(control.key, { control, input });
    const label = make("label", { className: "head", htmlFor: id, textContent: control.label });
    return make("div", { className: "control", dataset: { key: control.key } }, label, input, help);
  }
  const radios = Object.entries(control.values).map(([value, text]) => {
    const input = make("input", { type: "radio", name: id, value });
    input.addEventListener("change", () => set({ [control.key]: value }));
    return make("label", {}, input, make("span", { textContent: text }));
  });
  inputs.set(control.key, { control, radios });
  const field = make("fieldset", { className: "control", dataset: { key: control.key } }, make("legend", { className: "head", textContent: control.label }), make("div", { className: "segments" }, ...radios), help);
  field.setAttribute("aria-describedby", help.id);
  return field;
}

function refreshControls() {
  const { settings } = player;
  for (const [key, { control, input, output, radios }] of inputs) {
    const value = settings[key];
    if (radios) for (const label of radios) label.firstChild.checked = label.firstChild.value === value;
    else if (control.kind === "select") input.value = value;
    else {
      const place = control.values.indexOf(value);
      const text = control.say ? control.say(value) : String(value);
      input.value = place;
      input.style.setProperty("--part", `${(100 * place) / (control.values.length - 1)}%`);
      input.setAttribute("aria-valuetext", text);
      output.textContent = text;
    }
    if (control.shown) byId("controls").querySelector(`[data-key="${key}"]`).hidden = !control.shown(settings);
  }
  const alive = aliveNow();
  byId("people").replaceChildren(...Array.from({ length: settings.workers }, (_, worker) => {
    const isAlive = alive.has(worker);
    const button = make("button", { type: "button", title: isAlive ? `lose worker ${worker}` : `bring worker ${worker} back` });
    button.append(make("i", { className: "dot", style: { background: page.colours.worker[worker], opacity: isAlive ? 1 : 0.3 } }), isAlive ? `${worker}` : `${worker} lost`);
    button.setAttribute("aria-label", isAlive ? `Lose worker ${worker}` : `Bring worker ${worker} back`);
    button.disabled = isAlive && alive.size < 2;
    button.addEventListener("click", () => {
      (isAlive ? lose : bring)(worker);
      byId("people").children[worker]?.focus();
    });
    return button;
  }));
  byId("follow").replaceChildren(...Array.from({ length: settings.workers }, (_, k) => make("option", { value: k, textContent: k, selected: k === page.follow })));
  byId("play").textContent = page.isPlaying ? "Pause" : "Run";
  byId("play").setAttribute("aria-pressed", String(page.isPlaying));
  byId("speed").value = page.speed;
  byId("speed").style.setProperty("--part", `${(100 * page.speed) / (SPEEDS.length - 1)}%`);
  byId("speed").setAttribute("aria-valuetext", SPEED_NAMES[page.speed]);
  byId("speed-says").textContent = SPEED_NAMES[page.speed];
}

// --- Buttons and keys ---

const actions = {
  play() {
    page.isPlaying = !page.isPlaying;
    if (!page.isPlaying) say(describe());
    changed();
  },
  "phase-on"() {
    page.isPlaying = false;
    player.nextPhase();
    say(describe());
    changed();
  },
  "step-on"() {
    page.isPlaying = false;
    player.wholeStep();
    say(describe());
    changed();
  },
  "far-on"() {
    page.isPlaying = false;
    player.rest();
    player.target = player.training.steps + 50;
    changed();
  },
  restart() {
    page.isPlaying = false;
    set({}, { events: [], to: 0 });
    say("From the first step.");
  },
};

const KEYS = { " ": "play", ArrowRight: "phase-on", s: "step-on", f: "far-on", r: "restart" };

function listen() {
  for (const [id, act] of Object.entries(actions)) byId(id).addEventListener("click", act);
  byId("speed").addEventListener("input", (event) => {
    page.speed = Number(event.target.value);
    refreshControls();
  });
  byId("follow").addEventListener("change", (event) => follow(Number(event.target.value)));
  byId("scene").addEventListener("click", (event) => {
    const worker = stage.workerAt(event.offsetX, event.offsetY);
    if (worker !== null) follow(worker);
  });
  byId("lesson-next").addEventListener("click", () => (page.lesson < LESSONS.length ? openLesson(page.lesson + 1) : explore()));
  byId("lesson-back").addEventListener("click", () => openLesson(page.lesson - 1));
  byId("share").addEventListener("click", share);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, summary")) return;
    if (event.key === " " && event.target.closest("button")) return;
    if (event.key === "]" && page.lesson < LESSONS.length) openLesson(page.lesson + 1);
    if (event.key === "[" && page.lesson > 1) openLesson(page.lesson - 1);
    if (!(event.key in KEYS)) return;
    event.preventDefault();
    actions[KEYS[event.key]]();
  });
  addEventListener("hashchange", readAddress);
  for (const canvas of document.querySelectorAll("canvas")) {
    watchSize(canvas, () => {
      page.hasChanged = page.needsMachines = true;
      wake();
    });
  }
  isDark.addEventListener("change", () => {
    page.colours = makeColours(isDark.matches);
    changed();
  });
}

function explore() {
  page.lesson = 0;
  showLesson();
  look(null);
  writeAddress();
}

function follow(chunk) {
  page.follow = chunk;
  changed();
}

async function share() {
  writeAddress();
  try {
    await navigator.clipboard.writeText(location.href);
    byId("share").textContent = "Copied";
    setTimeout(() => (byId("share").textContent = "Copy link"), 1500);
  } catch {
    prompt("The address of this state:", location.href);
  }
}

// --- What is on show, in words ---

function describe() {
  const { step, phase, settings, training } = player;
  const [count, steps] = [training.workers.length, player.steps];
  if (player.isBehind) return `Training: step ${training.steps} of ${player.target}`;
  if (!step) return steps ? `After ${steps} ${steps === 1 ? "step" : "steps"}` : "Ready";
  const who = count === 1 ? "one worker" : `${count} workers`;
  if (phase.name === "deal") return step.lost.length ? `Worker ${step.lost.join(", ")} is lost: its part moves` : count === 1 ? "The whole batch for one worker" : `The batch is cut for ${who}`;
  if (phase.name === "compute") return player.progress < 1 / 3 ? `Forward on ${who}` : `Backward on ${who}`;
  if (phase.name === "sum") return { tree: "Each chunk's owner adds along the tree", server: "The server adds", naive: "Everyone adds, in the order of the ranks" }[step.kind] ?? "Owners add";
  if (phase.name === "update") return count === 1 ? "The update" : settings.mode === "local" ? (step.rounds.length ? "All take the mean of the weights" : "Each takes its own step") : settings.mode === "async" ? "The server has taken every gradient by itself" : "The same update on all";
  const { title } = step.rounds[phase.index];
  if (step.kind === "ring") return `Around the ring: ${title}, ${phase.index + 1} of ${step.rounds.length}`;
  return title[0].toUpperCase() + title.slice(1);
}

// --- The loop ---

const frames = { last: 0, isDue: false, times: [], work: [] };

function frame(now) {
  const seconds = frames.last ? Math.min(0.1, (now - frames.last) / 1000) : 0;
  if (frames.last) {
    frames.times.push(now - frames.last);
    if (frames.times.length > 600) frames.times.shift();
  }
  frames.last = now;
  const begun = performance.now();
  let isMoving = false;
  if (page.hasChanged) showPanels();
  if (player.isBehind) {
    isMoving = true;
    if (player.catchUp(3 * SLICE_MS)) changed();
    page.hasChanged = true;
  } else if (page.isPlaying) {
    const speed = SPEEDS[page.speed];
    isMoving = true;
    if (speed === Infinity) {
      player.wholeStep();
      page.hasChanged = true;
    } else if (player.advance(seconds * speed)) page.hasChanged = true;
  }
  isMoving = stage.draw(player, page.colours, page.follow, seconds, isStill.matches) || isMoving;
  showNow();
  if (!page.hasChanged && !page.isPlaying) isMoving = compareOthers() || isMoving;
  frames.work.push(performance.now() - begun);
  if (frames.work.length > 600) frames.work.shift();
  frames.isDue = false;
  if (isMoving || page.hasChanged) wake();
  else frames.last = 0;
}

/** Ask for the next frame; there is none while nothing moves and nothing was changed. */
function wake() {
  if (!frames.isDue) requestAnimationFrame(frame);
  frames.isDue = true;
}

function setText(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

function showNow() {
  const text = describe();
  if (byId("phase").textContent !== text) {
    setText("phase", text);
    byId("scene").setAttribute("aria-label", `${player.training.workers.length} workers. ${text}.`);
    showSum(player, page.colours, page.follow);
    showBytes(player, page.colours);
  }
  const loss = player.history[player.steps - 1]?.loss;
  setText("counts", `step ${player.steps}${loss === undefined ? "" : ` · loss ${loss.toFixed(4)}`}`);
}

function showPanels() {
  page.hasChanged = false;
  const isInFlight = player.step && !player.isCommitted; // What the workers hold already is not on show yet.
  if (!isInFlight && !player.isBehind) drawField(player, page.colours);
  drawLoss(player, page.colours);
  if (!player.isBehind && !isInFlight) {
    showHashes(player, page.colours);
    showOthers(player, false);
    page.comparedAt = "";
  }
  showBytes(player, page.colours);
  showSum(player, page.colours, page.follow);
  if (page.needsMachines) {
    page.needsMachines = false;
    drawTimeline(player.settings, page.colours);
    showMemory(player.settings, page.colours);
    drawEfficiency(player.settings, published, page.colours);
  }
}

/** While the run pauses: the same training on other numbers of workers. Returns whether there is more to do. */
function compareOthers() {
  const at = `${toFragment({ settings: player.settings, events: player.events, steps: player.steps })}`;
  if (page.comparedAt === at || (player.step && !player.isCommitted)) return false;
  if (!player.compare(SLICE_MS)) return true;
  page.comparedAt = at;
  showOthers(player, true);
  return false;
}

// --- Begin ---

makeControls();
byId("lessons").append(...LESSONS.map(({ title }, k) => {
  const button = make("button", { type: "button", textContent: k + 1, title, dataset: { lesson: k + 1 } });
  button.setAttribute("aria-label", `Lesson ${k + 1}: ${title}`);
  button.addEventListener("click", () => openLesson(k + 1));
  return make("li", {}, button);
}));
listen();
if (location.hash.length > 1) readAddress();
else openLesson(1);

/** For the console and for tests: the page's parts, and what it computes. */
globalThis.playground = { page, player, frames, wake, set, openLesson, actions, describe, simulate, stepInputs, Training, START, LESSONS, CONTROLS };
