"""The page of a run: well-formed, escaped, small; in a real browser, where there is one; its colours; its trace."""

import itertools
import json
import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report_browser import CHROMIUM, Browser
from report_run import write_hang, write_run

import lockstep
from lockstep.cli.main import main
from lockstep.watching import timelines
from lockstep.watching.run_folder import WorkerTrace
from lockstep.watching.step_record import SHARES, Flight
from lockstep.watching.timelines import lanes, reductions

VOID = {"meta", "link", "br", "img", "input", "hr"}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


class Reader(HTMLParser):
    """Checks that elements are closed in order, and keeps what is asked for."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.labels, self.text = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append((tag, found))
        self.ids += [found["id"]] if "id" in found else []
        self.labels += [found["aria-label"]] if found.get("role") == "img" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)


def page_of(folder):
    assert main(["report", str(folder)]) == 0
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("run"))
    page_of(folder)
    return folder


def test_the_page_is_well_formed_and_says_everything(folder):
    page = Reader((folder / "report.html").read_text())
    text = " ".join(page.text)
    assert len(page.ids) == len(set(page.ids))
    for heading in ("A step, worker by worker", "Where the time goes", "Speed", "Training", "Communication"):
        assert heading in text
    assert "The largest batch that still pays: 1,800; yours: 256." in text
    assert "64.2 MB" in text and "Worker 2 holds everyone up" in text
    charts = [label for label in page.labels if " over steps " in label]
    assert len(charts) == 9 and any(label.startswith("Efficiency over steps 0 to 299") for label in charts)


def test_the_page_refers_to_nothing_outside(folder):
    page = Reader((folder / "report.html").read_text())
    for tag, attributes in page.tags:
        assert not attributes.get("src") and tag not in ("iframe", "object", "embed")
        assert all(not name.startswith("on") for name in attributes)
        assert attributes.get("href", "data:").startswith("data:")


def test_everything_from_the_run_is_escaped(tmp_path):
    write_run(tmp_path, steps=30, name=HOSTILE)
    facts = json.loads((tmp_path / "run.json").read_text())
    for name in ("device", "backend", "lockstep", "torch", "started"):
        facts[name] = HOSTILE
    facts["hosts"] = [HOSTILE] * 4
    facts["buckets"][0]["params"] = [HOSTILE] * 5
    (tmp_path / "run.json").write_text(json.dumps(facts))
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    for line in lines:
        line["verdict"] = line["last"]["cause"] = HOSTILE
        line["workers"][0]["shares_ms"][HOSTILE] = 1.0
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    details = (tmp_path / "trace.jsonl").read_text().replace('"forward"', json.dumps(HOSTILE))
    (tmp_path / "trace.jsonl").write_text(details)
    write_hang(tmp_path, text=HOSTILE)
    (tmp_path / "hangs" / "worker-1.txt").write_text(HOSTILE)
    page = Reader(page_of(tmp_path))
    assert [tag for tag, _ in page.tags].count("script") == 3  # Its numbers, uPlot, and what draws.
    assert not any("onerror" in attributes or tag == "img" for tag, attributes in page.tags)
    assert HOSTILE in "".join(page.text)


def test_a_run_of_few_facts_has_a_page(tmp_path):
    (tmp_path / "run.json").write_text('{"version": 1, "size": 2}')
    step = {"step": 0, "time": 0.0, "wall_ms": 5.0, "workers": []}
    (tmp_path / "steps.jsonl").write_text(json.dumps(step) + "\n")
    text = " ".join(Reader(page_of(tmp_path)).text)
    assert "Where the time goes" not in text and "5.00 ms" in text


def test_a_run_of_which_every_second_step_is_recorded_says_so(tmp_path):
    write_run(tmp_path, steps=40)
    assert "Steps recorded" not in page_of(tmp_path)
    lines = (tmp_path / "steps.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "steps.jsonl").write_text("".join(lines[:10] + lines[10::2]))
    assert "Steps recorded" in page_of(tmp_path)


def test_a_long_run_and_many_workers_stay_small(tmp_path):
    for folder, workers, steps in ((tmp_path / "long", 2, 4000), (tmp_path / "wide", 48, 40)):
        page = page_of(write_run(folder, workers=workers, steps=steps))
        assert len(page) < 1_000_000
        Reader(page)
    assert "16 of 48 workers: those that were ready last." in page
    assert "Shown are the 32 of 48 workers that wait least." in page


def test_reductions_begin_with_the_last_worker():
    times = {0: (10.0, 20.0, 90.0), 1: (30.0, 70.0, 95.0)}
    workers = [WorkerTrace(rank, (), (Flight(5, 64, *each),)) for rank, each in times.items()]
    (found,) = reductions(workers)
    assert (found.place, found.begin, found.end, found.last_rank) == (5, 70.0, 95.0, 1)


def test_lanes_do_not_overlap():
    stretches = [(0, 10), (5, 15), (10, 20), (12, 13), (15, 30)]
    rows = lanes(stretches)
    assert rows == [0, 1, 0, 2, 1]
    assert max(lanes([(0, 1)] * 9, most=4)) == 3


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium on the PATH")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_the_page(browser, folder, width, dark):
    path = folder / "report.html"
    browser.show(path, width, dark=dark)
    assert browser.value("document.querySelectorAll('.plot canvas').length") == 9
    assert browser.value("document.querySelectorAll('.timeline rect').length") > 4 * 7
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value("getComputedStyle(document.body).backgroundColor") == (
        "rgb(18, 20, 23)" if dark else "rgb(246, 246, 243)"
    )
    assert browser.value("[...document.querySelectorAll('.step')].filter(step => !step.hidden).length") == 1
    assert browser.complaints() == []
    assert browser.requests() == [path.resolve().as_uri()]


def test_a_step_can_be_picked_and_a_value_read(browser, folder):
    browser.show(folder / "report.html", 1280)
    shown = "document.querySelector('.step:not([hidden])').dataset.step"
    picked = browser.value(
        "(() => { const pick = document.querySelector('#pick'); pick.selectedIndex = 3;"
        "pick.dispatchEvent(new Event('change')); return pick.value })()"
    )
    assert browser.value(shown) == picked
    x, y = browser.value(
        "(() => { const field = document.querySelector('.plot .u-over'); field.scrollIntoView();"
        "const box = field.getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2] })()"
    )
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert browser.value("document.querySelector('.at').textContent").startswith("step 1")
    assert browser.complaints() == []


def drag(browser, selector, begin, end):
    """Press the mouse at `begin` of an element's width, and let go at `end`."""
    x, y, width = browser.value(
        f"(() => {{ const field = document.querySelector({selector!r}); field.scrollIntoView({{block: 'center'}});"
        "const box = field.getBoundingClientRect(); return [box.left, box.top + box.height / 2, box.width] })()"
    )
    for kind, place, buttons in (("mouseMoved", begin, 0), ("mousePressed", begin, 1), ("mouseMoved", end, 1)):
        event = {"type": kind, "x": x + place * width, "y": y, "buttons": buttons, "clickCount": 1}
        browser.ask("Input.dispatchMouseEvent", **event, **({"button": "left"} if buttons else {}))
    browser.ask("Input.dispatchMouseEvent", type="mouseReleased", x=x + end * width, y=y, button="left", clickCount=1)


