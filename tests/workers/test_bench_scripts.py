"""The scripts in bench/ run, in their shortest form: those that look into what they measure break when it changes."""

import contextlib
import runpy
import sys
from pathlib import Path

import pytest
from amount import some
from processes import FromServer

BENCH = Path(__file__).parents[2] / "bench"
ALWAYS = [
    ("soak.py --steps 80", "nothing grew in 80 steps"),
]
ALL = [
    *ALWAYS,
    ("collectives.py --sizes 16K 1M --rounds 3", "all_reduce"),
    ("memory.py --workers 2 --blocks 4 --steps 2 --stages 0 3", "shm            3"),
    ("asynchronous.py --workers 2 --seconds 2", "Async"),
    ("trainer.py --steps 3", "trainer / lockstep"),
    ("elastic.py --systems lockstep --seconds 4 --every 2 --rounds 1 --warmup 2 --width 64 --layers 1", "   yes"),
    ("elastic.py --overhead --crews 1 --turns 2 --steps 2 --zero 1 --width 64 --layers 1", "zero=1    all"),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("command, words", some(ALWAYS, ALL))
def test_a_script_runs(command, words, tmp_path):
    ended = FromServer(tmp_path, run_script, *command.split()).wait()
    assert ended.code == 0, ended.err[-3000:]
    assert words in ended.out


def run_script(script, *options):
    """As `python bench/script options`; its workers are forks, since nobody can import what is run like this."""
    sys.argv = [script, *options]
    sys.path.insert(0, str(BENCH))
    runpy.run_path(str(BENCH / script), run_name="__main__")
    return 0


def test_every_script_can_be_imported_and_says_how_it_is_used(tmp_path):
    ended = FromServer(tmp_path, help_of_all).wait()
    assert ended.code == 0, ended.err[-3000:]
    assert ended.out.count("usage: ") == len(scripts())


def scripts():
    return [path.name for path in sorted(BENCH.glob("*.py")) if "__main__" in path.read_text()]


def help_of_all():
    for script in scripts():
        with contextlib.suppress(SystemExit):
            run_script(script, "--help")
    return 0
