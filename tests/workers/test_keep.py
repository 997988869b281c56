"""Checkpoints of real workers: read by other numbers of them, on full disks, beside training, killed at any moment."""

import contextlib
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
import torch
from amount import some
from processes import Forked

from lockstep.errors import CheckpointError
from lockstep.keep import HostMemory, Piece, open_checkpoint, write, write_async


def tensors(step=0):
    draw = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(37, 11, generator=draw),
        "bias": torch.randn(3, generator=draw).bfloat16(),
        "steps": torch.tensor(step),
        "nothing": torch.empty(0, 5),
    }


def cut(numel, part, parts):
    return numel * part // parts, numel * (part + 1) // parts


def own_pieces(world, content):
    """This worker's part of every tensor, in two pieces."""
    for name, tensor in content.items():
        begin, end = cut(tensor.numel(), world.rank, world.size)
        middle = (begin + end) // 2
        for start, stop in {(begin, middle), (middle, end)} if middle > begin else [(begin, end)]:
            yield Piece(name, tuple(tensor.shape), start, tensor.reshape(-1)[start:stop])


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def _writes(world, folder, is_async):
    options = {"step": 5, "pieces": list(own_pieces(world, tensors(5))), "tree": {"lr": [0.5]}, "world": world}
    return str(write_async(folder, **options).wait() if is_async else write(folder, **options))


def _reads(world, folder):
    with open_checkpoint(folder) as checkpoint:
        assert (checkpoint.step, checkpoint.tree) == (5, {"lr": [0.5]})
        for name, whole in tensors(5).items():
            begin, end = cut(whole.numel(), world.rank, world.size)
            assert torch.equal(checkpoint.read(name, begin, end), whole.reshape(-1)[begin:end])
            assert torch.equal(checkpoint.read_whole(name), whole)


@pytest.mark.parametrize(
    ("writers", "is_async"), some([(1, True), (2, False), (3, True), (4, False)], product((1, 2, 3, 4), (False, True)))
)
def test_any_number_of_workers_reads_what_any_number_wrote(pool, tmp_path, writers, is_async):
    assert pool.run(writers, _writes, str(tmp_path), is_async) == [str(tmp_path / "step-000000005")] * writers
    assert names(tmp_path) == ["step-000000005"]
    assert len(names(tmp_path / "step-000000005")) == writers + 1
    for readers in {1, 2, 4} - {writers}:
        pool.run(readers, _reads, str(tmp_path))


def _saves_beside_training(world, folder):
    """Collectives in this thread and saves in another: neither waits for, nor disturbs the other."""
    memory, param, handles = HostMemory(), torch.zeros(50_000), []
    for step in range(12):
        param.fill_(world.sum(step) / world.size)
        if step % 3 == 0:
            begin, end = cut(param.numel(), world.rank, world.size)
            mine = [Piece("p", tuple(param.shape), begin, param[begin:end])]
            handles.append(write_async(folder, step=step, pieces=mine, tree=step, world=world, memory=memory))
        param.neg_()
        assert world.sum(float(param[0])) == -step * world.size
    return [str(handle.wait()) for handle in handles]


def test_training_goes_on_while_a_thread_saves(pool, tmp_path):
    first, second, third = pool.run(3, _saves_beside_training, str(tmp_path))
    assert first == second == third
    for step in (0, 3, 6, 9):
        with open_checkpoint(tmp_path / f"step-{step:09d}") as checkpoint:
            assert checkpoint.read_whole("p").unique().tolist() == [step]
    assert len(names(tmp_path)) == 4


def failure_of(world, folder, pieces, is_async):
    """What a save that cannot succeed raises; collectives work before and after."""
    options = {"step": 2, "pieces": pieces, "tree": None, "world": world}
    with pytest.raises(CheckpointError) as caught:
        if is_async:
            write_async(folder, **options).wait()
        else:
            write(folder, **options)
    assert world.sum(1) == world.size
    return str(caught.value)


def _saves_to_a_full_disk(world, folder, is_async):
    write(folder, step=1, pieces=list(own_pieces(world, tensors(1))), tree=None, world=world)
    large = [Piece.whole("large", torch.zeros(1 << 20))] if world.rank == 1 else []
    said = failure_of(world, folder, large, is_async)
    found = names(folder)
    world.barrier()
    write(folder, step=3, pieces=list(own_pieces(world, tensors(3))), tree=None, world=world, keep_last=1)
    return said, found


