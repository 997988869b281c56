"""A crew: workers that hold one or more variants, and take their steps when they are told to.

Every worker connects to a Unix socket of the driver, which sends each order to all workers of a crew; each answers for
itself. Between orders workers wait in `recv`, and use no processor:

    try     make a variant and take its first steps; see what memory it takes. The answer is the same on all workers
    step    take a step of it, and say how long that took

The call that started the workers runs in a thread of the driver; it raises if a worker ends, and the others are ended
then. The driver, waiting for an answer, sees the connection closed, and raises CrewLost with the reason.
"""

import contextlib
import io
import itertools
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from types import TracebackType
from typing import Any, Literal, Self

import torch

import lockstep
from lockstep.bench import interleave, machine, models, variants
from lockstep.bench.models import Batch
from lockstep.bench.request import Contest
from lockstep.bench.results import Entry
from lockstep.bench.variants import Variant
from lockstep.comm import shm
from lockstep.errors import WorkerLost

_TRIAL_STEPS = 3
"""Enough for buckets that are laid out anew after the first step, and for the optimizer's state."""
_TIMEOUT = timedelta(minutes=3)
"""Of every wait: a variant that fails on one worker only is known to all after this long."""
_SEED = 0
"""Every variant starts from the same weights."""
_REHEARSAL = "tiny"
"""The workload with which each variant loads its code, before its memory is looked at."""
_LONGEST_REASON = 160
"""Characters."""
_POLL_S = 0.1

Order = tuple[Literal["try", "step"], str]
"""What a worker is to do, and with which variant."""


Answer = tuple[Any, float]
"""What a worker says to an order: to `try` an Entry, or why there is none; to `step` the seconds that it took. And the
processor time that it has used since it started."""


class CrewLost(Exception):
    """A worker of a crew has ended."""

    def __init__(self, variant: str, reason: str) -> None:
        super().__init__(f"{variant}: {reason}")
        self.variant = variant
        """What it was about."""
        self.reason = reason


