"""What a step of lockstep.DataParallel costs beyond the bare module, by line item, each against its floor.

    python bench/hot_path.py                               gpt-10m and the mlp, zero=0 to 3, 2 workers over shm
    python bench/hot_path.py --workload mlp --variants lockstep --steps 200
    python bench/hot_path.py --count FOLDER                instructions per gradient, by valgrind's callgrind

In every round three models take a step each, in an order that is shuffled anew (see lockstep.bench.interleave): the
bare module, one wrapped, and one wrapped whose objects have got a class with a stopwatch around the methods in ITEMS.
A method's time is its own, without timed methods that it calls, and less what the stopwatch takes, which is measured.
The reduction runs where it is waited for, or in a thread of its own: its time is that of its methods, without their
waiting for others, and that thread's processor time; waiting is what the pass waited beyond that. Times are means over
the workers and medians over the rounds.

Floors: bytes read and written, by the speed of a copy of as many bytes as there are gradients, by both workers at once;
messages, by the time of the smallest all_reduce; and waiting, by how far workers are apart after a step without any.
"""

import argparse
import gc
import inspect
import os
import re
import socket
import subprocess
import sys
import threading
import time
import timeit
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.bench import catalogue, interleave, machine, variants, workloads
from lockstep.bench.variant import Variant
from lockstep.replica.lending import Forward

ITEMS = {
    "forward: prologue": "Reducer.before_forward Zero.see_forward",
    "backward: begin": "Reducer.begin",
    "hook of each gradient": "Reducer.arrive",
    "lending slots": "SlotLender.lend",
    "gradients into buckets": "Bucket.put Bucket.put_later Bucket.put_waiting Bucket.fill_missing",
    "launching": "Departures.launch",
    "reduction": "Reductions.* Moves.*",
    "waiting": "World.wait Board._await",
    "notes": "Notes.* Buffers.changed",
    "handing out": "Whole.hand_out Split.hand_out",
    "finish: the rest": "Reducer.finish",
    "barriers around the update": "CommonParams.before_step CommonParams.after_step",
}
"""Whose time is whose, by class and method; a method that is not there (any more) counts with its caller."""
LEFT = ("forward", "backward", "update")
"""Phases, whose time without their items is compared with the bare module's."""
COUNTED = ("bare", "empty hook", "lockstep", "ddp")
REPEATS = 10  # Copies, and smallest messages, in a round; steps of each kind that are counted.
Record = dict[str, float]
"""Of one step: milliseconds by item and phase, and how often an item was called by "calls of" it."""


class Stopwatch:
    """Times methods of the main thread, each without those it calls, and the threads of a queue."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._main = threading.get_ident()
        self.nanoseconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.called = [0]
        """For each method under way, and for the phase of the step: the time of the timed methods it called."""
        self._inside = self._outside = 0
        bare, whole = (timeit.timeit(each, number=20_000) / 20e-6 for each in (int, self._timed(int, "nothing")))
        self._inside = round(self.nanoseconds["nothing"] / self.calls["nothing"] - bare / 2)
        self._outside = round(whole - bare - self._inside)

    def thread_time(self) -> int:
        """Processor time of the queue's threads, if it has any by now."""
        return sum(
            time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident))
            for thread in self._queue._threads
            if thread.is_alive()
        )

    def watch(self, watched: object) -> None:
        """Give `watched` a class whose methods are timed."""
        cls, found = type(watched), {}
        for item, methods in ITEMS.items():
            for owner, _, name in (method.partition(".") for method in methods.split()):
                names = [key for key in vars(cls) if not key.startswith("_")] if name == "*" else [name]
                for key in names if owner == cls.__name__ else ():
                    part = inspect.getattr_static(cls, key, None)
                    if isinstance(part, property):
                        found[key] = property(self._timed(part.fget, item))
                    elif part is not None:
                        found[key] = self._timed(part, item)
        if found:
            watched.__class__ = type(cls.__name__, (cls,), found)

    def _timed(self, function: Any, item: str) -> Callable[..., Any]:
        clock, called, inside, outside = time.perf_counter_ns, self.called, self._inside, self._outside
        ident, main = threading.get_ident, self._main
        nanoseconds, calls = self.nanoseconds, self.calls

        def timed(*args: Any, **kwargs: Any) -> Any:
            if ident() != main:
                return function(*args, **kwargs)
            begun = clock()
            called.append(0)
            result = function(*args, **kwargs)
            others = called.pop()
            lasted = clock() - begun
            nanoseconds[item] += lasted - others - inside
            calls[item] += 1
            called[-1] += lasted + outside
            return result

        def timed_waiting(*args: Any, **kwargs: Any) -> None:
            before = self.thread_time()
            timed(*args, **kwargs)
            nanoseconds["reduced while waiting"] += self.thread_time() - before

        return timed_waiting if function.__qualname__ == "World.wait" else timed

    def step(self, variant: Variant, batch: workloads.Batch) -> Record:
        """Take a step; what its items took, and its phases without them."""
        self.nanoseconds.clear()
        self.calls.clear()
        reduced, record = self.thread_time(), phases(variant, batch, self.called)
        spent = {item: nanoseconds / 1e6 for item, nanoseconds in self.nanoseconds.items()}
        by_thread, meanwhile = (self.thread_time() - reduced) / 1e6, spent.pop("reduced while waiting", 0.0)
        spent["reduction"] += by_thread
        spent["waiting"] -= meanwhile
        record["backward"] -= by_thread - meanwhile  # Both threads have one core.
        return record | spent | {f"calls of {item}": count for item, count in self.calls.items()}


