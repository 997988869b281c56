"""`lockstep report` without a browser: what is read, what is said, and what is refused."""

import json
import math
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_run import write_hang, write_run

import lockstep
from lockstep.cli.main import main
from lockstep.errors import UsageError
from lockstep.watching import number_format as fmt
from lockstep.watching.page import thinned, value_range
from lockstep.watching.run_folder import RunFolder
from lockstep.watching.run_report import read_report, verdict
from lockstep.watching.step_record import SHARES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


def read(folder):
    return read_report(RunFolder(folder))


# What is read


def test_who_was_often_last_is_not_accused_if_the_run_never_named_anybody(tmp_path):
    path = write_run(tmp_path, slow=1) / "steps.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "verdict": ""}) + "\n" for line in lines))
    said = verdict(read(tmp_path))
    assert said.is_good and said.headline == "Nobody holds the others up."
    assert "which is how steps scatter here" in said.detail


def test_a_run_is_read_as_it_was_written(folder):
    steps = list(RunFolder(folder).steps())
    assert [step["step"] for step in steps] == list(range(300))
    for step in steps:
        for worker in step["workers"]:
            assert sum(worker["shares_ms"].values()) == pytest.approx(worker["wall_ms"])
    traces = RunFolder(folder)
    assert list(traces.trace_places()) == [step for step in range(300) if step < 20 or step % 10 == 0]
    assert all(traces.trace_at(place).step == step for step, place in traces.trace_places().items())


def test_means_leave_the_first_steps_out(folder):
    found = read(folder)
    walls = found.columns["wall_ms"]
    assert found.num_warm_up == 10
    assert found.step_ms == pytest.approx(walls[10:].mean())
    assert found.samples_per_s == pytest.approx(256e3 / walls[10:].mean())
    assert found.efficiency == pytest.approx(182 / walls[10:].mean())
    assert found.part(*SHARES) == pytest.approx(1)


def test_the_straggler_is_named_with_its_cause(folder):
    said = verdict(read(folder))
    assert not said.is_good
    assert said.headline.startswith("Worker 2 holds everyone up by 64")
    assert "by data loading" in said.headline and "num_workers" in said.detail


def test_nobody_is_named_when_nobody_stands_out(tmp_path):
    said = verdict(read(write_run(tmp_path, slow=None)))
    assert said.is_good and said.headline == "Nobody holds the others up."


def test_one_worker_waits_for_nobody(tmp_path):
    assert verdict(read(write_run(tmp_path, workers=1, slow=None, steps=20))).headline.startswith("One worker")


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (12, "The run hung at step 12: worker 1 did not arrive."),
        (30, "The run stood still at step 12: worker 1 did not arrive in time. It went on later."),
    ],
)
def test_a_hang_comes_before_a_straggler(tmp_path, steps, said):
    write_hang(write_run(tmp_path, steps=steps))
    found = verdict(read(tmp_path))
    assert found.headline == said and "'head.weight'" in found.detail


def test_empty_files_of_stacks_are_no_hang(tmp_path):
    (write_run(tmp_path, steps=30) / "hangs").mkdir()
    (tmp_path / "hangs" / "worker-0.txt").touch()
    assert read(tmp_path).hang is None


def test_a_run_that_hung_in_its_first_step_has_a_page(tmp_path):
    write_hang(write_run(tmp_path, steps=0))
    assert main(["report", str(tmp_path)]) == 0
    assert "did not arrive" in (tmp_path / "report.html").read_text()


def test_damaged_lines_are_counted_and_a_torn_end_is_not(tmp_path, capsys):
    write_run(tmp_path, steps=40)
    whole = (tmp_path / "steps.jsonl").read_bytes().splitlines(keepends=True)
    whole[3] = b'{"step": 3, "time"\n'
    whole[7] = b"\xff\xfe\x00 not text\n"
    whole[9] = b'{"step": 9}\n'
    whole[11] = b'{"step": 11, "time": 0, "workers": [{"rank": 0}]}\n'
    whole[13] = b"[" * 100_000 + b"\n"
    whole[-1] = whole[-1][:50]
    (tmp_path / "steps.jsonl").write_bytes(b"".join(whole))
    found = read(tmp_path)
    assert found.num_skipped == 5 and found.steps.size == 34
    assert main(["report", str(tmp_path)]) == 0
    assert "5 lines could not be read" in capsys.readouterr().out
    assert "5 lines of the folder could not be read" in (tmp_path / "report.html").read_text()


