"""The demo, as far as it needs no workers."""

import argparse
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep
from lockstep.cli import demo as cli
from lockstep.cli.main import main
from lockstep.demo import gpt, train_gpt
from lockstep.demo.examiner import (
    Findings,
    Parity,
    digest,
    largest_difference,
)
from lockstep.demo.train_gpt import corpus_folder, read_corpus, windows_of
from lockstep.errors import UsageError
from lockstep.watching.collector import Summary

TINY = gpt.SHAPES["tiny"]


# Corpus


def test_the_corpus_is_source_code_in_order(tmp_path):
    files = {"b.py": b"second", "a.py": b"first", "c.pyc": b"compiled", "site-packages/s.py": b"somebody else's"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(text)
    assert read_corpus(tmp_path) == b"first\nsecond"


def test_a_python_without_source_code_is_told(tmp_path, monkeypatch, capsys):
    (tmp_path / "os.pyc").touch()
    monkeypatch.setattr(train_gpt, "corpus_folder", lambda: tmp_path)
    assert main(["demo", "-n", "2"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"lockstep demo: there is no Python source code in {tmp_path}")


def test_this_python_has_something_to_learn():
    text = read_corpus(corpus_folder())
    assert 1 << 20 < len(text) < 16 << 20
    assert b"def __init__(self" in text


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=200), st.integers(1, 20))
def test_windows_cover_the_text_once(text, context):
    windows = windows_of(text, context)
    items = [windows[index] for index in range(len(windows))]
    assert b"".join(bytes(x.tolist()) for x, _ in items) == text[: len(windows) * context]
    assert b"".join(bytes(y.tolist()) for _, y in items) == text[1 : len(windows) * context + 1]
    assert len(text) - 1 - len(windows) * context < context


# Model and recipe


def test_models_are_as_large_as_they_say():
    millions = [gpt.num_params(shape) / 1e6 for shape in gpt.SHAPES.values()]
    assert [round(number, 1) if number < 1 else round(number) for number in millions] == [0.1, 3, 11, 85]


def test_the_model_looks_at_earlier_bytes_only():
    torch.manual_seed(0)
    net = gpt.ByteGPT(TINY)
    text = torch.randint(256, (2, TINY.context))
    changed = text.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 256
    torch.testing.assert_close(net(text)[:, :40], net(changed)[:, :40])
    assert not torch.allclose(net(text)[:, 40:], net(changed)[:, 40:])


def test_the_model_writes_reproducibly_and_beyond_its_context():
    net = gpt.ByteGPT(gpt.Shape(layers=1, heads=1, width=8, context=8))
    text = net.write(b"def ", 16, seed=3)
    assert text == net.write(b"def ", 16, seed=3)
    assert text != net.write(b"def ", 16, seed=4)
    assert text.startswith(b"def ")
    assert len(text) == 4 + 16


@settings(deadline=None)
@given(st.integers(1, 1000))
def test_the_learning_rate_goes_up_and_down(steps):
    rates = [gpt.rate(step, steps) for step in range(steps + 20)]
    assert max(rates) == 1.0
    assert min(rates) > 0
    top = rates.index(1.0)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


@pytest.mark.parametrize("words", [["--steps", "0"], ["--batch", "0"], ["--steps", "-1"]])
def test_recipes_that_cannot_be_right(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["demo", *words])
    assert "is too few: give 1 or more" in capsys.readouterr().err


# Measuring


def test_differences_are_relative_and_see_what_is_not_a_number():
    a = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert largest_difference([a], [a]) == 0
    assert largest_difference([a + 0.01 * a.flip(0)], [a]) == pytest.approx(0.01)
    assert largest_difference([a, 2 * a], [a, a]) == 1
    assert math.isnan(largest_difference([a, a * float("nan"), a], [a, a, a]))


def test_one_bit_changes_the_digest():
    torch.manual_seed(0)
    net = gpt.ByteGPT(TINY)
    before = digest(net)
    assert digest(net) == before
    bits = net.byte.weight.detach().view(torch.int32)
    bits[17, 3] ^= 1
    assert digest(net) != before


# What is said


