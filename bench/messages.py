"""What torch DDP's messages take by themselves over gloo and over shm, and what DDP gains by the change of backend.

    python bench/messages.py                                            gpt-10m, gpt-40m and gpt-40m-small, 2 workers
    python bench/messages.py --workload gpt-10m --rounds 20 --crews 6   workers started anew, six times

One model in one DDP, whose communication hook is torch's own `allreduce_hook`, over a backend that changes from step to
step, or over none: so all steps use the same weights, buckets and heap, and differ in the backend alone. In one more
kind of step the workers only meet at the end of the pass, and nothing is moved. By themselves the messages are those
of one step, in DDP's own buckets: all are started, then waited for. In every round each of the six takes its turn, in
an order that is shuffled anew. The memory is DDP's, so over shm it is staged. With several crews the workloads take
turns too, so that a bad minute is not one workload's alone; all crews' rounds count together.

Printed last: what is saved by the messages alone, what DDP gains, and the second less the first, within rounds, with
the interval that a bootstrap gives (95 %). What a step over gloo takes more than one in which the workers only meet is
the most that any backend could gain, if it moved its bytes in no time. Where gloo hides a part of its messages behind
the pass, that is less than they take by themselves.
"""

import argparse
import operator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.bench import catalogue, interleave, machine, workloads
from lockstep.bench.variant import adamw
from lockstep.comm.backend import new_group

BACKENDS = ("gloo", "shm")


class Switched:
    """A DDP that communicates over a group that can be changed between steps, or only meets, or not even that."""

    def __init__(self, workload: str, world: lockstep.World) -> None:
        self._model = DistributedDataParallel(workloads.build(workload), gradient_as_bucket_view=True)
        self._optimizer = adamw(self._model)
        self._batches = workloads.batches(workload, catalogue.WORKLOADS[workload].batch, world.rank, world.device)
        self._group: dist.ProcessGroup | None = None
        self._moves, self._nothing = True, torch.zeros(1)
        self._model.register_comm_hook(None, self._send)

    def _send(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._group is not None and self._moves:
            return allreduce_hook(self._group, bucket)
        buffer = bucket.buffer().div_(dist.get_world_size())  # As the other does before it sends.
        if self._group is not None and bucket.is_last():
            met = dist.all_reduce(self._nothing, group=self._group, async_op=True)
            assert met is not None
            return met.get_future().then(lambda _: buffer)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def step(self, group: dist.ProcessGroup | None, number: int, *, moves: bool = True) -> None:
        """One step over `group`, in which gradients are moved or workers only meet; or over nothing."""
        self._group, self._moves = group, moves
        self._model(*self._batches[number % len(self._batches)]).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def buckets(self) -> list[torch.Tensor]:
        """What is sent in a step, in DDP's own memory."""
        return [bucket.buffer() for bucket in self._model.reducer._get_zeros_like_grad_buckets()]


def measure(workload: str, rounds: int) -> dict[str, Any]:
    """What one worker does; milliseconds by action and round, the same on all workers."""
    torch.set_num_threads(1)
    world = lockstep.join(device="cpu", backend="shm")
    assert world.group is not None
    groups = {"gloo": new_group(world.group, "gloo"), "shm": world.group}
    ddp = Switched(workload, world)
    for number in range(2):  # DDP lays its buckets out anew after the first.
        ddp.step(world.group, number)
    buckets = ddp.buckets()

    def send(group: dist.ProcessGroup) -> None:
        for work in [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]:
            work.wait()

    actions: dict[str, interleave.Action] = {
        "step over none": lambda number: ddp.step(None, number),
        "step with a meeting": lambda number: ddp.step(world.group, number, moves=False),
    }
    for name, group in groups.items():
        actions[f"step over {name}"] = lambda number, group=group: ddp.step(group, number)
        actions[name] = lambda number, group=group: send(group)
    measured = interleave.measure(world, actions, rounds=rounds, warmup=3)
    return {
        "times": {name: (1e3 * seconds).tolist() for name, seconds in measured.times.items()},
        "rounds": str(measured),
        "megabytes": [bucket.nbytes / 1e6 for bucket in buckets],
        "machine": machine.describe(world),
    }


def report(workload: str, crews: "list[dict[str, Any]]") -> None:
    """Print what all crews have found."""
    found = crews[0]
    times = interleave.as_times({name: [ms for crew in crews for ms in crew["times"][name]] for name in found["times"]})

    def show(what: str, quantity: Any, *names: str) -> None:
        got = interleave.compare(times, quantity, *names)
        print(f"  {what:38} {got.median:8.2f} ms ({got.low:.2f} to {got.high:.2f})", flush=True)

    print(", ".join(f"{name}: {value}" for name, value in found["machine"].items()))
    print(f"{workload}: buckets of {', '.join(f'{size:.1f}' for size in found['megabytes'])} MB")
    for crew in crews:
        print(f"  {crew['rounds']}")
    for backend in BACKENDS:
        show(f"{backend}, messages alone", lambda alone: alone, backend)
        show(f"{backend}, a step of DDP's", lambda step: step, f"step over {backend}")
        for less in ("step over none", "step with a meeting"):
            show(f"  more than a {less}", operator.sub, f"step over {backend}", less)
    show("saved by the messages", operator.sub, *BACKENDS)
    steps = [f"step over {backend}" for backend in BACKENDS]
    show("gained by DDP", operator.sub, *steps)
    show("gained less saved", lambda a, b, c, d: (a - b) - (c - d), *steps, *BACKENDS)


def main() -> None:
    """Do what the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = catalogue.workloads(on_gpu=False)
    parser.add_argument("--workload", nargs="+", choices=named, default=["gpt-10m", "gpt-40m", "gpt-40m-small"])
    parser.add_argument("--rounds", type=int, default=40, help="of each crew (default: %(default)s)")
    parser.add_argument(
        "--crews", type=int, default=1, help="how often workers are started anew (default: %(default)s)"
    )
    options = parser.parse_args()
    if min(options.rounds, options.crews) < 1:
        parser.error(f"--rounds {options.rounds} --crews {options.crews}: take at least one of each.")
    found: dict[str, list[dict[str, Any]]] = {workload: [] for workload in options.workload}
    for _ in range(options.crews):
        for workload, crews in found.items():
            crews.append(lockstep.launch(measure, workers=2, args=(workload, options.rounds))[0])
    for workload, crews in found.items():
        report(workload, crews)


if __name__ == "__main__":
    main()
