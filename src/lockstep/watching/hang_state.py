"""What one worker is doing, read from another thread, and as it tells the others: once a second and when it is called.

Only plain numbers and names are read, never a tensor or what autograd keeps: that is the training thread's alone, and
native code replaces it without the interpreter's lock. Nothing is added to the path of a step. Times are those at which
a change was first seen, so they are late by up to the time between two looks. A stack is looked at with the
interpreter's lock, see `lockstep.frames`; where native code keeps that, faulthandler writes the stack, see `hangs`.

On a GPU the host seldom waits for others itself: it queues, and blocks where it reads a result. So where the main
thread stands still, the device is asked whether its default stream has come to the end of what was queued on it. That
is asked only after a while: while a CUDA graph is captured it must not be.
"""

import dataclasses
import json
import linecache
import math
import pickle
import re
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from traceback import FrameSummary
from typing import Any

import torch

from lockstep import torch_private
from lockstep.comm.flat_group import FlatGroup
from lockstep.frames import PACKAGES, Stack, at, is_own, is_own_file, listing, own_frame, stacks, words
from lockstep.replica.bucket import Bucket
from lockstep.replica.data_parallel import DataParallel
from lockstep.replica.step_state import PassPhase, PassProgress
from lockstep.world import World

THREAD_NAME = "lockstep-hangs"
"""How the names of the threads that watch begin; they are left out of what they write."""
_MOST_NAMES = 8
"""How many parameters of a bucket are told by name."""
_BUCKET = re.compile(r"reducing bucket (\d+) of step")
"""How the reducer says what it waits for, see `BucketQueue.words`. On a GPU no host waits for a bucket."""
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
"""Whoever is in a public function of these waits for other workers."""
_WAITING = re.compile(r"\.wait\(")
"""A line that waits for an operation which was started before; the wait itself is native, or torch's or ours."""
_MOST_CALLS = 128
"""How many of the last calls of a group are told."""
_EQUAL_SIZES = frozenset({"all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base"})
"""Calls that have the same size on all workers."""
_SENDER = Bucket.launch.__code__.co_filename, Bucket.launch.__code__.co_name
"""The function that sends buckets, as it is found in stacks."""


@dataclass(frozen=True, slots=True)
class QueuedCall:
    """One collective that a worker has called over NCCL."""

    group: str
    number: int
    """How many of the group's collectives it is."""
    what: str
    """The same on all workers of the group."""
    at: str
    """Where it was called, in the script's own code; empty where that is not known."""
    later_buckets: int
    """If it was a bucket of Lockstep's: how many more of them were sent since; else -1."""

    @property
    def is_bucket(self) -> bool:
        """Whether it carried gradients."""
        return self.later_buckets >= 0


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker at one moment."""

    rank: int
    clock_s: float
    """When, on the monotonic clock of the worker's host."""
    time_s: float
    """The same in seconds since 1970."""
    step: int
    """How many synchronised backward passes have ended."""
    phase: PassPhase
    phase_s: float
    """Since how many seconds it has sent no bucket, and has been in this phase."""
    launched: int
    """How many buckets of this step the worker has sent."""
    num_buckets: int
    bucket: int
    """The bucket that the worker waits for, or -1."""
    waits: str
    """What the worker waits in, in words; empty if it does not wait."""
    waits_s: float
    """Since how many seconds."""
    lacking: tuple[str, ...]
    """Parameters of the next bucket whose gradients this worker has not computed yet, the first few."""
    num_lacking: int
    """How many there are."""
    at: str
    """Where its main thread is, in the script's own code."""
    calls: dict[str, int]
    """How many collectives the worker has called, by group."""
    queued: tuple[QueuedCall, ...] = ()
    """The last of them on a GPU, once the worker has waited for a while."""
    answers: int = 0
    """The last call for a report that the worker had heard."""
    has_left: bool = False
    """Whether the worker is no longer watched, since its training has ended."""

    @property
    def position(self) -> tuple[int, int]:
        """How far the worker has come: steps, then buckets sent."""
        return self.step, self.launched

    def pack(self) -> str:
        """The text that `unpack` reads."""
        return json.dumps(dataclasses.asdict(self) | {"phase": self.phase.value})

    @classmethod
    def unpack(cls, packed: bytes | str) -> "WorkerState":
        """The state that `packed` was made from."""
        fields: dict[str, Any] = json.loads(packed)
        fields["queued"] = tuple(QueuedCall(**call) for call in fields["queued"])
        fields["phase"] = PassPhase(fields["phase"])
        fields["lacking"] = tuple(fields["lacking"])
        return cls(**fields)


