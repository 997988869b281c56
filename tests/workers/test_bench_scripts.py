"""The scripts in bench/ run, in their shortest form: those that look into what they measure break when it changes."""

import subprocess
import sys
from pathlib import Path

import pytest
from amount import some

BENCH = Path(__file__).parents[2] / "bench"
ALWAYS = [
    ("hot_path.py --workload tiny --variants lockstep --steps 3", "| reduction |"),
    ("messages.py --workload tiny --rounds 3", "gained less saved"),
]
ALL = [
    *ALWAYS,
    ("hot_path.py --workload tiny --steps 3", "| barriers around the update |"),
    ("messages.py --workload tiny --rounds 3 --crews 2", "gained less saved"),
    ("collectives.py --sizes 16K 1M --rounds 3", "all_reduce"),
    ("floor.py --megabytes 4 --rounds 3", "of the sum's floor"),
    ("memory.py --workers 2 --blocks 4 --steps 2 --stages 0 3", "shm            3"),
    ("asynchronous.py --workers 2 --seconds 2", "Async"),
    ("trainer.py --steps 3", "trainer / lockstep"),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("command, words", some(ALWAYS, ALL))
def test_a_script_runs(command, words):
    script, *options = command.split()
    ended = subprocess.run([sys.executable, BENCH / script, *options], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert words in ended.stdout
