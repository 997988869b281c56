"""Memory by component, the heap played through, and a script followed."""

import os
import random
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.comm.memory import Memory as AnyMemory
from lockstep.comm.memory import Request, TurnsMemory
from lockstep.errors import UsageError
from lockstep.plan import machine, memory, models
from lockstep.plan.heap import Heap, replay
from lockstep.plan.script import workload_of, workload_of_script
from lockstep.plan.tracing import StepTrace, StorageUse, Tracer, live_peak, trace_step
from lockstep.plan.workload import Workload
from lockstep.replica.granularity import LATE
from lockstep.replica.layout import ParamSpec, plan

GB = 1e9
full = pytest.mark.skipif("FULL" not in os.environ, reason="every script starts Python and torch; set FULL=1")


def at(work: Workload, name: str, **more: object) -> memory.Memory:
    return memory.estimate(replace(work, **more), machine.named(name))


# What textbooks say


def test_a_model_of_7b_has_14_gb_of_gradients_in_half_precision() -> None:
    assert at(models.sized(7e9, layers=32, hidden=4096, precision="fp16"), "64xA100-80").gradients == 14 * GB


def test_the_lines_of_the_zero_paper() -> None:
    work = models.sized(7.5e9, layers=32, hidden=4096, precision="fp16", optimizer="adam")
    states = [at(work, "64xA100-80/8", zero=zero).states / GB for zero in range(4)]
    assert [round(each, 1) for each in states] == [120.0, 31.4, 16.6, 1.9]


def test_workers_of_one_host_share_parameters_once_anything_is_split() -> None:
    work = models.named("gpt2", precision="fp32")
    shared, apart = (memory.estimate(replace(work, zero=1), machine.named(name)) for name in ("4xCPU/4", "4xCPU/1"))
    assert shared.parameters == apart.parameters / 4 == work.num_params
    assert shared.gathered == 0
    assert at(work, "4xCPU/1", zero=3).gathered > 0


def test_gradients_of_earlier_micro_batches_are_whole() -> None:
    work = models.named("gpt2")
    assert at(work, "8xH100", accumulation=4, zero=2).accumulated == 2 * work.num_params
    assert at(work, "8xH100", zero=2).accumulated == 0


@given(st.lists(st.integers(1, 3_000_000), min_size=1, max_size=60), st.integers(2, 5))
@settings(max_examples=30, deadline=None)
def test_stretches_of_buckets_are_those_of_the_engine(numels: list[int], workers: int) -> None:
    specs = [ParamSpec(index, numel, torch.float32, torch.device("meta")) for index, numel in enumerate(numels)]
    plans = plan(specs, tail_numel=64, tail_cap_bytes=memory.TAIL_CAP_BYTES, grain=LATE, parts=workers)
    flats = TurnsMemory(AnyMemory()).lay_out([Request(each.numel, each.dtype, each.device) for each in plans])
    storages = {flat.untyped_storage()._cdata: flat.untyped_storage().nbytes() for flat in flats}
    sizes = [4 * numel for numel in numels]
    told = memory._turns(sizes, machine.assembled("cpu", workers, workers), 2, is_shared=True)
    assert told == pytest.approx(sum(storages.values()), abs=len(numels) * 128 + 4096 * workers)


# What fits


def test_the_largest_micro_batch_is_the_largest() -> None:
    work = replace(models.named("gpt2-xl"), batch=4096, zero=1)
    where = machine.named("8xA100-40")
    largest = memory.largest_micro_batch(work, where)
    assert 1 < largest < 512
    assert memory.estimate(work.trained_by(8, largest), where).fits
    assert not memory.estimate(work.trained_by(8, largest + 1), where).fits