def test_a_bucket_that_never_came_back_is_left_out(tmp_path):
    write_run(tmp_path, steps=5)
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    lines[2]["workers"][0]["buckets"][3]["reduced_us"] = None
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = RunFolder(tmp_path)
    traces = [found.trace_at(place) for place in found.trace_places().values()]
    assert [len(trace.workers[0].flights) for trace in traces] == [4, 4, 3, 4, 4]
    assert found.num_skipped == 0


def test_moments_that_are_none_are_damage(tmp_path):
    write_run(tmp_path, steps=5)
    text = (tmp_path / "trace.jsonl").read_text().splitlines()
    text[1] = re.sub(r'"data", [0-9.]+', '"data", NaN', text[1])
    text[2] = re.sub(r'"ready_us": [0-9.]+', '"ready_us": 1e300', text[2])
    (tmp_path / "trace.jsonl").write_text("\n".join(text) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    assert "2 lines of the folder could not be read" in (tmp_path / "report.html").read_text()


def test_losses_that_are_not_finite_are_said(tmp_path):
    write_run(tmp_path, steps=40)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    for line in lines[30:]:
        line["loss"] = math.nan
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(tmp_path)]) == 0
    assert "Not finite in 10 steps, the first time at step 30." in (tmp_path / "report.html").read_text()


# What is refused


def refused(*args):
    with pytest.raises(UsageError) as caught:
        read(*args)
    return str(caught.value)


def test_no_folder_is_refused(tmp_path):
    assert "there is no folder" in refused(tmp_path / "nowhere")


def test_another_folder_is_refused(tmp_path):
    assert "is not the folder of a watched run: it has no run.json" in refused(tmp_path)


def test_a_run_without_steps_is_refused(tmp_path):
    assert "has made no step yet" in refused(write_run(tmp_path, steps=0))


def test_a_run_of_damaged_steps_is_refused(tmp_path):
    write_run(tmp_path, steps=0)
    (tmp_path / "steps.jsonl").write_text("{}\n" * 7)
    assert "none of the 7 lines" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": "new"}'])
def test_a_damaged_run_is_refused(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    assert "cannot be read" in refused(tmp_path)


def test_a_run_from_the_future_is_refused(tmp_path):
    (tmp_path / "run.json").write_text('{"version": 2, "lockstep": "0.9.0", "shape": "unknown"}')
    assert "written by Lockstep 0.9.0 in format 2" in refused(tmp_path)
    assert main(["report", str(tmp_path)]) == 2


def test_a_page_that_cannot_be_written_is_refused(folder, tmp_path, capsys):
    assert main(["report", str(folder), "--output", str(tmp_path / "none" / "page.html")]) == 2
    assert "give --output a file" in capsys.readouterr().err


# The command


def test_the_command_says_the_verdict_and_needs_no_torch(folder, tmp_path):
    code = "import sys; from lockstep.cli.main import main; status = main(); print('torch' in sys.modules, status)"
    files = ["--output", str(tmp_path / "page.html"), "--trace", str(tmp_path / "trace.json")]
    command = [sys.executable, "-c", code, "report", str(folder), *files]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert said[0].startswith("train.py on 4 workers, 300 steps, 1,0")
    assert said[1].startswith("Worker 2 holds everyone up")
    assert said[-1] == "False 0"
    assert (tmp_path / "page.html").exists() and (tmp_path / "trace.json").exists()


def test_what_the_page_is_made_of_is_installed():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["lockstep"]
    package = Path(lockstep.__file__).parent
    assets = [path.relative_to(package) for path in (package / "watching" / "assets").iterdir()]
    assert len(assets) == 6 and all(any(path.match(pattern) for pattern in patterns) for path in assets)


# Axes and units


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500), st.integers(1, 60))
def test_thinning_keeps_what_is_highest_and_lowest(values, columns):
    y = np.array(values)
    shown = thinned(np.arange(y.size, dtype=float), y, columns)
    assert shown.x.size <= max(columns, 1)
    assert shown.low.min() == y.min() and shown.high.max() == y.max()
    assert np.all(np.diff(shown.x) > 0)


