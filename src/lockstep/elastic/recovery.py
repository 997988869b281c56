"""What a trainer's calls do when their world breaks, or is to change: regroup, catch up, and do the call again.

A *call* is one of those that all workers make together: a step, an evaluation, a save. Calls are numbered. The argument
why the end of a run has the bits of one that nothing happened to:

1. A call is a function of the state before it (weights, optimizer, position) and of (seed, number): whoever computes a
   shard computes the same, and sums are added along the tree of the shards. So a call can be done again, by others.
2. A call needs a message from every member after all of that member's own work on it (the report of a step, the gather
   of a metric). So when one member has finished call c, all members of its generation have come to c, and none can have
   finished c + 1 without all having finished c: members differ by one call at most. On a GPU the host waits for that
   message before it queues the update, which else would follow a message that came to nothing, on half a sum.
3. The state changes in one place, when everything has arrived (the commit of a step, in this worker's memory alone).
   Wherever a member dies, each survivor has the state after call c - 1 or after call c, whole.
4. Survivors form the next generation and tell each other how many calls they have finished. If these differ, the ones
   behind take the state, and what the call returned, from one that is ahead; its state is right by 1. Then all do the
   call that is due. Nobody outside can tell that it was begun before.

What can die when:

    in compute, exchange, vote      nobody has finished: the step is done again on the new cut
    between vote and commit         some have finished: the others take it from them; if these die too, it is done again
    in commit, boundary             as the line above
    while groups are opened         the coordinator breaks waits off, and the next generation follows
    while state travels             the receivers are as far behind as before: the next generation sends it again. A
                                    newcomer that had not all of it was never counted
    the last that is ahead          the others have the call before, whole: it is done again
    all                             the run is lost back to its last checkpoint, and says so

With something split (zero=1 to 3) a state is in parts, and 3 holds for a part: some may be updated and others not.
Over shm the parts outlive their owners (live.py): if none was being updated, the survivors take them as they are. Else
all go back to a copy of the state before an earlier call, of which every part is still in somebody's memory, and make
the steps since then again (snapshots.py).

Planned changes come at the beginning of a step: a newcomer, having built everything and taken the state, is then at the
same place in its script as all others, about to make the same call.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

from torch import nn, optim

from lockstep import faults
from lockstep.comm import group as groups
from lockstep.comm.generations import Generation, Generations
from lockstep.elastic import transfer
from lockstep.elastic.balance import Balance, even
from lockstep.elastic.live import Live
from lockstep.elastic.snapshots import Pieces, Snapshots, deal
from lockstep.errors import StepVoid, UsageError, WorkerLost
from lockstep.keep.pieces import Piece
from lockstep.world import World

Result = TypeVar("Result")

LEAST_PATIENCE_S = 10.0
_TIMES_LONGER = 20.0
"""A worker that is silent for so many times the longest of the last steps is given up."""
_NUM_WARM = 3
"""Steps that compile and allocate, and say nothing about the next."""
_COLD_PATIENCE_S = 60.0
"""How long a worker may be silent in the first steps of a generation, which are some member's first ones."""
_BROKEN = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "workers met is gone", "NCCL")
"""What backends say of a lost peer where their error comes through as it is."""