def test_the_cheapest_way_that_fits_comes_first() -> None:
    small, large = (
        memory.choices(replace(models.named(name), batch=64), machine.named("8xA100-80"))
        for name in ("gpt2", "llama-13b")
    )
    assert (small[0].zero, small[0].checkpointing, small[0].memory.fits) == (0, "none", True)
    assert large[0].memory.fits
    assert large[0].zero == 3 or large[0].checkpointing != "none"
    assert not next(way for way in large if way.zero == 0 and way.checkpointing == "full").memory.fits
    none = memory.choices(replace(models.named("llama-405b"), batch=8), machine.named("8xA100-40"))
    assert not any(way.memory.fits for way in none)
    assert memory.largest_micro_batch(replace(models.named("llama-405b"), batch=8), machine.named("8xA100-40")) == 0


# Traces


class Blocks(nn.Module):
    def __init__(self, width: int, *, recomputes: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(3)
        )
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else x + block(x)
        return x.square().mean()


def traced(samples: int, *, width: int = 32, recomputes: bool = False) -> StepTrace:
    def build() -> tuple[nn.Module, list[torch.Tensor], torch.optim.Optimizer]:
        net = Blocks(width, recomputes=recomputes)
        return net, [torch.zeros(samples, width)], torch.optim.AdamW(net.parameters())

    return trace_step(build)


def test_fake_tensors_tell_what_real_ones_do() -> None:
    net = Blocks(32)
    tracer = Tracer(net)
    x = torch.randn(16, 32)
    tracer.ignore(x, is_input=True)
    with tracer.watching():
        net(x).backward()
    real, fake = tracer.trace(16), traced(16)
    assert [use.num_bytes for use in real.uses] == [use.num_bytes for use in fake.uses]
    assert (real.activation_peak, real.saved_bytes) == (fake.activation_peak, fake.saved_bytes)
    assert real.arrivals == fake.arrivals
    assert real.arrivals[0] == 11  # The bias of the last layer.


def test_what_a_trace_counts() -> None:
    trace = traced(16)
    layer = 16 * 32 * 4
    # Of each block what its first product reads, and what GELU reads and makes, twice as wide; the inputs are given.
    assert trace.saved_bytes == pytest.approx(3 * 5 * layer, rel=0.2)
    assert trace.batch_bytes == layer
    assert sum(trace.layer_flops) == 3 * 2 * 2 * 16 * 32 * 64
    assert trace.state_bytes == pytest.approx(8 * sum(param.numel for param in trace.params), rel=0.01)
    assert {param.block for param in trace.params} == {0, 1, 2}
    assert traced(16, recomputes=True).saved_bytes < trace.saved_bytes / 2


def test_another_number_of_samples() -> None:
    small, large = traced(8), traced(16)
    told = small.at(64, large)
    assert told.activation_peak == traced(64).activation_peak
    assert told.layer_flops == traced(64).layer_flops
    assert small.at(64).activation_peak == pytest.approx(traced(64).activation_peak, rel=0.2)
    assert StepTrace.from_json(small.to_json()) == small


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_traced_workload_in_memory(backend: str) -> None:
    work = workload_of(traced(256, width=256), name="blocks")
    told = [
        memory.estimate(replace(work, zero=zero), machine.assembled("cpu", 2, 2), backend=backend) for zero in range(4)
    ]
    assert told[0].states == pytest.approx(16 * work.num_params, rel=0.001)  # Steps are counted by tensor.
    assert all(each.fragmentation >= 0 and each.activations == told[0].activations for each in told)
    assert told[2].states < told[1].states < told[0].states
    assert work.num_blocks() == 3


# The heap


@st.composite
def sequences(draw: st.DrawFn) -> list[StorageUse]:
    uses = []
    for number in range(draw(st.integers(1, 40))):
        died = draw(st.none() | st.integers(1, 30))
        end = None if died is None else 100 * number + 100 * died + 50
        phase = "forward" if number < 20 else "backward"
        uses.append(StorageUse(draw(st.integers(1, 200_000)), 100 * number, end, phase, 0, died is None or died > 15))
    return uses


