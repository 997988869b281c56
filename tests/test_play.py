"""The playground: its arithmetic against Python, its simulation against the planner's, and the page in a browser."""

import dataclasses
import json
import random
import time

import play_reference
import pytest
from report_browser import CHROMIUM, Browser

from lockstep.cli.main import main
from lockstep.plan.simulation import StepInputs, simulate
from lockstep.play.page import page

in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

PLAY = """
globalThis.settle = async () => {
  const { page, player } = playground;
  while (player.isBehind || page.hasChanged) await new Promise((done) => setTimeout(done, 15));
};
globalThis.go = async (address) => {
  location.hash = address;
  await new Promise((done) => setTimeout(done, 20));
  await settle();
};
globalThis.choose = async (key, value) => {
  const place = document.querySelector(`[data-key="${key}"]`);
  place.closest("details").open = true;
  const input = place.querySelector("input, select");
  if (input.type === "radio") place.querySelector(`input[value="${value}"]`).click();
  else if (input.tagName === "SELECT") { input.value = value; input.dispatchEvent(new Event("change")); }
  else {
    input.value = playground.CONTROLS.find((control) => control.key === key).values.indexOf(value);
    input.dispatchEvent(new Event("input"));
  }
  await settle();
};
globalThis.trained = (settings, steps, events = []) => {
  const training = new playground.Training({ ...playground.START, ...settings }, events);
  const losses = [];
  for (let k = 0; k < steps; k++) losses.push(training.step().loss);
  const { bytes, error } = training.last;
  return { losses, hash: training.hash(training.workers[0]), isEqual: training.isEqual, bytes, error };
};
globalThis.text = (id) => document.getElementById(id).textContent;
globalThis.until = async (holds) => {
  while (!holds()) await new Promise((done) => setTimeout(done, 20));
  return true;
};
globalThis.shownState = () => {
  const { training } = playground.player;
  return text("timeline-says") + text("memory-says") + training.hash(training.workers[0]) + training.workers;
};
globalThis.outside = () => [...document.querySelectorAll("button, p, h1, h2, label, li, canvas")].filter((each) => {
  const box = each.getBoundingClientRect();
  return box.width && !each.closest(".hidden, .bits, .skip") && (box.right > innerWidth + 1 || box.left < -1);
}).map((each) => each.outerHTML);
"""


class Play:
    """The page in a browser."""

    def __init__(self, browser, path):
        self.browser, self.path = browser, path

    def __call__(self, expression):
        return self.browser.value(expression)

    def show(self, width=1280, height=800, *, dark=False):
        self.browser.show(self.path, width, height, dark=dark)
        self(PLAY)

    def go(self, address):
        self(f"go({json.dumps(address)})")

    def trained(self, steps=10, events=(), **settings):
        return self(f"trained({json.dumps(settings)}, {steps}, {json.dumps(list(events))})")

    def key(self, key, code=None):
        for kind in ("keyDown", "keyUp"):
            given = {"text": key} if kind == "keyDown" and len(key) == 1 else {}
            self.browser.ask("Input.dispatchKeyEvent", type=kind, key=key, code=code or key, **given)


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    folder = tmp_path_factory.mktemp("play")
    assert main(["play", "--no-browser", "--out", str(folder / "play.html")]) == 0
    browser = Browser(folder / "profile", deadline=110)
    yield Play(browser, folder / "play.html")
    browser.close()


@pytest.fixture
def shown(play):
    play.browser._until = time.monotonic() + 110
    play.show()
    yield play
    assert play.browser.complaints() == []
    assert play.browser.requests() == [play.path.resolve().as_uri()]


# The file


def test_the_page_is_one_file_that_may_ask_for_nothing():
    text = page()
    assert "default-src 'none'" in text and "unsafe" not in text
    assert "<!--" not in text and " src=" not in text and "import {" not in text
    assert all(link.startswith(("data:", "#")) for link in (each.split('"')[1] for each in text.split("href=")[1:]))
    assert len(text) < 250_000


