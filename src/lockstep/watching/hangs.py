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
import dataclasses
import threading
import time
from datetime import timedelta
from pathlib import Path

from lockstep.comm.peers import Peer
from lockstep.replica.data_parallel import DataParallel
from lockstep.watching.hang_look import Look
from lockstep.watching.hang_post import Post
from lockstep.watching.hang_report import Report, Waited, report
from lockstep.watching.hang_stack import THREAD_NAME
from lockstep.watching.hang_state import Phase, State
from lockstep.watching.hang_verdict import Account, Verdict, judge
from lockstep.watching.hang_writer import Writer
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
        self._folder = folder / "hangs" if folder is not None else None
        self._deadline_s = min(deadline, world.timeout / 2).total_seconds()
        self._beat_s = min(BEAT_S, self._deadline_s / 4)
        self._look = Look(world, model, still_s=self._deadline_s / 4)
        self._latest = self._look.take()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"{THREAD_NAME}-watch", daemon=True)
        self._post: Post | None = None
        self._calls = 0
        """Calls that this worker has written its stack for."""
        self._waits_since = 0.0
        """When the wait that this worker is in began; 0 if it does not wait."""
        self._due = 0.0
        self._interval_s = self._deadline_s
        self._called_at: float | None = None
        """When this worker called, while it gathers answers."""

    def start(self) -> None:
        """Begin to watch; called on every worker."""
        peers, rank = self._peers, self._peers.me.rank
        if len(peers.all) == 1 or peers.store is None or self._post is not None:
            return
        self._writer = Writer(self._folder, rank)
        self._post = Post(peers.store, rank, [peer.rank for peer in peers.all], self._compose, self._beat_s)
        self._calls = self._post.calls
        peers.witness = self._world.peers.witness = self.known
        atexit.register(self.close)  # A thread that is in the store when the interpreter ends would abort the process.
        self._writer.wind_up(self._deadline_s)
        self._post.start()
        self._thread.start()

    def close(self) -> None:
        """Watch no longer; the others hear that this worker has left. A second call does nothing."""
        if self._post is None or self._has_ended.is_set():
            return
        atexit.unregister(self.close)
        self._has_ended.set()
        self._thread.join(timeout=2)
        self._latest = dataclasses.replace(self._latest, phase=Phase.LEFT, waits="", bucket=-1)
        self._post.close()
        self._peers.witness = self._world.peers.witness = None
        self._writer.close()

    def known(self) -> str:
        """What is known of the hang that this worker is in: the last report, if it was made during this wait."""
        post = self._post
        if post is None or not post.report or not 0 < self._waits_since <= post.report_at:
            return ""
        return f"What the watch found: {post.report}"

    # The thread that looks

    def _serve(self) -> None:
        wound_at = time.monotonic()
        while not self._has_ended.wait(min(LOOK_S, self._beat_s / 2)):
            now = time.monotonic()
            if now - wound_at > self._beat_s / 2:
                wound_at = now
                self._writer.wind_up(self._deadline_s)
            self._latest = self._look.take()
            self._watch(now)

    def _compose(self, beat: int, answers: int) -> State:
        """For the post's thread: the last look, stamped."""
        clock_s, time_s = time.monotonic(), time.time()
        told = dataclasses.replace(self._latest, beat=beat, answers=answers, clock_s=clock_s, time_s=time_s)
        return told if answers else dataclasses.replace(told, queued=())  # Too much for every beat of everybody.

    def _watch(self, now: float) -> None:
        """Answer a call; call if this worker has waited for too long; write the report if it is this worker's."""
        assert self._post is not None
        self._note_wait()
        if self._post.calls > self._calls:
            self._calls = self._post.calls
            self._write_stack(now)
        if self._called_at is None:
            if self._waits_since and now >= self._due:
                self._called_at = now
                self._post.call()
        elif self._is_gathered(now):
            self._called_at = None
            self._conclude(now)

    def _note_wait(self) -> None:
        """A new wait has its own deadline."""
        since = self._latest.clock_s - self._latest.waits_s if self._latest.waits else 0.0
        if not since:
            self._waits_since = 0.0
        elif abs(since - self._waits_since) > 0.1:
            self._waits_since = since
            self._interval_s = self._deadline_s
            self._due = since + self._deadline_s

    def _write_stack(self, now: float) -> None:
        """Say what this worker does; the next report of this hang comes after twice the time."""
        self._interval_s *= 2
        self._due = now + self._interval_s
        self._writer.stack(self._latest)

    def _is_gathered(self, now: float) -> bool:
        assert self._post is not None and self._called_at is not None
        answered = sum(state.answers >= self._post.claimed > 0 for state in self._post.states.values())
        return answered == len(self._peers.all) or now - self._called_at >= GRACE_S

    def _conclude(self, now: float) -> None:
        """The answers are there, or late: the report, if it is this worker's to write."""
        post = self._post
        assert post is not None
        post.wants_states = False
        if not self._waits_since:
            return  # It has gone on in the meantime.
        hears = not post.is_silent(LATE_S)
        if not hears:
            self._write_stack(now)
        accounts = [self._account(peer) for peer in self._peers.all]
        if (post.claimed > 0) if hears else self._is_first_here(accounts):
            found = self._report(judge(accounts, hears=hears), accounts)
            self._writer.report(found)
            self._writer.frozen(accounts)
            post.publish(found.summary)

    def _is_first_here(self, accounts: list[Account]) -> bool:
        """Whether this is the first worker of its host that is not stopped: it writes where nobody can be asked."""
        running = [a.peer.rank for a in accounts if a.process and a.process not in "TtZX"]
        return self._peers.me.rank == min(running, default=self._peers.me.rank)

    # What is known

    def _account(self, peer: Peer) -> Account:
        assert self._post is not None
        if peer.rank == self._peers.me.rank:
            return Account(peer, self._latest, 0.0, "R")
        state = self._post.states.get(peer.rank)
        is_here = peer.host == self._peers.me.host
        process = peer.process_state() if is_here else ""
        sleeps_in = _sleeps_in(peer) if is_here else ""
        if state is None:
            return Account(peer, None, 0.0, process, sleeps_in)
        # Hosts share no clock: who has not answered from another one is silent, about as long as theirs says.
        age_s = time.monotonic() - state.clock_s if is_here else max(GRACE_S, time.time() - state.time_s)
        is_late = age_s > self._beat_s + LATE_S or not is_here or process in tuple("TtZX")
        has_answered = state.answers >= self._post.claimed > 0
        return Account(peer, state, max(age_s, 0.1) if is_late and not has_answered else 0.0, process, sleeps_in)

    def _report(self, verdict: Verdict, accounts: list[Account]) -> Report:
        mine = self._latest
        step, place = self._awaited(verdict, accounts)
        num_bytes, params = self._look.bucket(place)
        bucket = place if 0 <= place < mine.num_buckets else None
        waited = Waited(step, mine.waits_s, bucket, mine.num_buckets, num_bytes, params)
        return report(waited, verdict, accounts, self._folder)

    def _awaited(self, verdict: Verdict, accounts: list[Account]) -> tuple[int, int]:
        """The step, and the bucket waited for or -1.

        As those say who wait, else the first that the missing ones have not sent; but where workers called different
        things, the first that came to nothing.
        """
        if found := [place for account in accounts if (place := _unpaired(verdict, account)) is not None]:
            return min(found)
        step = max((a.state.step for a in accounts if a.waits and a.state is not None), default=self._latest.step)
        return step, self._awaited_in(step, verdict, accounts)

    def _awaited_in(self, step: int, verdict: Verdict, accounts: list[Account]) -> int:
        waiting = [a.state for a in accounts if a.waits and a.state is not None and a.state.step == step]
        if buckets := [state.bucket for state in waiting if state.bucket >= 0]:
            return min(buckets)
        if not any(state.phase is Phase.REDUCING for state in waiting):
            return -1
        missing = [a.state for a in accounts if a.peer.rank in verdict.missing and a.state is not None]
        return min((state.launched if state.step >= step else 0 for state in missing), default=-1)


def _unpaired(verdict: Verdict, account: Account) -> tuple[int, int] | None:
    """Step and place of the bucket that a worker sent where others called something else; a step sends them all."""
    call, state = verdict.difference.get(account.peer.rank), account.state
    if call is None or state is None or not call.is_bucket or not state.num_buckets:
        return None
    steps, place = divmod(state.launched - 1 - call.later_buckets, state.num_buckets)
    return state.step + steps, place


def _sleeps_in(peer: Peer) -> str:
    """Where in the kernel the main thread of a process of this host sleeps; empty if it does not, or is not told."""
    try:
        return Path(f"/proc/{peer.pid}/wchan").read_text().strip("0\n ")
    except OSError:
        return ""
