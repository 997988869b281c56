"""`lockstep demo`, with real workers, in a process of its own."""

import os
import random
import re
import signal
import subprocess
import sys
from unittest import mock

import pytest
from amount import some
from processes import FromServer, in_forks, wait_until

from lockstep.cli.main import main
from lockstep.demo import train_gpt
from lockstep.demo.gpt import Recipe
from lockstep.demo.train_gpt import train

DEMO = [sys.executable, "-c", "import sys; from lockstep.cli.main import main; sys.exit(main())", "demo"]
SHORT = ["--steps", "8", "--model", "tiny", "-n", "2"]
WORDS = ["def", "return", "self", "x1", "in", "(y)", ":\n   ", "= 0", "# so"]
TEXT = " ".join(random.Random(0).choices(WORDS, k=20_000)).encode()
"""The same for good: of some texts a short run has gradients near zero, of which Adam makes steps by their rounding."""
ENVIRON = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")}


def demo_in_forks(*words):
    """With workers that are forks, and learn from little."""
    train_gpt.read_corpus = lambda folder: TEXT
    in_forks(train_gpt, "train")
    return main(["demo", *words])


def test_interrupted_it_ends_cleanly(tmp_path):
    started = FromServer(tmp_path, demo_in_forks, "--steps", "100000", "--model", "tiny", "-n", "2")
    wait_until(lambda: started.out.exists() and "step 1/" in started.out.read_text(), "the first step")
    os.kill(started.pid, signal.SIGINT)
    ended = started.wait()
    assert (ended.code, ended.err) == (130, "\nlockstep demo: interrupted; no worker is left.\n")


@pytest.mark.parametrize("workers", some(["forks"], ["forks", "fresh"]))
def test_a_short_run_says_what_it_checked(tmp_path, workers):
    if workers == "fresh":
        process = subprocess.run([*DEMO, *SHORT], env=ENVIRON, capture_output=True, text=True)
        code, said, errors = process.returncode, process.stdout, process.stderr
    else:
        ended = FromServer(tmp_path, demo_in_forks, *SHORT).wait()
        code, said, errors = ended.code, ended.out, ended.err
    assert (code, errors) == (0, ""), said
    assert re.findall(r"^step (\d+)/8  loss \d\.\d+", said, re.MULTILINE) == ["1", "8"]
    assert len(re.findall(r"^  ok    ", said, re.MULTILINE)) == 3
    assert re.search(r"SHA-256 [0-9a-f]{16}\.\.\. on each of 2", said)
    assert re.search(r"first 5 steps are one worker's on the same 16-sample batches", said)
    assert re.search(r"throughput +[\d.,]+ samples/s, [\d.,]+ m?s a step", said)
    assert re.search(r"scaling efficiency +\d+ %: ", said)
    assert re.search(r"communication +[\d.]+ % of the time", said)
    assert "\x1b" not in said


def _train(world, steps, batch):
    with mock.patch.object(train_gpt, "read_corpus", lambda folder: TEXT):
        return train(Recipe("tiny", steps, batch, seed=3))


def test_what_it_finds_is_the_training_of_one_worker(pool):
    (one,), (many, _) = (pool.run(size, _train, 8, 6) for size in (1, 2))
    assert many.is_as_promised
    assert many.losses == pytest.approx(one.losses, rel=1e-4)
    assert many.summary.steps == 3
    assert many.summary.samples_per_s > 0


def test_parts_of_different_sizes_and_steps_too_few_to_measure(pool):
    found, *others = pool.run(3, _train, 2, 7)
    assert others == [None, None]
    assert found.is_as_promised
    assert (found.parity.steps, found.parity.batch, len(found.digests)) == (2, 7, 3)
    assert found.summary.steps == 0


def test_on_one_worker(pool):
    (found,) = pool.run(1, _train, 8, 4)
    assert found.is_as_promised
    assert found.parity.weights == 0
    assert found.summary.efficiency is not None


def test_a_batch_smaller_than_the_workers_is_refused(pool):
    for _, trace in pool.run(2, _train, 8, 1, expect_failure=True):
        assert "UsageError: a batch of 1 samples: give at least 2, one for each worker" in trace
