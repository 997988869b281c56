"""Shared memory and words in it, within one process and with a forked one."""

import mmap
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm import shm
from lockstep.comm.shm import segment
from lockstep.comm.shm.barrier import CALL_TEXT_BYTES, pack_call
from lockstep.comm.shm.futex import WRAP, Futex, _kernel_fence, fence, reached
from lockstep.comm.shm.segment import cut, open_segment, pages
from lockstep.errors import LaunchError

DTYPES = sorted((value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str)


def pair(slice_bytes):
    """A segment as two workers see it."""
    store, found = dist.HashStore(), [None, None]

    def work(rank):
        found[rank] = open_segment("key", slice_bytes, store=store, rank=rank, size=2, watch=lambda doing: None)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    return found


def test_both_workers_see_one_memory():
    first, second = pair(100)
    assert first.slice_bytes == second.slice_bytes == mmap.PAGESIZE
    assert first.address != second.address
    first.slice(1)[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert second.slice(1)[:3].tolist() == [1, 2, 3]
    assert int(second.slice(0).sum()) == 0


def test_no_descriptor_and_no_socket_stay_open():
    before = len(os.listdir("/proc/self/fd"))
    held = pair(1 << 16)
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "Python's mmap keeps one descriptor per mapping"
    del held
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_tensor_is_found_in_its_own_slice_only():
    first, _ = pair(4096)
    tensor = first.slice(1)[64:128]
    assert first.offset_of(tensor.data_ptr(), 64, 1) == 64
    assert first.offset_of(tensor.data_ptr(), 64, 0) is None
    assert first.offset_of(tensor.data_ptr(), 4096, 1) is None


def test_memory_lives_as_long_as_a_tensor_over_it():
    tensor = pair(4096)[0].slice(0)
    tensor.fill_(7)
    assert int(tensor.sum()) == 7 * 4096


def test_nobody_can_shrink_it(monkeypatch):
    made = []
    create = segment._create
    monkeypatch.setattr(segment, "_create", lambda size: made.append(os.dup(d := create(size))) or d)
    pair(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(made[0], 10)
    os.close(made[0])


@pytest.mark.parametrize("what, found", [("system", "Darwin"), ("machine", "pdp11")])
def test_elsewhere_than_on_linux_it_says_so(monkeypatch, what, found):
    monkeypatch.setattr(shm.platform, what, lambda: found)
    with pytest.raises(LaunchError, match=rf"needs Linux.*{found}.*Use gloo"):
        shm._create("shm", None, None)


def test_a_wait_that_will_never_end_is_watched():
    def watch(doing):
        raise LaunchError(doing)

    with pytest.raises(LaunchError, match="waiting for shared memory"):
        open_segment("key", 1, store=dist.HashStore(), rank=1, size=2, watch=watch)


def test_a_sleeper_is_woken_by_another_process():
    memory, _ = pair(4096)
    words, futex = memoryview(memory.memory).cast("I"), Futex()
    child = os.fork()
    if child == 0:
        words[0] = 1
        futex.wake(__import__("ctypes").c_void_p(memory.address))
        os._exit(0)
    give_up = time.monotonic() + 20
    while words[0] == 0 and time.monotonic() < give_up:
        futex.wait(memory.address, 0, 20)
    os.waitpid(child, 0)
    assert words[0] == 1
    assert time.monotonic() < give_up


def test_a_changed_word_does_not_sleep_and_an_unchanged_one_not_for_ever():
    memory, _ = pair(4096)
    futex, begin = Futex(), time.monotonic()
    futex.wait(memory.address, 5, 20)
    futex.wait(memory.address, 0, 0.01)
    assert time.monotonic() - begin < 10


def test_fences_can_be_called():
    fence()()
    _kernel_fence()()


@given(st.integers(0, WRAP - 1), st.integers(0, 2**31 - 1))
def test_counters_compare_across_the_wrap(target, ahead):
    assert reached((target + ahead) % WRAP, target)
    assert ahead == 0 or not reached(target, (target + ahead) % WRAP)


@given(st.integers(0, 10**7), st.integers(1, 9), st.sampled_from((1, 2, 4, 8, 16)))
def test_cuts_cover_and_begin_on_cache_lines(numel, size, itemsize):
    parts = [cut(numel, size, rank, itemsize) for rank in range(size)]
    assert parts[0][0] == 0 and parts[-1][1] == numel
    for (begin, end), (following, _) in zip(parts, [*parts[1:], (numel, numel)], strict=True):
        assert begin <= end == following
        assert begin * itemsize % 64 == 0 or begin == numel


@given(st.sampled_from(DTYPES), st.integers(0, 2**60), st.sampled_from(("", "PREMUL_SUM")), st.integers(-1, 1000))
def test_a_call_has_its_place_on_the_page(dtype, numel, reduction, root):
    packed = pack_call("reduce_scatter", dtype, numel, reduction, root)
    assert len(packed) == CALL_TEXT_BYTES and str(dtype).removeprefix("torch.") in packed.decode()
    assert packed != pack_call("reduce_scatter", dtype, numel + 1, reduction, root)


@given(st.integers(0, 10**6))
def test_pages_are_whole(num_bytes):
    assert pages(num_bytes) >= num_bytes and pages(num_bytes) % mmap.PAGESIZE == 0
