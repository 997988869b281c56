"""A process that dies in the middle of a save, at every operation and every byte: what stood before still stands."""

import os
import resource
import shutil
import signal
import sys

import pytest
import torch
from amount import some
from test_keep_checkpoint import names, save

from lockstep.keep import open_checkpoint


def contents(folder):
    with open_checkpoint(folder) as checkpoint:
        checkpoint.verify()
        step = checkpoint.tree["step"]
        assert checkpoint.read_whole("x").tolist() == [float(step)] * 4
        return checkpoint.step, step


def dies(function):
    """Run `function` in a forked process that may die in the middle of it; whether it did."""
    child = os.fork()
    if not child:
        try:
            function()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] != 0


@pytest.mark.parametrize("step", [2, 3], ids=["a step again", "a new step"])
def test_dying_at_every_operation_on_files(tmp_path, step):
    """The process ends before its k-th operation on a file or folder, for every k, without a chance to clean up.

    By default odd ones in one case and even ones in the other, which have most operations in common.
    """
    steps_seen = set()
    save(tmp_path / "two", 1)
    save(tmp_path / "two", 2)
    for last in some(range(1 + step % 2, 1000, 2), range(1, 1000)):
        folder = tmp_path / str(last)
        shutil.copytree(tmp_path / "two", folder)
        left = last

        def die(event, args):
            nonlocal left
            if event.split(".")[0] in ("open", "os", "shutil", "fcntl"):
                left -= 1
                if not left:
                    os._exit(1)

        def work():
            sys.addaudithook(die)
            save(folder, step, tree={"step": 30}, tensors={"x": torch.full((4,), 30.0)}, keep_last=1)

        died = dies(work)
        seen = contents(folder)
        assert seen in {(2, 2), (step, 30)}
        steps_seen.add(seen)
        save(folder, 9, keep_last=1)
        assert contents(folder) == (9, 9) and names(folder) == ["step-000000009"]
        if not died:
            break
    assert last > 20 and steps_seen == {(2, 2), (step, 30)}


def test_dying_at_every_byte(tmp_path):
    """The kernel kills the process when it writes beyond byte k of a file."""
    save(tmp_path, 1)
    for limit in range(0, 1400, 37):

        def work():
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            save(tmp_path, 2)

        if not dies(work):
            break
        assert contents(tmp_path) == (1, 1)
    assert limit > 500 and contents(tmp_path) == (2, 2)