class Look:
    """Looks at one worker and one wrapped model. For one thread."""

    def __init__(self, world: World, model: DataParallel, still_s: float = 1.0) -> None:
        self._world = world
        self._still_s = still_s
        """How long the main thread has to stand still before the device is asked."""
        self.see(model)
        self._moment, self._wait = _Unchanged(), _Unchanged()
        """What changes with every move of the worker, and what it waits in."""
        self._queued: tuple[QueuedCall, ...] = ()
        """What was read for the wait that began then."""
        self._queued_since = 0.0

    def see(self, model: DataParallel) -> None:
        """Look at `model` from now on, as long as it lives."""
        self._peers = {self._world.peers, model.world.peers}
        self._reducer: Any = weakref.ref(model._engine.reducer) if model._engine.reducer is not None else lambda: None

    def take(self) -> WorkerState:
        """This worker now."""
        now = time.monotonic()
        reducer = self._reducer()
        progress = reducer.progress() if reducer is not None else PassProgress()
        calls = _call_counts()
        spot = main_thread_spot()
        moment_since = self._moment.since((progress.step, progress.num_launched, progress.phase), now)
        waits, since = self._waits(spot, calls, now)
        return WorkerState(
            rank=self._world.peers.me.rank,
            clock_s=now,
            time_s=time.time(),
            step=progress.step,
            phase=progress.phase,
            phase_s=now - moment_since,
            launched=progress.num_launched,
            num_buckets=progress.num_buckets,
            bucket=int(found[1]) if (found := _BUCKET.match(waits)) else -1,
            waits=waits,
            waits_s=now - since if waits else 0.0,
            lacking=progress.lacking[:_MOST_NAMES],
            num_lacking=len(progress.lacking),
            at=spot.at,
            calls=calls,
            queued=self._last_calls(since) if waits and now - since > self._still_s else (),
        )

    def bucket(self, place: int) -> tuple[int, tuple[str, ...]]:
        """Bytes of a bucket and names of its parameters; none if there is no such bucket."""
        reducer = self._reducer()
        return reducer.describe_bucket(place) if reducer is not None else (0, ())

    def _waits(self, spot: "Spot", calls: dict[str, int], now: float) -> tuple[str, float]:
        """What the worker waits in, or nothing, and since when."""
        for peers in self._peers:
            if (waits := peers.waits) is not None:
                self._wait.since(None, now)
                doing, since = waits
                return doing if isinstance(doing, str) else doing(), since
        found = spot.collective or ("an operation that it started before" if spot.awaits_work else "")
        since = self._wait.since((found, spot.at, spot.depth, calls), now)
        device = self._world.device
        is_on_gpu = device.type == "cuda" and now - since > self._still_s
        if not found and is_on_gpu and not torch.cuda.default_stream(device).query():
            found = "a read of what the device has not come to"
        return found, since

    def _last_calls(self, since: float) -> tuple[QueuedCall, ...]:
        """What NCCL was given before this wait: at once without lines, which follow when they have been read."""
        if self._world.device.type == "cuda" and abs(since - self._queued_since) > self._still_s / 2:
            self._queued, self._queued_since = _read_calls(with_lines=False), since
            threading.Thread(target=self._read_lines, args=(since,), name=f"{THREAD_NAME}-queue", daemon=True).start()
        return self._queued

    def _read_lines(self, since: float) -> None:
        found = _read_calls(with_lines=True)
        if self._queued_since == since:
            self._queued = found


class _Unchanged:
    """Since when something has not changed."""

    def __init__(self) -> None:
        self._value: Any = None
        self._since = time.monotonic()

    def since(self, value: Any, now: float) -> float:
        """Take what it is now."""
        if self._value != value:
            self._value, self._since = value, now
        return self._since


def _call_counts() -> dict[str, int]:
    """How many collectives this worker has called in each of torch's groups, by the group's name and the device."""
    counts = {}
    for group, name in torch_private.group_names().items():
        for kind in ("cpu", "cuda"):
            # Asked for its part for CUDA by torch's name, a group in shared memory would open one.
            is_ours = isinstance(group, FlatGroup)
            backend = group.backend_in_use(kind) if is_ours else torch_private.backend_of(group, kind)
            count = torch_private.num_collectives(backend) if backend is not None else None
            if count is not None:
                counts[f"{name}/{kind}"] = count
    return counts


# Stacks