@given(sequences())
@settings(max_examples=40, deadline=None)
def test_a_heap_has_no_less_than_what_lives(uses: list[StorageUse]) -> None:
    heap = Heap(1 << 40)
    assert replay(heap, uses, random.Random(0)) >= live_peak(uses)
    left = sum(use.num_bytes for use in uses if use.died is None)
    assert heap.resident_bytes >= left
    heap.trim()
    assert left <= heap.resident_bytes <= left + len(uses) * 3 * 4096


def test_a_hole_is_too_small_for_an_aligned_block_of_its_size() -> None:
    heap = Heap(32 << 20)
    first, _between = heap.take(1 << 20), heap.take(1 << 20)
    before = heap.resident_bytes
    heap.give(first)
    heap.take(1 << 19)
    assert heap.resident_bytes == before
    heap.take(1 << 20)
    assert heap.resident_bytes > before


def test_large_blocks_are_given_back() -> None:
    heap = Heap(1 << 20)
    block = heap.take(2 << 20)
    assert heap.resident_bytes >= 2 << 20
    heap.give(block)
    assert heap.resident_bytes == 0


# Scripts

SCRIPT = """
import sys
import torch
import lockstep
from torch import nn
from torch.nn import functional

world = lockstep.join(seed=1)
width = int(sys.argv[1])
net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)).to(world.device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
model = lockstep.DataParallel(net, optimizer=optimizer, zero=2)
data = torch.utils.data.TensorDataset(torch.randn(64, width), torch.randint(10, (64,)))
total = 0.0
for x, y in lockstep.shard(torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)):
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total += loss.item()
    print(f"{loss:.3f}", total)
raise SystemExit("it was not stopped")
"""


def test_a_script_is_followed_without_values(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    # Eight matrices of 40,000 x 40,000 would take 13 GB each.
    work = workload_of_script(script, ["40000"], limit_s=200)
    assert work.num_params == 40_000**2 + 40_000 + 40_000 * 10 + 10
    assert (work.zero, work.batch, work.precision, work.optimizer_bytes) == (2, 16, "fp32", 4.0)
    assert work.trace is not None
    assert [trace.samples for trace in work.trace if trace is not None] == [16, 8]
    assert work.forward_flops == 2 * (40_000**2 + 40_000 * 10)
    told = memory.estimate(work.trained_by(2), machine.named("2xH100"))
    assert told.states == pytest.approx(work.num_params * (4 + 2 + 2), rel=0.01)


@full
def test_a_script_of_trainer(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT[: SCRIPT.index("model = ")]
        + "data = torch.utils.data.TensorDataset(torch.randn(64, width), torch.randint(10, (64,)))\n"
        + "loss_fn = lambda model, shard: functional.cross_entropy(model(shard[0]), shard[1])\n"
        + "trainer = lockstep.Trainer(net, optimizer, loss_fn, shards=4)\n"
        + "for batch in trainer.batches(data, batch_size=32):\n    print(trainer.step(batch).loss)\n"
    )
    work = workload_of_script(script, ["64"], limit_s=200)
    assert (work.batch, work.micro_batch) == (32, 8)
    assert work.trace is not None


@full
def test_shapes_that_depend_on_values_are_tried_with_values(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("model(x), y)", "model(x[x[:, 0].isfinite().nonzero()[:, 0]]), y)"))
    work = workload_of_script(script, ["64"], limit_s=200)
    assert work.trace is not None
    assert work.trace[1] is None


@full
def test_a_script_that_cannot_be_followed_is_planned_from_its_parameters(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("loss.backward()", "raise ValueError('no such file: data.bin')"))
    with pytest.warns(UserWarning, match=r"no such file: data.bin.*4,810 parameters"):
        work = workload_of_script(script, ["64"], limit_s=200)
    assert work.num_params == 4810
    script.write_text("print('no model here')")
    with pytest.raises(UsageError, match="no step of DataParallel or Trainer"), warnings.catch_warnings():
        workload_of_script(script, limit_s=200)


def test_there_must_be_a_script() -> None:
    with pytest.raises(UsageError, match=r"no script 'nowhere\.py'"):
        workload_of_script("nowhere.py")
