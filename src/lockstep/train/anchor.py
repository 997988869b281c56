"""What all workers have in common: the weights of the last exchange, and how the next ones come of them.

Each worker trains away from the common weights. In an exchange they go on by the mean of the workers' changes, and
every worker's own follow:

    send      the change since the common weights, and go on training
    receive   the mean of the changes: the common weights advance, the own ones come along

If nothing happens between the two, the own weights are the common ones then. Else what the worker has learned in
between stays: own weights += common weights - own weights when they were sent.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lockstep.train.messages import Messages

Advance = Callable[[Sequence[nn.Parameter], Sequence[Tensor]], None]
"""Moves common weights by the mean change, in place, alike on all workers; may overwrite the mean."""


def follow(common: Sequence[nn.Parameter], mean: Sequence[Tensor]) -> None:
    """Advance by the mean change itself, so that the common weights become the mean of the workers'."""
    torch._foreach_add_(list(common), list(mean))


class Anchor:
    """Some tensors of a replica and their common values. Memory: these, and with `keeps` the values that were sent."""

    def __init__(
        self, tensors: Callable[[], list[Tensor]], messages: Messages, num_workers: int, advance: Advance = follow
    ) -> None:
        self._tensors = tensors
        """This worker's own, as they are now: a module may have put others into their places."""
        self._messages, self._num_workers = messages, num_workers
        self.advance = advance
        self.common = [nn.Parameter(tensor.detach().clone()) for tensor in tensors()]
        self._sent: list[Tensor] | None = None

    @torch.no_grad()
    def send(self, *, keeps: bool) -> None:
        """Start the exchange of changes; `keeps` if the tensors will change before it is received."""
        own = self._tensors()
        changes = self._messages.lay_out()
        torch._foreach_copy_(changes, own)
        torch._foreach_sub_(changes, list(self.common))
        torch._foreach_mul_(changes, 1.0 / self._num_workers)
        self._sent = [tensor.detach().clone() for tensor in own] if keeps else None
        self._messages.launch()

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the mean change, and apply it."""
        mean = self._messages.wait("exchanging the changes of a round")
        self.advance(self.common, mean)
        del mean
        self._messages.drop()
        if self._sent is None:
            self.go_back()
            return
        torch._foreach_neg_(self._sent)
        torch._foreach_add_(self._sent, list(self.common))
        torch._foreach_add_(self._tensors(), self._sent)
        self._sent = None

    def give_up(self) -> None:
        """Wait for what was sent, and forget it."""
        self._messages.wait("exchanging the changes of a round")
        self._messages.drop()
        self._sent = None

    @torch.no_grad()
    def go_back(self) -> None:
        """Set the own tensors to the common ones."""
        torch._foreach_copy_(self._tensors(), list(self.common))

    @torch.no_grad()
    def settle(self) -> None:
        """The own tensors have been set to something that all workers have: that is the common one now."""
        torch._foreach_copy_(list(self.common), self._tensors())
