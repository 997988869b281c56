"""What a worker of `lockstep bench step` and `lockstep bench gpu` does: hold variants, and take their steps when told.

Phases of `serve`: join; answer orders until there are none. The driver sends each order to all workers of a crew, and
each answers for itself (see crew.py):

    Try     make a variant and take its first steps; see what it keeps in memory. The answer is the same on all workers
    Step    take a step of it, and say how long that took
"""

import contextlib
import io
import itertools
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from typing import Any

import torch

import lockstep
from lockstep.bench import interleave, machine, memory, variants, workloads
from lockstep.bench.contest import Contest
from lockstep.bench.memory import Growth
from lockstep.bench.results import Entry
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
class Try:
    """An order to make a variant."""

    name: str


@dataclass(frozen=True, slots=True)
class Step:
    """An order to take a step of a variant."""

    name: str


@dataclass(frozen=True, slots=True)
class Ready:
    """What a worker says first."""

    machine: dict[str, str | int]
    """What it runs on."""
    num_params: int
    """Of the model."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker says to an order."""

    content: Any
    """To `Try` an Entry, or why there is none; to `Step` the seconds that it took."""
    used: float
    """Processor time that this worker has used since it started."""


class Holder:
    """One worker's variants, by name."""

    def __init__(self, asked: Contest, world: lockstep.World) -> None:
        self._asked = asked
        self._world = world
        self._fed = workloads.batches(asked.workload, asked.batch, world.rank, world.device)
        self._held: dict[str, tuple[Variant, Iterator[Batch]]] = {}

    def answer(self, order: Try | Step) -> Entry | str | float:
        """Do what is ordered."""
        return self._try(order.name) if isinstance(order, Try) else self._step(order.name)

    def _try(self, name: str) -> Entry | str:
        """Make a variant and take its first steps: what that takes, or why it failed; the same on all workers."""
        variant, reason, loss = None, None, 0.0
        self._world.barrier()
        grown = Growth()
        with contextlib.redirect_stdout(io.StringIO()):  # Peers' remarks to their users.
            try:
                self._rehearse(name)
                with memory.growth(self._world.device) as grown:
                    variant = self._stepped(self._asked, name, self._fed)
                loss = float(variant.loss.detach())
            except (Exception, SystemExit) as error:
                reason = first_line(error)
        if self._asked.device == "cpu":
            torch.set_num_threads(num_threads(self._asked))  # Whatever a peer thought best.
        everyone = self._world.gather((reason, grown.peak, grown.held, loss))
        reasons, peaks, held, losses = zip(*everyone, strict=True)
        if variant is None or any(reasons):
            return str(next(each for each in reasons if each))
        self._held[name] = variant, itertools.cycle(self._fed)
        return Entry(max(peaks), max(held), sum(losses) / len(losses))

    def _step(self, name: str) -> float:
        variant, batches = self._held[name]
        if self._asked.steps_before:
            variant.step(next(batches))
        return interleave.timed(self._world, lambda: variant.step(next(batches)))

    def _rehearse(self, name: str) -> None:
        """Code is loaded when it is first used: that is not what is asked of a variant's memory."""
        small = replace(self._asked, workload=REHEARSAL)
        fed = workloads.batches(REHEARSAL, small.batch, self._world.rank, self._world.device)
        self._stepped(small, name, fed)

    def _stepped(self, asked: Contest, name: str, fed: Sequence[Batch]) -> Variant:
        """The variant after its first steps."""
        own = "shm" if asked.device == "cpu" and shm.is_supported() else None
        torch.manual_seed(SEED)
        module = workloads.build(asked.workload)
        setting = variants.setting(name, module, self._world, bf16=asked.is_bf16, batch=asked.batch, own_backend=own)
        variant = variants.make(setting)
        for number in range(TRIAL_STEPS):
            variant.step(fed[number % len(fed)])
        return variant


def serve(asked: Contest, address: str) -> None:
    """Answer the driver, who listens at `address`, until it has no more orders. Called on every worker of a crew."""
    warnings.simplefilter("ignore")  # Nobody can act on them here.
    world = _join(asked)
    holder = Holder(asked, world)
    with Client(address, "AF_UNIX") as link:
        link.send(Ready(machine.describe(world), _num_params(asked.workload)))
        for order in _orders(link):
            link.send(Answer(holder.answer(order), time.process_time()))


def num_threads(asked: Contest) -> int:
    """Of each worker."""
    return max(1, machine.cores() // asked.workers)


def first_line(error: BaseException) -> str:
    """What an error says first, with its kind."""
    said = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."


def _num_params(workload: str) -> int:
    with torch.device("meta"):  # Nothing is to use this worker's memory before its variant does: see step.py.
        return sum(param.numel() for param in workloads.build(workload).parameters())


def _orders(link: Connection) -> Iterator[Try | Step]:
    try:
        while (order := link.recv()) is not None:
            yield order
    except (EOFError, OSError):
        os._exit(1)  # The driver is gone, and with it whoever could be told of anything.


def _join(asked: Contest) -> lockstep.World:
    """The world over torch's own backend, since peers use the default group; Lockstep's kinds get others."""
    if asked.device == "cuda":
        return _join_on_gpus(asked.workers)
    torch.set_num_threads(num_threads(asked))
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
