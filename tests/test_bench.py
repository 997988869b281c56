"""`lockstep bench`, as far as it needs no workers: what is asked, and how results read."""

import argparse
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.bench import request
from lockstep.bench.comm import CommResults, CommRow, bus_bandwidth
from lockstep.bench.interleave import Estimate
from lockstep.cli import bench
from lockstep.cli.main import main
from lockstep.comm.ring import Traffic


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "benchmark"),
        (["walk"], "invalid choice: 'walk'"),
        (["comm", "-n", "1"], "1 is too few: give 2 or more"),
        (["comm", "-n", "0"], "0 is too few"),
        (["comm", "-n", "-2"], "-2 is too few"),
        (["comm", "-n", "two"], "invalid int value: 'two'"),
        (["comm", "--rounds", "0"], "--rounds: 0 is too few"),
        (["comm", "--backends", "gloo", "smoke"], "invalid choice: 'smoke'"),
        (["comm", "--backends"], "--backends"),
        (["comm", "--sizes", "1K", "big"], "size 'big': give bytes as a whole number"),
        (["comm", "--sizes", "0"], "size '0'"),
        (["comm", "--sizes", "10"], "size '10'"),
        (["comm", "--sizes", "1.5M"], "size '1.5M'"),
        (["comm", "--sizes", "1T"], "size '1T'"),
        (["comm", "--sizes", "100000G"], "give smaller --sizes or fewer workers"),
        (["comm", "--json", "nowhere/file.json"], "'nowhere/file.json' cannot be written"),
        (["comm", "--json", "."], "'.' cannot be written"),
    ],
)
def test_a_request_that_cannot_be_right_is_refused_in_one_line(words, part, capsys):
    try:
        status = main(["bench", *words])
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr()
    assert status == 2
    assert said.out == ""
    assert part in said.err
    assert said.err.startswith("lockstep bench")
    assert said.err.count("\n") == 1


def test_torch_is_not_needed_to_say_what_is_wrong():
    code = (
        "import sys; from lockstep.cli.main import main;"
        "print(main(['bench', 'comm', '--sizes', '100000G']), 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["2", "False"]


def test_help_names_every_option_and_formula(capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", "comm", "--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert all(option in said for option in ("-n", "--workers", "--sizes", "--backends", "--rounds", "--json"))
    assert "2(N-1)/N * M" in said
    assert "default: 1K 64K 1M 16M" in " ".join(said.split())


def test_a_request_without_words_fits_the_machine(monkeypatch):
    for cores, workers in ((1, 2), (2, 2), (6, 6)):
        monkeypatch.setattr(request.host, "num_cores", lambda cores=cores: cores)
        asked = request.checked_comm(None, [1024, 2048, 1024, 64], None, 3)
        assert asked == request.CommRequest(workers, (1024, 2048, 64), None, 3)


@given(st.integers(1, 1 << 40))
def test_sizes_read_as_they_are_written(count):
    num_bytes = 4 * count
    assert request.parse_size(bench.size_text(num_bytes)) == num_bytes
    assert request.parse_size(bench.size_text(num_bytes).lower()) == num_bytes
    with pytest.raises(argparse.ArgumentTypeError):
        request.parse_size(str(num_bytes + 2))


def test_bus_bandwidth_is_that_of_the_least_traffic():
    assert bus_bandwidth(2, 10**9, 1.0) == pytest.approx(1.0)
    assert bus_bandwidth(4, 10**9, 0.5) == pytest.approx(3.0)


def test_the_table():
    rows = (
        CommRow(1024, "gloo", "ring", 0.002, Traffic(1536, 6, 6), 0.5, Estimate(2.0, 1.5, 2.5)),
        CommRow(2048, "gloo", "own", 0.001, None, 1.0, Estimate(1.0, 1.0, 1.0)),
    )
    names, first, blank, second = bench.table(rows)
    assert names.split()[:4] == ["size", "backend", "algorithm", "time"]
    assert first.split() == ["1K", "gloo", "ring", "2.00", "ms", "1536", "6", "0.500", "2.00", "(1.50-2.50)"]
    assert blank == ""
    assert second.split() == ["2K", "gloo", "own", "1.00", "ms", "-", "-", "1.000", "1.00", "(1.00-1.00)"]
    assert len(names) == len(first) == len(second) <= 120
    results = CommResults({"workers": 2, "cpu": "some"}, {1024: "2 of 2 rounds count"}, rows)
    assert bench.closing(results) == ["1K: 2 of 2 rounds count", "workers: 2, cpu: some"]