class Crew:
    """The workers of one or more variants."""

    def __init__(self, asked: Contest, address: str) -> None:
        """Start them; what they raise before they are ready is raised here. `address`: a path for the socket."""
        self.used = 0.0
        """Processor time of all workers until their last answers, in seconds."""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(asked, address), daemon=True)
        self._links: list[Connection] = []
        try:
            self._links = self._connected(address, asked.workers)
            answers: list[dict[str, str | int]] = [link.recv() for link in self._links]
            self.machine = answers[0]
            """What the workers run on."""
        except (EOFError, ConnectionError):
            self._close()
            raise self._error or WorkerLost("a worker ended before it was ready.", ()) from None
        except BaseException:
            self._close()
            raise

    def try_out(self, name: str) -> Entry | str:
        """Make a variant: what its first steps took, or why it failed."""
        found: Entry | str = self._ask(("try", name))[0]
        return found

    def step(self, name: str) -> float:
        """The seconds that a step of the variant took, until the last worker was done."""
        seconds: Sequence[float] = self._ask(("step", name))
        return max(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _run(self, asked: Contest, address: str) -> None:
        try:
            lockstep.launch(serve, asked.workers, args=(asked, address))
        except BaseException as error:
            self._error = error

    def _connected(self, address: str, workers: int) -> list[Connection]:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(workers)
            listener.settimeout(_POLL_S)
            self._thread.start()
            links: list[Connection] = []
            while len(links) < workers:
                with contextlib.suppress(TimeoutError):
                    accepted, _ = listener.accept()
                    accepted.setblocking(True)
                    links.append(Connection(accepted.detach()))
                if not self._thread.is_alive():
                    raise EOFError
        return links

    def _ask(self, order: Order) -> Sequence[Any]:
        try:
            for link in self._links:
                link.send(order)
            answers: list[Answer] = [link.recv() for link in self._links]
        except (EOFError, OSError):
            self._thread.join()
            reason = _first_line(self._error) if self._error else "a worker ended without a word"
            raise CrewLost(order[1], reason) from None
        self.used = sum(used for _, used in answers)
        return [content for content, _ in answers]

    def _close(self) -> None:
        """Let the workers end."""
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send(None)
            link.close()
        if self._thread.ident is not None:
            self._thread.join()


# In the workers


class VariantHolder:
    """One worker's variants, by name."""

    def __init__(self, asked: Contest, world: lockstep.World) -> None:
        self._asked = asked
        self._world = world
        self._fed = models.batches(asked.workload, asked.batch, world.rank, world.device)
        self._held: dict[str, tuple[Variant, Iterator[Batch]]] = {}

    def answer(self, order: Order) -> Entry | str | float:
        """Do what is ordered."""
        verb, name = order
        return self._try(name) if verb == "try" else self._step(name)

    def _try(self, name: str) -> Entry | str:
        """Make a variant and take its first steps: what that takes, or why it failed; the same on all workers."""
        variant, reason, loss = None, None, 0.0
        self._world.barrier()
        grown = machine.MemoryGrowth()
        with contextlib.redirect_stdout(io.StringIO()):  # Peers' remarks to their users.
            try:
                self._rehearse(name)
                with machine.memory_growth(self._world.device) as grown:
                    variant = self._stepped(self._asked, name, self._fed)
                loss = float(variant.loss.detach())
            except (Exception, SystemExit) as error:
                reason = _first_line(error)
        if self._asked.device == "cpu":
            torch.set_num_threads(_num_threads(self._asked))  # Whatever a peer thought best.
        everyone = self._world.gather_json([reason, grown.peak, loss])
        reasons, peaks, losses = zip(*everyone, strict=True)
        if variant is None or any(reasons):
            return str(next(each for each in reasons if each))
        self._held[name] = variant, itertools.cycle(self._fed)
        return Entry(max(peaks), sum(losses) / len(losses))

    def _step(self, name: str) -> float:
        variant, batches = self._held[name]
        if self._asked.has_own_workers:  # After another's step a core's caches are cold, as in no training.
            variant.step(next(batches))
        return interleave.timed(self._world, lambda: variant.step(next(batches)))

    def _rehearse(self, name: str) -> None:
        """Code is loaded when it is first used: that is not what is asked of a variant's memory."""
        small = replace(self._asked, workload=_REHEARSAL)
        fed = models.batches(_REHEARSAL, small.batch, self._world.rank, self._world.device)
        self._stepped(small, name, fed)

    def _stepped(self, asked: Contest, name: str, fed: Sequence[Batch]) -> Variant:
        """The variant after its first steps."""
        own = "shm" if asked.device == "cpu" and shm.is_supported() else None
        torch.manual_seed(_SEED)
        module = models.build(asked.workload)
        setting = variants.setting(name, module, self._world, bf16=asked.is_bf16, batch=asked.batch, own_backend=own)
        variant = variants.make(setting)
        for number in range(_TRIAL_STEPS):
            variant.step(fed[number % len(fed)])
        return variant


def serve(asked: Contest, address: str) -> None:
    """Answer the driver, who listens at `address`, until it has no more orders. Called on every worker of a crew."""
    warnings.simplefilter("ignore")  # Nobody can act on them here.
    world = _join(asked)
    holder = VariantHolder(asked, world)
    with Client(address, "AF_UNIX") as link:
        link.send(machine.describe(world))
        for order in _orders(link):
            link.send((holder.answer(order), time.process_time()))


def _num_threads(asked: Contest) -> int:
    """Of each worker."""
    return max(1, machine.cores() // asked.workers)


def _first_line(error: BaseException) -> str:
    """What an error says first, with its kind."""
    said = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."


def _orders(link: Connection) -> Iterator[Order]:
    try:
        while (order := link.recv()) is not None:
            yield order
    except (EOFError, OSError):
        os._exit(1)  # The driver is gone, and with it whoever could be told of anything.


def _join(asked: Contest) -> lockstep.World:
    """The world over torch's own backend, since peers use the default group; Lockstep's kinds get others."""
    if asked.device == "cuda":
        return _join_on_gpus(asked.workers)
    torch.set_num_threads(_num_threads(asked))
    return lockstep.join(device="cpu", backend="gloo", timeout=_TIMEOUT)


def _join_on_gpus(workers: int) -> lockstep.World:
    """Several workers of one GPU say to be different hosts: NCCL refuses them otherwise."""
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    count = torch.cuda.device_count()
    if workers <= count:
        return lockstep.join(device="cuda", timeout=_TIMEOUT)
    os.environ["NCCL_HOSTID"] = os.environ["RANK"]
    world = lockstep.join(device="cuda", timeout=_TIMEOUT)
    # Peers take these for the number of their GPU. On one worker only that would be wrong, and the others would wait.
    os.environ.update(LOCAL_RANK=str(world.device.index or 0), LOCAL_WORLD_SIZE=str(count))
    return world