def test_charts_are_zoomed_together_and_back(browser, folder):
    browser.show(folder / "report.html", 1280)
    ticks = "drawn.map(each => [each.scales.x.min, each.scales.x.max].map(Math.round))"
    assert browser.value(ticks) == [[0, 299]] * 9
    drag(browser, ".plot .u-over", 0.5, 0.75)
    zoomed = browser.value(ticks)
    assert len({tuple(each) for each in zoomed}) == 1
    assert 145 <= zoomed[0][0] <= 155 and 220 <= zoomed[0][1] <= 230
    assert browser.value("document.querySelector('.zoomed').innerText").startswith(f"steps {zoomed[0][0]} to")
    assert browser.value("getComputedStyle(document.querySelector('.zoomed')).display") != "none"
    assert browser.value("document.querySelector('.ref').hidden")  # "No loss" is far above.
    loss = "drawn[4].scales.y.max"
    assert browser.value(loss) < 3
    browser.value("document.querySelector('.zoomed button').click()")
    assert browser.value(ticks) == [[0, 299]] * 9 and browser.value(loss) > 4
    assert not browser.value("document.querySelector('.ref').hidden")
    assert browser.value("getComputedStyle(document.querySelector('.zoomed')).display") == "none"
    assert browser.complaints() == []


def test_a_timeline_can_be_widened(browser, folder):
    browser.show(folder / "report.html", 375)
    texts = "document.querySelectorAll('.timeline text').length"
    width = "document.querySelector('.timeline').getBoundingClientRect().width"
    narrow, few = browser.value(width), browser.value(texts)
    browser.value("[1, 2, 3].forEach(() => document.querySelectorAll('.pick button')[1].click())")
    assert browser.value(width) == 8 * narrow >= 8 * 660 and browser.value(texts) > few
    assert browser.value("document.documentElement.scrollWidth") <= 375
    left = browser.value("figure.querySelector('.scroll').scrollLeft")
    assert left > 1000 and browser.value("+figure.querySelector('.name').getAttribute('x')") == left
    browser.value("[1, 2, 3].forEach(() => document.querySelectorAll('.pick button')[0].click())")
    assert (browser.value(width), browser.value(texts)) == (narrow, few)
    assert browser.value("document.querySelectorAll('.pick button')[0].disabled")
    assert browser.complaints() == []


