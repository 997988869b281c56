"""Parameters that are dense but not row-major: every placement trains them as they are, and keeps them so."""

import hashlib

import pytest
import torch
import torch.nn.functional as F
from amount import some
from models import difference, part_of, weights_of
from torch import nn

import lockstep

BACKENDS = ["shm", "gloo"]
STAGES = (0, 1, 2, 3)


class Mixed(nn.Module):
    """Convolutions in channels_last, a transposed weight, one with gaps, one of two transposed dimensions of three."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.conv = nn.Conv2d(3, 7, 3)
        self.point = nn.Conv2d(7, 5, 1)
        self.turned = nn.Parameter(torch.randn(6, 5).t() / 3)
        self.gaps = nn.Parameter((torch.randn(4, 12) / 3)[:, ::2])
        self.cube = nn.Parameter(torch.randn(2, 4, 3).transpose(1, 2) / 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).relu()
        x = self.point(self.conv(x).relu()).mean((2, 3)) @ self.turned
        return (x @ self.gaps.t()) @ self.cube.sum(0).t()

    @staticmethod
    def batch(size, generator, dtype):
        x = torch.randn(size, 3, 8, 8, generator=generator, dtype=dtype)
        return x, torch.randint(3, (size,), generator=generator)


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),  # Sees whole matrices.
}


def strides_of(net):
    return {name: param.stride() for name, param in net.named_parameters()}


def make(dtype, zero, optimizer_name, **options):
    torch.manual_seed(3)
    net = Mixed().to(dtype)
    before = strides_of(net)
    optimizer = OPTIMIZERS[optimizer_name](net.parameters())
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero, bucket_cap_mb=0.001, **options)
    return net, before, optimizer, model


def go(world, net, optimizer, model, steps, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    norms = []
    for _ in range(steps):
        x, y = part_of(Mixed.batch(7, generator, dtype), world)
        lockstep.backward(F.cross_entropy(model(x), y), weight=len(x))
        norms.append(model.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def train(world, zero, optimizer_name, folder, **options):
    """Weights, norms, strides; with state cut when wrapped, saved in the middle, and gone on with under another."""
    dtype = torch.float64
    torch.manual_seed(3)
    net = Mixed().to(dtype)
    before = strides_of(net)
    optimizer = OPTIMIZERS[optimizer_name](net.parameters())
    x, y = Mixed.batch(7, torch.Generator().manual_seed(9), dtype)
    F.cross_entropy(net(x), y).backward()  # The same on all: the optimizer has a state when it is handed over.
    optimizer.step()
    optimizer.zero_grad()
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero, bucket_cap_mb=0.001, **options)
    norms = go(world, net, optimizer, model, 3, dtype, 1)
    lockstep.save(folder, model, optimizer, step=zero)
    with model.whole_params():
        half = weights_of(net)
    norms += go(world, net, optimizer, model, 2, dtype, 2)
    with model.whole_params():
        return half, weights_of(net), norms, before, strides_of(net)


def resume(world, zero, folder, step, optimizer_name):
    net, _, optimizer, model = make(torch.float64, zero, optimizer_name)
    lockstep.load(f"{folder}/step-{step:09d}", model, optimizer)
    with model.whole_params():
        half = weights_of(net)
    norms = go(world, net, optimizer, model, 2, torch.float64, 2)
    with model.whole_params():
        return half, weights_of(net), norms


@pytest.mark.parametrize(
    ("workers", "optimizer_name"),
    some([(3, "adamw"), (2, "adafactor")], [(2, "adamw"), (3, "adamw"), (4, "adafactor")]),
)
def test_every_stage_trains_and_keeps_every_memory_format(pool, tmp_path, workers, optimizer_name):
    wanted_half, wanted, wanted_norms, *_ = pool.run(1, train, 0, optimizer_name, str(tmp_path / "alone"))[0]
    for zero in STAGES:
        for half, weights, norms, before, after in pool.run(workers, train, zero, optimizer_name, str(tmp_path)):
            assert difference(half, wanted_half) <= 1e-12
            assert difference(weights, wanted) <= 1e-12
            assert norms == pytest.approx(wanted_norms, rel=1e-9)
            del before["gaps"], after["gaps"]  # The gaps are not kept.
            assert after == before
        other = (zero + 2) % 4
        for half, weights, norms in pool.run(5 - workers, resume, other, str(tmp_path), zero, optimizer_name):
            assert difference(half, wanted_half) <= 1e-12
            assert difference(weights, wanted) <= 1e-12
            assert norms == pytest.approx(wanted_norms[3:], rel=1e-9)


def same_bits(world, zero):
    torch.manual_seed(3)
    net = Mixed()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    trainer = lockstep.Trainer(
        net, optimizer, lambda model, shard: F.cross_entropy(model(shard[0]), shard[1]), shards=6, clip=0.5, zero=zero
    )
    generator = torch.Generator().manual_seed(1)
    for size in (12, 7, 12):
        trainer.step(Mixed.batch(size, generator, torch.float32))
    sha = hashlib.sha256()
    for name, tensor in sorted(trainer.state_dict()["tensors"].items()):
        sha.update(name.encode() + tensor.numpy().tobytes())
    return sha.hexdigest()


def test_trainer_comes_to_the_same_bits_in_every_memory_format(pool):
    alone = pool.run(1, same_bits, 0)
    for workers, zero in some([(2, 0), (3, 1), (2, 2), (3, 3)], [(n, zero) for n in (2, 3, 6) for zero in STAGES]):
        assert set(pool.run(workers, same_bits, zero)) == set(alone)


def in_precision(world, zero, wire):
    dtypes = lockstep.Precision(torch.float32, torch.float32, torch.float64) if zero else None
    net, _, optimizer, model = make(
        torch.float64 if zero else torch.float32, zero, "adamw", precision=dtypes, wire=wire
    )
    go(world, net, optimizer, model, 4, torch.float32, 1)
    with model.whole_params():
        return weights_of(net)


@pytest.mark.parametrize("wire", [None, lockstep.wire.LowRank(2)])
def test_masters_and_wires_know_the_memory_format(pool, wire):
    whole = pool.run(2, in_precision, 0, wire)[0]
    for zero in (1, 3):
        for weights in pool.run(2, in_precision, zero, wire):
            assert difference(weights, whole) <= 1e-4


def differs(world):
    net = nn.Conv2d(3, 4, 3)
    lockstep.DataParallel(net.to(memory_format=torch.channels_last) if world.rank else net)


def test_memory_formats_that_differ_are_refused(pool):
    for ok, text in pool.run(2, differs, expect_failure=True):
        assert not ok and "ModelMismatch" in text and "'weight' [4, 3, 3, 3] float32, dimensions [0, 2, 3, 1]" in text
