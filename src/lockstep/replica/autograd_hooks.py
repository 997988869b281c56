"""How Lockstep hears of a backward pass: when it begins, of every gradient, and when it has ended; and torch.compile.

A pass that raises has no end: the engine drops the callback that was to be called there, and with it the only reference
to it. A pass in progress (which may contain others, under re-entrant checkpointing) keeps it. So a weak reference to
the callback tells the one from the other (`call_at_end`).
"""

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.data import tree
from lockstep.events import Events, Kind
from lockstep.torch_private import backward_pass, leave_out_of_compiler, queue_callback
from lockstep.world import PassEnds

OWN_CODE = (
    *("lockstep.comm", "lockstep.data", "lockstep.events", "lockstep.seeds", "lockstep.weight", "lockstep.world"),
    *("lockstep.replica.agreement", "lockstep.replica.as_ddp", "lockstep.replica.autograd_hooks"),
    *("lockstep.replica.grad_weight", "lockstep.replica.reducer"),
)
"""What runs in a forward pass besides the model, and is nothing to compile: 34 frames were, for one of a model."""


class GradHooks:
    """A hook on every parameter of one replica, which calls `arrive` with its number when its gradient is there.

    `arrive` is a method, and its owner held weakly: the module, which has the hooks, outlives its wrapper.
    """

    def __init__(self, params: Sequence[Tensor], arrive: Callable[[int, Tensor], None]) -> None:
        self._params = params
        self._arrive = weakref.WeakMethod(arrive)
        self._hooks: dict[int, RemovableHandle] = {}
        # A module that is wrapped again and again must not keep the hooks of wrappers that are gone.
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def attach(self) -> None:
        """Have a hook on all parameters that need a gradient by now."""
        if len(self._hooks) == len(self._params):
            return
        for index, param in enumerate(self._params):
            if param.requires_grad and index not in self._hooks:
                self._hooks[index] = param.register_post_accumulate_grad_hook(_reporting(index, self._arrive))

    def detach(self) -> None:
        """Hear of no gradient any more."""
        _remove(self._hooks)
        self._hooks.clear()


def _reporting(index: int, method: "weakref.WeakMethod[Callable[[int, Tensor], None]]") -> Any:
    def arrived(param: Tensor) -> None:
        if (arrive := method()) is not None:
            arrive(index, param)

    return arrived


def _remove(hooks: dict[int, RemovableHandle]) -> None:
    for hook in hooks.values():
        hook.remove()


def call_at_begin(output: Any, begin: Callable[[], None]) -> bool:
    """Let `begin` be called when the backward pass comes to `output`, before any gradient of the model is there.

    Returns whether there is anything in the output to which it can come.
    """
    leaves = _trained(output)
    for leaf in leaves:
        leaf.register_hook(lambda _grad: begin())
    return bool(leaves)


def drop_gradient(output: Any) -> None:
    """Let nothing of a backward pass go beyond `output`: what was computed there must not count."""
    for leaf in _trained(output):
        leaf.register_hook(torch.zeros_like)


def _trained(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]


def call_at_end(end: Callable[[], None], ends: PassEnds, number: int) -> "weakref.ref[Any]":
    """Have `end` called when the backward pass in which this runs ends well; the reference dies when it is dropped.

    The engine calls back in the order in which this worker's pass came to its models; what is called then is that which
    is due next on all workers. `next` returns `due` where nothing is: so the engine keeps it.
    """
    due = functools.partial(end)
    queue_callback(functools.partial(next, ends.add(backward_pass(), number, due), due))
    return weakref.ref(due)


class PassEvents:
    """Tells of a backward pass that sends nothing: when its first gradient is due, and when it has ended.

    Called by the hook of each output of the model. The engine calls what is queued here after all else.
    """

    def __init__(self, events: Events, step: int) -> None:
        self._events, self._step = events, step
        self._has_begun = False

    def __call__(self) -> None:
        """A gradient has come to an output of the model."""
        if self._has_begun:
            return
        self._has_begun = True
        self._events.emit(Kind.BACKWARD, self._step)
        queue_callback(self._end)

    def _end(self) -> None:
        self._has_begun = False  # The graph may be kept, and walked again.
        self._events.emit(Kind.ENDED, self._step)


class Untraced:
    """A method that torch.compile leaves alone, while it still compiles the module called inside.

    `torch.compiler.disable(recursive=False)` does that, but imports the whole compiler, which takes two seconds. So
    the method is given that treatment when it is first looked up with the compiler loaded: torch.compile(model)
    looks it up before anything is traced.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, model: nn.Module | None, owner: type) -> Any:
        if model is None:
            return self._method
        if "torch._dynamo" not in sys.modules:
            return functools.partial(self._method, model)
        leave_out_of_compiler(OWN_CODE)
        bound = functools.partial(self._method, weakref.proxy(model))  # The model is not to hold itself.
        model.__dict__["forward"] = torch.compiler.disable(bound, recursive=False)
        return model.__dict__["forward"]
