"""What a lone worker on a GPU records of its steps: the passes of a shard, and the update."""

import contextlib
from collections.abc import Iterator

import torch

from lockstep.train.recorded_passes import Compute, RecordedPasses
from lockstep.train.recorded_update import Rates, RecordedUpdate
from lockstep.train.strategy import Setting


class RecordedStep:
    """The recordings of one trainer. Its steps run on a stream of their own, since the default one cannot record."""

    def __init__(self, setting: Setting, compute: Compute, rates: Rates | None) -> None:
        self._device = setting.world.device
        self._stream = torch.cuda.Stream(self._device)
        self.passes = RecordedPasses(setting.module, self._device, compute)
        self.update = (
            RecordedUpdate(setting.optimizer, setting.module, rates)
            if rates is not None and setting.scaler is None  # Which would read from the device whether to step.
            else None
        )

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """A block whose kernels run after those that were launched before it, and before those after it."""
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def forget(self) -> None:
        """Weights or optimizer state have been replaced."""
        self.passes.forget()
        if self.update is not None:
            self.update.forget()