@dataclass(frozen=True, slots=True)
class Spot:
    """Where the main thread is."""

    at: str
    """The innermost line of the script's own code, as `train.py:57 in main`."""
    collective: str
    """The collective of torch.distributed that it is in, by name, or empty."""
    awaits_work: bool
    """Whether its line waits for an operation that was started before."""
    depth: int
    """How many frames there are: with `at`, tells one moment of the script from another."""


def main_thread_spot() -> Spot:
    """Where the main thread is now."""
    found = stacks()
    main = found.get(threading.main_thread().ident or 0, [])
    # With a GPU the hooks of a backward pass run in a thread of autograd's, and what happens in them happens there.
    # Threads that were started from Python are somebody's own, and their waits are not the script's.
    named = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    native = [stack for ident, stack in found.items() if ident not in named]
    in_backward = bool(main) and main[0].name == "_engine_run_backward"
    stack = next((stack for stack in native if in_backward and is_own(own_frame(stack))), main)
    own = own_frame(stack)
    collective = next((name for stack in [main, *native] if (name := _collective(stack))), "")
    return Spot(at(own), collective, own is not None and _awaits_work(stack, own), len(stack))


def all_stacks() -> str:
    """What every thread is doing, the main thread first, with the lines of source."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for ident, stack in sorted(stacks().items(), key=lambda item: item[0] != main):
        name = threads.get(ident, f"native thread {ident}")
        if not name.startswith(THREAD_NAME):
            parts.append(f"thread {name}:\n" + listing(stack))
    return "".join(parts)


def _collective(stack: Stack) -> str:
    """The outermost function of torch.distributed, as the script called it."""
    names = [frame.name for frame in stack if frame.filename.endswith(_COLLECTIVES)]
    return next((f"torch.distributed.{name}" for name in reversed(names) if not name.startswith("_")), "")


def _awaits_work(stack: Stack, own: FrameSummary) -> bool:
    """Whether the script's line is `work.wait()`, and not the wait for a thread or a process of its own."""
    line = linecache.getline(own.filename, own.lineno or 0)
    called = stack[: stack.index(own)][-1:]
    return bool(_WAITING.search(line)) and all(frame.filename.startswith(PACKAGES) for frame in called)


# What NCCL was given to do, call by call. On a GPU a collective returns at once, and one that only some workers call
# pairs with whatever the others call next. The device then waits for ever, at a place that says nothing about the line
# that was wrong. torch keeps the last calls of every group, with sizes and stacks (its flight recorder, which is on by
# default); the first number at which workers have called different things is that line.


def _read_calls(*, with_lines: bool) -> tuple[QueuedCall, ...]:
    """This worker's last calls, by group; none where torch does not keep them. Called only in a hang.

    It takes a millisecond without the lines; with them, the first time, seconds in which torch imports its compiler: in
    a thread of its own, that delays nobody.
    """
    try:
        kept = torch_private.nccl_calls(with_stacks=with_lines)
        return tuple(parse_calls(pickle.loads(kept))) if kept is not None else ()
    except Exception:  # No promise of torch's: another version may tell it otherwise.
        return ()


def parse_calls(kept: Mapping[str, Any]) -> list[QueuedCall]:
    """The last calls of each group, of what the flight recorder keeps."""
    groups = defaultdict(list)
    members = {name: str(group.get("ranks", "")) for name, group in kept.get("pg_config", {}).items()}
    for entry in kept.get("entries", []):
        if not entry["is_p2p"]:
            name = entry["process_group"][0]
            groups[f"{name} of {members.get(name, '')}"].append(entry)  # Several may have one name.
    return [call for group, found in groups.items() for call in _calls_of_group(group, found)]


def _calls_of_group(group: str, entries: list[Mapping[str, Any]]) -> list[QueuedCall]:
    later, found = 0, []
    for entry in reversed(entries[-_MOST_CALLS:]):
        frames = entry.get("frames", [])
        is_bucket = any((frame["filename"], frame["name"]) == _SENDER for frame in frames)
        own = next((frame for frame in frames if is_own_file(frame["filename"])), None)
        where = words(own["filename"], own["line"], own["name"]) if own is not None else ""
        where = "a bucket of gradients" if is_bucket else where
        found.append(QueuedCall(group, entry["collective_seq_id"], _what(entry), where, later if is_bucket else -1))
        later += is_bucket
    return found[::-1]


def _what(entry: Mapping[str, Any]) -> str:
    name = str(entry["profiling_name"]).removeprefix("nccl:")
    if name not in _EQUAL_SIZES:
        return name
    numel = sum(math.prod(size) for size in entry["input_sizes"])
    return f"{name.strip('_')} of {numel} x {entry['input_dtypes'][0].lower()}"
