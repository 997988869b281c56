"""The pure parts of starting workers: what the host offers, output in lines, who failed first, tracebacks."""

import signal
import traceback
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lockstep import environment
from lockstep.errors import LaunchError, UsageError
from lockstep.start import host
from lockstep.start.failure import Failure, StderrTail, error_line, first, fold, how
from lockstep.start.host import refuse_nesting, variables
from lockstep.start.relay import LONGEST_BYTES, LineSplitter

LOST = "Traceback (most recent call last):\n  ...\nlockstep.errors.WorkerLost: worker 0: worker 1 left"
VOID = "Traceback (most recent call last):\n  ...\nlockstep.errors.StepVoid: worker 1"
GLOO = "Traceback (most recent call last):\n  ...\nRuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1"
QUOTED = "Traceback (most recent call last):\n  ...\nRuntimeError: Got the following error when running the callback: "
QUOTED += "WorkerLost: worker 0: worker 1 (pid 7 on host) ended"
OWN = 'Traceback (most recent call last):\n    raise ValueError("Connection closed by peer")\nValueError: mine'
WRAPPED = LOST + "\n\nThe above exception was the direct cause of the following exception:\n\nRuntimeError: gave up"


@pytest.mark.parametrize("consequence", [LOST, VOID, GLOO, QUOTED, WRAPPED])
def test_a_cause_comes_before_its_consequences(consequence):
    cause, effect = Failure(1, 20.0, 1, OWN), Failure(0, 10.0, 1, consequence)
    assert first([effect, cause]) is cause
    assert first([effect, Failure(2, 9.0, 1, consequence)]).rank == 2


def test_among_equals_the_earliest():
    assert first([Failure(0, 2.0, 1, OWN), Failure(1, 1.0, 3)]).rank == 1
    assert first([]) is None


def test_a_killed_worker_is_never_a_consequence():
    assert first([Failure(0, 1.0, 1, LOST), Failure(1, 2.0, -9, LOST)]).rank == 1


def test_exit_codes_in_words():
    assert how(3) == "exit code 3"
    assert how(-signal.SIGKILL) == "killed by SIGKILL, often because memory ran out"
    assert how(-signal.SIGTERM) == "killed by SIGTERM"
    assert how(-63) == "killed by signal 63"
    assert (Failure(0, 0.0, -9).status, Failure(0, 0.0, 3).status) == (137, 3)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 3), ("", 0), ("-1", 0), ("0", 1), ("2,0", 2), ("0,-1,1", 1), ("GPU-5f, MIG-77", 2), ("NoDevFiles", 0)],
)
def test_gpus_are_counted_as_cuda_counts_them(visible, expected):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert host.num_gpus(environ, ["nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"]) == expected
    assert host.num_gpus(environ, ["nvidiactl"]) == 0


def test_cores_in_a_container():
    assert host.cores_in_quota("max 100000\n") is None
    assert host.cores_in_quota("250000 100000\n") == 2
    assert host.num_cores() >= 1


def test_numbers_of_workers_and_threads():
    assert host.num_workers(None) >= 1
    assert host.num_workers(5) == 5
    for wrong in (0, -1, True, 1.5, "2"):
        with pytest.raises(UsageError, match="workers cannot be started"):
            host.num_workers(wrong)
    assert host.num_threads(None, 10**6, {}) == 1
    assert host.num_threads(None, 2, {"OMP_NUM_THREADS": "9"}) is None
    assert host.num_threads(4, 2, {"OMP_NUM_THREADS": "9"}) == 4


SECRET = {"secret": "s" * 32, "own_store": "a name"}


def test_join_understands_a_workers_environment():
    added = variables({"GLOO_SOCKET_IFNAME": "eth0"}, rank=1, size=3, port=1234, num_threads=2, **SECRET)
    launch = environment.read(added)
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (1, 3, 1, 3)
    assert (launch.address, launch.port, launch.store_is_up) == ("127.0.0.1", 1234, True)
    assert (launch.secret, launch.own_store) == (b"s" * 32, "a name")
    assert not environment.read(added | {"MASTER_PORT": "4321"}).own_store  # Of another launcher, started below.
    assert added["OMP_NUM_THREADS"] == "2"
    assert "GLOO_SOCKET_IFNAME" not in added
    assert "OMP_NUM_THREADS" not in variables({}, rank=0, size=1, port=1, num_threads=None, **SECRET)


def test_workers_do_not_start_workers():
    refuse_nesting({"SLURM_PROCID": "0"})  # A batch script is a Slurm process, and may well start workers.
    for name in ("RANK", "OMPI_COMM_WORLD_RANK"):
        with pytest.raises(LaunchError, match=f"{name}=0 is set"):
            refuse_nesting({name: "0"})


OURS = f'  File "{Path(host.__file__).parents[1]}/comm/peers.py", line 7, in wait\n    work.wait()\n    ^^^^^^^^^^^\n'
TORCHS = '  File "/x/site-packages/torch/_tensor.py", line 8, in backward\n    run()\n'
THEIRS = '  File "/home/train.py", line 9, in main\n    loss.backward()\n  [Previous line repeated 3 more times]\n'
BEGIN = "Traceback (most recent call last):\n"
CAUSE = "\n\nThe above exception was the direct cause of the following exception:\n\n"
FOLDED = "  ... of lockstep, {} deep: LOCKSTEP_TRACEBACK=full shows it ...\n"


