"""`lockstep run`, with real workers, real signals and real deaths."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from processes import PUBLISH, Ended, Forked, wait_for_pids, wait_until, wait_until_gone

from lockstep.cli.main import main
from lockstep.comm import notices
from lockstep.start import host, supervisor

pytestmark = pytest.mark.timeout(60)

STAY = PUBLISH + "stay_with_a_child()\n"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launcher(tmp_path):
    """Start `lockstep run` with these arguments, on a script with this source."""

    def start(*options: str, source: str = "", args: tuple[str, ...] = (), stdout_fd: int | None = None) -> Forked:
        (tmp_path / "script.py").write_text(source)
        script = () if "-m" in options else ("script.py",)
        return Forked(partial(main, ["run", *options, *script, *args]), tmp_path, stdout_fd)

    return start


@pytest.fixture
def lockstep_run(launcher):
    def run(*options: str, source: str = "", args: tuple[str, ...] = ()) -> Ended:
        return launcher(*options, source=source, args=args).wait()

    return run


def test_workers_get_arguments_environment_and_a_prefix(lockstep_run):
    source = """
import json, os, sys
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
         "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
print(json.dumps({"argv": sys.argv[1:], **{name: os.environ[name] for name in names}}))
print("and on stderr", file=sys.stderr)
print("unended", end="")
"""
    ended = lockstep_run("-n", "2", source=source, args=("--lr", "3", "-n", "7", "--", "-m"))
    assert ended.code == 0, ended
    *err, last = ended.err.splitlines()
    assert last.startswith("lockstep run: the 2 workers never met")
    assert sorted(err) == ["[0] and on stderr", "[1] and on stderr"]
    said = {int(line[1]): line[4:] for line in ended.out.splitlines() if "{" in line}
    assert sorted(line for line in ended.out.splitlines() if "{" not in line) == ["[0] unended", "[1] unended"]
    seen = {rank: json.loads(line) for rank, line in said.items()}
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]
    for rank in (0, 1):
        assert seen[rank] == {
            "argv": ["--lr", "3", "-n", "7", "--", "-m"],
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": seen[0]["MASTER_PORT"],
            "OMP_NUM_THREADS": str(max(1, host.num_cores() // 2)),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        }


def test_the_users_settings_stand(lockstep_run, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    source = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['GLOO_SOCKET_IFNAME'])"
    assert lockstep_run("-n", "2", "--no-prefix", source=source).out == "7 eth9\n" * 2
    assert lockstep_run("-n", "1", "--threads", "3", source=source).out == "3 eth9\n"


def test_a_module(lockstep_run, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    ended = lockstep_run("-n", "2", "-m", "package.train", args=("-m", "x"))
    assert sorted(ended.out.splitlines()) == [f"[{rank}] __main__ ['-m', 'x']" for rank in (0, 1)], ended


def test_a_single_worker_has_the_terminal(lockstep_run):
    ended = lockstep_run("-n", "1", source="print('bar\\r', end='', flush=True); raise SystemExit(4)")
    assert ended == Ended(4, "bar\r", "")


def test_the_entry_point(tmp_path):
    (tmp_path / "script.py").write_text("import os; print(os.environ['RANK'])")
    command = [sys.executable, "-c", "import sys; from lockstep.cli.main import main; sys.exit(main())"]
    done = subprocess.run([*command, "run", "-n", "2", "script.py"], cwd=tmp_path, capture_output=True, timeout=50)
    assert (done.returncode, sorted(done.stdout.split(b"\n"))) == (0, [b"", b"[0] 0", b"[1] 1"]), done.stderr


def test_much_output_from_all_arrives_whole(lockstep_run):
    source = """
import os, sys
for number in range(20_000):
    print(os.environ["RANK"] * 100, number)
    print(os.environ["RANK"] * 100, number, file=sys.stderr)
"""
    ended = lockstep_run("-n", "3", source=source)
    assert ended.code == 0
    for text in (ended.out, ended.err):
        lines = text.splitlines()
        for rank in "012":
            expected = [f"[{rank}] {rank * 100} {number}" for number in range(20_000)]
            assert [line for line in lines if line[1] == rank] == expected


def test_a_progress_bar_becomes_lines(lockstep_run):
    source = """
import sys
for percent in range(101):
    sys.stderr.write(f"\\r{percent}%|###")
    sys.stderr.flush()
