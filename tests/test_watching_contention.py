"""Time that other threads of the process take from this one, on one core: theirs counts, other programs' does not."""

import hashlib
import os
import subprocess
import sys
import threading
import time

import pytest

from lockstep.watching.contention import Contention

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="needs Linux's schedstat")

BLOCK = bytes(1 << 20)
LASTING_S = 0.6


@pytest.fixture
def one_core():
    """This thread, and whatever it starts, on one core."""
    before = os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(0, {core})
    yield core
    os.sched_setaffinity(0, before)


def work(until):
    """Work without the interpreter's lock."""
    while not until():
        hashlib.sha256(BLOCK)


def share_taken():
    contention = Contention()
    contention.begin()
    begun = time.perf_counter()
    work(lambda: time.perf_counter() - begun > LASTING_S)
    taken = contention.end()
    lasted = time.perf_counter() - begun
    contention.close()
    return taken / 1e9 / lasted


def test_a_thread_of_this_process(one_core):
    over = threading.Event()
    other = threading.Thread(target=work, args=(over.is_set,))
    other.start()
    try:
        assert 0.2 < share_taken() < 0.8
    finally:
        over.set()
        other.join()


def test_another_program(one_core):
    program = "import hashlib\nprint(flush=True)\nwhile True: hashlib.sha256(bytes(1 << 20))"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        try:
            assert share_taken() < 0.05
        finally:
            other.kill()


def test_nobody(one_core):
    assert share_taken() < 0.05


def test_an_end_without_a_begin():
    contention = Contention()
    assert contention.end() == 0
    contention.begin()
    found = []
    elsewhere = threading.Thread(target=lambda: found.append(contention.end()))
    elsewhere.start()
    elsewhere.join()
    assert found == [0]  # A pass that ends on another thread cannot be told.
    contention.close()
