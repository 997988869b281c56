"""How gradients are heard of: a hook on every parameter; and what is learned from when they came, or did not."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, Protocol, TypeVar

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lockstep.replica.buckets import Buckets

Hook = TypeVar("Hook", bound=Callable[..., Any])


class Receiver(Protocol):
    """Who is told of gradients."""

    def arrive(self, index: int, param: Tensor) -> None:
        """The gradient of parameter `index` is in `param.grad`. Called inside the backward pass."""


class Arrivals:
    """The hooks on the parameters of one replica."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._hooks: dict[int, RemovableHandle] = {}
        self._silent: frozenset[int] = frozenset()

    def report_to(self, receiver: Receiver) -> None:
        """Tell `receiver` of the gradients of all parameters that need one by now, but for silent ones."""
        if len(self._hooks) + len(self._silent) == len(self._params):
            return
        for index, param in enumerate(self._params):
            if param.requires_grad and index not in self._hooks and index not in self._silent:
                self._hooks[index] = _report(index, param, receiver)

    def silence(self, indices: Iterable[int], receiver: Receiver) -> None:
        """Tell `receiver` of all gradients but of these from now on."""
        self._silent = frozenset(indices)
        for index in self._silent & self._hooks.keys():
            self._hooks.pop(index).remove()
        self.report_to(receiver)


def ours(hook: Hook) -> Hook:
    """Marks a hook as one of Lockstep's own, which changes nothing that it is shown."""
    hook.is_ours = True  # type: ignore[attr-defined]
    return hook


def is_only_ours(param: Any) -> bool:
    """Whether no hook on the parameter but Lockstep's own can see its gradient, or change it."""
    hooks = [*(param._backward_hooks or {}).values(), *(param._post_accumulate_grad_hooks or {}).values()]
    return all(getattr(hook, "is_ours", False) for hook in hooks)


def _report(index: int, param: Tensor, receiver: Receiver) -> RemovableHandle:
    # Weak, so that a module can be wrapped anew: the hook of a wrapper that is gone does nothing.
    reference = weakref.ref(receiver)

    @ours
    def arrived(param: Tensor) -> None:
        if (alive := reference()) is not None:
            alive.arrive(index, param)

    hook: RemovableHandle = param.register_post_accumulate_grad_hook(arrived)
    return hook


def missing(buckets: Buckets, touched: Set[int]) -> list[int]:
    """Parameters for which this worker has no gradient of its own: neither in a bucket nor outside, in `touched`."""
    if None not in buckets.places and not any(bucket.num_missing for bucket in buckets.all):
        return []  # As nearly always.
    return [
        index
        for index, place in enumerate(buckets.places)
        if (place is None or (place[0].num_missing and not place[0].has(place[1]))) and index not in touched
    ]


def learn_order(buckets: Buckets, observed: Sequence[int], *, has_one_order: bool) -> None:
    """After the first step: expect gradients in the order in which worker 0 saw them, which all know by now.

    Where all is added in one order, those that came in portions are sent at the end of a pass from now on.
    """
    buckets.expect(observed)
    in_portions = [index for index, count in Counter(observed).items() if count > 1]
    if has_one_order and in_portions:
        buckets.make_room_for(in_portions)