def test_our_own_frames_are_folded_and_others_stay():
    error = 'lockstep.errors.WorkerLost: worker 0: gone\n  File "of the message", line 1\n    stays'
    whole = BEGIN + OURS + "RuntimeError: timed out" + CAUSE + BEGIN + THEIRS + TORCHS + OURS + THEIRS + OURS + error
    assert fold(whole) == BEGIN + THEIRS + FOLDED.format(2) + THEIRS + FOLDED.format(1) + error
    assert error_line(whole) == "lockstep.errors.WorkerLost: worker 0: gone"
    # Of another's error torch's frames stay, and all that it is chained to.
    whole = BEGIN + TORCHS + OURS + "KeyError: 1" + CAUSE + BEGIN + THEIRS + TORCHS + "ValueError: 2\n\nmore"
    assert fold(whole) == whole.replace(OURS, FOLDED.format(1))
    assert (error_line(whole), error_line("a\nb"), error_line("")) == ("ValueError: 2", "b", "")
    for text in ("", 'no traceback\n  File "x"', BEGIN + THEIRS + "E: e" + CAUSE + BEGIN + THEIRS + "F: f"):
        assert fold(text) == text


# Bytes into lines


def split(pieces, seconds=0.0):
    lines = LineSplitter()
    out = [line for number, piece in enumerate(pieces) for line in lines.feed(piece, number * seconds)]
    return out + lines.end()


@given(st.lists(st.text("ab\n").map(str.encode)))
def test_lines_without_carriage_returns_come_out_as_they_went_in(pieces):
    expected = b"".join(pieces).split(b"\n")
    assert split(pieces) == (expected if expected[-1] else expected[:-1])


@given(st.lists(st.sampled_from([b"one", b"two", b""])), st.integers(1, 7))
def test_windows_line_ends_cut_anywhere(lines, size):
    text = b"".join(line + b"\r\n" for line in lines)
    assert split([text[at : at + size] for at in range(0, len(text), size)], seconds=10) == lines


def test_one_redrawing_per_second_and_the_last():
    bar = [b"\r%d%%" % percent for percent in range(10)]
    assert split(bar, seconds=0.01) == [b"0%", b"9%"]
    assert split(bar, seconds=0.51) == [b"0%", b"2%", b"4%", b"6%", b"8%", b"9%"]
    assert split(bar, seconds=1.01) == [b"%d%%" % percent for percent in range(10)]


def test_a_bar_that_returns_after_drawing():
    assert split([b"10%\r", b"20%\r", b"30%\r", b"done\n"], seconds=2) == [b"10%", b"20%", b"done"]


def test_a_line_without_end_fills_no_memory():
    lines = LineSplitter()
    passed_on = sum(len(line) for _ in range(100) for line in lines.feed(b"x" * 100_000, 0.0))
    assert 10_000_000 - passed_on <= LONGEST_BYTES
    assert passed_on + sum(map(len, lines.end())) == 10_000_000


# The end of a worker's stderr


def tail_of(*texts):
    tail = StderrTail()
    for now, line in enumerate("\n".join(texts).encode().split(b"\n")):
        tail.feed(line, now)
    return tail


def traceback_of(function):
    try:
        function()
    except BaseException:
        return traceback.format_exc().rstrip("\n")
    raise AssertionError("did not raise")


def fail(message="it failed"):
    raise ValueError(message)


def chained():
    try:
        fail()
    except ValueError as error:
        raise KeyError("second") from error


def grouped():
    try:
        chained()
    except KeyError as error:
        raise ExceptionGroup("several", [error, ValueError("another")]) from None


CHATTER = "\n".join(f"line {number}" for number in range(10_000))


def test_the_last_traceback_alone_is_kept():
    old, new = traceback_of(fail), traceback_of(lambda: fail("new"))
    tail = tail_of(CHATTER, old, CHATTER, new)
    assert tail.text() == new
    assert tail.traceback_at == 20_000 + old.count("\n") + 1


def test_a_chain_is_kept_whole_and_counts_from_its_beginning():
    text = traceback_of(chained)
    tail = tail_of("before", text)
    assert tail.text() == text
    assert tail.traceback_at == 1


def test_a_group_is_kept_whole():
    text = traceback_of(grouped)
    assert tail_of(CHATTER, text).text() == text


def test_long_messages_and_chains_after_them():
    def long_chain():
        try:
            fail("\n".join(["wide" * 25] * 500))
        except ValueError:
            fail("short")

    text = traceback_of(long_chain)
    assert tail_of(CHATTER, text, "a warning at exit").text() == text + "\na warning at exit"


def test_what_follows_a_traceback_that_was_caught_is_bounded():
    text = tail_of(traceback_of(fail), *[CHATTER] * 20).text()
    assert text.startswith("Traceback")
    assert text.endswith("line 9998\nline 9999")
    assert len(text) < 70_000
    assert "lines ..." in text


def test_without_a_traceback_the_last_lines():
    tail = tail_of(CHATTER)
    assert tail.text().splitlines()[-1] == "line 9999"
    assert len(tail.text().splitlines()) <= 51
    assert tail.traceback_at is None


def test_without_output_nothing():
    assert tail_of("", "").text() == ""
