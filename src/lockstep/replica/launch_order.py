"""The one order in which all workers launch what a step with gathered parameters needs (zero=3 over gloo and NCCL).

Which blocks a worker runs, in which order and how often, is known to that worker alone; gathers and reductions need
every worker, in one order. So the order is agreed on while the passes run, in rounds. In a round every worker posts a
few numbers to all others: the blocks that it needs, how many buckets of gradients it has ready, and what it is doing.
From the result, which is the same everywhere, every worker launches the same:

    reductions    of the buckets that are ready on all workers, in the order of the plan
    gathers       of every block that some worker needs, in the order of their numbers; a worker that does not need one
                  takes part and releases it again. Only in a round to which all have posted after as many updates of
                  the parameters: one that serves others while it waits, between its backward pass and its optimizer's
                  step, still has its part as it was before. Who needs a block posts again, until it has caught up

Nothing hangs, whatever the workers' control flow. A worker waits for two things only. For an operation that a round has
decided: all workers launch those, in the same order, when they come to that round's result, and what they do before
that is computing and waiting for operations of earlier rounds. Or for the result of a round: every worker posts to it
when it needs a block, and at the latest when its pass ends, since no pass ends (nor the model's forward) before a round
in which all have ended one; until then a worker whose pass has ended posts again and again, that it needs nothing. A
worker whose pass has failed does the same when the step is made void. One that waits for something else, such as
`world.sum` after fewer passes than another has, posts and launches in that wait (`serve`); it must be a wait of
Lockstep's. On a GPU the same holds with its stream in the worker's place: all is launched on one communicator in one
order, and the stream waits for launched operations alone.

A round takes a worker no time where its post was made ahead: blocks that came next in the last pass are posted before
they are needed, and the result is looked at when the next block begins, or a gradient has come. A wrong guess costs a
gather for nothing. Rounds have a group of their own in host memory: they would queue behind large messages elsewhere.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.group import new_group
from lockstep.errors import UsageError
from lockstep.world import World

MOST_NEEDED = 3
"""Blocks in one post: those of no block, the first one and the next."""
CALLS = ("model.whole_params()", "model.state_dict()", "model.load_state_dict()")
"""Those that gather everything."""
_READY, _DOING, _VERSION, _NEEDED = range(4)
_NOTHING = -2
_PASS, _WAITING, _PASS_ENDED, _STEP_ENDED, _CALL = range(5)
"""What a worker is doing: a pass, or waiting for something else, or this; from _CALL on, one of the calls."""


class LaunchOrder:
    """The rounds of one replica, as this worker takes part in them. At most one post of a worker is on its way."""

    def __init__(
        self, world: World, group: dist.ProcessGroup, gather: "weakref.WeakMethod[Callable[[int], None]]"
    ) -> None:
        self._world = world
        self._group = new_group(group, "gloo", world.timeout)
        self._gather = gather
        self._num_ready = 0
        """How many buckets of this step may be launched on this worker's side."""
        self._reduce: Callable[[int], None] = _reduce_nothing
        """Launches the reductions of the first so many buckets."""
        self._num_agreed = 0
        """How many may be launched on all."""
        self._version = 0
        """How often the parameters have been updated here."""
        self._doing = _WAITING
        self._is_busy = False
        self._thread = threading.get_ident()
        self._posted: tuple[Any, Tensor] | None = None

    def offer(self, num_ready: int, reduce: Callable[[int], None]) -> None:
        """The first `num_ready` buckets may leave, for this worker; `reduce(count)` launches the first ones."""
        self._num_ready, self._reduce = num_ready, reduce

    def post(self, *needed: int) -> None:
        """Take part in the next round, unless a post is on its way already."""
        if self._posted is not None:
            return
        needed += (_NOTHING,) * (MOST_NEEDED - len(needed))
        mine = torch.tensor([self._num_ready, self._doing, self._version, *needed])
        everyone = mine.new_empty(self._world.size, len(mine))
        self._posted = dist.all_gather(list(everyone), mine, group=self._group, async_op=True), everyone

    def look(self) -> None:
        """Launch what was agreed on, if a result is there."""
        while self._posted is not None and self._posted[0].is_completed():
            self.settle()

    def settle(self) -> list[int]:
        """Wait for the result of the round posted to, and launch; returns what every worker was doing."""
        assert self._posted is not None
        work, everyone = self._posted
        with self.busy():
            self._world.wait(work, self._words)
            self._posted = None
            return self._launch(everyone.tolist())

    def _words(self) -> str:
        if self._doing >= _CALL:
            return f"gathering parameters for {CALLS[self._doing - _CALL]}, which every worker must call"
        return "gathering parameters, and needed every worker's word on which it needs next"

    def _launch(self, posts: list[list[int]]) -> list[int]:
        num_agreed = min(post[_READY] for post in posts)
        if num_agreed > self._num_agreed:
            self._num_agreed = num_agreed
            self._reduce(num_agreed)
        newest = max(post[_VERSION] for post in posts)
        if any(post[_VERSION] < newest and max(post[_NEEDED:]) > _NOTHING for post in posts):
            raise self._outdated(posts)
        if min(post[_VERSION] for post in posts) == newest:
            for block in sorted({block for post in posts for block in post[_NEEDED:]} - {_NOTHING}):
                if self._version != newest:
                    raise self._outdated(posts)
                if (gather := self._gather()) is not None:
                    gather(block)
        doing = [post[_DOING] for post in posts]
        if min(doing) >= _STEP_ENDED and min(doing) != max(doing):
            raise self._differ(doing)
        return doing

    def _differ(self, doing: list[int]) -> UsageError:
        """Some workers wait for all others in one place, and the others in another."""
        places = {_WAITING: "another call that waits for all", _STEP_ENDED: "the end of a backward pass"}
        where = [places.get(each) or CALLS[each - _CALL] for each in doing]
        return UsageError(
            f"worker {self._world.rank}: {', '.join(f'worker {rank} is in {at}' for rank, at in enumerate(where))}. "
            "Each of these needs all workers (zero=3 splits the parameters): make the same calls on every worker, not "
            "on one alone."
        )

    def _outdated(self, posts: list[list[int]]) -> UsageError:
        """A worker runs the model with parameters that another has updated meanwhile."""
        counts = ", ".join(f"worker {rank} {post[_VERSION]}" for rank, post in enumerate(posts))
        return UsageError(
            f"worker {self._world.rank}: a worker runs the model while another has stepped the optimizer (updates: "
            f"{counts}), so its parameters are gone (zero=3 splits them). Make the same forward passes between "
            "loss.backward() and optimizer.step() on every worker."
        )

    def updated(self) -> None:
        """The optimizer has changed this worker's part."""
        self._version += 1

    def begin_pass(self) -> None:
        """A pass has begun, or goes on."""
        self._doing = _PASS

    def drop_pass(self) -> None:
        """The pass has failed here; the others are waited for by the next one, or where the step is made void."""
        self._doing = _WAITING

    def close_pass(self) -> None:
        """The backward pass needs nothing more here, and its end comes: so it can be waited for in another model."""
        self._doing = _WAITING

    def end_pass(self) -> None:
        """Return when all workers are between two passes."""
        self._take_part(_PASS_ENDED, lambda doing: _PASS not in doing)

    def meet(self, call: str) -> None:
        """Return when all workers have made the call; raises UsageError if some wait for all in another place."""
        mine = _CALL + CALLS.index(call)
        self._take_part(mine, lambda doing: min(doing) == mine)

    def end_step(self) -> None:
        """Return when the reductions of all buckets that are ready here have been launched."""
        self._take_part(_STEP_ENDED, lambda _: self._num_agreed == self._num_ready)
        self._num_ready = self._num_agreed = 0
        self._reduce = _reduce_nothing

    def _take_part(self, doing: int, is_over: Callable[[list[int]], bool]) -> None:
        """Post that this worker needs nothing, and launch what others need, until it is over."""
        self._doing = doing
        begun = time.monotonic()
        self.post()
        while not is_over(everyone := self.settle()):
            if _PASS in everyone:
                begun = time.monotonic()
            elif time.monotonic() > begun + self._world.timeout.total_seconds():
                raise self._differ(everyone)
            self._world.peers.serve()  # This model's rounds may all be quick while another's waits for this worker.
            self.post()
        self._doing = _WAITING

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """A block whose waits are for what all have agreed on, or are about to: nothing else is launched in it."""
        outer, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = outer

    def serve(self) -> bool:
        """This worker waits for something else: launch what others need; see Peers."""
        if self._is_busy or threading.get_ident() != self._thread:
            return False
        self.look()
        self.post()
        return True

    def release(self) -> None:
        """Let go of the group."""
        self._posted = None
        del self._group


def _reduce_nothing(count: int) -> None:
    """No bucket has been full yet in this step."""