def test_where_the_page_cannot_be_written(tmp_path, capsys):
    assert main(["play", "--no-browser", "--out", str(tmp_path / "no" / "play.html")]) == 2
    assert "give --out a file in a folder that exists" in capsys.readouterr().err


# The simulation is the planner's


def settings_of_the_planner(count):
    choose = random.Random(5)
    for _ in range(count):
        buckets = choose.randint(1, 40)
        ready = sorted(choose.random() for _ in range(buckets))
        ready[-1] = choose.choice((1.0, ready[-1]))
        yield StepInputs(
            workers=choose.choice((1, 2, 3, 8, 16, 64, 1000)),
            per_host=choose.choice((1, 4, 8)),
            forward_s=choose.uniform(0.001, 1.0),
            backward_s=choose.uniform(0.001, 2.0),
            optimizer_s=choose.uniform(0.0, 0.1),
            bucket_bytes=[choose.uniform(1e5, 2e8) for _ in range(buckets)],
            bucket_ready=ready,
            gather_bytes=[choose.uniform(1e5, 1e8) for _ in range(buckets)],
            accumulation=choose.choice((1, 2, 3, 4, 17)),
            reduces_each=choose.random() < 0.3,
            zero=choose.randint(0, 3),
            regathers=choose.random() < 0.7,
            algorithm=choose.choice(("ring", "tree", "hierarchical", "shm", "naive", "auto")),
            intra_latency_s=choose.uniform(0.0, 1e-4),
            intra_bytes_per_s=choose.uniform(1e9, 3e11),
            inter_latency_s=choose.uniform(0.0, 1e-3),
            inter_bytes_per_s=choose.uniform(1e8, 1e11),
            message_s=choose.uniform(0.0, 1e-4),
            launch_s=choose.uniform(0.0, 1e-4),
            wire_factor=choose.choice((1.0, 0.5, 0.27)),
            wire_s_per_byte=choose.choice((0.0, 1e-11)),
            contention=choose.choice((0.0, 0.04, 0.5, 1.0)),
            jitter=choose.choice((0.0, 0.05)),
            spread=choose.choice((0.0, 0.03)),
            straggler=choose.choice((1.0, 2.5)),
            loader_s=choose.choice((0.0, 0.5, 5.0)),
            between_s=choose.choice((0.0, 0.01)),
        )


@in_a_browser
def test_the_simulation_is_the_planners(shown):
    given = list(settings_of_the_planner(50))
    found = shown(f"{json.dumps([dataclasses.asdict(each) for each in given])}.map(playground.simulate)")
    for inputs, theirs in zip(given, found, strict=True):
        ours = dataclasses.asdict(simulate(inputs))
        assert theirs.keys() == ours.keys()
        for name in ours.keys() - {"spans"}:
            assert theirs[name] == pytest.approx(ours[name], rel=1e-6, abs=1e-12), (name, inputs)
        assert [(each["lane"], each["name"], each["index"]) for each in theirs["spans"]] == [
            (each["lane"], each["name"], each["index"]) for each in ours["spans"]
        ]
        for name in ("begin", "end"):
            times = [[each[name] for each in spans] for spans in (theirs["spans"], ours["spans"])]
            assert times[0] == pytest.approx(times[1], rel=1e-6, abs=1e-12)


# The training is what it says


@in_a_browser
@pytest.mark.parametrize(("reduction", "workers"), [("tree", 3), ("ring", 3), ("ring", 1)])
def test_training_has_the_bits_of_float32_in_python(shown, reduction, workers):
    setting = {"workers": workers, "batch": 50, "width": 8, "rate": 0.2, "reduction": reduction}
    losses, digest = play_reference.train(**setting, steps=11)
    found = shown.trained(11, **setting)
    assert found["losses"] == losses
    assert found["hash"] == digest


