"""`lockstep bench step` and `lockstep bench gpu`: the step of Lockstep and of its peers, side by side.

Every variant has its own model and fused AdamW, starts from the same weights and takes the same batches. A step is
forward, backward and update. All variants live in the same workers and take turns, step by step (see interleave.py);
where memory does not hold all of them, they run in several heats, with the limit and torch's DDP in each.

Phases of a heat, on every worker: join; try each variant for a few steps, and see what it keeps in memory; drop those
that failed; measure the others. A variant that takes a worker with it is left out of a second attempt.
"""

import contextlib
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch

import lockstep
from lockstep.bench import catalogue, contest, interleave, machine, memory, results, variants, workloads
from lockstep.bench.contest import Contest
from lockstep.bench.memory import Growth
from lockstep.bench.results import Entry, Heat, Results
from lockstep.bench.variant import Variant
from lockstep.bench.workloads import Batch
from lockstep.comm import shm

TRIAL_STEPS = 3
"""Enough for buckets that are laid out anew after the first step, and for the optimizer's state."""
TIMEOUT = timedelta(minutes=3)
"""Of every wait: a variant that fails on one worker only is known to all after this long."""
SEED = 0
"""Every variant starts from the same weights."""
REHEARSAL = "tiny"
"""The workload with which each variant loads its code, before its memory is looked at."""
LONGEST_REASON = 160
"""Characters."""


@dataclass(frozen=True, slots=True)
class Entered:
    """A variant that passed its trial."""

    variant: Variant
    entry: Entry


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
        held.append(_hold(asked, group))
    return results.collect(asked, date, missing, held)


def _hold(asked: Contest, names: Sequence[str]) -> Heat:
    """One heat; again without a variant that ended a worker, as long as there is one."""
    lost: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        note = Path(folder) / "at"
        while True:
            note.write_text("")
            left = [name for name in names if name not in lost]
            try:
                heat = lockstep.launch(measure, asked.workers, args=(asked, left, str(note)))[0]
                return replace(heat, failed={**heat.failed, **lost})
            except Exception as error:
                culprit = note.read_text()
                if culprit not in left:
                    raise
                lost[culprit] = first_line(error)


def measure(asked: Contest, names: Sequence[str], note: str) -> Heat:
    """What one worker does in a heat; all return the same. `note` is a file for the name of what is being tried."""
    warnings.simplefilter("ignore")  # Peers' remarks to their users; nobody can act on them here.
    world = _join(asked)
    fed = workloads.batches(asked.workload, asked.batch, world.rank, world.device)
    num_params = _warm_up(asked, world, fed)
    entered: dict[str, Entered] = {}
    failed: dict[str, str] = {}
    for name in names:
        found = _try(asked, world, name, fed, Path(note))
        if isinstance(found, Entered):
            entered[name] = found
        else:
            failed[name] = found
    actions = {name: _action(name, each.variant, fed, Path(note)) for name, each in entered.items()}
    measured = interleave.measure(world, actions, rounds=asked.steps, warmup=asked.warmup) if actions else None
    return Heat(
        machine.describe(world),
        str(measured or "nothing was measured"),
        num_params,
        {name: times.tolist() for name, times in measured.times.items()} if measured else {},
        {name: each.entry for name, each in entered.items()},
        failed,
    )


def first_line(error: BaseException) -> str:
    """What an error says first, with its kind."""
    said = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."


def _join(asked: Contest) -> lockstep.World:
    """The world over torch's own backend, since peers use the default group; Lockstep's kinds get others."""
    if asked.device == "cuda":
        return _join_on_gpus(asked.workers)
    torch.set_num_threads(_num_threads(asked))
    return lockstep.join(device="cpu", backend="gloo", timeout=TIMEOUT)


def _join_on_gpus(workers: int) -> lockstep.World:
    """Several workers of one GPU say to be different hosts: NCCL refuses them otherwise."""
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    count = torch.cuda.device_count()
    if workers <= count:
        return lockstep.join(device="cuda", timeout=TIMEOUT)
    os.environ["NCCL_HOSTID"] = os.environ["RANK"]
    world = lockstep.join(device="cuda", timeout=TIMEOUT)
    # Peers take these for the number of their GPU. On one worker only that would be wrong, and the others would wait.
    os.environ.update(LOCAL_RANK=str(world.device.index or 0), LOCAL_WORLD_SIZE=str(count))
    return world


def _num_threads(asked: Contest) -> int:
    return max(1, machine.cores() // asked.workers)


def _warm_up(asked: Contest, world: lockstep.World, fed: Sequence[Batch]) -> int:
    """Load the code that a step needs, so that the first variant does not pay for it; returns the model's size."""
    variant = _stepped(asked, world, "nocomm", fed)
    return sum(param.numel() for param in variant.model.parameters())


def _stepped(asked: Contest, world: lockstep.World, name: str, fed: Sequence[Batch]) -> Variant:
    """The variant after its first steps."""
    own = "shm" if asked.device == "cpu" and shm.is_supported() else None
    torch.manual_seed(SEED)
    module = workloads.build(asked.workload)
    variant = variants.make(
        variants.setting(name, module, world, bf16=asked.is_bf16, batch=asked.batch, own_backend=own)
    )
    for number in range(TRIAL_STEPS):
        variant.step(fed[number % len(fed)])
    return variant


def _rehearse(asked: Contest, world: lockstep.World, name: str) -> None:
    """Code is loaded when it is first used: that is not what is asked of a variant's memory."""
    small = replace(asked, workload=REHEARSAL)
    _stepped(small, world, name, workloads.batches(REHEARSAL, asked.batch, world.rank, world.device))


def _try(asked: Contest, world: lockstep.World, name: str, fed: Sequence[Batch], note: Path) -> Entered | str:
    """The variant after its first steps, or why it could not make them; the same on all workers."""
    variant, reason, loss = None, None, 0.0
    if world.is_main:
        note.write_text(name)
    world.barrier()
    grown = Growth()
    with contextlib.redirect_stdout(io.StringIO()):  # Peers' remarks again.
        try:
            _rehearse(asked, world, name)
            with memory.growth(world.device) as grown:
                variant = _stepped(asked, world, name, fed)
            loss = float(variant.loss.detach())
        except (Exception, SystemExit) as error:
            reason = first_line(error)
    if asked.device == "cpu":
        torch.set_num_threads(_num_threads(asked))  # Whatever a peer thought best.
    everyone = world.gather((reason, grown.peak, grown.held, loss))
    if world.is_main:
        note.write_text("")
    reasons, peaks, held, losses = zip(*everyone, strict=True)
    if variant is None or any(reasons):
        return str(next(each for each in reasons if each))
    return Entered(variant, Entry(max(peaks), max(held), sum(losses) / len(losses)))


def _action(name: str, variant: Variant, fed: Sequence[Batch], note: Path) -> interleave.Action:
    def step(number: int) -> None:
        try:
            variant.step(fed[number % len(fed)])
        except BaseException:
            note.write_text(name)
            raise

    return step


def _free_bytes(asked: Contest) -> int:
    if asked.device == "cuda":
        devices = range(min(asked.workers, torch.cuda.device_count()))
        return sum(torch.cuda.get_device_properties(device).total_memory for device in devices)
    return contest.free_bytes()
