"""Memory that a step frees is kept for the next one, unless the user has tuned C's allocator."""

import os
import resource
import subprocess
import sys

import pytest
import torch
from torch import nn

import lockstep

PAGE_BYTES = resource.getpagesize()
SEEN_STEPS = 10
full = pytest.mark.skipif("FULL" not in os.environ, reason="needs FULL=1")


def faults_of_a_step() -> int:
    """The fewest page faults of several steps of a model whose activations and gradients take 20 MB."""
    net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = lockstep.DataParallel(net, optimizer=optimizer)
    x = torch.randn(256, 1024)
    counts = []
    for _ in range(SEEN_STEPS):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts)


def _faults_with(**variables: str) -> int:
    """`faults_of_a_step` in a process that starts with these environment variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env={**kept, **variables}, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


def test_a_step_gets_the_memory_of_the_last_one() -> None:
    assert _faults_with() < 100


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"MALLOC_MMAP_THRESHOLD_": "131072"}, marks=full),
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"},
    ],
)
def test_the_settings_of_the_user_stand(variables: dict[str, str]) -> None:
    assert _faults_with(**variables) > (16 << 20) / PAGE_BYTES


if __name__ == "__main__":
    torch.set_num_threads(1)
    lockstep.join(device="cpu")
    print(faults_of_a_step())
