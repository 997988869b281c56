"""`lockstep bench`, with real workers: forks, but for what FULL=1 adds."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from processes import FromServer, in_forks

from lockstep.bench import catalogue, machine
from lockstep.cli.main import main

BENCH = [sys.executable, "-c", "import sys; from lockstep.cli.main import main; sys.exit(main())", "bench"]
ALGORITHMS = ["naive", "ring", "own"]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def bench(folder, *words, packages=None):
    """`lockstep bench` with workers that are forks; `packages`: a folder of those found before what is installed."""
    ended = FromServer(folder, _bench, words, packages).wait()
    assert ended.code == 0, ended
    return ended


def _bench(words, packages):
    from lockstep.bench import comm, crew

    in_forks(comm, "measure")
    in_forks(crew, "serve")
    machine.cores = lambda: 2  # Forks compute with one thread.
    if packages is not None:
        sys.path.insert(0, str(packages))
    return main(["bench", *words])


def run(folder, *words):
    ended = bench(folder, "comm", "--rounds", "2", *words)
    assert ended.err == ""
    return ended.out


def test_the_table_and_the_json_say_the_same(tmp_path):
    target = tmp_path / "comm.json"
    said = run(tmp_path, "-n", "3", "--sizes", "1200", "48K", "--backends", "gloo", "shm", "--json", str(target))
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


@pytest.mark.skipif("FULL" not in os.environ, reason="takes many seconds; run it with FULL=1")
def test_without_words_it_takes_every_backend_that_works(tmp_path):
    said = run(tmp_path, "-n", "2", "--sizes", "1K")
    assert re.findall(r"^ *1K  (\w+) +(\w+)", said, re.MULTILINE) == [
        (backend, name) for backend in ("shm", "gloo") for name in ALGORITHMS
    ]
    assert re.search(r"^1K: \d of 2 rounds count", said, re.MULTILINE)
    assert "workers: 2, backend: shm, gloo," in said


def test_steps_are_compared_and_who_fails_is_listed(tmp_path):
    peers = tmp_path / "peers"
    peers.mkdir()
    (peers / "accelerate.py").write_text("raise OSError('the wheel\\nis broken')")
    (peers / "deepspeed.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    names = ["deepspeed1", "nocomm", "lockstep", "accelerate", "zero3", "ddp/gloo"]
    target, picture = tmp_path / "step.json", tmp_path / "step.svg"
    words = ["step", "-n", "2", "--workload", "tiny", "--steps", "2", "--warmup", "0", "--variants", *names]
    ended = bench(tmp_path, *words, "--json", str(target), "--plot", str(picture), packages=peers)
    (found,) = json.loads(target.read_text())
    assert [row["variant"] for row in found["rows"]] == ["nocomm", "lockstep", "zero3", "ddp/gloo"]
    assert list(found["not_run"]) == ["deepspeed1", "accelerate"]
    assert found["not_run"]["accelerate"] == "OSError: the wheel"
    assert found["not_run"]["deepspeed1"].startswith("WorkerLost: worker ")
    (heat,) = found["heats"]
    assert heat["machine"]["workers"] == 2
    for row in found["rows"]:
        times = heat["seconds"][row["variant"]]
        assert 1 <= len(times) <= 2
        assert min(times) > 0
        assert set(row["ratios"]) == {"nocomm", "ddp/gloo"}
        assert re.search(rf"^{row['variant']} +{1e3 * row['median']:.1f} ", ended.out, re.MULTILINE)
    losses = {row["variant"]: row["entry"]["loss"] for row in found["rows"]}
    assert losses["lockstep"] == pytest.approx(losses["ddp/gloo"], rel=1e-6)
    assert losses["zero3"] == pytest.approx(losses["ddp/gloo"], rel=1e-6)
    assert "  accelerate      OSError: the wheel\n" in ended.out
    bars = [each for each in ElementTree.parse(picture).iter() if each.get("class") in ("ours", "peer", "limit")]
    assert len(bars) == 4


@pytest.mark.skipif("FULL" not in os.environ, reason="takes minutes; run it with FULL=1")
@pytest.mark.parametrize("workload", catalogue.workloads(on_gpu=False))
@pytest.mark.timeout(600)
def test_every_variant_makes_steps_of_every_workload(workload, tmp_path):
    target = tmp_path / "step.json"
    words = ["step", "-n", "2", "--workload", workload, "--steps", "1", "--warmup", "0", "--json", str(target)]
    ended = subprocess.run([*BENCH, *words], capture_output=True, text=True)
    assert ended.returncode == 0, ended
    (found,) = json.loads(target.read_text())
    assert all(reason.startswith("not installed") for reason in found["not_run"].values()), found["not_run"]
    assert "within 1e-04 for all that communicate." in ended.stdout
