"""A flat buffer of gradients that travels as one message, and its life within a step.

    lend     a slot's gradient is about to be computed in the slot itself, and scaled
    put      a gradient arrived: scale it into its slot (the one copy from autograd), for good or on top; a small one
             waits for the others, since a copy by itself would cost many times what its bytes do
    launch   hand the buffer to the backend
    wait     until the sum over all workers is in the buffer
    reset    for the next step

A bucket does not know in which order buckets are launched: that is the reducer's.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.replica.layout import BucketPlan, Slot
from lockstep.replica.silent_slots import SilentSlots

SMALL_BYTES = 16 << 10
"""Gradients up to here are copied into their bucket together: 23,500 instructions each instead of 38,800, all else as
it was then (`bench/hot_path.py --count`). They are kept until the bucket leaves, so they must be small."""

_address_of = Tensor.data_ptr

Factor = float | Tensor
Launch = Callable[["Bucket"], Any]
"""Sends a bucket; returns what to wait for."""


class Bucket:
    """One flat buffer: its views have the shapes and strides of their parameters."""

    def __init__(
        self, place: int, plan: BucketPlan, params: Sequence[Tensor], memory: Tensor, num_lanes: int = 1
    ) -> None:
        self.place = place
        """Number in the launch order."""
        self.plan = plan
        self.params = [params[slot.index] for slot in plan.slots]
        self.indices = [slot.index for slot in plan.slots]
        """Numbers of the parameters, in the order of their slots."""
        self.lanes = memory.view(num_lanes, plan.numel)
        """One row for each sum that this worker sends; the last is the buffer itself."""
        self.flat = self.lanes[-1]
        self.flat_grads = self.flat[: plan.tail_offset]
        storage = memory.untyped_storage()
        self._begin = storage.data_ptr()
        self._end = self._begin + storage.nbytes()
        """Where the memory of all buckets like this one begins and ends."""
        self.tail = self.flat[plan.tail_offset :]
        self.views: list[Tensor] = []
        """The slots, as tensors like the parameters."""
        self._view_slots()
        self.waits = [slot.numel * self.flat.element_size() <= SMALL_BYTES for slot in plan.slots]
        """Whether a slot's gradient is copied with those of the others."""
        self.is_apart = False
        """Whether it keeps its place and stays empty, since its gradients travel otherwise: see rows.py."""
        self._silent = SilentSlots((), (), (), (), self.flat)
        self._quiet: frozenset[int] = frozenset()
        """Slots of whose gradients nobody tells, since they are computed there."""
        self._others: Sequence[int] = range(len(self.params))
        """Slots that are not silent."""
        self.previous: Bucket | None = None
        """The bucket that uses the same memory before this one in every pass."""
        self.work: Any = None
        self.is_launched = self.is_settled = False
        self.reset()

    def _view_slots(self) -> None:
        # Each with a version of its own, by which it is known whether something was added to it: see silent_slots.py.
        self.views[:] = [view_like(self.flat, slot.offset, param).data for slot, param in self._pairs()]
        self._addresses = [view.data_ptr() for view in self.views]

    def views_of_lane(self, lane: int) -> list[Tensor]:
        """The slots of a lane, as `views` are those of the last one."""
        return [view_like(self.lanes[lane], slot.offset, param) for slot, param in self._pairs()]

    def _pairs(self) -> Any:
        return zip(self.plan.slots, self.params, strict=True)

    @property
    def num_bytes(self) -> int:
        """Bytes in the message."""
        return self.flat.numel() * self.flat.element_size()

    def silence(self, slots: Sequence[int], quiet: Iterable[int] = ()) -> None:
        """From now on nobody says that the gradients of these have arrived: they are looked for once all others have.

        They have no gradient when a pass begins. `slots` are small; `quiet` are expected to be lent, and to be sent at
        the end of a pass.
        """
        self._silent = SilentSlots(slots, self.plan.slots, self.params, self.views, self.flat)
        self._quiet = frozenset(quiet)
        silent = frozenset(slots)
        self._others = [slot for slot in range(len(self.params)) if slot not in silent]
        self.reset()

    def offer(self) -> None:
        """A pass begins: let autograd add silent gradients to their slots, if nobody else uses the memory now."""
        if list(map(_address_of, self.views)) != self._addresses:
            # They are handed out as gradients, and somebody has set the `data` of one.
            self._view_slots()
            self.silence(self._silent.numbers, self._quiet)
        if self.previous is None:
            self._silent.offer()

    def is_ready(self) -> bool:
        """Whether all gradients have arrived."""
        if self.num_missing and not self._num_awaited:
            self.take_silent()
        return not self.num_missing

    def has_any(self) -> bool:
        """Whether gradients have arrived."""
        return self.num_missing < len(self._filled) or self.take_silent()

    def take_silent(self) -> bool:
        """Note those gradients that have arrived without a word; returns whether there were any."""
        in_place, elsewhere = self._silent.come(self._filled)
        elsewhere += [slot for slot in self._quiet if not self._filled[slot] and self.params[slot].grad is not None]
        for slot in (*in_place, *elsewhere):
            self._filled[slot] = True
        self.num_missing -= len(in_place) + len(elsewhere)
        self._waiting += elsewhere
        return bool(in_place or elsewhere)

    def late(self) -> list[int]:
        """Numbers of parameters of which more has come, without a word, after the bucket has left."""
        return [self.indices[slot] for slot in self._silent.numbers if self.params[slot].grad is not None]

    def withdraw(self) -> None:
        """Nothing comes of the pass: no parameter has a gradient of it."""
        self._silent.take_back()
        for slot in self.mixed:
            self.params[slot].grad = None

    @property
    def is_held_up(self) -> bool:
        """Whether all gradients have come of which somebody was to say so, and others have not."""
        return self.num_missing > 0 and not self._num_awaited

    def put_later(self, slot: int) -> None:
        """Note that a gradient has arrived that is small, or while another bucket is still in this one's memory."""
        if not self._filled[slot]:
            self._arrived(slot)
            self._waiting.append(slot)

    def _arrived(self, slot: int) -> None:
        self._filled[slot] = True
        self.num_missing -= 1
        self._num_awaited -= 1

    def put_waiting(self, factor: Factor, *, keeps: bool = False) -> None:
        """Let everything be in its slot, times `factor`.

        keeps: nothing more will come, and slots are to be gradients again: let parameters have those that they have.
        """
        for run in self._silent.keep() if keeps else self._silent.take_back():
            _scale_into(run, run, factor)
        for slot in self._quiet & self._lent:
            if self.params[slot].grad is not None:
                self.put(slot, self.params[slot], factor)  # The rest of it.
        if not self._waiting:
            return
        params = [self.params[slot] for slot in self._waiting]
        views = [self.views[slot] for slot in self._waiting]
        grads = [param.grad for param in params]
        for param in params:
            param.grad = None
        self._waiting.clear()
        dense = [grad for grad in grads if grad is not None and grad.layout is torch.strided]
        if len(dense) == len(grads) and not _is(factor, 0.0):
            self._copy_together(views, dense, factor)
        else:
            for view, grad in zip(views, grads, strict=True):
                _scale_into(view, grad, factor)

    @torch.no_grad()
    def _copy_together(self, views: list[Tensor], grads: list[Tensor], factor: Factor) -> None:
        torch._foreach_copy_(views, grads)
        if len(views) == len(self.views):
            _scale(self.flat_grads, factor)
        elif not _is(factor, 1.0):
            torch._foreach_mul_(views, factor)

    def lend(self, slot: int) -> tuple[Tensor, bool]:
        """Where to compute the gradient of a slot that has none yet, times the factor; and whether that is all.

        Then it has arrived with that. Else it is to be the gradient that arrives.
        """
        self._lent.add(slot)
        if slot not in self._quiet:
            return self.views[slot].detach(), False
        self._filled[slot] = True
        self.num_missing -= 1
        return self.views[slot], True

    def can_lend(self, slot: int, operands: Sequence[Tensor]) -> bool:
        """Whether the slot is free, and large enough to be worth it, and none of the operands lies in a bucket."""
        if self.is_launched or self.waits[slot] or self._filled[slot] or slot in self._lent:
            return False
        return not any(self._begin <= operand.data_ptr() < self._end for operand in operands)

    def awaits(self, slot: int) -> bool:
        """Whether the slot was lent, and nothing has arrived for it yet."""
        return slot in self._lent and not self._filled[slot] and slot not in self.mixed and not self.is_launched

    def add_rows(self, slot: int, rows: Tensor, values: Tensor) -> None:
        """Have `values` added to these rows of a gradient that is awaited: see tied.py."""
        self._rows.setdefault(slot, []).append((rows, values))

    def put(self, slot: int, param: Tensor, factor: Factor) -> None:
        """Move `param.grad`, times `factor`, into its slot; the gradient is whole again after the step."""
        grad = param.grad
        view = self.views[slot]
        if self._filled[slot]:
            # A second arrival in one pass (a tied weight under re-entrant checkpointing).
            if slot in self._waiting:
                return  # It was added to the first.
            assert grad is not None
            view.add_(_dense(grad).to(view.dtype) * factor)
            self.in_parts.add(slot)
        elif slot in self._lent and grad is not None:
            is_own = _lies_in(grad, view)
            if slot in self._rows:
                self.in_parts.add(slot)
            for rows, values in self._rows.pop(slot, ()):
                grad.index_add_(0, rows, values * factor if is_own else values)
            if not is_own:
                self.mixed.add(slot)
                return  # More of it may come.
            self._arrived(slot)
            self.alone.append(slot)
        else:
            self._arrived(slot)
            _scale_into(view, grad, factor)
        param.grad = None

    def has(self, slot: int) -> bool:
        """Whether the slot's gradient has arrived in this step."""
        if self._filled[slot] or slot in self.mixed:
            return True
        is_silent = self.is_apart or slot in self._silent.numbers or slot in self._quiet
        grad = self.params[slot].grad
        return is_silent and grad is not None and grad is not self.views[slot]

    def fill_missing(self, factor: Factor) -> None:
        """Put what there is (nothing, or what earlier passes left) into the slots whose gradient did not come."""
        if not self.num_missing:
            return
        self.take_silent()
        for slot, param in enumerate(self.params):
            if slot in self.mixed:
                self._put_right(slot, param, factor)
            elif not self._filled[slot]:
                _scale_into(self.views[slot], param.grad, factor)

    @torch.no_grad()
    def _put_right(self, slot: int, param: Tensor, factor: Factor) -> None:
        """All of a gradient has come, in parts: what was computed in the slot is scaled in both, the rest in none."""
        if param.grad is None:
            self.views[slot].zero_()
        else:
            self.views[slot].mul_(1.0 - factor).add_(_dense(param.grad) * factor)
        param.grad = None

    def hand_out(self, used: Sequence[bool]) -> None:
        """Let slots be the gradients of the parameters that some worker has used, by number."""
        if self._silent.are_kept and not all(used):
            for slot in [slot for slot in self._silent.numbers if not used[self.indices[slot]]]:
                self.params[slot].grad = None
        elif self._silent.are_kept and self._silent.have_all_come:  # As nearly always: they have theirs.
            for slot in self._others:
                self.params[slot].grad = self.views[slot]
            return
        for slot, param in enumerate(self.params):
            if used[self.indices[slot]] and param.grad is not self.views[slot]:
                param.grad = self.views[slot]

    def launch(self, send: Launch) -> None:
        """Hand the buffer to the backend."""
        self.is_launched = True
        self.work = send(self)

    def reset(self) -> None:
        """Ready for the next step."""
        self.num_missing = len(self.plan.slots)
        self._num_awaited = self.num_missing - len(self._silent.numbers) - len(self._quiet)
        self.is_launched = False
        self.is_settled = False
        """Whether the reduction is over and this worker has what it keeps of it."""
        self.work = None
        self._filled = [False] * len(self.plan.slots)
        self._lent: set[int] = set()
        self._rows: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """By slot: rows that are to be added to what was computed there, and what to add to them."""
        self.mixed: set[int] = set()
        """Slots that were lent, and whose gradient is not just what was computed there."""
        self.alone: list[int] = []
        """Slots that were lent, and were then told of, and into which all of a gradient has come at once;"""
        self.in_parts: set[int] = set()
        """and those to which more of it has come."""
        self._waiting: list[int] = []
        self._silent.are_kept = self._silent.have_all_come = False

    # What a communication hook sees: the names of torch's GradBucket.

    def index(self) -> int:
        """Number in the launch order."""
        return self.place

    def buffer(self) -> Tensor:
        """The flat gradients, without the tail."""
        return self.flat_grads

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the flat gradients' values."""
        self.flat_grads.copy_(tensor)

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of their slots."""
        return list(self.params)

    def gradients(self) -> list[Tensor]:
        """Their gradients, as views of the buffer."""
        return list(self.views)

    def is_last(self) -> bool:
        """Whether no other bucket with gradients follows."""
        return self.is_last_with_grads

    is_last_with_grads = False


def view_of(flat: Tensor, slot: Slot, param: Tensor) -> Tensor:
    """The slot as a contiguous tensor of the shape of `param`, so that cuts of the one are cuts of the other."""
    piece = flat[slot.offset : slot.offset + slot.numel]
    return (torch.view_as_complex(piece.view(-1, 2)) if param.is_complex() else piece).view(param.shape)


def view_like(flat: Tensor, offset: int, param: Tensor) -> Tensor:
    """What begins at `offset` as a tensor like `param`, with its strides where they cover it densely."""
    piece = flat[offset : offset + param.numel() * (2 if param.is_complex() else 1)]
    if param.is_complex():
        piece = torch.view_as_complex(piece.view(-1, 2))
    if is_dense(param):
        return piece.as_strided(param.size(), param.stride(), piece.storage_offset())
    return piece.view(param.shape)


def is_dense(param: Tensor) -> bool:
    """Whether the strides, in some order of the dimensions, cover the memory without gaps or overlap."""
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _lies_in(grad: Tensor, view: Tensor) -> bool:
    return grad.layout is torch.strided and grad.data_ptr() == view.data_ptr() and grad.stride() == view.stride()


def _scale_into(view: Tensor, grad: Tensor | None, factor: Factor) -> None:
    if grad is None or _is(factor, 0.0):
        view.zero_()  # Zero even where the gradient is not a number: a part without samples counts nothing.
    elif grad is view:
        _scale(view, factor)
    elif grad.dtype == view.dtype:
        torch.mul(_dense(grad), factor, out=view)
    else:
        # Not in one call: that would round the product to the gradient's dtype on its way into the wider one.
        view.copy_(_dense(grad)).mul_(factor)


def _scale(view: Tensor, factor: Factor) -> None:
    if not _is(factor, 1.0):
        view.mul_(factor)


def _is(factor: Factor, value: float) -> bool:
    return isinstance(factor, float) and factor == value


def _dense(grad: Tensor) -> Tensor:
    grad = grad.to_dense() if grad.layout is not torch.strided else grad
    return grad.detach() if grad.requires_grad else grad