def test_names_in_all_sizes_fit_a_phone(browser, tmp_path):
    write_hang(write_run(tmp_path, workers=20, steps=60, name="a_very_long_name_" * 12), text="x" * 500)
    page_of(tmp_path)
    browser.show(tmp_path / "report.html", 375)
    assert browser.value("document.documentElement.scrollWidth") <= 375
    assert browser.complaints() == []


def test_hostile_names_and_extreme_values_are_drawn_as_they_are(browser, tmp_path):
    write_run(tmp_path, steps=30, name=HOSTILE)
    facts = json.loads((tmp_path / "run.json").read_text()) | {"hosts": [HOSTILE, "b", "c", "d"]}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    extremes = [(5e-324, 1.0, 7.0), (1e300, -1e289, 7.0), (1e289, 1e289, 7.0 + 1e-15)]
    for line, (loss, norm, noise) in zip(lines, 10 * extremes, strict=True):
        line |= {"loss": loss, "grad_norm": norm, "noise_scale": noise}
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page_of(tmp_path)
    browser.show(tmp_path / "report.html", 1280)
    assert HOSTILE in browser.value("document.querySelector('.timeline .name').textContent")
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert browser.value("document.querySelectorAll('.plot canvas').length") == 9
    assert browser.complaints() == []


# Colours: kinds of time can be told apart with any colour vision, and text can be read


STYLE = (Path(lockstep.__file__).parent / "watching" / "assets" / "page.css").read_text()
LIGHT, DARK = (dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{([^}]*)\}", STYLE))

VISIONS = {
    "full": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""What is left of linear RGB (Machado, Oliveira and Fernandes 2009, severity 1)."""

TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
LEAST_DISTANCE = 13
"""In CIELAB; about 2 can be seen side by side."""


def linear(colour):
    values = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(colour, vision):
    xyz = TO_XYZ @ np.clip(np.array(vision) @ linear(colour), 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one, other):
    low, high = sorted(float(TO_XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_kinds_can_be_told_apart(colours, vision):
    for one, other in itertools.combinations(SHARES, 2):
        distance = np.linalg.norm(lab(colours[one], VISIONS[vision]) - lab(colours[other], VISIONS[vision]))
        assert distance >= LEAST_DISTANCE, (one, other, distance)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_can_be_read(colours):
    for text, ground in itertools.product(("ink", "soft"), ("card", "ground")):
        assert contrast(colours[text], colours[ground]) >= 4.5
    for kind in (*SHARES, "hidden"):
        assert contrast(colours[kind], "#ffffff" if kind == "backward" else "#111111") >= 4.5, kind


# The trace for Perfetto: slices that nest, arrows that lead somewhere, counters, names


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("run"))
    assert main(["report", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def events(traced):
    return json.loads((traced / "trace.json").read_text())["traceEvents"]


def test_every_track_has_a_name(events):
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert names[0, None] == "worker 0 (node0)" and names[4, None] == "run"
    for event in events:
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in names


def test_slices_of_a_track_nest(events):
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], -(event["ts"] + event["dur"])))
    assert {pid for pid, _ in tracks} == {0, 1, 2, 3}
    for slices in tracks.values():
        open_ends = []
        for begin, minus_end in sorted(slices):
            while open_ends and open_ends[-1] <= begin + 1e-3:
                open_ends.pop()
            assert not open_ends or -minus_end <= open_ends[-1] + 2e-3, "two slices overlap without nesting"
            open_ends.append(-minus_end)


def test_arrows_lead_from_a_bucket_to_its_reduction(events):
    slices = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    begins, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    num_steps = sum(event["name"].startswith("step ") for event in events if event["ph"] == "X" and event["pid"] == 0)
    assert begins.keys() == ends.keys() and len(begins) == num_steps * 4 * 4
    for number, begin in begins.items():
        end = ends[number]
        bucket = slices[begin["pid"], begin["tid"], begin["ts"]]
        assert slices[end["pid"], end["tid"], end["ts"]] == f"reduce {bucket}"
        assert begin["ts"] <= end["ts"]


def test_throughput_is_a_counter(events):
    counters = [e for e in events if e["ph"] == "C" and e["name"].startswith("throughput")]
    assert len(counters) == 300 and all(e["args"]["value"] > 0 for e in counters)
    assert [e["ts"] for e in counters] == sorted(e["ts"] for e in counters)


def test_long_runs_are_thinned(traced, tmp_path, monkeypatch):
    monkeypatch.setattr(timelines, "_MOST_EVENTS", 1000)
    target = tmp_path / "small.json"
    assert main(["report", str(traced), "--output", str(tmp_path / "page.html"), "--trace", str(target)]) == 0
    events = json.loads(target.read_text())["traceEvents"]
    assert 500 < sum(e["ph"] in "Xsf" for e in events) <= 1000 + 200
