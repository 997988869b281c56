"""Parameters that exist whole only while they are used: gathered before a block runs, released after it.

Every worker keeps its part of each block. A block's parameters are views of a flat tensor whose memory comes and goes:

    forward     before a block runs its flat tensor is gathered, and that of the next block is asked for;
                after it has run, it is released, unless it is to stay for the backward pass
    backward    when the gradient of a block's output is known the flat tensor is gathered again, and the block before
                it is asked for; when the gradients of all its parameters have arrived, it is released

The next block is the one that ran next in the last pass. What belongs to no block is gathered when the model is called
and stays until the backward pass has ended. The flat tensor keeps its storage object while the memory behind it goes,
since autograd saves views of it; the parameters themselves look at a single NaN in the meantime, so that whoever reads
them then sees it, and nobody reads memory that is gone.

Gathering needs every worker, and workers may run different blocks: launch_order.py says how they agree on what is
gathered and reduced when. A block that is gathered for others while it is in use here is written over with the bytes
that it has.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.group import all_gather
from lockstep.replica.autograd_hooks import call_at_begin, call_at_end
from lockstep.replica.launch_order import LaunchOrder
from lockstep.replica.layout import BucketPlan, FlatSpan, are_equal, view_of
from lockstep.replica.params import FlatParams, gather_parts
from lockstep.torch_private import in_backward
from lockstep.wire import Half, Int8
from lockstep.world import FIRST, World

MODEL = -1
"""Stands for what belongs to no block."""
AHEAD = 2
"""How many blocks are held at a time: the one that runs, and the next one on its way."""


class Gathered:
    """The flat tensor of one bucket, and the part of it that stays."""

    def __init__(
        self, world: World, plan: BucketPlan, params: Sequence[Tensor], dtype: torch.dtype, wire: Int8 | Half | None
    ) -> None:
        self._world, self._wire = world, wire
        self._plan, self._params = plan, params
        self.flat, self._views = self._new_flat(dtype)
        with torch.no_grad():
            for view, param in zip(self._views, params, strict=True):
                view.copy_(param)
        self._absent = [_absent(view) for view in self._views]
        self.own: Tensor = self.flat
        self._spans: Sequence[FlatSpan] = ()
        self._work: list[Any] = []
        self._packed: list[Tensor] = []
        """What is on its way, where it is encoded: what this worker sends, and all that is to arrive."""
        self.is_asked = self.is_there = True
        self.has_frozen = any(not param.requires_grad for param in params)

    def _new_flat(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        plan = self._plan
        flat = torch.zeros(plan.tail_offset, dtype=dtype, device=plan.device)
        return flat, [view_of(flat, slot, param) for slot, param in zip(plan.slots, self._params, strict=True)]

    def keep(self, spans: Sequence[FlatSpan]) -> Tensor:
        """Keep the owned part, and release the rest."""
        own = spans[self._world.rank]
        self._spans = spans
        self.own = self.flat[own.begin : own.end].clone()
        self.release()
        return self.own

    def ask(self, group: dist.ProcessGroup, *, plainly: bool = False) -> None:
        """Start gathering; every worker does so at the same place of the launch order, whether it has this or not.

        plainly: as the parameters are, whatever the wire.
        """
        if not self.is_asked:
            self.is_asked = True
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        if self._wire is None or plainly or not are_equal(self._spans):
            self._work += gather_parts(self.flat, self.own, self._spans, group)
            return
        packed = self._wire.pack(self.own)
        self._packed += [packed, packed.new_empty(len(self._spans) * packed.numel())]
        self._work.append(all_gather(self._packed[-1], packed, group))

    def gather(self) -> None:
        """Return when the parameters are there, which were asked for."""
        self._await()
        if not self.is_there:
            self.is_there = True
            for param, view in zip(self._params, self._views, strict=True):
                param.data = view

    def _await(self) -> None:
        for work in self._work:
            self._world.await_on_device(work, "gathering parameters")
        self._work = []
        if self._packed and self._wire is not None:
            # By `data`, whose changes autograd does not count: these are the values that it has saved views of.
            self._wire.unpack(self._packed[-1], self.flat.data, len(self._spans))
            self._packed = []

    def is_on_its_way(self) -> bool:
        """Whether a gather has begun and not ended."""
        return not all(work.is_completed() for work in self._work)

    def release(self) -> None:
        """Give the memory back; what was asked for is waited for first."""
        if not self.is_asked:
            return
        self._await()
        self.is_asked = self.is_there = False
        for param, absent in zip(self._params, self._absent, strict=True):
            param.data = absent
        if not self.flat.untyped_storage().resizable():  # Somebody has it as a numpy array: leave it to him.
            self.flat, self._views = self._new_flat(self.flat.dtype)
        self.flat.untyped_storage().resize_(0)

    def write_back(self) -> None:
        """Keep what was changed in the gathered parameters."""
        own = self._spans[self._world.rank]
        self.own.copy_(self.flat[own.begin : own.end])


class GatheredParams(FlatParams):
    """The parameters of a model, block by block."""

    def __init__(
        self,
        world: World,
        group: dist.ProcessGroup,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        block_of: Mapping[nn.Parameter, int],
        *,
        reshards: bool,
        wire: Int8 | Half | None = None,
    ) -> None:
        """`reshards`: a block is released between its forward and its backward pass. `wire`: how parts travel."""
        super().__init__(world, group)
        self._reshards, self._wire = reshards, wire
        self._block_of = block_of
        self._buckets: list[Gathered] = []
        self._of_block: dict[int, list[Gathered]] = {number: [] for number in range(MODEL, len(blocks))}
        self._number = world.replicas.pass_ends.next_number()
        self._order = LaunchOrder(world, group, weakref.WeakMethod(self._ask))
        world.peers.servers.add(self)
        self._sequence: list[int] = []
        """Blocks in the order in which they last ran."""
        self._running: list[int] = []
        self._in_use: set[int] = set()
        """Blocks that are read here before they are released."""
        self._next: Sequence[int] = ()
        """Blocks that are expected to be needed here soon."""
        self._unused: list[int] = []
        """Blocks that were gathered for others alone."""
        self._num_full = 0
        """How many buckets have all their gradients, in turn: nothing in this pass reads their parameters any more."""
        self._is_synced = False
        """Whether the reducer says when the pass in flight ends."""
        self._is_whole = False
        """Whether all is there, whatever runs."""
        self._end: Callable[[], Any] = lambda: None
        """The end of the backward pass in progress."""
        module.register_forward_pre_hook(self._hook("_before_model"), prepend=True)
        module.register_forward_hook(self._hook("_after_model"), always_call=True)
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(self._hook("_before_block", number), prepend=True)
            block.register_forward_hook(self._hook("_after_block", number))

    def _hook(self, name: str, *args: Any) -> Any:
        """A method as a hook that does not keep this object alive: a module can be wrapped anew."""
        me = weakref.ref(self)

        def hook(module: nn.Module, *given: Any) -> None:
            alive = me()
            if alive is not None and not alive._is_whole:
                getattr(alive, name)(*args, given[-1])

        # Left alone by a compiler that takes the hooks of a block along: it would compile a block anew for every state
        # of ours. The optimizer, which is there before this, has loaded it already.
        return torch.compiler.disable(hook)

    # As FlatParams

    def place(self, plan: BucketPlan, params: Sequence[Any], spans: Sequence[FlatSpan], dtype: torch.dtype) -> Tensor:
        """Move a block's parameters into a flat tensor, keep the owned part of it, and release the rest."""
        gathered = Gathered(self._world, plan, params, dtype, self._wire)
        self._buckets.append(gathered)
        self._of_block[self._block_of[params[0]]].append(gathered)
        return gathered.keep(spans)

    def after_step(self) -> None:
        """What is still gathered is out of date."""
        self._order.updated()
        self._release_all()

    def begin(self) -> None:
        """A synchronised pass has begun."""
        self._is_synced = True

    def look(self) -> None:
        """Launch what has been agreed on by now."""
        self._order.look()

    def let_leave(self, count: int, launch: Callable[[int], None], *, is_over: bool) -> None:
        """Launch the first `count` buckets as far as they are ready on all workers; all of them, at the pass's end."""
        self._order.offer(count, launch)
        for number in range(self._num_full, min(count, len(self._buckets))):
            gathered = self._buckets[number]
            if gathered not in self._of_block[MODEL] and not gathered.has_frozen:
                gathered.release()
        self._in_use = {block for block in self._in_use if any(each.is_asked for each in self._of_block[block])}
        self._num_full = count
        if is_over:
            self._release_all()
            self._order.end_step()
            self._after_pass()
        else:
            self._order.look()

    def end_pass(self) -> None:
        """A backward pass has ended that sends nothing."""
        self._release_all()
        self._order.end_pass()
        self._after_pass()

    def _after_pass(self) -> None:
        self._is_synced = False
        self._num_full = 0
        self._release_all()  # What others needed until now.

    def serve(self) -> bool:
        """Take part in what others gather, while this worker waits for something else."""
        is_free = self._order.serve()
        if is_free:
            self._release_unused()
        return is_free

    def release(self) -> None:
        """Let go of the groups."""
        self._is_whole = True  # Hooks of a module that is wrapped anew find nothing to do here.
        self._world.peers.servers.discard(self)
        self._order.release()
        super().release()

    def whole(self, call: str) -> Iterator[None]:
        """Gather everything; at the end keep what was changed, and release it."""
        self._release_all()
        self._order.meet(call)
        self._after_pass()
        with self._order.busy():
            for gathered in self._buckets:
                gathered.ask(self._group, plainly=True)
            for gathered in self._buckets:
                gathered.gather()
            self._is_whole = True
            try:
                yield
            finally:
                self._is_whole = False
                for gathered in self._buckets:
                    gathered.write_back()
                self._release_all()

    def _release_all(self) -> None:
        self._in_use.clear()
        self._unused.clear()
        for gathered in self._buckets:
            gathered.release()

    # Which blocks are here

    def _ask(self, number: int) -> None:
        """Some worker needs a block: gather it, on all."""
        for gathered in self._of_block[number]:
            gathered.ask(self._group)
        if number not in self._in_use and number not in self._next:
            self._unused.append(number)

    def _need(self, number: int, upcoming: Sequence[int]) -> None:
        """Return when a block is here; those that are expected after it are on their way, or asked for."""
        self._order.begin_pass()
        self._unused += self._next
        self._next = upcoming
        self._in_use.add(number)
        self._order.look()
        while missing := self._missing([number]):
            self._order.post(*missing, *self._missing(upcoming))
            self._order.settle()
        with self._order.busy():
            for gathered in self._of_block[number]:
                gathered.gather()
        self._order.look()
        if missing := self._missing(upcoming):
            self._order.post(*missing)
        self._release_unused()

    def _missing(self, numbers: Sequence[int]) -> list[int]:
        return [number for number in numbers if not all(gathered.is_asked for gathered in self._of_block[number])]

    def _release_unused(self) -> None:
        unused, self._unused = self._unused, []
        for number in unused:
            if number in self._in_use or number in self._next:
                continue
            if any(gathered.is_on_its_way() for gathered in self._of_block[number]):
                self._unused.append(number)
            else:
                self._release(number)

    def _release(self, number: int) -> None:
        self._in_use.discard(number)
        for gathered in self._of_block[number]:
            gathered.release()

    # Forward

    def _before_model(self, _inputs: object) -> None:
        self._need(MODEL, self._sequence[:AHEAD])
        if not in_backward():
            self._running = []

    def _after_model(self, output: object) -> None:
        if self._running:
            self._sequence = self._running
        if in_backward():
            return
        has_failed = output is None and sys.exc_info()[0] is not None
        needs_backward = torch.is_grad_enabled() and self._watch(output, MODEL)
        if not needs_backward:
            self._release_all()
        if has_failed:
            self._order.drop_pass()
            return  # The error comes first: others wait until this worker's next pass, or see that it has ended.
        self._order.end_pass()
        self._next = ()
        self._release_unused()

    def _before_block(self, number: int, _inputs: object) -> None:
        if in_backward():
            self._need(number, self._next)
        else:
            self._running.append(number)
            self._need(number, self._after(number, self._sequence)[:AHEAD])

    def _after_block(self, number: int, output: object) -> None:
        if in_backward():
            return  # Recomputed for the backward pass, which follows at once.
        needs_backward = torch.is_grad_enabled() and self._watch(output, number)
        # The last ones are needed again first; as many are held at any time of the backward pass.
        if not needs_backward or (self._reshards and number not in self._sequence[-AHEAD:]):
            self._release(number)

    # Backward

    def _watch(self, output: object, number: int) -> bool:
        """Have the block gathered when the gradient of its output comes; whether there will be one."""
        return call_at_begin(output, functools.partial(self._before_backward, number))

    def _before_backward(self, number: int) -> None:
        if self._end() is None:
            ends = self._world.replicas.pass_ends
            call_at_end(self._order.close_pass, ends, FIRST)
            self._end = call_at_end(self._after_backward, ends, self._number)
        order = self._sequence[::-1]
        self._need(number, (order if number == MODEL else self._after(number, order))[:1])

    def _after_backward(self) -> None:
        if not self._is_synced:
            self.end_pass()

    @staticmethod
    def _after(number: int, order: Sequence[int]) -> Sequence[int]:
        return order[order.index(number) + 1 :] if number in order else ()


def _absent(param: Tensor) -> Tensor:
    """What a parameter looks at while it is elsewhere: its shape, a single NaN, and no memory."""
    value = torch.nan if param.is_floating_point() or param.is_complex() else 0
    return torch.full((1,), value, dtype=param.dtype, device=param.device).expand(param.shape)
