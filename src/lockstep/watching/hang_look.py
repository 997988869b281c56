"""A look at this worker from another thread: what it is doing, read from fields that its own threads write anyway.

Nothing is added to the path of a step. Times are those at which a change was first seen, so they are late by up to the
time between two looks.

On a GPU the host seldom waits for others itself: it queues, and blocks where it reads a result. So where the main
thread stands still, the device is asked whether its default stream has come to the end of what was queued on it. That
is asked only after a while: while a CUDA graph is captured it must not be.
"""

import contextlib
import re
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.shm.base import GroupBase
from lockstep.replica.bucket import Bucket
from lockstep.replica.data_parallel import DataParallel
from lockstep.watching import hang_queue, hang_stack
from lockstep.watching.hang_queue import Queued
from lockstep.watching.hang_stack import Spot
from lockstep.watching.hang_state import Phase, State
from lockstep.world import World

NUM_NAMES = 8
"""How many parameters of a bucket are told by name."""
_BUCKET = re.compile(r"reducing bucket (\d+) of step")
"""How the reducer says what it waits for, see `replica.words`. On a GPU no host waits for a bucket."""


class Look:
    """Looks at one worker and one wrapped model. For one thread."""

    def __init__(self, world: World, model: DataParallel, still_s: float = 1.0) -> None:
        self._world, self._model = world, model
        self._still_s = still_s
        """How long the main thread has to stand still before the device is asked."""
        self._moment: Any = None
        """What changes with every move of the worker, and since when it has not."""
        self._moment_since = time.monotonic()
        self._wait: Any = None
        self._wait_since = time.monotonic()
        self._queued: tuple[Queued, ...] = ()
        """What was read for the wait that began then."""
        self._queued_since = 0.0

    def take(self) -> State:
        """This worker now."""
        now = time.monotonic()
        reducer: Any = self._model._reducer
        phase = _phase(reducer)
        buckets = list(reducer._buckets.all) if reducer is not None else []
        step, launched = (reducer.step, reducer.num_launched) if reducer is not None else (0, 0)
        calls = _calls()
        spot = hang_stack.spot()
        if self._moment != (step, launched, phase):
            self._moment, self._moment_since = (step, launched, phase), now
        waits, since = self._waits(spot, calls, now)
        lacking = self._lacking(buckets[launched]) if launched < len(buckets) else []
        return State(
            rank=self._world.peers.me.rank,
            beat=0,
            clock_s=now,
            time_s=time.time(),
            answers=0,
            step=step,
            phase=phase,
            phase_s=now - self._moment_since,
            launched=launched,
            num_buckets=len(buckets),
            bucket=int(found[1]) if (found := _BUCKET.match(waits)) else -1,
            waits=waits,
            waits_s=now - since if waits else 0.0,
            lacking=tuple(lacking[:NUM_NAMES]),
            num_lacking=len(lacking),
            at=spot.at,
            calls=calls,
            queued=self._last_calls(since) if waits and now - since > self._still_s else (),
        )

    def bucket(self, place: int) -> tuple[int, tuple[str, ...]]:
        """Bytes of a bucket and names of its parameters; none if there is no such bucket."""
        reducer: Any = self._model._reducer
        buckets: list[Bucket] = list(reducer._buckets.all) if reducer is not None else []
        if not 0 <= place < len(buckets):
            return 0, ()
        return buckets[place].num_bytes, tuple(reducer._names[index] for index in buckets[place].indices)

    def _lacking(self, bucket: Bucket) -> list[str]:
        names = self._model._reducer._names if self._model._reducer is not None else ()
        return [names[index] for slot, index in enumerate(bucket.indices) if not bucket.has(slot)]

    def _last_calls(self, since: float) -> tuple[Queued, ...]:
        """What NCCL was given before this wait: at once without lines, which follow when they have been read."""
        if self._world.device.type == "cuda" and abs(since - self._queued_since) > self._still_s / 2:
            self._queued, self._queued_since = hang_queue.read(with_lines=False), since
            name = f"{hang_stack.THREAD_NAME}-queue"
            threading.Thread(target=self._read_lines, args=(since,), name=name, daemon=True).start()
        return self._queued

    def _read_lines(self, since: float) -> None:
        found = hang_queue.read(with_lines=True)
        if self._queued_since == since:
            self._queued = found

    def _waits(self, spot: Spot, calls: dict[str, int], now: float) -> tuple[str, float]:
        """What the worker waits in, or nothing, and since when."""
        for peers in {self._world.peers, self._model.world.peers}:
            if (waits := peers.waits) is not None:
                self._wait = None
                doing, since = waits
                return doing if isinstance(doing, str) else doing(), since
        found = spot.collective or ("an operation that it started before" if spot.awaits_work else "")
        if self._wait != (found, spot.at, spot.depth, calls):
            self._wait, self._wait_since = (found, spot.at, spot.depth, calls), now
        if not found and now - self._wait_since > self._still_s and _is_busy(self._world.device):
            found = "a read of what the device has not come to"
        return found, self._wait_since


def _is_busy(device: torch.device) -> bool:
    """Whether a GPU has not come to the end of what was queued on it."""
    return device.type == "cuda" and not torch.cuda.default_stream(device).query()


def _phase(reducer: Any) -> Phase:
    if reducer is None:
        return Phase.BETWEEN
    if reducer._armed is not None:
        return Phase.BACKWARD
    if reducer._has_arrived or reducer.num_launched:
        return Phase.REDUCING
    if reducer._expects_pass:
        return Phase.FORWARD if reducer._syncs else Phase.ACCUMULATING
    return Phase.BETWEEN


def _calls() -> dict[str, int]:
    """How many collectives this worker has called in each of torch's groups, by the group's name and the device."""
    counts = {}
    registry: Any = dist.distributed_c10d._world
    for group, name in list(registry.pg_names.items()):
        for kind in ("cpu", "cuda"):
            # It may have no such backend, or be ended just now.
            with contextlib.suppress(RuntimeError, AttributeError, KeyError):
                if (count := _count(group, kind)) is not None:
                    counts[f"{name}/{kind}"] = count
    return counts


def _count(group: Any, kind: str) -> int | None:
    if isinstance(group, GroupBase):  # Asked for its part for CUDA, it would open one.
        backend = group if kind == "cpu" else group._nccl
    else:
        backend = group._get_backend(torch.device(kind))
    return None if backend is None else int(backend._get_sequence_number_for_group())
