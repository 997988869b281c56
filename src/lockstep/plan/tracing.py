"""One step on tensors without values: what memory it takes when, and what it computes, before anything is computed.

The step runs under torch's FakeTensorMode, whose tensors have shapes, dtypes and devices, and no memory: a model of any
size is traced on any machine in the time of its Python code. A mode around that sees every operation, and with it every
storage that comes, and when its last tensor goes. Gradients of parameters go as soon as they arrive, since the engine
copies them into its buckets then (see replica/bucket.py).

    forward     begins with the first operation after `begin`
    backward    begins when autograd runs its first node
    update      begins when the optimizer steps

What kernels allocate inside themselves is not seen; `workspace` knows those that take bytes that count.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lockstep.torch_private import in_backward

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


@dataclass(frozen=True, slots=True)
class StorageUse:
    """One piece of memory of a step."""

    num_bytes: int
    born: int
    """Number of the event with which it came."""
    died: int | None
    """And with which it went; None if it is there after the step."""
    phase: str
    """In which part of the step it came."""


@dataclass(frozen=True, slots=True)
class TracedParam:
    """One parameter, as the step found it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    arrival: int | None
    """Its place in the order in which gradients arrived; None if none came."""

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StepTrace:
    """What one step of one worker takes beside parameters, buckets and optimizer state."""

    params: tuple[TracedParam, ...]
    """In their order of registration."""
    buffer_bytes: int
    batch_bytes: int
    """Of the inputs."""
    uses: tuple[StorageUse, ...]
    num_events: int
    forward_flops: int
    backward_flops: int
    saved_bytes: int
    """What autograd keeps from the forward to the backward pass, each storage once, parameters aside."""

    def phase(self, name: str) -> tuple[StorageUse, ...]:
        """What came in one part of the step."""
        return tuple(use for use in self.uses if use.phase == name)


class Tracer(TorchDispatchMode):
    """Watches the storages of fake tensors come and go. Entered inside a FakeTensorMode."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._known = {_storage(t)._cdata for t in (*module.parameters(), *module.buffers())}
        self._alive: dict[int, Any] = {}
        self._sizes: list[int] = []
        self._born: list[int] = []
        self._died: list[int | None] = []
        self._phases: list[str] = []
        self.now = 0
        self.phase = FORWARD

    def ignore(self, tensor: Tensor) -> None:
        """Do not count this one: it is the caller's."""
        self._known.add(_storage(tensor)._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and see what it made."""
        result = func(*args, **(kwargs or {}))
        if self.phase == FORWARD and in_backward():
            self.phase = BACKWARD
        workspace = _workspace(func, args)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        if workspace:
            self._add(workspace)
            self.now += 1
            self._died[-1] = self.now
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        key = storage._cdata
        if key in self._known or key in self._alive or not storage.nbytes():
            return
        number = self._add(storage.nbytes())
        self._alive[key] = weakref.ref(storage, lambda _: self._end(key, number))

    def _add(self, num_bytes: int) -> int:
        self.now += 1
        self._sizes.append(num_bytes)
        self._born.append(self.now)
        self._died.append(None)
        self._phases.append(self.phase)
        return len(self._sizes) - 1

    def _end(self, key: int, number: int) -> None:
        self._alive.pop(key, None)
        self.now += 1
        self._died[number] = self.now

    def uses(self) -> tuple[StorageUse, ...]:
        """What was seen."""
        return tuple(map(StorageUse, self._sizes, self._born, self._died, self._phases))


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _workspace(func: Any, args: Any) -> int:
    return 0
