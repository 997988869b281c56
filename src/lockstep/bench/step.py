"""`lockstep bench step` and `lockstep bench gpu`: the step of Lockstep and of its peers, side by side.

Every variant has its own model and fused AdamW, starts from the same weights and takes the same batches. A step is
forward, backward and update. Variants take turns, step by step, in an order that is shuffled anew in every round.

On the CPU every variant has workers of its own, as it would in the hands of a user, and takes a step that is not timed
before each that is: where another model has lived before, C's allocator keeps what it would else give back in every
step, which is up to half of a step's time; and after another's step caches are cold, which they never are in training.
While one takes its turn, all others wait. On GPUs all variants live in the same workers: torch keeps a GPU's memory for
itself, and each process would keep its own.

How fast a process is depends on the memory that it happens to get, by a few percent on CPUs: `crews` has all workers
started anew so many times, and the steps of all count together.

Where memory does not hold all variants, they run in several heats, with the limit and torch's DDP in each.

Phases of a heat: start the workers; try each variant for a few steps, and see what it keeps in memory; drop those that
failed; measure the others. A variant that takes a worker with it is left out of a second attempt.
"""

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import numpy as np
import torch

from lockstep.bench import catalogue, contest, interleave, results
from lockstep.bench.contest import Contest
from lockstep.bench.crew import Crew, CrewLost
from lockstep.bench.interleave import Measured
from lockstep.bench.results import Entry, Heat, Results


def run(asked: Contest, announce: Callable[[str], None] = lambda _: None) -> Results:
    """Hold all heats of a contest. Called on no worker; `announce` is told what begins."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    missing = {name: reason for name in asked.variants if (reason := catalogue.missing(name)) is not None}
    names = [name for name in asked.variants if name not in missing]
    groups = catalogue.heats(names, catalogue.bases(names), contest.room(asked, _free_bytes(asked))) if names else []
    held = []
    for number, group in enumerate(groups, 1):
        which = f" (heat {number} of {len(groups)})" if len(groups) > 1 else ""
        announce(f"{asked.workload}{which}: {', '.join(group)}")
        held.append(results.joined([_hold(asked, group) for _ in range(asked.crews)]))
    return results.collect(asked, date, missing, held)


def _hold(asked: Contest, names: Sequence[str]) -> Heat:
    """One heat; again without a variant that ended a worker, as long as there is one."""
    lost: dict[str, str] = {}
    while True:
        left = [name for name in names if name not in lost]
        try:
            return _attempt(asked, left, lost)
        except CrewLost as error:
            lost[error.variant] = error.reason


def _attempt(asked: Contest, names: Sequence[str], lost: Mapping[str, str]) -> Heat:
    entries: dict[str, Entry] = {}
    failed = dict(lost)
    crews: dict[str, Crew] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-bench-"))
        for number, group in enumerate(_groups(asked, names)):
            crew = stack.enter_context(Crew(asked, f"{folder}/{number}"))
            ready = crew.ready
            for name in group:
                found = crew.try_out(name)
                if isinstance(found, Entry):
                    entries[name], crews[name] = found, crew
                else:
                    failed[name] = found
        measured = _measure(asked, crews) if crews else None
    return Heat(
        ready.machine,
        str(measured or "nothing was measured"),
        ready.num_params,
        {name: times.tolist() for name, times in measured.times.items()} if measured else {},
        entries,
        failed,
    )


def _groups(asked: Contest, names: Sequence[str]) -> list[Sequence[str]]:
    """Which variants have workers in common; one group at least, since a heat says what it ran on."""
    return [[name] for name in names] if asked.has_own_workers and names else [names]


def _measure(asked: Contest, crews: Mapping[str, Crew]) -> Measured:
    """Let all variants take their turns, round by round."""
    shuffler = random.Random(0)
    names = list(crews)
    cores = os.sched_getaffinity(0)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    others, walls = [], []
    for _ in range(asked.warmup + asked.steps):
        shuffler.shuffle(names)
        start, used, busy = time.perf_counter(), _used(crews), interleave.busy_seconds(cores)
        for name in names:
            seconds[name].append(crews[name].step(name))
        walls.append(time.perf_counter() - start)
        others.append(interleave.busy_seconds(cores) - busy - (_used(crews) - used))
    times = {name: np.array(seconds[name][asked.warmup :]) for name in crews}
    disturbance = np.array(others[asked.warmup :]) / (len(cores) * np.array(walls[asked.warmup :]))
    return interleave.counted(times, disturbance)


def _used(crews: Mapping[str, Crew]) -> float:
    """Processor time of this process and of all workers, in seconds."""
    return time.process_time() + sum(crew.used for crew in set(crews.values()))


def _free_bytes(asked: Contest) -> int:
    if asked.device == "cuda":
        devices = range(min(asked.workers, torch.cuda.device_count()))
        return sum(torch.cuda.get_device_properties(device).total_memory for device in devices)
    return contest.free_bytes()
