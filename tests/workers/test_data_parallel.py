"""Each case trains on several workers and must equal the same training on one, in plain torch."""

import copy
import dataclasses
import gc
import itertools
import os
import sys
import traceback
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from amount import some
from models import GPT, MLP, difference, part_of, weights_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep

DOUBLE = 1e-12

BACKENDS = some(["shm"], ["shm", "gloo"])


def run_steps(world, net, wrap, steps=5, size=10, loss_of=None, lr=0.05):
    """Train `net` for some steps on fixed data; `world` None means plain torch on one worker."""
    model = wrap(net) if world else net
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.5)
    generator = torch.Generator().manual_seed(7)
    for step in range(steps):
        batch = torch.randn(size, 12, generator=generator, dtype=torch.double)
        (x,) = part_of((batch,), world) if world else (batch,)
        loss = loss_of(model, x, step, world)
        if world:
            lockstep.backward(loss, weight=len(x))
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return weights_of(net)


def wrapped(net):
    return lockstep.DataParallel(net, bucket_cap_mb=0.002)


def assert_same_as_one(pool, case, workers=tuple(some([3], [2, 3])), tolerance=DOUBLE):
    expected = case(None)
    for number in workers:
        results = pool.run(number, case)
        for result in results:
            assert difference(result, expected) < tolerance
        assert all(np.array_equal(result[k], results[0][k]) for result in results for k in result)


