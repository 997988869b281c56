"""The page of a run: well-formed, escaped, small; and in a real browser, where there is one."""

import json
from html.parser import HTMLParser

import pytest
from report_browser import CHROMIUM, Browser
from report_run import write_hang, write_run

from lockstep.cli.main import main
from lockstep.watching.page_timeline import lanes, reductions
from lockstep.watching.run_record import Flight, WorkerTrace

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
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not any("onerror" in attributes or tag == "img" for tag, attributes in page.tags)
    assert HOSTILE in "".join(page.text)


def test_a_run_of_few_facts_has_a_page(tmp_path):
    (tmp_path / "run.json").write_text('{"version": 1, "size": 2}')
    step = {"step": 0, "time": 0.0, "wall_ms": 5.0, "workers": []}
    (tmp_path / "steps.jsonl").write_text(json.dumps(step) + "\n")
    text = " ".join(Reader(page_of(tmp_path)).text)
    assert "Where the time goes" not in text and "5.00 ms" in text


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
    assert (found.place, found.begin_us, found.end_us, found.last_rank) == (5, 70.0, 95.0, 1)


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
        "(() => { const field = document.querySelector('.field'); field.scrollIntoView();"
        "const box = field.getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2] })()"
    )
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert browser.value("document.querySelector('.at').textContent").startswith("step 1")
    assert browser.complaints() == []


def test_names_in_all_sizes_fit_a_phone(browser, tmp_path):
    write_hang(write_run(tmp_path, workers=20, steps=60, name="a_very_long_name_" * 12), text="x" * 500)
    page_of(tmp_path)
    browser.show(tmp_path / "report.html", 375)
    assert browser.value("document.documentElement.scrollWidth") <= 375
    assert browser.complaints() == []