@in_a_browser
def test_with_the_tree_bits_do_not_depend_on_the_number_of_workers(shown):
    counts = (1, 2, 3, 5, 8, 16)
    for setting in ({}, {"batch": 50}, {"norm": "own"}, {"norm": "all"}):
        found = [shown.trained(reduction="tree", workers=workers, **setting) for workers in counts]
        assert len({each["hash"] for each in found}) == 1, setting
        assert all(each["isEqual"] for each in found)
    ragged = shown.trained(reduction="tree", workers=5, cut="ragged")
    assert ragged["hash"] == shown.trained(reduction="tree")["hash"]
    ring = [shown.trained(reduction="ring", workers=workers) for workers in counts]
    assert len({each["hash"] for each in ring}) == len(counts)
    assert all(each["isEqual"] and each["error"] < 1e-6 for each in ring)


@in_a_browser
def test_a_lost_worker_changes_no_bit(shown):
    quiet = shown.trained(12, reduction="tree")
    events = [{"step": 4, "worker": 2, "alive": False}, {"step": 6, "worker": 0, "alive": False}]
    events += [{"step": 9, "worker": 2, "alive": True}]
    assert shown.trained(12, events, reduction="tree")["hash"] == quiet["hash"]
    assert shown.trained(12, events, reduction="ring")["hash"] != shown.trained(12, reduction="ring")["hash"]


@in_a_browser
def test_what_is_wrong_is_shown_wrong(shown):
    assert shown.trained(batch=50, workers=3, cut="ragged")["error"] < 1e-6
    assert shown.trained(batch=50, workers=3, cut="ragged", weighting="means")["error"] > 0.01
    assert not shown.trained(norm="own")["isEqual"]
    assert shown.trained(norm="all")["isEqual"]
    assert not shown.trained(7, mode="local")["isEqual"] and shown.trained(8, mode="local")["isEqual"]
    assert not shown.trained(mode="async")["isEqual"]


@in_a_browser
@pytest.mark.parametrize("workers", [2, 3, 8, 16])
def test_bytes_are_those_of_the_textbook(shown, workers):
    size = 4 * (16 * 2 + 16 + 16 * 16 + 16 + 16 + 1)
    sent = {kind: shown.trained(1, workers=workers, reduction=kind)["bytes"] for kind in ("ring", "naive", "server")}
    assert sum(sent["ring"].values()) == 2 * (workers - 1) * size
    assert max(sent["ring"].values()) - min(sent["ring"].values()) <= 8 * workers
    assert set(sent["naive"].values()) == {(workers - 1) * size}
    assert sent["server"] == {**{str(rank): size for rank in range(workers)}, "-1": workers * size}
    if 16 % workers == 0:
        tree = shown.trained(1, workers=workers, reduction="tree")["bytes"]
        assert sum(tree.values()) == 2 * (workers - 1) * size
    for wire, share in (("bf16", 0.5), ("int8", 0.27)):
        less = shown.trained(1, workers=workers, wire=wire)["bytes"]
        assert sum(less.values()) / sum(sent["ring"].values()) == pytest.approx(share, abs=0.08)
    # A tenth with its places one way, and back what was among anybody's.
    sparse = shown.trained(1, workers=workers, wire="top10")["bytes"]
    assert 0.15 < sum(sparse.values()) / sum(sent["ring"].values()) < min(0.62, 0.1 * (workers + 1))


# The page


