"""Hears what the engine says, and cuts it into steps. All that watching does on the path of a step is here.

A step runs from the end of an optimizer's step to the end of the next one that follows a backward pass. The first one
begins with the first thing heard. Hearing an event costs an append (and on CUDA the record of a timing event); what
becomes of a step is worked out in the background, by another thread that takes it from here: `take`.

Who writes what: the training threads append to the step in hand and put closed ones into a deque; the background
thread only pops from its other end. Both are single operations of the interpreter, so nobody holds a lock.
"""

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.events import Event, Events, Kind
from lockstep.watching.step_record import StepRecord, is_recorded, record_step

_MOST_CLOSED = 10_000
"""So many steps wait for the background thread at most; where it is gone or starved, older ones are dropped."""
_ANCHOR_S = 20.0
"""After so long a new anchor is set: clocks that drift by 10 millionths are apart by 0.2 ms then."""

_INTERRUPTS = slice(5, 7)
"""irq and softirq, of the columns user, nice, system, idle, iowait, irq, softirq, steal."""

Stamp = Any
"""When a moment took place: nanoseconds, or on CUDA an event that will tell once it has passed."""


@dataclass(slots=True)
class HeardStep:
    """A step as it was heard."""

    step: int
    begin: Stamp
    heard: list[tuple[Event, Stamp]] = field(default_factory=list)
    noted: dict[str, float | Tensor] = field(default_factory=dict)
    """What was logged: read, on a GPU, only when its turn has come."""
    taken_ns: int = 0
    """What communication took of the backward passes."""


