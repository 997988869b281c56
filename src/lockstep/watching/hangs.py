"""Who is stuck: a thread in every worker that looks how long its worker has been waiting, and says so when it is long.

Nothing here ends a run: a report is a warning. A wait ends by itself at the world's own deadline, see `comm.peers`, and
its error then tells what is known here.

The phases of a report, from the worker that has waited for longer than `deadline`:

    call      everybody, by the store; each writes its stack to its file and to stderr, and answers by a fresh state
    gather    what they say, for a moment; those of this host who say nothing are looked up in /proc
    judge     who has not come, or is somewhere else
    write     one report for all, by whoever called first; again after twice the time, while the hang lasts

A worker in native code that keeps the interpreter's lock cannot do any of it: for it faulthandler is wound up anew at
every beat, and writes the stack from a thread that needs no lock once the beats stop.
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from lockstep.comm.peers import Peer
from lockstep.replica.data_parallel import DataParallel
from lockstep.watching.hang_report import STANDS, Account, HangVerdict, Waited, awaited, judge, make_report
from lockstep.watching.hang_state import THREAD_NAME, Look, WorkerState, all_stacks
from lockstep.watching.heartbeats import Heartbeats
from lockstep.world import World

DEADLINE = timedelta(seconds=60)
BEAT_S = 1.0
LOOK_S = 0.25
GRACE_S = 1.2
"""How long answers to a call are waited for: longer than a beat, and short enough for a report within two seconds."""
LATE_S = 0.7
"""A worker whose last beat is older than a beat and this much is silent."""


class Hangs:
    """Watches one worker, and with those of the others finds out who is stuck. Started on every worker.

    folder: of the run; stacks and the report go to `hangs/` in it, and to stderr. Without it, to stderr alone.
    deadline: how long a worker waits before a report; at most half of the world's own deadline.

    Costs a thread that looks four times a second and one that talks to the store once a second, and nothing in a step.
    faulthandler's timer is taken for it. A world of one has nobody to wait for: nothing is started there.
    """

    def __init__(
        self, world: World, model: DataParallel, folder: Path | None = None, deadline: timedelta = DEADLINE
    ) -> None:
        self._world, self._peers = world, model.world.peers
        """The peers are those with whom the model is trained, with their ranks in the whole world."""
        self._writer = HangWriter(folder / "hangs" if folder is not None else None)
        self._timer = _WaitTimer(min(deadline, world.timeout / 2).total_seconds())
        self._beat_s = min(BEAT_S, self._timer.deadline_s / 4)
        self._look = Look(world, model, still_s=self._timer.deadline_s / 4)
        self._latest = self._look.take()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"{THREAD_NAME}-watch", daemon=True)
        self._beats: Heartbeats | None = None
        self._num_answered = 0
        """Calls that this worker has written its stack for."""
        self._called_at: float | None = None
        """When this worker called, while it gathers answers."""

    def start(self) -> None:
        """Begin to watch; called on every worker."""
        peers = self._peers
        if len(peers.all) == 1 or peers.store is None or self._beats is not None:
            return
        self._writer.open(peers.me.rank)
        self._beats = Heartbeats(peers.store, [peer.rank for peer in peers.all], self._compose, self._beat_s)
        self._num_answered = self._beats.calls
        peers.witness = self._world.peers.witness = self.known
        atexit.register(self.close)  # A thread that is in the store when the interpreter ends would abort the process.
        self._writer.wind_up(self._timer.deadline_s)
        self._beats.start()
        self._thread.start()

    def see(self, model: DataParallel) -> None:
        """Look at `model` from now on, the one that was wrapped last."""
        self._look.see(model)

    def close(self) -> None:
        """Watch no longer; the others hear that this worker has left. A second call does nothing."""
        if self._beats is None or self._has_ended.is_set():
            return
        atexit.unregister(self.close)
        self._has_ended.set()
        self._thread.join(timeout=2)
        self._latest = dataclasses.replace(self._latest, has_left=True, waits="", bucket=-1)
        self._beats.close()
        self._peers.witness = self._world.peers.witness = None
        self._writer.close()

    def known(self) -> str:
        """What is known of the hang that this worker is in: the last report, if it was made during this wait."""
        text, came_at = self._beats.report if self._beats is not None else ("", 0.0)
        return f"What the watch found: {text}" if text and 0 < self._timer.since <= came_at else ""

    # The thread that looks

    def _serve(self) -> None:
        wound_at = time.monotonic()
        while not self._has_ended.wait(min(LOOK_S, self._beat_s / 2)):
            now = time.monotonic()
            if now - wound_at > self._beat_s / 2:
                wound_at = now
                self._writer.wind_up(self._timer.deadline_s)
            self._latest = self._look.take()
            self._timer.see(self._latest)
            assert self._beats is not None
            self._watch(self._beats, now)

    def _compose(self, answers: int) -> WorkerState:
        """For the heartbeats' thread: the last look, stamped."""
        told = dataclasses.replace(self._latest, answers=answers, clock_s=time.monotonic(), time_s=time.time())
        return told if answers else dataclasses.replace(told, queued=())  # Too much for every beat of everybody.

    def _watch(self, beats: Heartbeats, now: float) -> None:
        """Answer a call; call if this worker has waited for too long; write the report if it is this worker's."""
        if beats.calls > self._num_answered:
            self._num_answered = beats.calls
            self._write_stack(now)
        if self._called_at is None:
            if self._timer.is_due(now):
                self._called_at = now
                beats.call()
            return
        answered = sum(state.answers >= beats.claimed > 0 for state in beats.states.values())
        if answered == len(self._peers.all) or now - self._called_at >= GRACE_S:
            self._called_at = None
            beats.stop_gathering()
            if self._timer.since:  # Else it has gone on in the meantime.
                self._conclude(beats, now)

    def _write_stack(self, now: float) -> None:
        """Say what this worker does; the next report of this hang comes after twice the time."""
        self._timer.postpone(now)
        self._writer.stack(self._latest)

    def _conclude(self, beats: Heartbeats, now: float) -> None:
        """The answers are there, or late: the report, if it is this worker's to write."""
        hears = not beats.is_silent(LATE_S)
        accounts = [self._account(peer, beats) for peer in self._peers.all]
        is_mine = beats.claimed > 0
        if not hears:
            # Nobody can be asked: of each host the first worker that is not stopped writes.
            self._write_stack(now)
            running = [a.peer.rank for a in accounts if a.process and a.process not in STANDS]
            is_mine = self._peers.me.rank == min(running, default=self._peers.me.rank)
        if is_mine:
            beats.publish(self._report(judge(accounts, hears=hears), accounts))

    # What is known

    def _account(self, peer: Peer, beats: Heartbeats) -> Account:
        if peer.rank == self._peers.me.rank:
            return Account(peer, self._latest, 0.0, "R")
        state = beats.states.get(peer.rank)
        is_here = peer.host == self._peers.me.host
        process = peer.process_state() if is_here else ""
        if state is None:
            return Account(peer, None, 0.0, process)
        # Hosts share no clock: who has not answered from another one is silent, about as long as theirs says.
        age_s = time.monotonic() - state.clock_s if is_here else max(GRACE_S, time.time() - state.time_s)
        is_late = age_s > self._beat_s + LATE_S or not is_here or process in STANDS
        has_answered = state.answers >= beats.claimed > 0
        return Account(peer, state, max(age_s, 0.1) if is_late and not has_answered else 0.0, process)

    def _report(self, verdict: HangVerdict, accounts: list[Account]) -> str:
        """Write it; returns it in one line."""
        mine = self._latest
        step, place = awaited(verdict, accounts)
        num_bytes, params = self._look.bucket(place)
        bucket = place if 0 <= place < mine.num_buckets else None
        waited = Waited(step, mine.waits_s, bucket, mine.num_buckets, num_bytes, params)
        summary, text = make_report(waited, verdict, accounts, self._writer.folder)
        self._writer.report(text, {"step": step, "bucket": bucket, "params": params, "missing": verdict.missing})
        return summary


