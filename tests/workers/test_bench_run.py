"""`lockstep bench comm`, with real workers, in a process of its own."""

import json
import re
import subprocess
import sys

import pytest

BENCH = [sys.executable, "-c", "import sys; from lockstep.cli.main import main; sys.exit(main())", "bench", "comm"]
ALGORITHMS = ["naive", "ring", "own"]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def run(*words):
    ended = subprocess.run([*BENCH, "--rounds", "2", *words], capture_output=True, text=True)
    assert ended.returncode == 0, ended
    assert ended.stderr == ""
    return ended.stdout


def test_the_table_and_the_json_say_the_same(tmp_path):
    target = tmp_path / "comm.json"
    said = run("-n", "3", "--sizes", "1200", "48K", "--backends", "gloo", "shm", "--json", str(target))
    assert said.startswith("Summing float32 tensors of 1200, 48K over 3 workers of this host. Rounds: 2.\n")
    lines = re.findall(r"^ *(1200|48K)  (gloo|shm) +(naive|ring|own) .*$", said, re.MULTILINE)
    wanted = [(size, backend, name) for size in ("1200", "48K") for backend in ("gloo", "shm") for name in ALGORITHMS]
    assert lines == wanted
    written = json.loads(target.read_text())
    assert written["machine"]["workers"] == 3
    assert list(written["rounds"]) == ["1200", "49152"]
    rows = written["rows"]
    assert [(row["num_bytes"], row["backend"], row["algorithm"]) for row in rows] == [
        ({"1200": 1200, "48K": 49152}[size], backend, name) for size, backend, name in wanted
    ]
    for row in rows:
        size = row["num_bytes"]
        sent = {"naive": (2 * size, 2, 1), "ring": (4 * size // 3, 4, 4), "own": None}[row["algorithm"]]
        assert (row["sent"] and tuple(row["sent"].values())) == sent
        assert row["bus_bandwidth"] == pytest.approx(4 / 3 * size / row["seconds"] / 1e9)
        if row["algorithm"] == "own":
            assert row["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
        else:
            assert f" {sent[0]} " in said


def test_without_words_it_takes_every_backend_that_works():
    said = run("-n", "2", "--sizes", "1K")
    assert re.findall(r"^ *1K  (\w+) +(\w+)", said, re.MULTILINE) == [
        (backend, name) for backend in ("shm", "gloo") for name in ALGORITHMS
    ]
    assert re.search(r"^1K: \d of 2 rounds count", said, re.MULTILINE)
    assert "workers: 2, backend: shm, gloo," in said