class Recorder:
    """The steps of this worker. The training thread fills it; the background thread calls `take`."""

    def __init__(self, events: Events, device: torch.device, at_end: Callable[[HeardStep], None]) -> None:
        self._events = events
        self._clock = CudaClock(device) if device.type == "cuda" else None
        self._contention = Contention() if device.type == "cpu" else None
        """What measures how the host's threads get into each other's way, where backward passes run on the host."""
        self._at_end = at_end
        """Called with every step that has just ended, in the training thread."""
        self._closed: collections.deque[HeardStep] = collections.deque(maxlen=_MOST_CLOSED)
        self._unread: collections.deque[HeardStep] = collections.deque()
        """Closed steps that the background thread has taken, and that the device has not come to the end of."""
        self._current: HeardStep | None = None
        self._has_passed = False
        """Whether a backward pass has ended in this step."""
        self._backward_ns = 0
        """When the backward pass began that sends."""
        self._depth = 0
        """How many optimizer steps are under way: optimizers may call others."""
        self._num_steps = 0
        """How many steps have ended."""
        self._ends = [
            events.subscribe(self._hear),
            register_optimizer_step_pre_hook(self._before_update).remove,
            register_optimizer_step_post_hook(self._after_update).remove,
        ]

    def close(self) -> None:
        """Stop listening."""
        for end in self._ends:
            end()
        self._ends.clear()
        if self._contention is not None:
            self._contention.close()

    def note(self, values: dict[str, float | Tensor]) -> None:
        """Add to the step under way, or between two, to the one that has just ended."""
        if self._current is not None and self._current.heard:
            self._current.noted.update(values)
        elif self._closed:
            self._closed[-1].noted.update(values)

    # The background thread

    def take(self, every: int, *, is_last: bool) -> tuple[list[StepRecord], int]:
        """Records of the steps that are over, one of `every`, and the number of the newest step taken or 0.

        The newest is kept back until `is_last`, since something may be noted about it; and so are those that the
        device has not come to the end of. At last that is waited for, briefly.
        """
        if self._contention is not None:
            self._contention.see_interrupts()
        while len(self._closed) > (0 if is_last else 1):
            self._unread.append(self._closed.popleft())
        records: list[StepRecord] = []
        newest = 0
        while self._unread and self._is_past(self._unread[0].heard[-1][1], is_last):
            step = self._unread.popleft()
            newest = step.step
            if is_recorded(step.step, every):
                records.append(self._read(step))
            if self._clock is not None:
                # The last stamp is also the begin of the next step, which has still to be read.
                self._clock.reuse([stamp for _, stamp in step.heard[:-1]])
        return records, newest

    def _is_past(self, stamp: Stamp, waits: bool) -> bool:
        give_up = time.monotonic() + (1.0 if waits else 0.0)
        while self._clock is not None and not self._clock.is_past(stamp):
            if time.monotonic() >= give_up:
                return False
            time.sleep(0.01)
        return True

    def _read(self, step: HeardStep) -> StepRecord:
        moments = [(event, self._nanoseconds(stamp)) for event, stamp in step.heard]
        noted = {name: float(value) for name, value in step.noted.items()}
        return record_step(step.step, self._nanoseconds(step.begin), moments, noted, step.taken_ns)

    def _nanoseconds(self, stamp: Stamp) -> int:
        return int(stamp) if self._clock is None else self._clock.read(stamp)

    # The training thread

    def _hear(self, event: Event) -> None:
        stamp = event.time_ns if self._clock is None else self._clock.now(event)
        if self._current is None:
            self._current = HeardStep(self._num_steps + 1, stamp)
        self._current.heard.append((event, stamp))
        if self._contention is not None:
            self._see_backward(event, self._contention, self._current)
        if event.kind is Kind.SYNCED or event.kind is Kind.ENDED:
            self._has_passed = True
        elif event.kind is Kind.UPDATED and self._has_passed:
            self._close_step(self._current, stamp)

    def _see_backward(self, event: Event, contention: "Contention", step: HeardStep) -> None:
        if event.kind is Kind.BACKWARD:
            self._backward_ns = event.time_ns
            contention.begin()
        elif event.kind is Kind.WAITING:
            lasted = max(1, event.time_ns - self._backward_ns)
            stolen = contention.end()
            # Threads get into the way of filling buckets as they do of the rest: not to be counted twice.
            step.taken_ns += event.spent_ns + int(stolen * max(0.0, 1 - event.spent_ns / lasted))

    def _close_step(self, step: HeardStep, stamp: Stamp) -> None:
        self._num_steps += 1
        self._has_passed = False
        self._current = HeardStep(self._num_steps + 1, stamp)
        self._at_end(step)
        self._closed.append(step)

    def _before_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            if self._current is not None and optimizer.param_groups:
                self._current.noted.setdefault("lr", optimizer.param_groups[0].get("lr", 0.0))
            self._events.emit(Kind.OPTIMIZER)

    def _after_update(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._depth = max(0, self._depth - 1)  # It may have begun before anybody listened.
        if self._depth == 0:
            self._events.emit(Kind.UPDATED)


class CudaClock:
    """The device's clock, by timing events on whatever stream is current.

    On CUDA a moment on the host says when work was queued, not when it ran. So with each moment a timing event is
    recorded on the current stream; it is read once it has passed, by the background thread, and nothing ever waits for
    it. On an idle stream such an event passes at once, so loading that the device had to wait for shows at its full
    length, and loading under the device's work not at all. An anchor, an event on a stream of its own whose passing the
    background thread waits for, places device times on the host's clock; it is renewed now and then, since the two
    clocks drift.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: collections.deque[torch.cuda.Event] = collections.deque()
        self._stream = torch.cuda.Stream(device)
        self._anchor, self._anchored_ns = self._set_anchor()

    def now(self, event: Event) -> Stamp:
        """A stamp for this moment; while a CUDA graph is captured, of which it would become part, the host's time."""
        if torch.cuda.is_current_stream_capturing():
            return event.time_ns
        try:
            stamp = self._free.pop()
        except IndexError:
            stamp = torch.cuda.Event(enable_timing=True)
        stamp.record(torch.cuda.current_stream(self._device))
        return stamp

    def is_past(self, stamp: Stamp) -> bool:
        """Whether the moment is over, so that it can be read."""
        return isinstance(stamp, int) or bool(stamp.query())

    def read(self, stamp: Stamp) -> int:
        """Nanoseconds of `time.perf_counter_ns` at the moment; called in the background thread."""
        if isinstance(stamp, int):
            return stamp
        if time.perf_counter_ns() - self._anchored_ns > _ANCHOR_S * 1e9:
            self._anchor, self._anchored_ns = self._set_anchor()
        since: float = self._anchor.elapsed_time(stamp)
        return self._anchored_ns + round(since * 1e6)

    def reuse(self, stamps: list[Stamp]) -> None:
        """These will not be read again."""
        self._free.extend(stamp for stamp in stamps if not isinstance(stamp, int))

    def _set_anchor(self) -> tuple[torch.cuda.Event, int]:
        """The best of a few: the one whose passing was seen soonest."""
        tries = []
        for _ in range(5):
            anchor = torch.cuda.Event(enable_timing=True)
            before = time.perf_counter_ns()
            anchor.record(self._stream)
            anchor.synchronize()
            after = time.perf_counter_ns()
            tries.append((after - before, anchor, (before + after) // 2))
        _, anchor, when = min(tries, key=lambda each: each[0])
        return anchor, when


class Contention:
    """What communication takes from a backward pass beside it, on a host whose cores do both: from `begin` to `end`.

    Threads that move bytes run on the cores that compute. While one does, the thread of the backward pass stands ready
    and does not run: Linux counts that time (its run delay). Other programs can be the cause as well, so that no more
    counts as this process's other threads have run meanwhile.

    What arrives from the network is handled in interrupts, on whatever core is at hand and in the name of the thread
    that runs there; a backward pass loses the part of its time that all cores spend in them.
    """

    def __init__(self) -> None:
        self._begin: tuple[int, int, int, int] | None = None
        self._files: dict[int, int] = {}
        self._ticks = (0, 0)
        self._interrupted = 0.0
        """The part of the cores' time that went into interrupts of late."""

    def begin(self) -> None:
        """A backward pass begins on this thread."""
        self._begin = self._read()

    def end(self) -> int:
        """It has ended: nanoseconds for which others had its core, threads of this process or the network."""
        begin, self._begin, now = self._begin, None, self._read()
        if begin is None or now is None or begin[0] != now[0]:
            return 0  # It cannot be told.
        _, run_delay, of_thread, of_process = (after - before for before, after in zip(begin, now, strict=True))
        return max(0, min(run_delay, of_process - of_thread)) + int(self._interrupted * of_thread)

    def see_interrupts(self) -> None:
        """Look how much time interrupts take; called about once a second, by another thread."""
        with contextlib.suppress(OSError, ValueError), Path("/proc/stat").open() as file:
            ticks = [int(word) for word in file.readline().split()[1:9]]
            now, before = (sum(ticks), sum(ticks[_INTERRUPTS])), self._ticks
            if before[0] and now[0] > before[0]:
                self._interrupted = (now[1] - before[1]) / (now[0] - before[0])
            self._ticks = now

    def close(self) -> None:
        """Let go of what was opened."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _read(self) -> tuple[int, int, int, int] | None:
        """This thread, and in nanoseconds its run delay, how long it has run, and how long the process has."""
        thread = threading.get_native_id()
        try:
            if thread not in self._files:
                self._files[thread] = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            run_delay = int(os.pread(self._files[thread], 96, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return None  # The kernel does not tell.
        return thread, run_delay, time.thread_time_ns(), time.process_time_ns()
