"""The two edges of a backward pass: how its begin and its end are heard of.

A pass that raises has no end: the engine drops the callback that was to be called there, and with it the only reference
to it. A pass in progress (which may contain others, under re-entrant checkpointing) keeps it. So a weak reference to
the callback tells the one from the other.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.data import tree


def call_at_begin(output: Any, begin: Callable[[], None]) -> bool:
    """Let `begin` be called when the backward pass comes to `output`, before any gradient of the model is there.

    Returns whether there is anything in the output to which it can come.
    """
    leaves = [leaf for leaf in tree.leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    for leaf in leaves:
        leaf.register_hook(lambda _grad: begin())
    return bool(leaves)


class PassEnd:
    """The callback at the end of one backward pass; it lives as long as the engine still means to call it."""

    __slots__ = ("__weakref__", "_finish")

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def queue(self) -> None:
        """Have the engine call this when the backward pass in which it runs now ends well."""
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        """The pass has ended well."""
        self._finish()