"""
    ended = lockstep_run("-n", "2", source=source)
    lines = [line for line in ended.err.splitlines() if line.startswith("[1]")]
    assert lines[-1] == "[1] 100%|###"
    assert len(lines) < 20


def test_the_exit_code_is_that_of_the_failure_and_the_others_are_ended(lockstep_run, tmp_path):
    source = PUBLISH + "sys.exit(3) if os.environ['RANK'] == '1' else stay_with_a_child()"
    ended = lockstep_run("-n", "3", "--notice", "0", source=source)
    assert ended.code == 3
    assert ended.err.splitlines()[-1] == (
        "lockstep run: worker 1 failed first (exit code 3); it said nothing on stderr."
    )
    wait_until_gone([int(path.read_text()) for path in tmp_path.glob("*.pid")])


def test_the_first_failures_traceback_comes_last_and_complete(lockstep_run, tmp_path):
    source = """
import os, sys, traceback
rank = os.environ["RANK"]

def down(depth):
    if depth == 0:
        raise KeyError("at the bottom")
    (lambda: down(depth - 1))()

def fail():
    try:
        down(200)
    except KeyError as error:
        try:
            raise OSError("in between")
        except OSError:
            raise ValueError("a message\\n\\nof several lines\\n  indented") from error

print("an old traceback\\nTraceback (most recent call last):\\n  caught\\nOldError: old", file=sys.stderr)
if rank == "1":
    for _ in range(1000):
        print("chatter", file=sys.stderr)
    try:
        fail()
    except ValueError:
        open("expected", "w").write(traceback.format_exc())
        raise
while True:
    print("chatter of another", file=sys.stderr)
"""
    ended = lockstep_run("-n", "2", "--notice", "0.2", source=source)
    assert ended.code == 1
    expected = (tmp_path / "expected").read_text()
    assert expected.count("Traceback (most recent call last)") == 2
    last_words = ended.err.rpartition("lockstep run: worker 1 failed first (exit code 1); its last words:\n")[2]
    assert last_words == expected


def test_a_consequence_is_not_taken_for_the_cause(lockstep_run):
    source = """
import os, pathlib, sys, time
class WorkerLost(Exception):
    __module__ = "lockstep.errors"

if os.environ["RANK"] == "0":
    pathlib.Path("gone").touch()
    raise WorkerLost("worker 1 is gone")
while not pathlib.Path("gone").exists():
    time.sleep(0.01)
raise ValueError("the cause")
"""
    ended = lockstep_run("-n", "2", source=source)
    assert "failed first" in ended.err
    assert ended.err.splitlines()[-1] == "ValueError: the cause"


LOSES = """
import atexit, os, pathlib, time, traceback
class WorkerLost(Exception):
    __module__ = "lockstep.errors"

def lose(when):
    while not pathlib.Path(when).exists():
        time.sleep(0.01)
    raise WorkerLost("worker 0: worker 1 (pid 7 on host) is missing")
"""


@pytest.mark.parametrize(
    ("fate", "said"),
    [
        ("pathlib.Path('ready').touch()", "worker 0 failed (exit code 1) because of worker 1, which had finished"),
        (
            "pathlib.Path('ready').touch(); os.kill(os.getpid(), 19)",
            "worker 0 failed (exit code 1) because of worker 1, which was stopped",
        ),
        (
            "atexit.register(time.sleep, 1000); atexit.register(pathlib.Path('ready').touch); raise ValueError('mine')",
            "worker 1 failed first (exit code 1)",
        ),
    ],
)
def test_the_worker_that_the_others_lost_is_the_one_to_look_at(lockstep_run, fate, said):
    source = LOSES + f"if os.environ['RANK'] == '0':\n    lose('ready')\n{fate}\n"
    ended = lockstep_run("-n", "2", "--notice", "0.5", source=source)
    assert ended.code == 1
    assert f"lockstep run: {said}" in ended.err, ended.err


def test_a_traceback_is_shown_once_and_one_that_was_caught_too(lockstep_run):
    source = """
import os, pathlib, sys, time, traceback
rank = os.environ["RANK"]
try:
    raise KeyError("caught by " + rank)
except KeyError:
    traceback.print_exc()
print("goes on", file=sys.stderr)
if rank != "2":
    raise ValueError("of " + rank)
