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

Phases of a heat: start the workers; try each variant for a few steps, and see what memory it takes; drop those that
failed; measure the others. A variant that takes a worker with it is left out of a second attempt.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import numpy as np
import torch

from lockstep.bench import catalogue, interleave, request, results
from lockstep.bench.crew import Crew, CrewLost
from lockstep.bench.interleave import Measured
from lockstep.bench.request import Contest
from lockstep.bench.results import ContestResults, Entry, Heat

Progress = Callable[[int, int, str], None]
"""Takes how much is done, of how much, and what is being done."""


def run(asked: Contest, announce: Callable[[str], None], progress: Progress) -> ContestResults:
    """Hold all heats of a contest. Called on no worker; `announce` is told which heat begins."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    missing = {name: reason for name in asked.variants if (reason := catalogue.missing(name)) is not None}
    names = [name for name in asked.variants if name not in missing]
    groups = catalogue.heats(names, catalogue.bases(names), request.room(asked, _free_bytes(asked))) if names else []
    held = []
    for number, group in enumerate(groups, 1):
        which = f" (heat {number} of {len(groups)})" if len(groups) > 1 else ""
        announce(f"{asked.workload}{which}: {', '.join(group)}")
        held.append(results.joined([_hold(asked, group, progress) for _ in range(asked.crews)]))
    return results.collect(asked, date, missing, held)


def _hold(asked: Contest, names: Sequence[str], progress: Progress) -> Heat:
    """One heat; again without a variant that ended a worker, as long as there is one."""
    lost: dict[str, str] = {}
    while True:
        left = [name for name in names if name not in lost]
        try:
            return _attempt(asked, left, lost, progress)
        except CrewLost as error:
            lost[error.variant] = error.reason


def _attempt(asked: Contest, names: Sequence[str], lost: Mapping[str, str], progress: Progress) -> Heat:
    entries: dict[str, Entry] = {}
    failed = dict(lost)
    crews: dict[str, Crew] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-bench-"))
        # One crew at least, since a heat says what it ran on.
        groups = [[name] for name in names] if asked.has_own_workers and names else [names]
        for number, group in enumerate(groups):
            crew = stack.enter_context(Crew(asked, f"{folder}/{number}"))
            for name in group:
                progress(len(entries), len(names), f"starting {name}")
                found = crew.try_out(name)
                if isinstance(found, Entry):
                    entries[name], crews[name] = found, crew
                else:
                    failed[name] = found
        measured = _measure(asked, crews, progress) if crews else None
    return Heat(
        crew.machine,
        str(measured or "nothing was measured"),
        {name: times.tolist() for name, times in measured.times.items()} if measured else {},
        entries,
        failed,
    )


def _measure(asked: Contest, crews: Mapping[str, Crew], progress: Progress) -> Measured:
    """Let all variants take their turns, round by round."""
    cores = os.sched_getaffinity(0)
    rounds = asked.warmup + asked.steps

    def act(name: str, number: int) -> float:
        progress(number, rounds, "rounds")
        return crews[name].step(name)

    def used() -> float:  # By this process and all workers.
        return time.process_time() + sum(crew.used for crew in set(crews.values()))

    found = interleave.take_turns(list(crews), rounds, act, used, cores)
    timed = {name: np.array(values[asked.warmup :]) for name, values in found.items()}
    return interleave.counted({name: timed[name] for name in crews}, timed, timed[interleave.USED], len(cores))


def _free_bytes(asked: Contest) -> int:
    if asked.device == "cuda":
        devices = range(min(asked.workers, torch.cuda.device_count()))
        return sum(torch.cuda.get_device_properties(device).total_memory for device in devices)
    return request.free_bytes()
