"""`lockstep demo`, with real workers, in a process of its own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import lockstep
from lockstep.demo import corpus, examiner
from lockstep.demo.recipe import Recipe
from lockstep.demo.training import train

DEMO = [sys.executable, "-c", "import sys; from lockstep.cli.main import main; sys.exit(main())", "demo"]
SHORT = ["--steps", "8", "--model", "tiny"]
ENVIRON = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")}


def begin(*words):
    return subprocess.Popen(
        [*DEMO, *words, "-n", "2"], env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def short():
    """A short run, which goes on while another is interrupted."""
    with begin(*SHORT) as process:
        yield process
        process.kill()


def test_interrupted_it_ends_cleanly(short):
    with begin("--steps", "100000", "--model", "tiny") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for text in process.stdout:
            if text.startswith("step 1/"):
                break
        os.kill(process.pid, signal.SIGINT)
        process.stdout.read()  # Ends when the last worker has, since they share it.
        said = process.stderr.read()
        assert process.wait() == 130
    assert said == "\nlockstep demo: interrupted; no worker is left.\n"


def test_a_short_run_says_what_it_checked(short):
    said, errors = short.communicate()
    assert (short.returncode, errors) == (0, ""), said
    assert re.findall(r"^step (\d+)/8  loss \d\.\d+", said, re.MULTILINE) == list("12345678")
    assert len(re.findall(r"^  ok    ", said, re.MULTILINE)) == 3
    assert re.search(r"SHA-256 [0-9a-f]{16}\.\.\. on each of 2", said)
    assert re.search(r"first 5 steps are one worker's on the same 16-sample batches", said)
    assert re.search(r"samples/s with 2 workers", said)
    assert re.search(r"\d+ % of 2 x one alone \(medians of 3 steps and 4 lone ones", said)
    assert re.search(r"\d+\.\d % of the time went into waiting", said)
    assert "\x1b" not in said


def _train(world, steps, batch, calibrates=True):
    is_calibration = examiner.is_calibration if calibrates else lambda step, steps: False
    source = Path(lockstep.__file__).parent  # Since the standard library takes each worker a second to read.
    with (
        mock.patch.object(examiner, "is_calibration", is_calibration),
        mock.patch.object(corpus, "folder", lambda: source),
    ):
        return train(Recipe("tiny", steps, batch, seed=3))


def test_calibration_changes_nothing(pool):
    with_it, without = (pool.run(2, _train, 8, 6, calibrates)[0] for calibrates in (True, False))
    assert with_it.speed is not None
    assert without.speed is None
    assert with_it.is_as_promised
    assert (with_it.digests, with_it.losses) == (without.digests, without.losses)


def test_parts_of_different_sizes_and_steps_too_few_to_measure(pool):
    found, *others = pool.run(3, _train, 2, 7)
    assert others == [None, None]
    assert found.is_as_promised
    assert (found.parity.steps, found.parity.batch, len(found.digests), len(found.waiting)) == (2, 7, 3, 3)
    assert found.speed is None


def test_on_one_worker(pool):
    (found,) = pool.run(1, _train, 8, 4)
    assert found.is_as_promised
    assert found.parity.weights == 0
    assert found.efficiency is not None


def test_a_batch_smaller_than_the_workers_is_refused(pool):
    for _, trace in pool.run(2, _train, 8, 1, expect_failure=True):
        assert "UsageError: a batch of 1 samples: give at least 2, one for each worker" in trace
