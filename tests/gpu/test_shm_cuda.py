"""Backend shm beside NCCL: host tensors through shared memory, CUDA tensors through NCCL, in one group."""

import os

import pytest
import torch
import torch.distributed as dist

import lockstep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def talk(name):
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_HOSTID=os.environ["RANK"])
    torch.cuda.set_device(0)
    dist.init_process_group(name)
    rank = dist.get_rank()
    results = []
    for device in ("cpu", "cuda"):
        mine = torch.full((5,), float(rank + 1), device=device)
        dist.all_reduce(mine)
        parts = [torch.empty(2, device=device) for _ in range(2)]
        dist.all_gather(parts, torch.full((2,), float(rank), device=device))
        dist.broadcast(theirs := torch.full((3,), float(rank), device=device), 1)
        results.append([mine.tolist(), torch.cat(parts).tolist(), theirs.tolist()])
    dist.barrier()
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("name", ["cpu:shm,cuda:nccl", "shm"])
def test_both_kinds_of_tensors_in_one_group(name):
    for results in lockstep.launch(talk, workers=2, args=(name,)):
        assert results == [[[3.0] * 5, [0.0, 0.0, 1.0, 1.0], [1.0] * 3]] * 2
