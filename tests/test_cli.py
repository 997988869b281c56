"""The command line, as far as it needs no workers."""

import sys

import pytest

from lockstep.cli.main import main
from lockstep.cli.run import closing_words
from lockstep.start.command import RunOutcome
from lockstep.start.failure import Failure


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    (tmp_path / "folder").mkdir()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "command"),
        (["walk"], "invalid choice: 'walk'"),
        (["run"], "SCRIPT"),
        (["run", "-n", "two", "script.py"], "two is no whole number"),
        (["run", "-n", "0", "script.py"], "0 workers"),
        (["run", "-n", "-3", "script.py"], "-3 workers"),
        (["run", "-n", "2", "--threads", "0", "script.py"], "0 threads"),
        (["run", "--notice", "nan", "script.py"], "nan is no number of seconds"),
        (["run", "--notice", "inf", "script.py"], "inf is no number of seconds"),
        (["run", "--notice", "soon", "script.py"], "soon is no number of seconds"),
        (["run", "-n", "2", "missing.py"], "there is no 'missing.py'"),
        (["run", "-n", "2", "folder"], "'folder' is not a file"),
    ],
)
def test_a_request_that_cannot_be_right_is_refused_in_one_line(words, part, capsys):
    try:
        status = main(words)
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr()
    assert status == 2
    assert said.out == ""
    assert part in said.err
    assert said.err.startswith("lockstep")
    assert said.err.count("\n") == 1


def test_a_worker_starts_no_workers(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    assert main(["run", "script.py"]) == 2
    assert "RANK=3 is set: this process is itself a worker" in capsys.readouterr().err


def test_a_python_that_cannot_be_executed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert main(["run", "-n", "2", "script.py"]) == 2
    assert "'/nowhere/python' cannot be executed" in capsys.readouterr().err


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as left:
        main(["run", "--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert all(option in said for option in ("-n", "-m", "--threads", "--no-prefix", "--notice"))


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (RunOutcome(2), []),
        (RunOutcome(1, has_met=False), []),
        (RunOutcome(2, signum=13, has_met=False), []),
        (RunOutcome(1, Failure(0, 0.0, 3, "")), []),
        (
            RunOutcome(1, Failure(0, 0.0, -11, "")),
            ["lockstep run: the worker was killed by SIGSEGV, a crash in native code."],
        ),
        (RunOutcome(2, signum=13), []),
        (RunOutcome(2, signum=2), ["lockstep run: ended by SIGINT; no worker is left."]),
        (
            RunOutcome(2, Failure(1, 0.0, 1, "Traceback")),
            ["lockstep run: worker 1 failed first (exit code 1); its last words:", "Traceback"],
        ),
    ],
)
def test_closing_words(outcome, said):
    assert closing_words(outcome) == said
