"""The trace of a run for Perfetto: slices that nest, arrows that lead somewhere, counters, names."""

import json
from collections import defaultdict

import pytest
from report_run import write_run

from lockstep.cli.main import main
from lockstep.watching import trace as traces


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("run"))
    assert main(["report", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def events(folder):
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


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


def test_long_runs_are_thinned(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "_MOST_EVENTS", 1000)
    target = tmp_path / "small.json"
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html"), "--trace", str(target)]) == 0
    events = json.loads(target.read_text())["traceEvents"]
    assert 500 < sum(e["ph"] in "Xsf" for e in events) <= 1000 + 200
