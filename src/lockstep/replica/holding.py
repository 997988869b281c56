"""What this worker's optimizer updates. Chosen once, when a model is wrapped.

Holding          the parameters themselves
MasterHolding    master weights, from which the parameters are rounded: on a lone worker
PartHolding      this worker's part of the parameters, or of their master weights: see zero.py
"""

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from lockstep.replica.precision import Masters
from lockstep.replica.zero import Zero


class Holding:
    """All parameters, as they are."""

    @property
    def parts(self) -> list[tuple[nn.Parameter, nn.Parameter, int]] | None:
        """Parameter, fragment, number of its first element; None where the optimizer has the parameters themselves."""
        return None

    @contextlib.contextmanager
    def whole_params(self) -> Iterator[None]:
        """A block in which all parameters are there, to be read and changed."""
        yield

    def before_load(self) -> None:
        """What the optimizer updates is about to be overwritten."""

    def after_load(self) -> None:
        """What the optimizer updates has been overwritten."""

    def clip_grad_norm_(
        self,
        params: Iterable[nn.Parameter],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        foreach: bool | None,
    ) -> Tensor:
        """Clip the gradients of `params`, which are all of the model's; returns the norm that they had."""
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop the gradients of what is held besides the parameters."""


class MasterHolding(Holding):
    """Master weights of all parameters."""

    def __init__(self, masters: Masters) -> None:
        self._masters = masters

    @property
    def parts(self) -> list[tuple[nn.Parameter, nn.Parameter, int]]:
        """All masters."""
        return self._masters.holdings()

    @contextlib.contextmanager
    def whole_params(self) -> Iterator[None]:
        """See Holding; changes reach the masters."""
        yield
        self._masters.take_back()

    def after_load(self) -> None:
        """Parameters follow."""
        self._masters.publish()


class PartHolding(Holding):
    """This worker's part of what is split."""

    def __init__(self, zero: Zero) -> None:
        self._zero = zero

    @property
    def parts(self) -> list[tuple[nn.Parameter, nn.Parameter, int]]:
        """The fragments of this worker."""
        return self._zero.holdings()

    @contextlib.contextmanager
    def whole_params(self) -> Iterator[None]:
        """See Holding; every worker must enter it."""
        yield from self._zero.whole_params()

    def before_load(self) -> None:
        """As before a step."""
        self._zero.before_step()

    def after_load(self) -> None:
        """As after a step."""
        self._zero.after_step()

    def clip_grad_norm_(
        self,
        params: Iterable[nn.Parameter],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        foreach: bool | None,
    ) -> Tensor:
        """By the norm over all workers' parts."""
        total = self._zero.total_norm(float(norm_type), error_if_nonfinite)
        nn.utils.clip_grads_with_norm_(self._zero.owned, max_norm, total, foreach)
        return total

    def zero_grad(self, set_to_none: bool) -> None:
        """Of this worker's fragments."""
        for param in self._zero.owned:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()
