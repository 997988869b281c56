"""The model of a worker whose parameters are owned in parts by all workers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from lockstep.replica.data_parallel import DataParallel
from lockstep.replica.part import Part
from lockstep.replica.split_optimizer import SplitOptimizer
from lockstep.train.flats import Flats


class PartedModel(DataParallel):
    """A whole copy of the module to compute with, and the part that this worker owns and its optimizer updates.

    What is saved and loaded is the parts; `renew` sets the copies to them, and is called on all workers.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, reduces=False)
        params = list(module.parameters())
        self.flats = Flats(params, self.world.size)
        self.owned: list[Part] = self.flats.part(self.world.rank)
        """Bucket by bucket."""
        self._params: Sequence[nn.Parameter] = params
        SplitOptimizer(optimizer).point_at(params, self.owned)
        self.settle: Callable[[], None] = lambda: None
        """Returns when no gradient is under way, on all workers."""
        self.renew: Callable[[], None] = lambda: None
        self.on_release: Callable[[], None] = lambda: None

    @property
    def parts(self) -> list[tuple[nn.Parameter, nn.Parameter, int]]:
        """See DataParallel."""
        return [
            (self._params[fragment.index], own, fragment.offset)
            for part in self.owned
            for fragment, own in zip(part.fragments, part.params, strict=True)
        ]

    def before_load(self) -> None:
        """See DataParallel."""
        self.settle()

    def after_load(self) -> None:
        """See DataParallel."""
        self.renew()

    @contextlib.contextmanager
    def whole_params(self) -> Iterator[None]:
        """See DataParallel: the copy is whole; what is changed in it counts in the parts."""
        self.settle()
        self.renew()
        yield
        with torch.no_grad():
            for param, own, offset in self.parts:
                flat = (torch.view_as_real(param) if param.is_complex() else param).reshape(-1)
                own.copy_(flat[offset : offset + own.numel()])
        self.renew()

    def release(self) -> None:
        """See DataParallel."""
        self.on_release()
        super().release()