"""
    ended = lockstep_run("-n", "3", source=source)
    assert ended.code == 1
    for rank in range(3):
        assert ended.err.count(f"KeyError: 'caught by {rank}'") == 1
    assert ended.err.count("ValueError: of 0") == ended.err.count("ValueError: of 1") == 1
    assert ended.err.count("Traceback (most recent call last)") == 4  # The caught ones, and the first failure's.
    assert re.search(
        r"lockstep run: worker [01] failed first .*; its last words:\nTraceback .*\n.*\n.*\n.*$", ended.err
    )


def test_all_of_it_is_in_the_folder_of_a_watched_run_or_behind_a_variable(lockstep_run, tmp_path, monkeypatch):
    source = LOSES + "lose('.') if os.environ['RANK'] == '0' else 1 / 0"
    ended = lockstep_run("-n", "2", "--watch=kept", source=source)
    assert "its last words (whole, with those of the others: kept/errors):" in ended.err
    assert "in lose" in (tmp_path / "kept/errors/worker-0.txt").read_text() and "in lose" not in ended.err
    assert (tmp_path / "kept/errors/worker-1.txt").read_text().endswith("ZeroDivisionError: division by zero\n")
    monkeypatch.setenv("LOCKSTEP_TRACEBACK", "full")
    ended = lockstep_run("-n", "2", source=source)
    assert "[0]   File" in ended.err and "in lose" in ended.err and "[1] ZeroDivisionError" in ended.err


def test_a_killed_worker_is_named(lockstep_run, tmp_path):
    source = (
        PUBLISH
        + """
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), 9)
stay_with_a_child()
"""
    )
    ended = lockstep_run("-n", "2", "--notice", "0", source=source)
    assert ended.code == 128 + signal.SIGKILL
    assert "worker 1 failed first (killed by SIGKILL, often because memory ran out)" in ended.err.splitlines()[-1]
    wait_until_gone([int(path.read_text()) for path in tmp_path.glob("*.pid")])


def test_what_a_worker_leaves_behind_is_ended(lockstep_run, tmp_path):
    ended = lockstep_run("-n", "2", source=STAY.replace("time.sleep(1000)", ""))
    assert ended.code == 0
    wait_until_gone(wait_for_pids(tmp_path, 4))


DAEMON = (
    PUBLISH
    + """
