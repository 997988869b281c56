"""No core to spare: as many as there are workers, one thread each."""

import contextlib
import os

import torch


@contextlib.contextmanager
def crowded(world, num_threads=1):
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, sorted(cores)[: world.size])
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
