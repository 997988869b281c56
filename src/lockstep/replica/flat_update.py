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
                  this step member by member, and it is laid anew later. So does whoever looks on: hooks of the step
    update        windows enter, the optimizer steps, windows leave: also when it raises
"""

import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

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
        self._stretches = stretches
        self._seen: Sequence[Stretch] | None = None
        """What lay side by side at the last step."""
        self._windows: list[Window] = []
        self._members: list[Tensor] = []
        self._grads: list[Tensor] = []
        self._places: list[tuple[int, tuple[int, ...]]] = []
        """Of each member, and of each gradient: its address and its strides."""
        self._groups: list[_Group] = []
        self._num_layings = 0
        _wrap_step(optimizer, self)

    def forget(self) -> None:
        """Let go of everything that lies side by side: it is about to move."""
        self._drop()
        self._seen = None

    def release(self) -> None:
        """Leave the optimizer alone from now on."""
        self.forget()
        self._num_layings = MOST_LAYINGS
        self._stretches = tuple

    # Around the optimizer's step

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer see windows, if all is where it was laid; `leave` must be called either way."""
        if not self._is_laid(optimizer):
            return
        for window in self._windows:
            window.enter(optimizer.state)
        for group in self._groups:
            group.now["params"] = group.together

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer see its parameters again, if it saw windows."""
        has_stepped = False
        for group in self._groups:
            has_stepped = has_stepped or group.now["params"] is group.together
            group.now["params"] = group.own
        for window in self._windows:
            if window.param in optimizer.state:
                window.leave(optimizer.state)
        if has_stepped:
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
        return (
            len(optimizer.param_groups) == len(self._groups)
            and all(map(_Group.is_intact, self._groups, optimizer.param_groups))
            and all(map(operator.is_, map(_grad_of, self._members), self._grads))
            and self._places_now() == self._places
            and all(window.is_intact(optimizer.state) and window.catch_up() for window in self._windows)
        )

    def _places_now(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(tensor.data_ptr(), tensor.stride()) for tensor in (*self._members, *self._grads)]

    def _drop(self) -> None:
        self._windows, self._members, self._grads, self._places, self._groups = [], [], [], [], []

    # Laying

    @torch.no_grad()
    def _lay(self, optimizer: torch.optim.Optimizer, stretches: Sequence[Stretch]) -> None:
        """Choose windows by what is there now, and move parameters and state there."""
        self._drop()
        groups = optimizer.param_groups
        group_of = {param: number for number, group in enumerate(groups) for param in group["params"]}
        together: list[list[Tensor]] = [[] for _ in groups]
        for stretch in stretches:
            for begin, end in _runs(stretch, group_of, optimizer.state):
                window = _window(stretch, begin, end)
                window.gather(optimizer.state)
                self._windows.append(window)
                self._members += window.members
                self._grads += stretch.grads[begin:end]
                together[group_of[stretch.members[begin]]].append(window.param)
        inside = set(self._members)
        self._places = self._places_now()
        for group, windows in zip(groups, together, strict=True):
            others = [param for param in group["params"] if param not in inside]
            self._groups.append(_Group(group, group["params"], windows + others, len(group["params"])))


@dataclass(frozen=True, slots=True)
class _Group:
    """One of the optimizer's groups."""

    now: dict[str, Any]
    """Itself."""
    own: list[Tensor]
    """Its list of parameters,"""
    together: list[Tensor]
    """what stands in for that during a step,"""
    length: int
    """and how long it was."""

    def is_intact(self, group: dict[str, Any]) -> bool:
        """Whether the optimizer's group is still this one, with these parameters."""
        return group is self.now and group["params"] is self.own and len(self.own) == self.length


def _runs(stretch: Stretch, group_of: dict[Tensor, int], states: Any) -> Iterator[tuple[int, int]]:
    """Where windows begin and end: neighbours that can be updated by one call."""
    begin, movable = 0, stretch.movable()
    fit = [
        member in movable and _fits(member, grad) for member, grad in zip(stretch.members, stretch.grads, strict=True)
    ]
    for number in range(1, len(stretch.members) + 1):
        is_end = number == len(stretch.members) or not (fit[begin] and fit[number])
        if is_end or not _belong_together(stretch, begin, number, group_of, states):
            if number - begin >= FEWEST:
                yield begin, number
            begin = number


def _belong_together(stretch: Stretch, first: int, number: int, group_of: dict[Tensor, int], states: Any) -> bool:
    """Whether member `number` goes on with the window that has begun with `first`."""
    one, before, other = stretch.members[first], stretch.members[number - 1], stretch.members[number]
    return (
        before.numel() == aligned(before.numel(), before.dtype)
        and stretch.offsets[number] == stretch.offsets[number - 1] + before.numel()
        and one in group_of
        and group_of[one] == group_of.get(other)
        and are_alike(one, other, states)
    )


def _fits(member: Tensor, grad: Tensor) -> bool:
    """Whether a member may be in a window: it has its gradient, and no attribute that an optimizer could look at."""
    return member.grad is grad and member.stride() == grad.stride() and is_small(member) and not vars(member)


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

    Not by the optimizer's hooks: they are not called when a step raises. Nobody holds the optimizer by this.
    """
    reference, owner = weakref.ref(update), weakref.ref(optimizer)
    found: Any = optimizer.step
    is_method = hasattr(found, "__func__")  # A learning rate scheduler may have put a function there.
    inner = found.__func__ if is_method else found

    @functools.wraps(inner)  # Schedulers mark what they have wrapped.
    def step(own: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        call = inner.__get__(own) if is_method else inner
        alive = reference()
        if alive is None or any(arg is not None for arg in (*args, *kwargs.values())) or _is_hooked(own):
            return call(*args, **kwargs)  # A closure computes gradients within the step.
        try:
            alive.enter(own)
            return call()
        finally:
            alive.leave(own)

    def bound(*args: Any, **kwargs: Any) -> Any:
        own = owner()
        assert own is not None, "a step is called on its optimizer"
        return step(own, *args, **kwargs)

    functools.update_wrapper(bound, step).__func__ = step  # type: ignore[attr-defined]  # Schedulers ask for it.
    optimizer.step = bound  # type: ignore[method-assign]


def _is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody else looks at the optimizer within its step: he is to see its parameters."""
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return True
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    return not all(str(getattr(hook, "__module__", "")).startswith("lockstep.") for hook in hooks)
