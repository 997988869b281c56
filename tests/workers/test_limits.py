"""Small limits of the system: our own words for them, at once. In forks that have them for real."""

import contextlib
import ctypes
import os
import resource
import sys
import tempfile

import pytest
import torch
from processes import Forked, FromServer, in_forks
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.comm import shm
from lockstep.errors import LockstepError

pytestmark = pytest.mark.timeout(60)
CLONE_NEWNS, MS_RDONLY, MS_PRIVATE_ALL = 0x20000, 1, 0x44000


def few_handles(number):
    """Let this process open so many files more; returns the limits that it had."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + number, before[1]))
    return before


def mount(folder, options, flags=0):
    """Put a small file system over `folder`, for this process and its children alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (
        libc.unshare(CLONE_NEWNS),
        libc.mount(b"none", b"/", None, MS_PRIVATE_ALL, None),
        libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", flags, options.encode()),
    ):
        assert not failed, os.strerror(ctypes.get_errno())


def load_in_processes():
    loader = DataLoader(TensorDataset(torch.zeros(8, 500_000)), batch_size=4, num_workers=1)
    return len(list(lockstep.shard(loader, world=lockstep.join())))


def in_fork(folder, limit, action):
    """What `action` raises in a fork with a limit."""

    def limited():
        torch.set_num_threads(1)  # Threads of the process that was forked are not here, and would be waited for.
        limit()
        try:
            action()
        except LockstepError as error:
            print(error)
        return 0

    return Forked(limited, folder).wait().out


def join_two():
    os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    lockstep.join()


@pytest.mark.parametrize(
    ("action", "number", "said"),
    [
        (join_two, 5, "worker 0 needs 18 more file handles, and there are 5"),
        (load_in_processes, 4, "a loader (num_workers=1) ran out of file handles"),
    ],
)
def test_too_few_file_handles(tmp_path, action, number, said):
    if action is load_in_processes:

        def limit():
            lockstep.join()
            few_handles(number)
    else:

        def limit():
            few_handles(number)

    assert said in in_fork(tmp_path, limit, action)


def allocate_until_it_fails(world):
    before = few_handles(0 if world.rank == 0 else 50)
    fillers = []
    with contextlib.suppress(OSError):  # A process that has closed files has free numbers below its limit.
        while world.rank == 0:
            fillers.append(os.open("/dev/null", os.O_RDONLY))
    try:
        with pytest.raises(LockstepError) as raised:
            shm.allocate(world.group, 1000, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for filler in fillers:
            os.close(filler)
    return str(raised.value)


def test_too_few_file_handles_for_shared_memory(pool):
    texts = pool.run(2, allocate_until_it_fails, timeout=10, backend="shm")
    assert any("ran out of file handles: too many open files. Raise the limit" in text for text in texts), texts


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize(
    ("kind", "said"), [("shm", "(/dev/shm has 1 MB, of which"), ("read-only", "TMPDIR"), ("full", "TMPDIR")]
)
def test_no_room_for_loader_processes(tmp_path, kind, said):
    folder = tmp_path / "temporary"
    folder.mkdir()

    def limit():
        if kind == "shm":
            mount("/dev/shm", "size=1m")
            return
        mount(folder, "size=4k", MS_RDONLY if kind == "read-only" else 0)
        tempfile.tempdir = str(folder)
        if kind == "full":
            (folder / "file").write_bytes(bytes(4096))

    text = in_fork(tmp_path, limit, load_in_processes)
    assert text.startswith("a loader (num_workers=1)") and said in text, text


def train_watched(folder):
    """Worker: steps until worker 0 has been told that there is no room, and some more; returns the last verdict."""
    world = lockstep.join(seed=0, timeout=20)
    model = lockstep.DataParallel(torch.nn.Linear(4, 1))
    watcher = lockstep.watch(model, folder=folder, progress=False)
    if world.is_main:
        with contextlib.suppress(OSError), (folder.parent / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
    told = folder.parent.parent / "stderr"
    after = 0
    while world.sum(after) < 20:
        model(torch.ones(2, 4)).sum().backward()
        after += world.is_main and "watching has ended" in told.read_text()
    verdict = watcher.verdict()
    world.leave()
    return str(verdict)


def fill_a_disk(folder):
    mount(folder, "size=256k")
    in_forks(sys.modules[__name__], "train_watched")
    print(lockstep.launch(train_watched, workers=2, args=(folder / "watched",)))
    return 0


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_under_watch_ends_the_watching_alone(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    ended = FromServer(tmp_path, fill_a_disk, folder).wait()
    assert (ended.code, ended.out) == (0, "['', '']\n"), ended
    assert ended.err.count("watching has ended, training goes on") == 1, ended
    assert f"No space left on device: '{folder}/watched" in ended.err, ended
