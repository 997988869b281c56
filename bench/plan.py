"""Predicted step time against measured: from one worker's step and a test of the link alone.

    python bench/plan.py                                       shm, gloo, 100 Mbit/s, 1 and 10 Gbit/s; two workers
    python bench/plan.py --ways shm gloo --workers 4
    python bench/plan.py --ways shm 1000 --model gpt-10m resnet18 --json plan.json

For each way between two workers (shared memory, gloo over loopback, or two network namespaces and a cable that `tc tbf`
limits, see link.py), one core each, every round does three things, one after the other:

    one worker     forward, backward and update of the bare model, the other worker idle; when each gradient came
    the link       all-reduces of 4 KB and of some MB, alone and beside computing that has nothing to do with the model
    measured       steps of lockstep.DataParallel, the slower worker's time

The first two alone go into the prediction: the engine's layout of the gradients, and plan.simulation. Each round has a
prediction and a measurement of its own, since machines that are shared drift; printed are medians over rounds, the
error among them. Cables need root and iproute2. On a machine that others use, both sides are noisy:
the load is printed beside the figures.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import link
import torch

import lockstep
from lockstep.bench import models
from lockstep.plan import simulation
from lockstep.plan.measure import LinkTest, StepProfile, profile_step, test_link
from lockstep.plan.simulation import StepInputs
from lockstep.plan.timing import Constants, engine_seconds
from lockstep.replica.engine import are_all_computing
from lockstep.replica.granularity import UNCUT, Granularity, fill, usual_granularity

BATCH = {"gpt-10m": 4, "gpt-40m-small": 2, "resnet18": 8, "mlp": 256}
LARGE_BYTES = {"100": 8 << 20}
"""Of the link's test, where the usual would take too long; still many times what `tc` lets pass at once."""


def main() -> None:
    """Start two workers for each way; worker 0 reports."""
    options = _options()
    if "RANK" in os.environ:
        _work(options)
        return
    for way in options.ways:
        if way in ("shm", "gloo"):
            command = [sys.executable, "-m", "lockstep", "run", "-n", str(options.workers), *sys.argv]
            subprocess.run(command, env=os.environ | {"PLAN_WAY": way, "OMP_NUM_THREADS": "1"}, check=True)
        else:
            with link.Link() as pair:
                pair.run_here(PLAN_WAY=way)


def _work(options: argparse.Namespace) -> None:
    way, rank = os.environ["PLAN_WAY"], int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    with lockstep.join(device="cpu", backend="shm" if way == "shm" else "gloo", seed=0) as world:
        if way not in ("shm", "gloo"):
            link.limit(float(way) * 1e6)
        for model in ("mlp", "tiny") if options.engine else ():
            _engine(world, model)
        for model in () if options.engine else options.model:
            found = _compare(world, way, model, options)
            if world.is_main:
                _print(found)
                if options.json:
                    with Path(options.json).open("a") as file:
                        file.write(json.dumps(found) + "\n")


