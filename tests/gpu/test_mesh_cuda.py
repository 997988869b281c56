"""Meshes on a CUDA device: 2 x 2 workers over NCCL, of dp x tp and of replicate x split, against one worker."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_cuda import CUDA, join
from torch import nn

import lockstep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 20


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=32, vocabulary=64, depth=3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallel(net, mesh, kind):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    if kind == "tensor":
        return parallelize_module(net, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(net, mesh, plan)


def build():
    torch.manual_seed(3)
    return Net().to(CUDA)


def loss_of(model, step, part):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(64, ([8, 7][step % 2], 13), generator=generator)[part].to(CUDA)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()), len(tokens)


def optimizer_of(net, foreach=None):
    return torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1, foreach=foreach)


def full(model, net):
    with model.whole_params():
        return {n: getattr(p, "full_tensor", lambda p=p: p)().cpu() for n, p in net.named_parameters()}


def train(kind, folder):
    world = join()
    torch.backends.cuda.matmul.allow_tf32 = False
    names, data = (("replicate", "split"),) * 2 if kind == "hybrid" else (("dp", "tp"), "dp")
    mesh = dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=names)
    results = {}
    for zero in (0, 1, 2, 3, "resumed"):
        net = build()
        if kind != "hybrid":
            parallel(net, mesh["tp"], kind)
        optimizer = optimizer_of(net, foreach=True if zero in (1, 2, 3) else None)
        model = lockstep.DataParallel(
            net, device_mesh=mesh[data], optimizer=optimizer, zero=2 if zero == "resumed" else zero, bucket_cap_mb=0.02
        )
        first = lockstep.load(folder, model, optimizer).step if zero == "resumed" else 0
        norms = []
        for step in range(first, STEPS):
            size, place = [8, 7][step % 2], model.world.rank
            part = slice(size * place // model.world.size, size * (place + 1) // model.world.size)
            loss, count = loss_of(model, step, part)
            lockstep.backward(loss, weight=count)
            norms.append(model.clip_grad_norm_(0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            if zero == 3 and step == 9:
                lockstep.save(folder, model, optimizer, step=10)
        results[zero] = full(model, net), norms
    world.barrier()
    return results


@pytest.mark.parametrize("kind", ["tensor", "sequence", "hybrid"])
def test_every_stage_over_a_mesh_is_as_one_worker(kind, tmp_path):
    torch.backends.cuda.matmul.allow_tf32 = False
    net = build()
    optimizer = optimizer_of(net)
    norms = []
    for step in range(STEPS):
        loss_of(net, step, slice(None))[0].backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    for results in lockstep.launch(train, workers=4, args=(kind, str(tmp_path))):
        for zero, (weights, got_norms) in results.items():
            assert got_norms == pytest.approx(norms[-len(got_norms) :], rel=1e-5), zero
            for name, value in net.named_parameters():
                assert (weights[name] - value.detach().cpu()).abs().max() <= 1e-5, (zero, name)