rank = os.environ["RANK"]
publish("daemon" + rank, subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
orphan = f"echo $$ > orphan{rank}.tmp; mv orphan{rank}.tmp orphan{rank}.pid; exec sleep 1000"
subprocess.run(["setsid", "--fork", "sh", "-c", orphan])
"""
)


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_workers_start_in_sessions_of_their_own_ends_too(launcher, tmp_path, is_killed):
    started = launcher("-n", "2", source=DAEMON + "time.sleep(1000)" * is_killed)
    pids = wait_for_pids(tmp_path, 4)
    if is_killed:
        started.signal(signal.SIGKILL)
    assert started.wait().code == (-signal.SIGKILL if is_killed else 0)
    wait_until_gone(pids)


def test_a_killed_warden_is_no_failure(launcher, tmp_path):
    source = PUBLISH + "publish('worker' + os.environ['RANK'], os.getpid())\n"
    source += "while not os.path.exists('go'): time.sleep(0.01)"
    started = launcher("-n", "2", source=source)
    workers = wait_for_pids(tmp_path, 2)
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    (warden,) = {int(pid) for pid in children} - set(workers)
    os.kill(warden, signal.SIGKILL)
    wait_until_gone([warden])
    (tmp_path / "go").touch()
    ended = started.wait()
    assert (ended.code, ended.out) == (0, "") and ended.err.count("\n") == 1 and "never met" in ended.err


@pytest.mark.parametrize("num_handles", [10, 24])
def test_too_few_file_handles_are_said_at_once(tmp_path, num_handles):
    (tmp_path / "script.py").write_text("")

    def limited() -> int:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_handles, num_handles))
        return main(["run", "-n", "2", "script.py"])

    ended = Forked(limited, tmp_path).wait()
    assert ended.code == 2 and len(ended.err.splitlines()) == 1
    assert (
        "lockstep run: the process that launches 2 workers needs 28 more file handles" in ended.err
        and "ulimit -n 4096" in ended.err
    )


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_all(launcher, tmp_path, signum):
    started = launcher("-n", "2", source=STAY)
    pids = wait_for_pids(tmp_path, 4)
    started.signal(signum)
    ended = started.wait()
    assert ended.code == 128 + signum
    assert ended.err.splitlines()[-1] == f"lockstep run: ended by {signum.name}; no worker is left."
    wait_until_gone(pids)


def test_a_second_signal_does_not_wait(launcher, tmp_path):
    source = """
import signal
signal.signal(signal.SIGINT, lambda *_: publish("told" + os.environ["RANK"], 0))
while True:
    try:
        stay_with_a_child()
    except Exception:
        pass
"""
    # Short sleeps: a signal that comes just before a sleep is seen by Python when that is over.
    source = PUBLISH.replace("time.sleep(1000)", "while True: time.sleep(0.1)") + source
    started = launcher("-n", "2", source=source)
    pids = wait_for_pids(tmp_path, 4)
    started.signal(signal.SIGINT)
    wait_until(lambda: len(list(tmp_path.glob("told*.pid"))) == 2, "the workers to be told")
    started.signal(signal.SIGINT)
    assert started.wait().code == 128 + signal.SIGINT
    wait_until_gone(pids)


def test_a_killed_launcher_leaves_nobody(launcher, tmp_path):
    started = launcher("-n", "2", source=STAY)
    pids = wait_for_pids(tmp_path, 4)
    started.signal(signal.SIGKILL)
    assert started.wait().code == -signal.SIGKILL
    wait_until_gone(pids)


def test_when_nobody_reads_the_output_all_ends(launcher, tmp_path):
    read_fd, write_fd = os.pipe()
    started = launcher("-n", "2", source="while True: print('x' * 1000)", stdout_fd=write_fd)
    os.close(write_fd)
    os.read(read_fd, 10)
    os.close(read_fd)
    assert started.wait().code == 128 + signal.SIGPIPE


def test_a_stuck_reader_does_not_keep_workers_alive(launcher, tmp_path):
    read_fd, write_fd = os.pipe()
    source = STAY.replace("time.sleep(1000)", "print('x' * 1_000_000)")
    started = launcher("-n", "2", source=source, stdout_fd=write_fd)
    os.close(write_fd)
    pids = wait_for_pids(tmp_path, 4)
    started.signal(signal.SIGTERM)
    assert started.wait().code == 128 + signal.SIGTERM
    wait_until_gone(pids)
    os.close(read_fd)


PLAIN_TORCH = """
import json, os, pathlib
import torch, torch.distributed as dist

def listening(pid):
    inodes = set()
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd))
        except OSError:
            pass
    for table in ("tcp", "tcp6"):
        for row in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            field = row.split()
            if field[3] == "0A" and f"socket:[{field[9]}]" in inodes:
                yield field[1].partition(":")[0]

dist.init_process_group("gloo")
total = torch.ones(2)
dist.all_reduce(total)
print(json.dumps([total.tolist(), *listening(os.getpid()), *listening(os.getppid())]))
dist.barrier()
dist.destroy_process_group()
"""


def test_a_plain_torch_script_runs_and_listens_on_loopback_only(lockstep_run):
    ended = lockstep_run("-n", "2", source=PLAIN_TORCH)
    assert ended.code == 0, ended.err
    for line in ended.out.splitlines():
        total, *listening = json.loads(line[4:])
        assert total == [2.0, 2.0]
        assert len(listening) >= 1
        assert set(listening) == {"0100007F"}


def test_survivors_say_whom_they_lost(lockstep_run):
    source = """
import os, lockstep
world = lockstep.join()
world.barrier()
if world.rank == 1:
    os.kill(os.getpid(), 9)
world.barrier()
"""
    ended = lockstep_run("-n", "2", source=source)
    assert ended.code == 128 + signal.SIGKILL
    assert re.search(
        r"\[0\] lockstep.errors.WorkerLost: worker 0: worker 1 \(.*\) was killed by SIGKILL \(often", ended.err
    )
    assert "worker 1 failed first (killed by SIGKILL" in ended.err.splitlines()[-1]


def test_workers_that_all_raised_and_hang_in_their_own_exit_are_ended(lockstep_run):
    source = """
import atexit, time
atexit.register(time.sleep, 1000)
import lockstep
lockstep.join().barrier()
raise ValueError("of all")
"""
    ended = lockstep_run("-n", "2", "--notice", "0.2", source=source)
    assert ended.code == 1
    assert re.search(r"lockstep run: worker [01] failed first \(exit code 1\); its last words:\nTraceback", ended.err)
    assert ended.err.splitlines()[-1] == "ValueError: of all"


def test_the_launcher_knows_how_a_farewell_begins():
    assert supervisor._RAISED == notices.RAISED