class Branches(nn.Module):
    """Three branches of which one, two or none are used."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(12, 12)
        self.branches = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x, chosen):
        x = self.stem(x)
        for branch in chosen:
            x = torch.tanh(self.branches[branch](x))
        return x


def branches_by_row(world):
    """Which branch a sample takes depends on the sample, so workers and steps differ in what they use."""
    torch.manual_seed(1)

    def loss_of(model, x, step, world):
        chosen = (x[:, 0] > 0).long() + (step % 2)
        losses = [model(x[chosen == c], [c] if c else []).square().sum() for c in range(3) if (chosen == c).any()]
        return sum(losses) / len(x)

    return run_steps(world, Branches().double(), wrapped, loss_of=loss_of)


def branch_used_by_one_worker(world):
    torch.manual_seed(1)

    def loss_of(model, x, step, world):
        # The first sample of the global batch takes branch 0: one worker has it.
        if world and world.rank:
            return model(x, []).square().mean()
        head, rest = model(x[:1], [0]).square().sum(), model(x[1:], []).square().sum()
        return (head + rest) / (len(x) * 12)

    return run_steps(world, Branches().double(), wrapped, loss_of=loss_of)


def frozen_and_unfrozen(world):
    torch.manual_seed(1)
    net = Branches().double()
    net.branches[0].requires_grad_(False)

    def loss_of(model, x, step, world):
        net.branches[0].requires_grad_(step in (1, 2, 4))
        net.branches[1].requires_grad_(step != 2)
        return model(x, [0, 1]).square().mean()

    return run_steps(world, net, wrapped, loss_of=loss_of, steps=6)


def tied(world):
    torch.manual_seed(1)
    net = Branches().double()
    net.branches[2].weight = net.branches[0].weight

    def loss_of(model, x, step, world):
        return model(x, [0, 1, 2]).square().mean()

    return run_steps(world, net, wrapped, loss_of=loss_of)


def several_forwards(world):
    torch.manual_seed(1)

    def loss_of(model, x, step, world):
        outputs = [model(x * scale, [0, 1]) for scale in (1.0, 0.5, 2.0)]
        return sum(output.square().mean() for output in outputs)

    return run_steps(world, Branches().double(), wrapped, loss_of=loss_of)


class Checkpointed(nn.Module):
    def __init__(self, reentrant, ties):
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        if ties:
            self.layers[3].weight = self.layers[0].weight

    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpoint(lambda v, layer=layer: torch.tanh(layer(v)), x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(pool, reentrant, ties):
    case = {
        (False, False): checkpoint_plain,
        (False, True): checkpoint_plain_tied,
        (True, False): checkpoint_reentrant,
        (True, True): checkpoint_reentrant_tied,
    }[reentrant, ties]
    assert_same_as_one(pool, case)


def _checkpointed(world, reentrant, ties):
    torch.manual_seed(1)
    net = Checkpointed(reentrant, ties).double()
    return run_steps(world, net, wrapped, loss_of=lambda model, x, step, world: model(x).square().mean())


def checkpoint_plain(world):
    return _checkpointed(world, False, False)


def checkpoint_plain_tied(world):
    return _checkpointed(world, False, True)


def checkpoint_reentrant(world):
    return _checkpointed(world, True, False)


def checkpoint_reentrant_tied(world):
    return _checkpointed(world, True, True)


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    extra: dict


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(12, 4) for _ in range(3))

    def forward(self, x):
        return Result(self.a(x), {"b": [self.b(x)], "c": (self.c(x), None, 3)})


def structured_outputs(world):
    torch.manual_seed(1)

    def loss_of(model, x, step, world):
        out = model(x)
        picked = [out.logits, out.extra["b"][0], out.extra["c"][0]][: 1 + step % 3]
        return sum(t.square().mean() for t in picked)

    return run_steps(world, Structured().double(), wrapped, loss_of=loss_of)


def compiled_before(world):
    torch.manual_seed(1)
    net = MLP().double()
    inner = torch.compile(net, backend="aot_eager")
    loss_of = lambda model, x, step, world: model(x).square().mean()
    run_steps(world, inner, wrapped, loss_of=loss_of)
    return weights_of(net)


def compiled_after(world):
    torch.manual_seed(1)
    net = MLP().double()
    wrap = lambda module: torch.compile(wrapped(module), backend="aot_eager")
    return run_steps(world, net, wrap, loss_of=lambda model, x, step, world: model(x).square().mean())


def complex_weights(world):
    torch.manual_seed(1)

    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 6, dtype=torch.complex128))
            self.bias = nn.Parameter(torch.randn(6, dtype=torch.double))

        def forward(self, x):
            return (x.to(torch.complex128) @ self.weight).abs() + self.bias

    return run_steps(world, Complex(), wrapped, loss_of=lambda model, x, step, world: model(x).square().mean())


def channels_last(world):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 2)).double().to(memory_format=torch.channels_last)
    return run_steps(world, net, wrapped, loss_of=lambda model, x, step, world: model(x).square().mean())


CASES = [
    branches_by_row,
    branch_used_by_one_worker,
    frozen_and_unfrozen,
    tied,
    several_forwards,
    structured_outputs,
    compiled_before,
    compiled_after,
    complex_weights,
    channels_last,
]


@pytest.mark.parametrize(
    "case", some([case for case in CASES if case is not compiled_before], CASES), ids=lambda case: case.__name__
)
def test_equals_one_worker(pool, case):
    assert_same_as_one(pool, case)


# Accumulation


def accumulate(world, uneven):
    torch.manual_seed(2)
    net = MLP().double()
    model = wrapped(net) if world else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(7)
    sent = []
    if world:
        world.events.subscribe(lambda event: sent.append(event.kind))
    for _ in range(3):
        sizes = (6, 12, 6) if uneven else (12, 12, 12)
        micro = [torch.randn(size, 12, generator=generator, dtype=torch.double) for size in sizes]
        for number, x in enumerate(micro):
            if not world:
                # The mean over everything counted, times the usual 1 / 3.
                (model(x).square().mean(1).sum() / sum(sizes)).backward()
                continue
            (part,) = part_of((x,), world)
            sync = number == len(micro) - 1
            before = len(sent)
            with model.no_sync() if not sync else torch.enable_grad():
                lockstep.backward(model(part).square().mean() / len(micro), weight=len(part))
            assert (lockstep.events.Kind.LAUNCHED in sent[before:]) == (sync and world.size > 1)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(net)


def accumulate_even(world):
    return accumulate(world, uneven=False)


def accumulate_uneven(world):
    return accumulate(world, uneven=True)


@pytest.mark.parametrize("case", [accumulate_even, accumulate_uneven], ids=lambda case: case.__name__)
def test_accumulation_sends_once_and_is_exact(pool, case):
    assert_same_as_one(pool, case, workers=(1, 2, 3))


def several_backwards(world):
    """Backward passes that add up without zero_grad between them, each of them reduced, one graph twice."""
    torch.manual_seed(2)
    net = MLP().double()
    model = wrapped(net) if world else net
    generator = torch.Generator().manual_seed(7)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(3):
            x = torch.randn(12, 12, generator=generator, dtype=torch.double)
            (part,) = part_of((x,), world) if world else (x,)
            loss = model(part).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(net)


def test_several_backwards_before_a_step(pool):
    assert_same_as_one(pool, several_backwards)


# Nobody uses it


def unused_by_all(world):
    torch.manual_seed(1)
    net = Branches()
    model = wrapped(net)
    grads = []
    for step in range(3):
        model(torch.ones(2, 12), [0] if step else []).sum().backward()
        grads.append([p.grad is None for p in net.branches.parameters()])
        net.zero_grad()
    return grads


def test_a_parameter_used_by_nobody_keeps_no_gradient(pool):
    for grads in pool.run(2, unused_by_all):
        assert grads[0] == [True] * 6
        assert grads[1] == grads[2] == [False, False, True, True, True, True]


# A pass that fails


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ArithmeticError("this pass fails half-way")
        return grad, None


def fails_half_way(world, where, failing_ranks):
    torch.manual_seed(1)
    net = nn.ModuleList(nn.Linear(12, 12) for _ in range(4)).double()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = net

        def forward(self, x, fails):
            x = x.clone().requires_grad_()
            for number, layer in enumerate(self.layers):
                x = layer(Fails.apply(x, fails and number == where))
            return x

    model = wrapped(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outcome = []
    for step in range(4):
        x = torch.full((2, 12), 1.0 + world.rank, dtype=torch.double)
        try:
            model(x, step in (0, 2) and world.rank in failing_ranks).square().mean().backward()
            optimizer.step()
            outcome.append("step")
        except ArithmeticError:
            outcome.append("failed")
        except lockstep.StepVoid as error:
            outcome.append(str(error))
        optimizer.zero_grad()
    return outcome, weights_of(model)


@pytest.mark.parametrize("where", [0, 2, 3])
@pytest.mark.parametrize("failing", [(1,), (0, 1), (0, 1, 2)])
def test_a_backward_that_fails_voids_the_step_everywhere(pool, where, failing):
    results = pool.run(3, fails_half_way, where, failing)
    for rank, (outcome, weights) in enumerate(results):
        assert outcome[1] == outcome[3] == "step"
        for voided in (outcome[0], outcome[2]):
            if rank in failing:
                assert voided == "failed"
            else:
                assert f"backward pass of worker {', '.join(map(str, failing))} failed" in voided
        assert all(np.array_equal(weights[k], results[0][1][k]) for k in weights)


# Dtypes, scaling, sparse, buffers


def half_types(world, dtype):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 4)).to(dtype)
    model = lockstep.DataParallel(net, bucket_cap_mb=0.001)
    x = torch.randn(world.size, 12, generator=torch.Generator().manual_seed(5)).to(dtype)
    lockstep.backward(model(x[world.rank :][:1]).float().square().mean(), weight=world.rank + 1)
    return [p.grad.float().numpy().copy() for p in net.parameters()], x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_are_weighted(pool, dtype):
    results = pool.run(3, half_types, dtype)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 4)).to(dtype)
    x = results[0][1]
    weights = torch.tensor([1.0, 2.0, 3.0])
    (net(x).float().square().mean(1) * weights / weights.sum()).sum().backward()
    for grads, _ in results:
        for own, param in zip(grads, net.parameters(), strict=True):
            assert np.linalg.norm(own - param.grad.float().numpy()) < 0.03 * np.linalg.norm(own)


def scaled(world):
    """GradScaler: a gradient that is not finite on one worker skips the step on all."""
    torch.manual_seed(1)
    net = nn.Linear(12, 3)
    model = wrapped(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    trace = []
    for step in range(3):
        x = torch.full((2, 12), float("inf") if step == 1 and world.rank == 1 else 1.0)
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        trace.append((scaler.get_scale(), norm.item(), net.weight.detach().sum().item()))
    return trace


def test_grad_scaler_and_clipping_agree(pool):
    results = pool.run(2, scaled)
    np.testing.assert_equal(results[0], results[1])
    scales = [scale for scale, _, _ in results[0]]
    assert scales == [1024.0, 512.0, 512.0]
    assert results[0][0][2] == results[0][1][2] != results[0][2][2]


def sparse_embedding(world):
    torch.manual_seed(1)
    net = nn.ModuleDict({"embed": nn.Embedding(50, 6, sparse=True), "head": nn.Linear(6, 2)}).double()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = net

        def forward(self, tokens):
            return self.parts["head"](self.parts["embed"](tokens))

    model = wrapped(Net()) if world else Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(3)
    for step in range(4):
        tokens = torch.randint(50, (7, 3), generator=generator)
        (part,) = part_of((tokens,), world) if world else (tokens,)
        loss = model(part).square().mean()
        if world:
            lockstep.backward(loss, weight=len(part))
        else:
            loss.backward()
        assert net["embed"].weight.grad.is_sparse
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(net)


def test_sparse_embeddings_stay_sparse_and_exact(pool):
    assert_same_as_one(pool, sparse_embedding, workers=(2, 3, 4))


def buffers(world):
    net = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8))
    net.register_buffer("constant", torch.ones(1000))
    model = wrapped(net)
    torch.manual_seed(world.rank)
    seen = []
    for _ in range(3):
        model(torch.randn(4, 12)).square().mean().backward()
        seen.append({k: v.clone().numpy() for k, v in net[1].state_dict().items()})
    return seen, model._engine.reducer.shared.buffers.changed()


def test_buffers_are_those_of_worker_zero_after_every_step(pool):
    results = pool.run(3, buffers)
    for step in range(3):
        for seen, changed in results:
            assert changed == []
            for key, value in seen[step].items():
                np.testing.assert_array_equal(value, results[0][0][step][key])
    assert not np.array_equal(results[0][0][0]["running_mean"], results[0][0][1]["running_mean"])


# Workers with fewer batches


def uneven_batches(world, divides_by_all):
    torch.manual_seed(4)
    net = MLP().double()
    model = wrapped(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=divides_by_all):
        for step in range(2 + 2 * world.rank):
            x = torch.full((3, 12), 0.1 * (1 + step + world.rank), dtype=torch.double)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    model(torch.ones(1, 12, dtype=torch.double)).sum().backward()  # The world still works.
    return weights_of(net)


def uneven_reference(divides_by_all, workers=3):
    torch.manual_seed(4)
    net = MLP().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2 * workers):
        active = [rank for rank in range(workers) if step < 2 + 2 * rank]
        total = workers if divides_by_all else len(active)
        for rank in active:
            x = torch.full((3, 12), 0.1 * (1 + step + rank), dtype=torch.double)
            (net(x).square().mean() / total).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(net)


@pytest.mark.parametrize("divides_by_all", [False, True])
def test_join_lets_workers_run_out_of_batches(pool, divides_by_all):
    expected = uneven_reference(divides_by_all)
    for weights in pool.run(3, uneven_batches, divides_by_all):
        assert difference(weights, expected) < DOUBLE


def stops_early(world):
    model = wrapped(MLP())
    with model.join(throw_on_early_termination=True):
        for _ in range(1 + world.rank):
            model(torch.ones(1, 12)).sum().backward()


def test_join_can_throw(pool):
    outcomes = pool.run(2, stops_early, expect_failure=True)
    assert not any(ok for ok, _ in outcomes)
    assert "ran out of batches" in outcomes[0][1] and "ran out of batches" in outcomes[1][1]


# Hooks, attributes, misuse


def with_torch_hook(world):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    torch.manual_seed(1)
    net = MLP()
    model = wrapped(net)
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    seen = []
    model(torch.full((2, 12), 1.0 + world.rank)).square().mean().backward()
    first = [p.grad.clone() for p in net.parameters()]

    def mine(state, bucket):
        seen.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
        return lockstep.join().sum(bucket.buffer()) / world.size

    model.register_comm_hook("state", mine)
    net.zero_grad()
    model(torch.full((2, 12), 1.0 + world.rank)).square().mean().backward()
    return [g.numpy() for g in first], [p.grad.numpy().copy() for p in net.parameters()], seen


def test_comm_hooks_ours_and_torchs(pool):
    results = pool.run(2, with_torch_hook)
    torch.manual_seed(1)
    net = MLP()
    for rank in range(2):
        (net(torch.full((2, 12), 1.0 + rank)).square().mean() / 2).backward()
    for halved, exact, seen in results:
        for own, full, param in zip(halved, exact, net.parameters(), strict=True):
            np.testing.assert_allclose(full, param.grad.numpy(), rtol=1e-5, atol=1e-6)
            assert np.linalg.norm(own - full) < 0.02 * np.linalg.norm(full)
        assert [index for index, _, _ in seen] == list(range(len(seen)))
        assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]


def smaller_dtypes(world):
    """torch's mixed_precision: bf16 forward and backward, bf16 on the way, float32 weights."""
    from torch.nn.parallel.distributed import _MixedPrecision

    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.Linear(32, 2))
    half = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = lockstep.DataParallel(net, mixed_precision=half)
    x = torch.arange(24.0).view(2, 12) / 24 * (1 + world.rank)
    out = model(x)
    out.float().square().mean().backward()
    return str(out.dtype), [p.grad.numpy().copy() for p in net.parameters()], str(net[0].weight.dtype)