@pytest.mark.parametrize("is_async", [False, True])
def test_a_full_disk(pool, tmp_path, is_async):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        outcomes = pool.run(3, _saves_to_a_full_disk, str(tmp_path / "run"), is_async)
        assert len({said for said, _ in outcomes}) == 1
        for said, found in outcomes:
            # While worker 1 fills the disk, others may find no room either: for their small parts, or for a letter.
            culprit = r"worker [012] could not write \S*"
            if not is_async:  # All who failed are named, and it is among them.
                culprit = r"worker ([012]) could not write \S*worker-0000\1-of"
                assert re.search(r"worker 1 could not write|workers failed too: [^.]*\b1\b", said), said
            assert re.search(rf"{culprit}\S*: No space left on device\. Free some space", said), said
            assert "Earlier checkpoints are as they were" in said
            assert found == ["step-000000001"]
        assert names(tmp_path / "run") == ["step-000000003"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def _saves_with_few_files_left(world, folder, num_left):
    fillers = []
    if world.is_main:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(folder / f"filler-{len(fillers)}")
                fillers[-1].touch()
        for filler in fillers[: num_left + 1]:
            filler.unlink(missing_ok=True)
    world.barrier()
    try:
        write_async(folder, step=1, pieces=list(own_pieces(world, tensors(1))), tree=None, world=world).wait()
        said = ""
    except CheckpointError as error:
        said = str(error)
    world.barrier()
    for filler in fillers:
        filler.unlink(missing_ok=True)
    world.barrier()
    return said


def test_a_disk_that_takes_no_more_files_holds_nobody_up(pool, tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=40", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        for num_left in range(3, 8):  # Up to a letter, a part or the manifest too few.
            said = pool.run(2, _saves_with_few_files_left, tmp_path, num_left)
            assert len(set(said)) == 1 and "No space left on device" in said[0]
            assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def _may_write_little(world, folder, is_async):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank != 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        pieces = [Piece("large", (world.size, 10_000), world.rank * 10_000, torch.zeros(10_000))]
        return failure_of(world, folder, pieces, is_async)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_limit_on_file_sizes(pool, tmp_path, is_async):
    said = pool.run(3, _may_write_little, str(tmp_path), is_async)
    assert len(set(said)) == 1
    assert "worker 1 could not write" in said[0] and "File too large" in said[0] and "ulimit -f" in said[0]
    assert "1 more of 3 workers failed too" in said[0]
    assert names(tmp_path) == []


def _saves_where_no_folder_can_be(world, folder):
    return [failure_of(world, folder, [], is_async) for is_async in (False, True)]


def test_a_file_where_the_folder_should_be(pool, tmp_path):
    (tmp_path / "file").write_text("")
    said = pool.run(2, _saves_where_no_folder_can_be, str(tmp_path / "file" / "run"))
    assert said[0] == said[1] and "worker 0 could not write" in said[0][0] and "Not a directory" in said[0][0]


class Alone:
    rank, size = 0, 1

    def gather_json(self, obj):
        return [obj]


def save_for_ever(folder, started):
    """Go on from the latest checkpoint, every second step saved twice, every third by a thread."""
    torch.set_num_threads(1)
    step = open_checkpoint(folder).step if os.listdir(folder) else 0
    memory = HostMemory()
    while True:
        step += 1
        for _ in range(1 + step % 2):
            pieces = [Piece.whole(name, tensor) for name, tensor in tensors(step).items()]
            options = {"step": step, "pieces": pieces, "tree": step, "world": Alone(), "keep_last": 2}
            if step % 3:
                write(folder, **options)
            else:
                write_async(folder, **options, memory=memory).wait()
            started.set()


def test_killed_at_any_moment(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    draw = random.Random(0)
    latest = 0
    for _ in some(range(20), range(50)):
        started = multiprocessing.get_context("fork").Event()
        process = Forked(lambda: save_for_ever(folder, started), tmp_path)
        assert started.wait(30)
        time.sleep(draw.uniform(0, 0.03))
        process.signal(signal.SIGKILL)
        assert process.wait().code == -signal.SIGKILL
        with open_checkpoint(folder) as checkpoint:
            assert checkpoint.step == checkpoint.tree > latest
            latest = checkpoint.step
            for name, tensor in tensors(latest).items():
                assert torch.equal(checkpoint.read_whole(name), tensor)
        assert sum(name.startswith("step-") for name in names(folder)) <= 3
        assert len(names(folder)) <= 5, "leftovers do not pile up"


def test_a_script_that_ends_still_gets_its_checkpoint(tmp_path):
    code = f"""
import torch
from types import SimpleNamespace
from lockstep.keep import Piece, write_async
alone = SimpleNamespace(rank=0, size=1, gather_json=lambda obj: [obj])
write_async({str(tmp_path)!r}, step=5, pieces=[Piece.whole("large", torch.ones(1 << 22))], tree=None, world=alone)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
    assert open_checkpoint(tmp_path).read_whole("large").sum() == 1 << 22