CONTROLS = [
    ("workers", 6, "document.querySelectorAll('#hashes li').length", 6, ""),
    ("batch", 128, "playground.player.training.last.samples.length", 128, ""),
    ("accumulation", 4, "playground.player.training.last.parts.length", 16, ""),
    ("width", 32, "playground.player.training.network.size", 1185, ""),
    ("rate", 0.4, "playground.player.training.rate", 0.4, ""),
    ("scaling", "linear", "playground.player.training.rate", 0.4, ""),
    ("warmup", 50, "playground.player.training.rate.toFixed(3)", "0.232", "scaling=linear"),
    ("mode", "async", "playground.player.training.last.kind", "async", ""),
    ("staleness", 0, "Math.max(...playground.player.training.started)", 8, "mode=async&slow=4"),
    ("every", 4, "text('same-chip')", "equal on all 4", "mode=local&every=16"),
    ("reduction", "naive", "playground.player.training.last.kind", "naive", ""),
    ("wire", "int8", "playground.player.training.last.bytes[0] < 700", True, ""),
    ("weighting", "means", "document.getElementById('error').className", "note differs", "cut=ragged"),
    ("cut", "ragged", "playground.player.training.last.parts.at(-1).samples.length", 5, ""),
    ("norm", "own", "text('same-chip')", "they differ", ""),
    ("slow", 2, "/slowest 1\\d\\d ms/.test(text('timeline-says'))", True, ""),
    ("model", "bert", "/BERT/.test(text('timeline-what') + text('memory-what'))", True, ""),
    ("gbits", 10, "/exposed communication \\d{3} ms/.test(text('timeline-says'))", True, ""),
    ("latency", 1000, "/exposed communication [3-9]\\d/.test(text('timeline-says'))", True, ""),
    ("bucket", 1000, "/ 2 buckets/.test(text('timeline-says'))", True, ""),
    ("zero", "3", "/Fits with zero=3/.test(text('memory-says'))", True, ""),
]


@in_a_browser
def test_every_control_changes_what_it_should(shown):
    shown.show(700, 400)  # Less to paint.
    assert [key for key, *_ in CONTROLS] == shown("playground.CONTROLS.map(({ key }) => key)")
    for key, value, expression, wanted, before in CONTROLS:
        shown.go(f"{before}&steps=8".lstrip("&"))
        assert shown(expression) != wanted, key
        shown(f"choose({json.dumps(key)}, {json.dumps(value)})")
        assert shown(expression) == wanted, key
        assert shown("playground.player.steps") == 8
        assert f"{key}={value}" in shown("location.hash")


@in_a_browser
def test_every_state_has_an_address(shown):
    shown.go("workers=5&reduction=tree&norm=all&rate=0.4&steps=9&events=3-1.6+1&chunk=2")
    shown("playground.actions['step-on'](), settle()")
    address, digest = shown("location.hash"), shown("playground.player.training.hash(0)")
    assert shown("playground.player.steps") == 10
    shown.go("lesson=2")
    shown.go(address)
    assert shown("[playground.player.steps, playground.player.training.hash(0), location.hash]") == [
        10,
        digest,
        address,
    ]
    shown.go("workers=99&steps=-4&rate=lots&events=x&lesson=11&model=<b>")
    assert shown("[playground.player.settings.workers, playground.player.steps, playground.page.lesson]") == [4, 0, 10]


@in_a_browser
def test_ten_lessons_and_all_they_offer(shown):
    shown.show(700, 400)  # Less to paint.
    assert shown("playground.LESSONS.length") == 10
    for number in range(1, 11):
        shown(f"document.querySelector('#lessons [data-lesson=\"{number}\"]').click(), settle()")
        assert shown("text('lesson-title')") == shown(f"playground.LESSONS[{number - 1}].title")
        seen = set()
        for place in range(shown("document.getElementById('lesson-tries').children.length")):
            shown(f"document.getElementById('lesson-tries').children[{place}].click(), settle()")
            # Into the step, phase by phase, and to its end.
            shown("['phase-on', 'phase-on', 'phase-on', 'step-on'].forEach((each) => playground.actions[each]())")
            shown("settle()")
            seen.add(shown("shownState()"))
        assert len(seen) == shown(f"playground.LESSONS[{number - 1}].tries.length"), number