def findings(**changed):
    values = {
        "workers": 2,
        "steps": 40,
        "losses": (5.5, *[2.0] * 39),
        "digests": ("ab" * 32, "ab" * 32),
        "parity": Parity(steps=5, batch=32, weights=1e-7, losses=2e-8),
        "summary": Summary(
            steps=35, wall_ms=500.0, exposed_ms=10.0, waiting_ms=15.0, samples_per_s=64.0, efficiency=0.8
        ),
        "sample": b"def main(\xff\x1b[2J):\n\n    return 1\n",
    }
    return Findings(**values | changed)


def test_statements_hold_the_numbers():
    said = "\n".join([*cli.checked(findings()), *cli.measured(findings())])
    for part in (
        "abababababababab", "1.0e-07", "2.0e-08", "1e-05", "32-sample", "from 5.500 to 2.000", "64.0 samples/s",
        "500 ms a step", "80 %", "2.0 % of the time", "slower worker 3.0 %",
    ):  # fmt: skip
        assert part.lower() in said.lower(), part
    assert "FAILED" not in said
    assert all(len(text) <= 120 for text in said.splitlines())


def test_what_was_not_measured_is_not_claimed():
    said = "\n".join(cli.measured(findings(summary=Summary())))
    assert "too few steps" in said
    assert not any(character.isdigit() for character in said)


def test_the_sample_cannot_reach_into_the_terminal():
    assert cli.written(findings().sample)[1:] == ["    def main(??[2J):", "        return 1"]


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Runs the command with these findings in the place of a real run's."""
    (tmp_path / "source.py").write_text("pass\n")
    monkeypatch.setattr(train_gpt, "corpus_folder", lambda: tmp_path)  # The whole library takes a second to read.

    def run(found):
        def launch(fn, workers, args):
            if isinstance(found, BaseException):
                raise found
            return [found, None]

        monkeypatch.setattr(lockstep, "launch", launch)
        return main(["demo", "-n", "2", "--model", "tiny"])

    return run


def test_a_good_run_says_what_to_do_next(launched, capsys):
    assert launched(findings()) == 0
    said = capsys.readouterr().out
    assert "lockstep.DataParallel(net.to(world.device))" in said
    assert "lockstep run -n 2 train.py" in said


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"digests": ("a" * 64, "b" * 64)}, "worker 1: bbbbbbbbbbbbbbbb"),
        ({"parity": Parity(5, 32, weights=1e-3, losses=0.0)}, "weights differ by 1.0e-03"),
        ({"parity": Parity(5, 32, weights=0.0, losses=1e-3)}, "losses by 1.0e-03"),
        ({"parity": Parity(5, 32, weights=float("nan"), losses=0.0)}, "weights differ by nan"),
        ({"losses": (5.5, float("nan"))}, "to nan"),
    ],
)
def test_a_check_that_fails_is_told_and_is_the_exit_code(launched, capsys, changed, part):
    assert launched(findings(**changed)) == 1
    said = capsys.readouterr()
    failed = said.out.split("FAILED")
    assert len(failed) == 2
    assert part in failed[1]
    assert "NOT as promised" in said.err
    assert "Three lines" not in said.out


@pytest.mark.parametrize(
    ("error", "status", "part"),
    [
        (KeyboardInterrupt(), 130, "interrupted; no worker is left"),
        (lockstep.WorkerLost("worker 1 was killed by SIGKILL.", (1,)), 1, "worker 1 was killed"),
        (UsageError("a batch of 1 samples: give at least 2."), 2, "give at least 2"),
    ],
)
def test_runs_that_do_not_come_to_an_end(launched, capsys, error, status, part):
    assert launched(error) == status
    assert part in capsys.readouterr().err


def test_models_offered_are_those_there_are():
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    for name in gpt.SHAPES:
        assert parser.parse_args(["demo", "--model", name]).model == name
    with pytest.raises(SystemExit):
        parser.parse_args(["demo", "--model", "huge"])


def test_describing_the_command_does_not_import_the_demo():
    code = "import sys; from lockstep.cli import demo; print('lockstep.demo' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False"]
