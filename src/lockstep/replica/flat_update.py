"""Small parameters are updated together: one call of the optimizer's for neighbours in flat memory, not one for each.

A tensor of a few thousand elements costs an optimizer more in calls than in arithmetic. Gradients lie side by side in
their buckets; parameters are laid in the same order, and so is the optimizer's state. While its `step` runs, and only
then, the optimizer sees windows (window.py) in its groups, instead of their members. Everything else stays as its user
knows it: groups, schedulers, `param.grad`, `state[param]`, `state_dict()`. To the bit: an optimizer that looks at more
than one element is left alone (elementwise.py), and a window ends after a member that does not fill whole vectors, so
that no element is computed by another loop than before.

    first steps   the optimizer makes its state by itself, and the order of gradients shows itself
    lay           parameters and state side by side
    check         before each step: do groups, gradients, parameters and state lie where they were laid? Whoever has
                  replaced one of them (a checkpoint was loaded, a parameter got no gradient, the model was moved) gets
                  this step member by member, and it is laid anew later
    update        windows enter, the optimizer steps, windows leave: also when it raises
"""

import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.replica.layout import aligned
from lockstep.replica.stretch import Stretch
from lockstep.replica.window import Window, are_alike

SMALL_BYTES = 64 << 10
"""Larger parameters are updated by themselves: a call takes as long as the arithmetic of 24 KB or so."""
FEWEST = 4
"""Fewer neighbours are not worth what checking them costs."""
MOST_LAYINGS = 8
"""What has to be laid anew so often is left as it is: a model whose parameters take turns."""

_grad_of = operator.attrgetter("grad")