def _compare(world: lockstep.World, way: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    alone, trained = models.build(model), models.build(model)
    batches = models.batches(model, options.batch or BATCH[model], world.rank, world.device)
    bare_update = torch.optim.AdamW(alone.parameters(), fused=True)
    update = torch.optim.AdamW(trained.parameters(), fused=True)
    wrapped = lockstep.DataParallel(trained)
    steps = _Steps(batches)
    for _ in range(3):
        steps.timed(wrapped, update)
    rounds = []
    uncut = way == "shm" and are_all_computing(world)
    is_near = world.peers.are_on_one_host
    grain = UNCUT if uncut else usual_granularity(is_on_one_host=is_near, is_on_gpu=False)
    for _ in range(options.rounds):
        world.barrier()
        profile = None
        if world.rank == 0:
            profile = profile_step(
                alone, steps.loss(alone), _updating(bare_update), steps=options.steps, quantile=options.quantile
            )
        world.barrier()
        test = test_link(
            world, rounds=options.tests, large_bytes=LARGE_BYTES.get(way, 16 << 20), quantile=options.quantile
        )
        measured = []
        for _ in range(options.steps):
            world.barrier()
            measured.append(max(world.gather(steps.timed(wrapped, update))))
        if profile is not None:
            given = _inputs(profile, test, grain, way)
            own = sorted(measured)[int(options.quantile * len(measured))]
            rounds.append((profile, test, simulation.simulate(given), own))
    if world.rank:
        return {}
    errors = sorted(times.step_s / seconds - 1 for _, _, times, seconds in rounds)
    return {
        "way": way,
        "workers": world.size,
        "model": model,
        "error": median(errors),
        "errors": errors,
        "predicted_s": median(times.step_s for _, _, times, _ in rounds),
        "measured_s": median(seconds for *_, seconds in rounds),
        "exposed_s": median(times.exposed_s for _, _, times, _ in rounds),
        "alone_s": median(each.forward_s + each.backward_s + each.optimizer_s for each, *_ in rounds),
        **{
            name: median(getattr(test, name) for _, test, _, _ in rounds)
            for name in ("latency_s", "bytes_per_s", "contention", "crowding")
        },
        "load": os.getloadavg()[0],
    }


def _inputs(profile: StepProfile, test: LinkTest, grain: Granularity, way: str) -> StepInputs:
    """What follows from one worker's step and from the link."""
    ends = [0, *fill([4 * numel for numel in profile.numels], grain)]
    sizes = [4.0 * sum(profile.numels[begin:end]) for begin, end in itertools.pairwise(ends)]
    return StepInputs(
        workers=test.workers,
        per_host=test.workers if way in ("shm", "gloo") else 1,
        forward_s=test.crowding * profile.forward_s,
        backward_s=test.crowding * profile.backward_s,
        optimizer_s=0.0,
        between_s=test.crowding * profile.optimizer_s + Constants().engine_s,
        bucket_bytes=sizes,
        bucket_ready=[profile.arrivals[end - 1] if grain.leaves_early else 1.0 for end in ends[1:]],
        algorithm=simulation.SHARED_MEMORY if way == "shm" else simulation.RING,
        # A ring waits 2 (N - 1) times, an exchange through memory twice.
        intra_latency_s=test.latency_s / (2 if way == "shm" else 2 * (test.workers - 1)),
        intra_bytes_per_s=test.bytes_per_s,
        inter_latency_s=test.latency_s / 2,
        inter_bytes_per_s=test.bytes_per_s,
        launch_s=engine_seconds(len(profile.numels), sum(sizes), 2 / test.copy_s_per_byte) / len(sizes),
        contention=test.contention,
        jitter=profile.deviation,
    )


def _engine(world: lockstep.World, model: str, passes: int = 60) -> None:
    """Print the CPU time that a pass takes a worker with the engine and without: what others take is not in it."""
    bare, trained = models.build(model), models.build(model)
    wrapped = lockstep.DataParallel(trained)
    batch = models.batches(model, 16, world.rank, world.device)[0]

    def lower_quartile(each: torch.nn.Module) -> float:
        times = []
        for _ in range(passes):
            world.barrier()
            begin = time.thread_time()
            each(*batch).backward()
            times.append(time.thread_time() - begin)
            for param in each.parameters():
                param.grad = None
        return sorted(times)[passes // 4]

    lower_quartile(wrapped)
    more = lower_quartile(wrapped) - lower_quartile(bare)
    if world.is_main:
        tensors = list(bare.parameters())
        num_bytes = sum(param.nbytes for param in tensors)
        print(f"{model}: {1e3 * more:.2f} ms for {len(tensors)} gradients of {num_bytes:,} bytes in all")


class _Steps:
    """Steps of a model on batches that are taken in turn."""

    def __init__(self, batches: list[models.Batch]) -> None:
        self._batches, self._number = batches, 0

    def loss(self, model: torch.nn.Module) -> Callable[[], torch.Tensor]:
        """The forward pass on the next batch."""

        def forward() -> torch.Tensor:
            self._number += 1
            loss: torch.Tensor = model(*self._batches[self._number % len(self._batches)])
            return loss

        return forward

    def timed(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        """Seconds of a step."""
        begin = time.perf_counter()
        self.loss(model)().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin


def _updating(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def _print(found: dict[str, Any]) -> None:
    way = found["way"] if found["way"] in ("shm", "gloo") else f"{found['way']} Mbit/s"
    errors = found["errors"]
    print(
        f"{way:>12} x{found['workers']} {found['model']:<10} predicted {1e3 * found['predicted_s']:8.1f} ms, measured "
        f"{1e3 * found['measured_s']:8.1f} ms, error {100 * found['error']:+6.1f} % (rounds {100 * errors[0]:+.0f} to "
        f"{100 * errors[-1]:+.0f} %); alone {1e3 * found['alone_s']:.1f} ms, crowding {found['crowding']:.2f}, link "
        f"{found['latency_s'] * 1e6:.0f} us, {found['bytes_per_s'] / 1e6:.0f} MB/s, contention "
        f"{found['contention']:.2f}, exposed {1e3 * found['exposed_s']:.0f} ms, load {found['load']:.0f}",
        flush=True,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ways", nargs="+", default=["shm", "gloo", "100", "1000", "10000"], metavar="WAY")
    parser.add_argument("--model", nargs="+", default=["gpt-10m"], choices=[*BATCH], metavar="NAME")
    parser.add_argument("--batch", type=int, help="samples of a worker (default: the model's)")
    parser.add_argument("--workers", type=int, default=2, help="over shm and gloo (a cable has two ends)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="of each thing in a round")
    parser.add_argument("--tests", type=int, default=3, help="of the link in a round")
    parser.add_argument(
        "--quantile", type=float, default=0.5, help="of times: below a half on a machine that is shared"
    )
    parser.add_argument("--engine", action="store_true", help="what the engine itself takes a CPU, and nothing else")
    parser.add_argument("--json", help="append the results there, a line each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