def test_thinning_leaves_gaps_out():
    shown = thinned(np.arange(4.0), np.array([1.0, math.nan, math.inf, 2.0]), 10)
    assert shown.x.tolist() == [0, 3] and not shown.is_thinned


@given(st.floats(-1e290, 1e290), st.floats(0, 1e290), st.booleans())
def test_an_axis_holds_its_values(low, span, from_zero):
    begin, end, is_log = value_range(low, low + span, from_zero=from_zero)
    assert math.isfinite(begin) and math.isfinite(end) and begin < end
    assert begin <= max(low, 1e-300) * (1 + 1e-9) if low > 0 else begin <= low
    assert end >= (low + span) * (1 - 1e-9) if low + span > 0 else end >= low + span
    assert not is_log or begin > 0


def test_an_axis_is_logarithmic_where_values_span_decades():
    assert value_range(3, 90_000) == (1, 100_000, True)
    assert value_range(3, 90_000, from_zero=True)[::2] == (0, False)
    assert value_range(7, 7) == (3.15, 10.85, False)


@pytest.mark.parametrize("values", [(5e-324, 1.0), (0.0, 5e-324), (1e300, 1e308), (-1e308, 1e308), (7.0, 7.0 + 1e-15)])
def test_extreme_values_have_a_page(tmp_path, values):
    write_run(tmp_path, steps=2)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    for line, value in zip(lines, values, strict=True):
        line["loss"] = line["lr"] = line["noise_scale"] = line["batch"] = value
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    "text",
    [
        (fmt.number(1788.4), "1,788"), (fmt.number(0.003123), "0.00312"), (fmt.number(None), fmt.NONE),
        (fmt.number(math.nan), fmt.NONE),
        (fmt.milliseconds(64.03), "64.0 ms"), (fmt.milliseconds(0.02), "20.0 µs"),
        (fmt.milliseconds(74_000), "1 min 14 s"), (fmt.duration(9600), "2 h 40 min"),
        (fmt.percent(0.031), "3.1 %"),
        (fmt.percent(0.999), "100 %"), (fmt.size(42_800_000), "42.8 MB"), (fmt.count(10_700_000), "10.7 M"),
        (fmt.counted(1, "step"), "1 step"),
    ],
)  # fmt: skip
def test_numbers_with_their_units(text):
    assert text[0] == text[1]


# A folder of a stranger


def facts(**changes):
    return lambda folder: (folder / "run.json").write_text(
        json.dumps(json.loads((folder / "run.json").read_text()) | changes)
    )


def pipe(name):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (facts(size=10**9), "size is 1000000000, and 1 to 131072 can be"),
        (facts(size=-1), "size is -1"),
        (facts(grad_bytes=10**400), "cannot be read"),
        (pipe("run.json"), "a link, a pipe or a device"),
        (pipe("steps.jsonl"), "has made no step yet"),
        (lambda folder: (folder / "steps.jsonl").write_text('{"step": 1e30, "workers": []}\n'), "none of the 1 lines"),
    ],
)
def test_what_could_not_end_is_refused(tmp_path, change, said):
    folder = write_run(tmp_path, workers=2, steps=3)
    change(folder)
    with pytest.raises(UsageError, match=said):
        read(folder)


def test_pipes_and_links_beside_the_run_are_left_out(tmp_path):
    folder = write_run(tmp_path, workers=2, steps=30)
    (folder / "hangs").mkdir(exist_ok=True)
    for name in ("trace.jsonl", "hangs/hang.json", "hangs/worker-0.txt"):
        pipe(name)(folder)
    (folder / "hangs" / "worker-1.txt").symlink_to("/dev/zero")
    found = read(folder)
    assert (found.hang, found.traces, found.steps.size) == (None, (), 30)
