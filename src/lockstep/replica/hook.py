"""A user's own way of reducing a bucket, in the form of torch DDP's communication hooks.

    def hook(state, bucket):                       # bucket.buffer() is the flat gradient tensor
        ...
        return future                              # a torch Future of the averaged tensor, or that tensor

The hook gets gradients multiplied by this worker's weight over the mean weight, so that a plain average over the
workers, as torch's own hooks compute it, gives the exact result. It is called for buckets in the same order on all
workers. Weights and marks travel apart from the hook.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.replica.bucket import Bucket
from lockstep.world import World

Hook = Callable[[Any, Any], Any]


class CommHook:
    """A registered hook with its state."""

    def __init__(self, state: object, hook: Hook, size: int) -> None:
        if not callable(hook):
            raise UsageError(f"register_comm_hook: the hook must be callable, got {type(hook).__name__}.")
        self._state = state
        self._hook = hook
        self._size = size

    def launch(self, bucket: Bucket) -> Any:
        """Start the hook on a bucket; what it returns is kept as the bucket's work."""
        bucket.flat_grads.mul_(self._size)
        return self._hook(self._state, bucket)

    def wait(self, bucket: Bucket, world: World, doing: Callable[[], str]) -> None:
        """Bring what the hook made of the bucket back into it."""
        result = bucket.work
        if isinstance(result, torch._C.Future):
            if bucket.flat.device.type == "cpu":
                world.wait(_FutureWork(result), doing)
            result = result.wait()
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]
        if not isinstance(result, Tensor) or result.numel() != bucket.flat_grads.numel():
            raise UsageError(
                "a communication hook must return a tensor like bucket.buffer(), or a Future of one; "
                f"got {type(result).__name__}."
            )
        if result.data_ptr() != bucket.flat_grads.data_ptr():
            bucket.set_buffer(result.view_as(bucket.flat_grads))


class _FutureWork:
    """A future in the form of a torch.distributed operation, so that waiting for it has a deadline."""

    def __init__(self, future: "torch._C.Future[Any]") -> None:
        self._future = future

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self, timeout: timedelta | None = None) -> bool:
        give_up = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while not self._future.done():
            if give_up is not None and time.monotonic() > give_up:
                raise RuntimeError("Operation timed out!")
            time.sleep(0.0001)
        self._future.wait()
        return True