def phases(variant: Variant, batch: workloads.Batch, called: list[int]) -> Record:
    """Take a step; what it and each of its phases took, without what was `called` in them."""
    record, first = {}, time.perf_counter_ns()
    for phase, act in zip(LEFT, (lambda: variant.forward(batch), variant.backward, variant.update), strict=True):
        called[0], begun = 0, time.perf_counter_ns()
        act()
        record[phase] = (time.perf_counter_ns() - begun - called[0]) / 1e6
    return record | {"step": (time.perf_counter_ns() - first) / 1e6}


def train(workload: str, kind: str, steps: int) -> list[str]:
    """What one worker does for one variant; returns what is to be printed."""
    torch.set_num_threads(max(1, machine.cores() // 2))
    world = lockstep.join(device="cpu", backend="shm")
    fed = workloads.batches(workload, catalogue.WORKLOADS[workload].batch, world.rank, world.device)
    timed = _variant(kind, workload, world, fed)
    reducer: Any = timed.model.reducer
    stopwatch = Stopwatch(reducer.group._queue)
    for each in gc.get_objects():  # There is no other model of ours yet.
        if str(type(each).__module__).startswith("lockstep."):
            stopwatch.watch(each)
    bare, plain = (_variant(name, workload, world, fed) for name in ("nocomm", kind))
    num_bytes = sum(bucket.num_bytes for bucket in reducer.buckets)
    num_lent = sum(
        layer.weight.nbytes for layer in timed.model.modules() if type(vars(layer).get("forward")) is Forward
    )
    one, source, target = torch.zeros(1), torch.ones(num_bytes // 4), torch.ones(num_bytes // 4)
    records: dict[str, list[Record]] = {"bare": [], "plain": [], "timed": []}
    actions: dict[str, interleave.Action] = {
        "bare": lambda number: records["bare"].append(phases(bare, fed[number % 4], [0])),
        "plain": lambda number: records["plain"].append(phases(plain, fed[number % 4], [0])),
        "timed": lambda number: records["timed"].append(stopwatch.step(timed, fed[number % 4])),
        "copy": lambda _: [target.copy_(source) for _ in range(REPEATS)].clear(),
        "message": lambda _: [dist.all_reduce(one, group=reducer.group) for _ in range(REPEATS)].clear(),
    }
    measured = interleave.measure(world, actions, rounds=steps, warmup=3)
    medians = {name: _medians([theirs[name][3:] for theirs in world.gather(records)]) for name in records}
    ratio = interleave.compare(measured.times, interleave.ratio, "plain", "bare")
    copy, message = (1e3 * float(np.median(measured.times[name])) / REPEATS for name in ("copy", "message"))
    copies = {
        "gradients into buckets": 1 - num_lent / num_bytes,
        "reduction": 1.0 if kind == "lockstep" else (1 + 1 / world.size) / 2,
    }
    floors = {item: times * copy for item, times in copies.items()}
    floors |= {"launching": len(reducer.buckets) * message, "waiting": medians["bare"]["apart"]}
    floors["barriers around the update"] = 2 * message
    return [
        f"\n### {workload}, {kind}\n\n{measured}. Not timed, a step is {ratio.median:.3f} ({ratio.low:.3f}-"
        f"{ratio.high:.3f}) of the bare module's ({medians['bare']['step']:.2f} ms). {num_bytes / 1e6:.1f} MB in "
        f"{len(reducer.buckets)} messages, of which {num_lent / 1e6:.1f} MB are computed in their slots: a copy of all "
        f"takes {copy:.3f} ms, the smallest message {message:.3f} ms.\n",
        *_table(medians, {item: 2 * times * num_bytes / 1e6 for item, times in copies.items()}, floors),
    ]


def _variant(name: str, workload: str, world: lockstep.World, fed: list[workloads.Batch]) -> Variant:
    torch.manual_seed(0)  # The same first weights for all.
    variant = variants.make(variants.setting(name, workloads.build(workload), world))
    for batch in fed[:3]:  # The buckets are laid out anew after the first.
        variant.step(batch)
    return variant


def _medians(everybody: list[list[Record]]) -> Record:
    """Over the steps, of means over the workers; "apart" is by how much the slower one's step is above the mean."""
    keys = everybody[0][0]
    values = {key: np.array([[step.get(key, 0.0) for step in theirs] for theirs in everybody]) for key in keys}
    values["apart"] = values["step"].max(axis=0, keepdims=True) - values["step"].mean(axis=0)
    return {key: float(np.median(each.mean(axis=0))) for key, each in values.items()}


def _table(medians: dict[str, Record], moved: Record, floors: Record) -> list[str]:
    bare, timed = medians["bare"], medians["timed"]
    spent = {item: timed[item] for item in ITEMS if item in timed}
    spent |= {f"{phase}, against the bare module's": timed[phase] - bare[phase] for phase in LEFT}
    lines = ["| | calls | MB | ms | % of a bare step | floor, ms | of its floor |", "|---|---|---|---|---|---|---|"]
    for item, ms in spent.items():
        calls, mega, floor = timed.get(f"calls of {item}"), moved.get(item), floors.get(item)
        counted = (f"{calls:.0f} | " if calls else "| ") + (f"{mega:.1f}" if mega else "")
        compared = f"{floor:.3f} | {ms / floor:.1f}" if floor else "|"
        lines.append(f"| {item} | {counted} | {ms:.3f} | {100 * ms / bare['step']:.2f} | {compared} |")
    whole = {"sum": sum(spent.values()), "measured, not timed": medians["plain"]["step"] - bare["step"]}
    for name, ms in whole.items():
        lines.append(f"| **{name}** | | | {ms:.3f} | {100 * ms / bare['step']:.2f} | | |")
    return lines


def run_counted(gradients: int) -> None:
    """What a worker does while its instructions are counted; worker 0 runs under valgrind."""
    torch.set_num_threads(1)
    with lockstep.join(device="cpu", backend="shm") as world:
        for kind in COUNTED:
            model = nn.Module()
            model.params = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(gradients))
            model.forward = lambda params=list(model.params): torch.cat(params).sum()
            for param in model.parameters() if kind == "empty hook" else ():
                param.register_post_accumulate_grad_hook(lambda _: None)
            if wrap := {"lockstep": lockstep.DataParallel, "ddp": nn.parallel.DistributedDataParallel}.get(kind):
                model = wrap(model, gradient_as_bucket_view=True)
            for command, steps in (["--instr=on"], 3), (["--zero"], REPEATS), (["--dump"], 0):
                if world.is_main:
                    subprocess.run(["callgrind_control", *command, str(os.getpid())], stdout=sys.stderr, check=True)
                for _ in range(steps):
                    model().backward()
                    model.zero_grad()


def count(gradients: int, folder: str) -> None:
    """Print the instructions of a gradient in worker 0, everything that a step does included."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [sys.executable, __file__, "--gradients", str(gradients), "--count", folder]
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/callgrind.out"]
    with subprocess.Popen(command, env=environ | {"RANK": "1"}, stderr=subprocess.DEVNULL):
        subprocess.run([*valgrind, *command], env=environ | {"RANK": "0"}, check=True)
    print(f"| {gradients} gradients a step | instructions per gradient | more than bare |\n|---|---|---|")
    dumps = [Path(folder, f"callgrind.out.{number + 1}").read_text() for number in range(len(COUNTED))]
    found = [int(re.findall(r"^totals: (\d+)", dump, re.MULTILINE)[0]) / (REPEATS * gradients) for dump in dumps]
    for kind, each in zip(COUNTED, found, strict=True):
        print(f"| {kind} | {each:,.0f} | {each - found[0]:,.0f} |")


def main() -> None:
    """Do what the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=catalogue.workloads(on_gpu=False), default=["gpt-10m", "mlp"])
    parser.add_argument("--variants", nargs="+", default=["lockstep", "zero1", "zero2", "zero3"])
    parser.add_argument("--steps", type=int, default=60, help="of each model (default 60)")
    parser.add_argument("--count", metavar="FOLDER", help="instructions; callgrind's files go there")
    parser.add_argument("--gradients", type=int, default=1000, help="in a step, for --count (default 1000)")
    options = parser.parse_args()
    if options.count is not None:
        run_counted(options.gradients) if "RANK" in os.environ else count(options.gradients, options.count)
        return
    for workload in options.workload:
        for kind in options.variants:
            print("\n".join(lockstep.launch(train, workers=2, args=(workload, kind, options.steps))[0]), flush=True)


if __name__ == "__main__":
    main()