class FlatUpdate:
    """The windows of one optimizer. `stretches` returns what lies side by side now, the same objects until it moves."""

    def __init__(self, optimizer: torch.optim.Optimizer, stretches: Callable[[], Sequence[Stretch]]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._stretches = stretches
        self._seen: Sequence[Stretch] | None = None
        """What lay side by side at the last step."""
        self._windows: list[Window] = []
        self._members: list[Tensor] = []
        self._grads: list[Tensor] = []
        self._addresses: list[int] = []
        self._groups: list[tuple[list[Tensor], list[Tensor], int]] = []
        """Of each group: its own list, what stands in for it in a step, and how many parameters it had."""
        self._is_behind = False
        """Whether members were updated one by one since windows last were."""
        self._num_layings = 0
        _wrap_step(optimizer, self)

    def release(self) -> None:
        """Leave the optimizer alone from now on."""
        self._drop()
        self._num_layings = MOST_LAYINGS
        self._stretches = tuple

    # Around the optimizer's step

    def enter(self) -> bool:
        """Let the optimizer see windows, if all is where it was laid; returns whether it does."""
        optimizer = self._optimizer()
        assert optimizer is not None, "a step is called on its optimizer"
        if not self._is_laid(optimizer):
            self._is_behind = True
            return False
        for window in self._windows:
            window.enter(optimizer.state)
        for group, (_, together, _) in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = together
        return True

    def leave(self) -> None:
        """Let the optimizer see its parameters again."""
        optimizer = self._optimizer()
        assert optimizer is not None, "a step is called on its optimizer"
        for group, (own, _, _) in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = own
        for window in self._windows:
            window.leave(optimizer.state)
        torch.autograd.graph.increment_version(self._members)  # So that autograd knows that they have changed.

    def _is_laid(self, optimizer: torch.optim.Optimizer) -> bool:
        stretches = self._stretches()
        if stretches is not self._seen:
            self._drop()
            self._seen = stretches
            return False
        if not self._windows:
            if self._num_layings == MOST_LAYINGS:
                return False
            self._num_layings += 1
            self._lay(optimizer, stretches)
            return bool(self._windows)
        if self._is_intact(optimizer):
            return True
        self._drop()
        return False

    def _is_intact(self, optimizer: torch.optim.Optimizer) -> bool:
        if len(optimizer.param_groups) != len(self._groups):
            return False
        for group, (own, _, length) in zip(optimizer.param_groups, self._groups, strict=True):
            if group["params"] is not own or len(own) != length:
                return False
        if not all(map(operator.is_, map(_grad_of, self._members), self._grads)):
            return False
        if [member.data_ptr() for member in self._members] != self._addresses:
            return False
        if not all(window.is_intact(optimizer.state) for window in self._windows):
            return False
        if self._is_behind and not all(window.catch_up() for window in self._windows):
            return False
        self._is_behind = False
        return True

    def _drop(self) -> None:
        self._windows, self._members, self._grads, self._addresses, self._groups = [], [], [], [], []

    # Laying

    @torch.no_grad()
    def _lay(self, optimizer: torch.optim.Optimizer, stretches: Sequence[Stretch]) -> None:
        """Choose windows by what is there now, and move parameters and state there."""
        self._drop()
        group_of = {param: number for number, group in enumerate(optimizer.param_groups) for param in group["params"]}
        together: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        for stretch in stretches:
            for begin, end in _runs(stretch, group_of, optimizer.state):
                window = _window(stretch, begin, end)
                window.gather(optimizer.state)
                self._windows.append(window)
                self._members += window.members
                self._grads += stretch.grads[begin:end]
                together[group_of[stretch.members[begin]]].append(window.param)
        inside = set(self._members)
        self._addresses = [member.data_ptr() for member in self._members]
        for group, windows in zip(optimizer.param_groups, together, strict=True):
            others = [param for param in group["params"] if param not in inside]
            self._groups.append((group["params"], windows + others, len(group["params"])))
        self._is_behind = False


def _runs(stretch: Stretch, group_of: dict[Tensor, int], states: Any) -> Iterator[tuple[int, int]]:
    """Where windows begin and end: neighbours that can be updated by one call."""
    begin = 0
    for number in range(1, len(stretch.members) + 1):
        if number == len(stretch.members) or not _belong_together(stretch, begin, number, group_of, states):
            if number - begin >= FEWEST:
                yield begin, number
            begin = number


def _belong_together(stretch: Stretch, first: int, number: int, group_of: dict[Tensor, int], states: Any) -> bool:
    """Whether member `number` goes on with the window that has begun with `first`."""
    one, before, other = stretch.members[first], stretch.members[number - 1], stretch.members[number]
    return (
        all(_can_be_in_one(stretch, each) for each in (first, number))
        and before.numel() == aligned(before.numel(), before.dtype)
        and stretch.offsets[number] == stretch.offsets[number - 1] + before.numel()
        and one in group_of
        and group_of[one] == group_of.get(other)
        and are_alike(one, other, states)
    )


def _can_be_in_one(stretch: Stretch, number: int) -> bool:
    member = stretch.members[number]
    return member.grad is stretch.grads[number] and is_small(member)


def _window(stretch: Stretch, begin: int, end: int) -> Window:
    start = stretch.offsets[begin]
    flat_params = stretch.flat_params(begin, end)
    flat_grads = stretch.flat_grads[start : start + flat_params.numel()]
    offsets = [offset - start for offset in stretch.offsets[begin:end]]
    return Window(stretch.members[begin:end], offsets, flat_params, flat_grads)


def is_small(param: Tensor) -> bool:
    """Whether a call costs about as much as the arithmetic; on a GPU one kernel updates many tensors anyway."""
    return (
        param.device.type == "cpu"
        and param.dim() > 0
        and not param.is_complex()
        and param.numel() * param.itemsize <= SMALL_BYTES
    )


def is_worth_it(params: Sequence[Tensor]) -> bool:
    """Whether there may be anything to update together."""
    return sum(map(is_small, params)) >= FEWEST


def _wrap_step(optimizer: torch.optim.Optimizer, update: FlatUpdate) -> None:
    """Have windows in the optimizer's groups whenever its `step` runs, as long as `update` lives.

    Not by the optimizer's hooks: they are not called when a step raises.
    """
    inner, reference = optimizer.step, weakref.ref(update)

    @functools.wraps(inner)  # Learning rate schedulers mark what they have wrapped themselves.
    def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        alive = reference()
        # A closure computes gradients within the step.
        if alive is None or any(arg is not None for arg in (*args, *kwargs.values())) or not alive.enter():
            return inner(*args, **kwargs)
        try:
            return inner(*args, **kwargs)
        finally:
            alive.leave()

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
