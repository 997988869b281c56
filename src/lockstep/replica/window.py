"""Neighbours in flat memory as one parameter, with the optimizer's state of all of them as one.

The state of each member stays what the optimizer made it: a dictionary with the same names. Of a tensor as large as the
member (a moment) the member's is a view of the window's; of a single number in a tensor (a count of steps) the members'
are elements of one vector, which is filled after a step of the window; other values are equal for all.
"""

import copy
import operator
import types
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.replica.bucket import view_like

_CONSTANT = (int, float, str, types.NoneType)
"""What members may share: nobody can change it in place."""
State = dict[str, Any]
States = MutableMapping[Tensor, State]


class Window:
    """Some members of a stretch, to be updated by one call."""

    def __init__(self, members: Sequence[Tensor], offsets: Sequence[int], flat: Tensor, grad: Tensor) -> None:
        self.members = members
        self._offsets = offsets
        """Where each begins in the window."""
        self.param = nn.Parameter(flat)
        self._grad = grad
        self._state: State = {}
        self._given: State = {}
        """The window's own state as the members' was last made from it."""
        self._numbers: dict[str, Tensor] = {}
        """Single numbers of all members, by name."""
        self._versions: dict[str, int] = {}
        """Of those, when they were last equal to the window's own."""
        self._dicts: list[State] = []
        self._values: list[Any] = []

    # To and from the members' state

    def gather(self, states: States) -> None:
        """Make the window's state from its members', and theirs views of it."""
        first = states.get(self.members[0], {})
        self._state = {name: self._together(name, states) for name in first}
        self._spread(states)

    def _together(self, name: str, states: States) -> Any:
        values = [states[member][name] for member in self.members]
        if not isinstance(values[0], Tensor):
            return values[0]
        if values[0].dim() == 0:
            return values[0].clone()
        flat = torch.empty_like(self.param.detach(), dtype=values[0].dtype)
        for member, offset, value in zip(self.members, self._offsets, values, strict=True):
            view_like(flat, offset, member).copy_(value)
        return flat

    def _spread(self, states: States) -> None:
        """Give the members their share of the window's state."""
        singles = {name: value for name, value in self._state.items() if isinstance(value, Tensor) and not value.dim()}
        self._numbers = {name: value.repeat(len(self.members)) for name, value in singles.items()}
        for number, (member, offset) in enumerate(zip(self.members, self._offsets, strict=True)):
            state = states[member] if self._state else {}
            for name, value in self._state.items():
                if name in self._numbers:
                    state[name] = self._numbers[name][number]
                elif isinstance(value, Tensor) and value.shape == self.param.shape:
                    state[name] = view_like(value, offset, member)
                else:
                    state[name] = value.clone() if isinstance(value, Tensor) else copy.copy(value)
        self._note_numbers()
        self._given = dict(self._state)
        self._dicts = [states[member] for member in self.members] if self._state else []
        self._values = [value for state in self._dicts for value in state.values()]

    def is_intact(self, states: States) -> bool:
        """Whether the members' state is what this window has given them."""
        if not self._dicts:
            return not any(states.get(member) for member in self.members)
        if not all(map(operator.is_, map(states.get, self.members), self._dicts)):
            return False
        values = [value for state in self._dicts for value in state.values()]
        return len(values) == len(self._values) and all(map(operator.is_, values, self._values))

    def catch_up(self) -> bool:
        """Follow members that were updated, or counted otherwise, one by one; returns whether they are all as far."""
        for name, numbers in self._numbers.items():
            if numbers._version != self._versions[name]:
                if not bool((numbers == numbers[0]).all()):
                    return False
                self._state[name].copy_(numbers[0])
        self._note_numbers()
        return True

    def _note_numbers(self) -> None:
        self._versions = {name: numbers._version for name, numbers in self._numbers.items()}

    # Around a step

    def enter(self, states: States) -> None:
        """The optimizer is about to see the window instead of its members."""
        self.param.grad = self._grad
        states[self.param] = self._state

    def leave(self, states: States) -> None:
        """The optimizer has updated the window, or failed to."""
        self.param.grad = None
        self._state = states.pop(self.param, self._state)
        if len(self._state) == len(self._given) and all(map(self._is_given, self._state)):
            for name, numbers in self._numbers.items():
                numbers.fill_(self._state[name])
            self._note_numbers()
        else:
            self._spread(states)

    def _is_given(self, name: str) -> bool:
        return name in self._given and self._state[name] is self._given[name]


def are_alike(one: Tensor, other: Tensor, states: States) -> bool:
    """Whether two neighbours' state is of one kind, and they are equally far."""
    left, right = states.get(one, {}), states.get(other, {})
    if left.keys() != right.keys():
        return False
    return all(_is_alike(left[name], right[name], one, other) for name in left)


def _is_alike(left: Any, right: Any, one: Tensor, other: Tensor) -> bool:
    if isinstance(left, Tensor) != isinstance(right, Tensor):
        return False
    if not isinstance(left, Tensor):
        return isinstance(left, _CONSTANT) and type(left) is type(right) and left == right
    if left.dtype != right.dtype or left.device != right.device:
        return False
    if left.dim() == 0 or right.dim() == 0:
        return left.dim() == right.dim() and bool(left == right)
    return left.shape == one.shape and right.shape == other.shape and left.device == one.device
