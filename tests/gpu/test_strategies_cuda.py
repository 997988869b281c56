"""LocalSGD and DiLoCo over NCCL: the training that they are on the CPU, equal replicas, saved and resumed."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep import wire

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WORKERS, STEPS = 2, 10


def loss_fn(model, shard):
    x, y = shard
    return F.cross_entropy(model(x), y)


def train(device, strategy, folder=None, first=0, save_at=None):
    """Weights and buffers at the end, once the round has been ended; and the bytes of the last exchange."""
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_HOSTID=os.environ.get("RANK", "0"))
    torch.backends.cuda.matmul.allow_tf32 = False
    world = lockstep.join(seed=0, timeout=120, device=device)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 5)).to(world.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    trainer = lockstep.Trainer(net, optimizer, loss_fn, shards=4, clip=1.0, seed=5, strategy=strategy)
    if first:
        trainer.load(folder)
    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(step)
        trainer.step((torch.randn(16, 12, generator=generator), torch.randint(5, (16,), generator=generator)))
        if step + 1 == save_at:
            trainer.save(folder)
    state = trainer.state_dict()["tensors"]
    return {name: tensor.numpy() for name, tensor in state.items()}, trainer.model.companion.num_bytes


STRATEGIES = [
    lockstep.LocalSGD(every=3),
    lockstep.LocalSGD(every=4, overlap=True, delay=2),
    lockstep.DiLoCo(every=3, overlap=True),
    lockstep.DiLoCo(every=4, wire=wire.Half("fp16")),
    lockstep.DiLoCo(every=4, wire=wire.Int8(block=64), overlap=True, delay=3),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_as_on_the_cpu(strategy):
    expected, _ = lockstep.launch(train, workers=WORKERS, args=("cpu", strategy))[0]
    results = lockstep.launch(train, workers=WORKERS, args=("cuda", strategy))
    tolerance = 1e-4 if strategy.wire is None else 2e-2
    for found, num_bytes in results:
        assert num_bytes > 0 and found.keys() == expected.keys()
        for name, tensor in found.items():
            assert (tensor == results[0][0][name]).all(), name
            if not name.startswith("strategy/"):
                torch.testing.assert_close(
                    torch.from_numpy(tensor), torch.from_numpy(expected[name]), rtol=tolerance, atol=tolerance
                )


@pytest.mark.parametrize("strategy", [STRATEGIES[2], STRATEGIES[4]], ids=str)
def test_resumed(tmp_path, strategy):
    """The run that goes on from a checkpoint and the one that wrote it end in the same bits."""
    expected = lockstep.launch(train, workers=WORKERS, args=("cuda", strategy, str(tmp_path), 0, 6))
    found = lockstep.launch(train, workers=WORKERS, args=("cuda", strategy, str(tmp_path), 6))
    for (one, _), (other, _) in zip(found, expected, strict=True):
        assert all((one[name] == other[name]).all() for name in other)


def sized(strategy):
    """GPU memory between two rounds and at its peak, in models: weights, gradients, momentum, common weights."""
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_HOSTID=os.environ.get("RANK", "0"))
    world = lockstep.join(seed=0, timeout=120)
    net = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4))).to(world.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    trainer = lockstep.Trainer(net, optimizer, lambda model, x: model(x).square().mean(), shards=2, strategy=strategy)
    for _ in range(4):
        trainer.step(torch.randn(4, 4096))
    model = sum(param.numel() * 4 for param in net.parameters())
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() / model, torch.cuda.max_memory_allocated() / model


def test_memory():
    """LocalSGD keeps one model more than plain training, and its messages are where the gradients were."""
    for kept, peak in lockstep.launch(sized, workers=WORKERS, args=(lockstep.LocalSGD(every=2),)):
        assert kept < 3.3 and peak < 4.3
