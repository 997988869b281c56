"""How a run under way is told to change, and what `lockstep verify --chaos` draws and says: without workers."""

import itertools
import os
import socket
import threading

import pytest

from lockstep.cli.main import main
from lockstep.cli.verify import closing_of_chaos
from lockstep.errors import LaunchError, UsageError
from lockstep.start import control
from lockstep.verify.chaos import ChaosRun, ChaosVerdict, draw


@pytest.fixture
def served():
    """A launcher's side, attended by a thread; what it was asked for."""
    asked, is_over = [], threading.Event()

    def resize(wanted):
        if wanted > 8:
            raise UsageError(f"{wanted} workers: too many.")
        asked.append(wanted)
        return f"{wanted} workers are wanted."

    here = control.Control("test_control", resize)

    def serve():
        while not is_over.wait(0.01):
            here.attend()

    thread = threading.Thread(target=serve)
    thread.start()
    yield asked
    is_over.set()
    thread.join()
    here.close()


def test_a_run_is_found_by_name_and_by_process_id(served):
    assert control.resize("test_control", 3) == "3 workers are wanted."
    assert control.resize(str(os.getpid()), 4) == "4 workers are wanted."
    assert served == [3, 4]
    assert {"test_control", str(os.getpid())} <= set(control.runs())


def test_what_the_run_refuses_is_told(served, capsys):
    with pytest.raises(UsageError, match="9 workers: too many"):
        control.resize("test_control", 9)
    assert main(["resize", "test_control", "9"]) == 2
    assert capsys.readouterr().err == "lockstep resize: 9 workers: too many.\n"
    with pytest.raises(SystemExit, match="2"):
        main(["resize", "test_control", "0"])
    assert served == []


@pytest.mark.parametrize("line", [b"what?\n", b"resize many\n", b"resize 3; rm\n", b"x" * 5000, b"resize 3", b""])
def test_who_speaks_another_language_holds_nobody_up(served, line):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.connect(f"\0lockstep-run-{os.geteuid()}-test_control")
        channel.sendall(line)
        assert control.resize("test_control", 2) == "2 workers are wanted."
    assert served == [2]


def test_a_name_is_given_once(served):
    with pytest.raises(LaunchError, match="has this name already"):
        control.Control("test_control", str)


def test_after_its_end_nothing_is_left():
    control.Control("test_control_gone", str).close()
    assert "test_control_gone" not in control.runs()
    with pytest.raises(LaunchError, match="no elastic run 'test_control_gone' of yours"):
        control.resize("test_control_gone", 2)


@pytest.mark.parametrize("name", ["", "1", "a b", "x" * 65, "../x"])
def test_names_that_are_none(name):
    with pytest.raises(UsageError, match="the name of a run begins with a letter"):
        control.check_name(name)


# verify --chaos


@pytest.mark.parametrize(("count", "num_steps"), [(10, 1000), (10, 12), (3, 4), (5, 1)])
def test_kills_leave_a_step_between_them(count, num_steps):
    kills = draw(count, num_steps, 4, seed=3)
    steps = [kill.step for kill in kills]
    assert len(kills) <= count and all(later - step >= 2 for step, later in itertools.pairwise(steps))
    assert all(0 < kill.step < num_steps - 1 and 0 <= kill.rank < 4 for kill in kills)
    assert kills == draw(count, num_steps, 4, seed=3)
    assert len(kills) == count or num_steps < 4 * count


def a_run(value, kills=()):
    steps = {step: {"w": "a", "the loss": "b"} for step in range(1, 9)}
    steps[7] = {"w": value, "the loss": "b"}
    return ChaosRun({"w": value, "exp_avg": "c"}, steps, list(kills))


def test_the_verdict_in_words():
    kills = [(3, 1, 100), (6, 2, 101)]
    same = closing_of_chaos(ChaosVerdict(a_run("a"), a_run("a", kills)), 10)
    assert same[0] == "Verdict: the same bits, after 2 kills in 8 steps: 2 tensors compared."
    assert same[1:] == ["  10 kills were asked for: a longer training has room for more."]
    other = "\n".join(closing_of_chaos(ChaosVerdict(a_run("a"), a_run("x", kills), a_run("a")), 2))
    assert "1 of 2 tensors differ at the end: 'w'." in other
    assert "First difference: 'w' after step 7, after the kill of worker 2 in step 6." in other
    assert "so the kills made the difference" in other
    never = "\n".join(closing_of_chaos(ChaosVerdict(a_run("a"), a_run("x", kills), a_run("y")), 2))
    assert "Undisturbed" not in never and "before you blame the kills" in never


def test_chaos_is_asked_for_whole(capsys, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    assert main(["verify", "--kills", "3", str(script)]) == 2
    assert "give that too" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["verify", "--chaos", "-n", "1", str(script)])
    assert "1 is too few: give 2 or more" in capsys.readouterr().err