class Recoverable(Protocol):
    """A trainer, as far as recovery knows it."""

    optimizer: optim.Optimizer

    @property
    def module(self) -> nn.Module:
        """What is trained."""

    @property
    def is_split(self) -> bool:
        """Whether a worker has what no other has (zero=1 to 3)."""

    def whole_progress(self) -> Any:
        """All of a run's state besides tensors, as it was before the call under way."""

    def go_on_from_progress(self, progress: Any, *, is_new: bool) -> None:
        """Take what `whole_progress` gave; a newcomer takes the position in the data too."""

    def let_go(self) -> None:
        """The world has ended: drop what belongs to it."""

    def reopen(self, counts: Sequence[int]) -> None:
        """The world is another one: make anew what belongs to it, with so many shards for each worker.

        All have the same state, or get it afterwards.
        """

    def pieces(self) -> Sequence[Piece]:
        """What this worker has of the tensors of the run, where they are split."""

    def wanted(self, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Which elements of a tensor this worker needs, where they are split."""

    def restore(self, pieces: Pieces, progress: Mapping[str, Any]) -> None:
        """Set all tensors, where they are split, to what has been dealt."""

    def reference(self, batch: Any) -> Any:
        """What `replay` needs to make a step from `batch` again, on whichever shards are this worker's then."""

    def replay(self, reference: Any) -> Any:
        """Make a step again that was made before."""


class Recovery:
    """One trainer's, on one worker."""

    def __init__(self, world: World, generations: Generations, trainer: Recoverable, shards: int) -> None:
        self._world, self._generations, self._trainer = world, generations, trainer
        self._calls = 0
        """How many calls have been finished."""
        self._result: Any = None
        """What the last one returned."""
        self._balance = Balance(shards)
        self._counts = even(world.size, shards)
        """How many shards each worker has."""
        self._snapshots = Snapshots()
        self._live: Live | None = None
        """What is split, where it outlives its owners; of this generation, or of the one that has just ended."""
        self._steps: dict[int, Any] = {}
        """References to the batches of the steps that may have to be made again, by call."""
        self._num_replayed = 0
        """How many steps were made again for the current generation, besides the one under way."""
        self._took_s: deque[float] = deque(maxlen=50)
        self._num_steps = 0
        """In this generation."""
        self._full_timeout = world.timeout
        self.is_leaving = False
        """Whether this worker was asked to go."""
        self.is_due = False
        """Whether all workers have agreed to regroup before the next step."""
        self.is_calling = False
        """Whether a call is under way here, which may be made of others."""
        self._has_failed = ""
        generations.tell_trainer()
        if world.is_main:
            generations.tell_begun(self._counts, 0.0, 0)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._ask_to_leave)

    @property
    def wants_change(self) -> bool:
        """Whether this worker knows a reason to regroup before the next step."""
        return self.is_leaving or self._generations.is_called

    def see(self, times: Sequence[float], *, is_change_due: bool) -> None:
        """A step has been made: how long a shard took each worker, and whether one wishes that the world changes."""
        current = self._generations.current
        if current is not None:
            self._balance.see(current.members, times)
            self.is_due = is_change_due or self._balance.is_due(current.members, self._counts)

    def forget_state(self) -> None:
        """The state was set to that of a checkpoint: what is kept of the one before must not come back."""
        self._snapshots = Snapshots()
        self._steps.clear()
        self._drop_live()

    def _drop_live(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None

    def begin_source(self, source: int) -> bool:
        """The script comes to this source of batches. A newcomer waits to be let in; False if the run is beyond."""
        if not self._generations.is_waiting:
            if self._world.rank == 0:
                self._generations.tell_source(source)
            return True
        answer = self._generations.ask_in(source)
        if not isinstance(answer, Generation):
            return False
        self._move(lambda: answer, {"calls": -1, "call": "join"})
        return True

    def run(self, call: str, attempt: Callable[[], Result], batch: Any = None) -> Result:
        """Make a call, as often as it takes. `batch`: that of a step."""
        if self._has_failed:
            raise UsageError(
                f"worker {self._world.rank}: {call} after {self._has_failed} In an elastic run the others have gone on "
                "without this worker: let such an error end the script, and another worker takes its place."
            )
        if self.is_calling:
            return attempt()
        if self._generations.is_waiting and call == "step":
            self._generations.stay_out()
        self.is_calling = True
        try:
            return attempt() if self._generations.is_waiting else self._run(call, attempt, batch)
        finally:
            self.is_calling = False

    def _run(self, call: str, attempt: Callable[[], Result], batch: Any) -> Result:
        is_planned = self.is_due and call == "step"
        while True:
            begun = time.monotonic()
            try:
                with self._patience(call):
                    if call == "step" and self._trainer.is_split:
                        self._keep(batch, is_due=is_planned)
                    if not is_planned:
                        self._result = attempt()
            except Exception as error:
                if not _is_loss(error):
                    self._fail(call, error)
                    raise
                why = f"{type(error).__name__}: {error}"
            else:
                if not is_planned:
                    self._calls += 1
                    if self._live is not None:
                        self._live.mark(self._calls)
                    if call == "step":
                        self._took_s.append(time.monotonic() - begun)
                        self._num_steps += 1
                    return cast(Result, self._result)
                faults.at("boundary")
                why = ""
            is_planned = False
            if self._regroup(call, why):
                return cast(Result, self._result)

    def _keep(self, batch: Any, *, is_due: bool) -> None:
        """A step is about to be made, of which a worker's part would be lost with it."""
        snapshots, calls = self._snapshots, self._calls
        if self._num_steps == 1:  # Now optimizers have their state.
            self._live = Live.of(self._world, self._trainer, calls)
        self._steps = {call: kept for call, kept in self._steps.items() if call >= snapshots.oldest_call}
        self._steps[calls] = self._trainer.reference(batch)
        if is_due or snapshots.is_due(calls):
            self._world.await_device("gathering parameters")
            took_s = sorted(self._took_s)[len(self._took_s) // 2] if self._took_s else 0.0
            snapshots.take(self._world, calls, self._trainer.pieces(), self._trainer.whole_progress(), took_s)

    # Regrouping

    def _regroup(self, call: str, why: str) -> bool:
        """Be in a later generation; returns whether the call under way turned out to be finished."""
        faults.at("regroup")
        calls = self._calls
        facts = {
            "calls": calls,
            # Where something is split, a newcomer begins with a copy of this very moment.
            "call": f"{call} again" if why and self._trainer.is_split else call,
            "why": why,
            "leaves": self.is_leaving and not why,
            "patience_s": self._patience_s(),
        }
        self._trainer.let_go()
        self._generations.leave(facts)
        self._move(self._generations.following, facts)
        return self._calls > calls

    def _move(self, following: Callable[[], Generation], facts: dict[str, Any]) -> None:
        """Be in the generation that `following` gives, or a later one, with the state that its members have."""

        def open_place(generations: Generations) -> groups.Membership:
            generation = following()
            if generations.member not in generation.members:
                sys.exit(0)  # It has left, as it was asked to.
            return groups.enter(generations, generation, self._world.device, self._full_timeout, facts)

        is_new, begun = facts["calls"] < 0, time.monotonic()
        while True:
            try:
                self._world.move(open_place)
                current = self._generations.current
                assert current is not None
                # Worker 0 has been there before, and knows how fast the others are.
                self._counts = self._world.gather_json(self._balance.counts(current.members))[0]
                if self._trainer.is_split:
                    self._go_back(is_new=is_new)
                else:
                    self._catch_up(is_new=is_new)
                    self._trainer.reopen(self._counts)
                self.is_due = False
                self._num_steps = 0
                if self._world.rank == 0:
                    self._generations.tell_begun(self._counts, time.monotonic() - begun, self._num_replayed)
                return
            except Exception as error:
                if not _is_loss(error) or self._generations.is_waiting:
                    raise
                facts["why"] = str(error)
            self._trainer.let_go()
            self._generations.leave(facts)
            following = self._generations.following

    def _catch_up(self, *, is_new: bool) -> None:
        """Let those who are behind have what those have who are ahead."""
        world = self._world
        finished = [int(calls) for calls in world.gather_json(-1 if is_new else self._calls)]
        most = max(finished)
        if min(finished) == most:
            return
        source = finished.index(most)
        rest = (self._trainer.whole_progress(), self._result) if world.rank == source else None
        module, optimizer, needs = self._trainer.module, self._trainer.optimizer, finished[world.rank] < most
        progress, result = transfer.share(world, source, module, optimizer, rest, needs=needs)
        if needs:
            self._calls, self._result = most, result
            self._trainer.go_on_from_progress(progress, is_new=is_new)

    def _go_back(self, *, is_new: bool) -> None:
        """Where something is split: take what outlived its owners, or a copy and make the steps since then again."""
        world, trainer = self._world, self._trainer
        calls = -1 if is_new else self._calls
        told = world.gather_json([calls, self._live.call if self._live is not None else -1])
        most = max(each[0] for each in told)
        if [most, most] in told:
            source = told.index([most, most])
            snapshot = self._live.snapshot() if self._live is not None and world.rank == source else None
            call, holders = most, {0: source}
            result = world.gather(self._result if world.rank == source else None)[source]
            self._result = self._result if calls == most else result
        else:
            snapshot, call, holders = self._snapshots.choose(world)
        rest = next(filter(None, world.gather(snapshot.rest if snapshot is not None else None)))
        trainer.reopen(self._counts)
        pieces = deal(world, snapshot, holders, trainer.wanted)
        trainer.restore(pieces, rest)
        trainer.go_on_from_progress(rest, is_new=is_new)
        # Now, not when the steps since then have been made again: the next loss may come meanwhile.
        self._snapshots.take(world, call, trainer.pieces(), rest, 0.0)
        self._drop_live()
        self._num_replayed = 0
        for again in range(call, most):
            faults.at("replay", again)
            if again in self._steps:
                self._result = trainer.replay(self._steps[again])
                self._num_replayed += 1
        self._calls = most

    def _fail(self, call: str, error: Exception) -> None:
        """This worker's script has raised in a call: the others go on without it."""
        what = f"{type(error).__name__}: {error}"
        self._has_failed = f"{call} has failed ({what})."
        with contextlib.suppress(RuntimeError):
            self._generations.leave({"calls": self._calls, "call": call, "failed": what[:500]})

    def _ask_to_leave(self, _signum: int, _frame: Any) -> None:
        """SIGTERM: go before the next step; the second one, and one to a worker not counted yet, end it at once."""
        if self.is_leaving or self._generations.is_waiting:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)  # Its launcher sees what ended it.
        self.is_leaving = True

    # Silence

    @contextlib.contextmanager
    def _patience(self, call: str) -> Any:
        """A block whose waits have the deadline of a step, which follows from how long steps take."""
        peers = self._world.peers
        if call == "step":
            peers.timeout = timedelta(seconds=self._patience_s())
        try:
            yield
        finally:
            peers.timeout = self._full_timeout

    def _patience_s(self) -> float:
        most = self._full_timeout.total_seconds()
        if len(self._took_s) < _NUM_WARM:
            return most
        least = LEAST_PATIENCE_S if self._num_steps >= _NUM_WARM else _COLD_PATIENCE_S
        return min(most, max(least, _TIMES_LONGER * max(self._took_s)))


def _is_loss(error: BaseException) -> bool:
    """Whether an error says that a peer is gone, or gave the step up."""
    if isinstance(error, WorkerLost | StepVoid):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _BROKEN)


def recovering(world: World, trainer: Recoverable, shards: int) -> Recovery | None:
    """What keeps `trainer` going in an elastic run; None where the workers are fixed."""
    return Recovery(world, world.generations, trainer, shards) if world.generations is not None else None