@in_a_browser
def test_killing_a_worker_in_the_lesson_keeps_the_bits(shown):
    shown("playground.openLesson(9), settle()")
    shown("playground.page.isPlaying = false, playground.actions['phase-on'](), settle()")
    shown("document.getElementById('lesson-tries').children[0].click(), settle()")
    shown("playground.page.isPlaying = false, playground.actions['step-on'](), settle()")
    assert shown("playground.player.training.workers") == [0, 1, 3]
    assert shown("until(() => text('alone').includes('any number'))")
    assert shown("text('bits')") == ""
    shown("choose('reduction', 'ring')")
    assert shown("until(() => text('bits'))")
    assert "First difference from one worker alone" in shown("text('bits')")
    assert shown("document.querySelectorAll('#bits mark').length") == 2


@in_a_browser
def test_phases_lead_through_a_whole_step(shown):
    for setting, phases in (
        ("reduction=ring", 3 + 6),
        ("reduction=tree", 3 + 3),
        ("reduction=naive", 3 + 2),
        ("reduction=server", 3 + 3),
        ("workers=1", 3),
        ("mode=async", 3 + 8),
    ):
        shown.go(setting)
        said = [shown("playground.actions['phase-on'](), settle(), playground.describe()") for _ in range(phases)]
        assert said[0] in ("The batch is cut for 4 workers", "The whole batch for one worker")
        assert shown("playground.player.phase.name") == "update", (setting, said)
        assert shown("playground.player.steps") == 1
        assert len(said) == len(set(said)), said


@in_a_browser
def test_the_keyboard_does_what_the_buttons_do(shown):
    shown.go("workers=4")
    shown.key("s")
    shown.key("s")
    assert shown("playground.player.steps") == 2
    shown.key("ArrowRight")
    assert shown("playground.player.phase.name") == "deal"
    shown.key("]")
    assert shown("playground.page.lesson") == 1
    shown.key("r")
    assert shown("settle(), playground.player.steps") == 0
    shown.key(" ", "Space")
    assert shown("playground.page.isPlaying")
    shown.key(" ", "Space")
    assert not shown("playground.page.isPlaying")
    shown("document.querySelector('#set-workers').focus()")
    shown.key("s")
    assert shown("playground.player.steps") == 0  # Keys belong to the control that has the focus.


@in_a_browser
def test_everything_has_a_name_for_who_cannot_see_it(shown):
    shown.go("workers=3&mode=async&steps=2")
    shown("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    nodes = shown.browser.ask("Accessibility.getFullAXTree")["nodes"]
    seen = {"button": 0, "slider": 0, "radio": 0, "combobox": 0, "image": 0, "img": 0}
    for node in nodes:
        role = node.get("role", {}).get("value")
        if role in seen and not node.get("ignored"):
            seen[role] += 1
            assert node.get("name", {}).get("value"), node
    assert seen["slider"] >= 10 and seen["radio"] >= 15 and seen["button"] >= 20 and seen["image"] + seen["img"] >= 5
    assert shown("document.getElementById('scene').getAttribute('aria-label')") == "3 workers. After 2 steps."


@in_a_browser
def test_nothing_overflows_on_a_phone(play):
    play.browser._until = time.monotonic() + 110
    for width in (320, 390):
        play.show(width, 844)
        for number in range(1, 11):
            play(f"playground.openLesson({number}), settle()")
            assert play("document.documentElement.scrollWidth") <= width
            assert play("outside()") == []
    assert play.browser.complaints() == []


@in_a_browser
def test_who_wants_less_motion_gets_it(play):
    play.browser._until = time.monotonic() + 110
    features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    play.browser.ask("Emulation.setEmulatedMedia", features=features)
    play.browser.ask("Page.navigate", url="about:blank")
    play.browser.ask("Page.navigate", url=play.path.resolve().as_uri())
    while not play("typeof playground === 'object'"):
        time.sleep(0.02)
    play(PLAY)
    assert not play("playground.page.isPlaying")
    play("playground.openLesson(3), settle()")
    assert not play("playground.page.isPlaying")