class _WaitTimer:
    """When the wait that a worker is in has lasted too long: each has its own deadline, doubled by every report."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.since = 0.0
        """When the wait began; 0 if the worker does not wait."""
        self._due = 0.0
        self._interval_s = deadline_s

    def see(self, state: WorkerState) -> None:
        """Take the newest look."""
        since = state.clock_s - state.waits_s if state.waits else 0.0
        if since and abs(since - self.since) > 0.1:
            self._interval_s = self.deadline_s
            self._due = since + self.deadline_s
        elif since:
            since = self.since
        self.since = since

    def is_due(self, now: float) -> bool:
        """Whether a report is to be called for."""
        return self.since > 0 and now >= self._due

    def postpone(self, now: float) -> None:
        """A report is being made."""
        self._interval_s *= 2
        self._due = now + self._interval_s


class HangWriter:
    """Where reports and stacks go: the folder `hangs` of the run, and stderr. A full disk is no reason to fail."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._stacks: IO[bytes] | None = None
        self._printed = ""
        """The stack that was printed last: the same one is not printed again."""

    def open(self, rank: int) -> None:
        """Begin the file of worker `rank`, this one."""
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._stacks = (self.folder / f"worker-{rank}.txt").open("ab", buffering=0)

    def wind_up(self, seconds: float) -> None:
        """Have this worker's stack written from outside the interpreter if this is not called again in time."""
        faulthandler.dump_traceback_later(seconds, repeat=True, file=self._stacks or sys.__stderr__ or 2)

    def stack(self, state: WorkerState) -> None:
        """What every thread of this worker does, to its file; to stderr, where it is new, what the main thread does."""
        stack = all_stacks()
        waits = f"waiting {state.waits_s:.1f} s ({state.waits})" if state.waits else "not waiting for others"
        head = f"lockstep: worker {state.rank} at {time.strftime('%H:%M:%S')}, step {state.step}, {waits}:\n"
        shown = stack
        if self._stacks is not None:
            shown = stack.partition("\nthread ")[0]
            with contextlib.suppress(OSError):
                self._stacks.write(f"{head}{stack}\n".encode())
        if shown != self._printed:
            self._printed = shown
            _print(f"{head}{shown}".rstrip())

    def report(self, text: str, facts: dict[str, Any]) -> None:
        """The report, for all workers; the file appears whole."""
        _print(text)
        if self.folder is not None:
            with contextlib.suppress(OSError):
                whole = self.folder / "hang.tmp"
                whole.write_text(json.dumps({"time": time.time(), **facts, "text": text}, indent=1))
                whole.replace(self.folder / "hang.json")

    def close(self) -> None:
        """Leave no file without a word in it."""
        faulthandler.cancel_dump_traceback_later()
        if self._stacks is None:
            return
        self._stacks.close()
        path = Path(self._stacks.name)
        with contextlib.suppress(OSError):  # Others may still have theirs in the folder.
            if path.stat().st_size == 0:
                path.unlink()
                path.parent.rmdir()


def _print(text: str) -> None:
    """In one piece, so that the lines of several workers do not mix."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