def test_mixed_precision_of_ddp(pool):
    results = pool.run(2, smaller_dtypes)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.Linear(32, 2))
    for rank in range(2):
        (net(torch.arange(24.0).view(2, 12) / 24 * (1 + rank)).square().mean() / 2).backward()
    for dtype, grads, kept in results:
        assert (dtype, kept) == ("torch.bfloat16", "torch.float32")
        assert all(np.array_equal(a, b) for a, b in zip(grads, results[0][1], strict=True))
        last = list(net.parameters())[-1].grad.numpy()
        assert np.linalg.norm(grads[-1] - last) < 0.05 * np.linalg.norm(last)


def two_models(world):
    """A generator and a discriminator, each wrapped, in one backward pass and in separate ones."""
    torch.manual_seed(1)
    one, two = nn.Linear(12, 12).double(), nn.Linear(12, 1).double()
    a, b = (wrapped(one), wrapped(two)) if world else (one, two)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    for step in range(4):
        x = torch.full((6, 12), 0.1 * (step + 1), dtype=torch.double) + torch.arange(6).view(6, 1)
        (x,) = part_of((x,), world) if world else (x,)
        out = b(torch.tanh(a(x)))
        penalty = torch.autograd.grad(out.sum(), a.parameters(), create_graph=True)
        (out.mean() + sum(g.square().sum() for g in penalty) * 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(nn.ModuleList([one, two]))


def test_two_wrapped_models(pool):
    assert_same_as_one(pool, two_models, workers=(2, 3))


def surface(world):
    net = MLP()
    model = lockstep.DataParallel(
        net,
        None,
        None,
        0,
        True,
        True,
        None,
        25,
        True,
        False,
        True,
        True,
    )
    keys = list(model.state_dict())
    del model
    gc.collect()
    again = lockstep.DataParallel(net, bucket_cap_mb=0.001, find_unused_parameters=True, static_graph=True)
    again(torch.ones(2, 12)).sum().backward()
    reference = weakref.ref(again._engine.reducer)
    del again
    return keys, net.net[0].weight.grad is not None, reference() is None


def test_surface_and_wrapping_again(pool):
    for keys, has_grad, is_freed in pool.run(2, surface):
        assert keys[0] == "module.net.0.weight"
        assert has_grad and is_freed


def held():
    """Handles, threads, and megabytes of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    handles, threads = (len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task"))
    return handles, threads, resident / 1e6


def wrap_again_and_again(world, number, options):
    """What this worker holds early on and in the end; the last one drops its wrappers later than the others do."""
    counts = []
    for count in range(number):
        net = nn.Sequential(nn.Linear(256, 2048, bias=False), nn.Linear(2048, 256, bias=False))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = lockstep.DataParallel(net, **options | ({"optimizer": optimizer} if "zero" in options else {}))
        for _ in range(2):
            model(torch.ones(2, 256)).sum().backward()
            optimizer.step()
        kept = model if world.rank == world.size - 1 else None  # Until the next one has been wrapped.
        if count in (3, number - 1):
            counts.append(held())
    del kept
    return counts


@pytest.mark.parametrize("options", [{}, {"zero": 3}, {"wire": lockstep.wire.Int8()}], ids=str)
def test_a_wrapper_that_is_dropped_lets_go(pool, options):
    for early, late in pool.run(2, wrap_again_and_again, 12, options):
        assert late[0] <= early[0] + 2 and late[1] <= early[1] + 2  # Two more for each wrapper, if it were held.
        assert late[2] < early[2] + 20  # Eight wrappers would have 33 of gradients alone.


def wrap_one_module(world, number):
    net = MLP()
    for _ in range(number):
        lockstep.DataParallel(net)(torch.ones(2, 12)).sum().backward()
    return max(len(param._post_accumulate_grad_hooks or ()) for param in net.parameters())


def test_a_module_keeps_no_hooks_of_wrappers_that_are_gone(pool):
    assert pool.run(2, wrap_one_module, 5) == [0, 0]


def mismatched(world, kind):
    net = MLP()
    if world.rank == 1:
        net.net[2] = {
            "shape": lambda: nn.Linear(40, 25),
            "missing": lambda: nn.Identity(),
            "dtype": lambda: nn.Linear(40, 24).double(),
        }[kind]()
    lockstep.DataParallel(net)


@pytest.mark.parametrize("kind", ["shape", "missing", "dtype"])
def test_models_that_differ_are_refused_by_name(pool, kind):
    for ok, text in pool.run(3, mismatched, kind, expect_failure=True):
        assert not ok
        assert "ModelMismatch" in text and "'net.2.weight'" in text and "on worker 1" in text


def mixed_calls(world):
    model = wrapped(MLP())
    loss = model(torch.ones(1, 12)).sum()
    loss.backward() if world.rank else lockstep.backward(loss, weight=3)


def test_mixed_kinds_of_weight_are_an_error_for_all(pool):
    for ok, text in pool.run(2, mixed_calls, expect_failure=True):
        assert not ok and "UsageError" in text and "Use the same call on every worker" in text


def test_misuse_is_refused():
    with pytest.raises(lockstep.UsageError, match=r"torch\.nn\.Module"):
        lockstep.DataParallel("model")
    model = lockstep.DataParallel(MLP())
    with pytest.raises(lockstep.UsageError, match="wrapped already"):
        lockstep.DataParallel(model)
    with pytest.raises(lockstep.UsageError, match="no shape yet"):
        lockstep.DataParallel(nn.LazyLinear(3))
    with pytest.raises(lockstep.UsageError, match="meta device"):
        lockstep.DataParallel(nn.Linear(2, 2, device="meta"))
    with pytest.raises(lockstep.UsageError, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(lockstep.UsageError, match="one number"):
        lockstep.backward(torch.ones((), requires_grad=True), weight=torch.ones(3))
    with pytest.raises(lockstep.UsageError, match="zero or more"):
        lockstep.backward(torch.ones((), requires_grad=True), weight=-1)
    with pytest.raises(lockstep.UsageError, match="one loss value"):
        lockstep.backward(torch.ones(2, requires_grad=True), weight=1)
    lockstep.join().leave()


def test_order_is_learnt(pool):
    for places in pool.run(2, order_of_gpt):
        assert places == sorted(places)


def order_of_gpt(world):
    """After the first step buckets follow the order of arrival: blocks from last to first, then the embedding."""
    net = GPT(depth=3)
    model = lockstep.DataParallel(net, bucket_cap_mb=0.003)
    for _ in range(2):
        F.cross_entropy(model(torch.ones(2, 5, dtype=torch.long)), torch.ones(2, 5, dtype=torch.long)).backward()
    reducer = model._engine.reducer
    place = {name: reducer._queue.buckets.places[i][0].place for i, (name, _) in enumerate(net.named_parameters())}
    order = ["blocks.2.mlp.2.weight", "blocks.1.mlp.2.weight", "blocks.0.mlp.2.weight", "embed.weight"]
    return [place[name] for name in order]


def ways(world):
    """How many frames of ours lie between the end of a backward pass and the backend's call, and the wait for it."""
    group, peers, found = type(world.group), type(world.peers), {}

    def counted(name, call):
        def count(*args, **kwargs):
            files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1)))
            found[name] = sum(1 for _ in itertools.takewhile(lambda file: "/torch/autograd/" not in file, files))
            return call(*args, **kwargs)

        return count

    model = lockstep.DataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()  # Its end is another: the order is learnt, inputs are compared.
    model(torch.ones(1, 4)).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "allreduce", counted("call", group.allreduce))
        patch.setattr(peers, "_wait", counted("wait", peers._wait))
        model(torch.ones(1, 4)).sum().backward()
    return found


def test_the_ways_to_the_backend_and_back_are_short(started_pool):
    for found in started_pool.run(2, ways):
        assert found["call"] <= 7
        assert found["wait"] + 1 <= 7, "the wait itself is one"
