"""Parameters that are DTensors (torch's tensor parallelism), as the engine sees them: the memory that is held here.

A bucket is flat memory of what lies here, so each worker trains its shards with those who hold the same ones, and
nothing below has to know of a mesh. A `LocalParam` is that memory as a parameter like any other. What is done to it is
done to the DTensor, whose identity stays: it is pointed at other memory, its gradients are read in its own placement
and written back as DTensors, its hooks are the DTensor's.

`local_param` is the one way into the engine, `whole_param` the way back to what module and optimizer know.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.torch_private import as_dtensor, is_dtensor, local_tensor, set_local_tensor

_data: Any = Tensor.data  # As the base class has it.


class LocalParam(nn.Parameter):
    """What this worker holds of a parameter that is a DTensor."""

    whole: nn.Parameter
    """The DTensor."""

    @staticmethod
    def of(whole: nn.Parameter) -> "LocalParam":
        """One for `whole`, over its memory."""
        made: LocalParam = torch.Tensor._make_subclass(LocalParam, local_tensor(whole).detach(), False)
        made.whole = whole
        return made

    def __new__(cls, *args: Any) -> "LocalParam":
        """By `of` only."""
        raise TypeError("a LocalParam is made by LocalParam.of(param)")

    @property
    def data(self) -> Tensor:
        """The memory; where it is set, the DTensor looks at it too."""
        held: Tensor = _data.__get__(self)
        return held

    @data.setter
    def data(self, memory: Tensor) -> None:
        _data.__set__(self, memory)
        set_local_tensor(self.whole, memory)

    @property
    def grad(self) -> Tensor | None:
        """This worker's part of the gradient, in the parameter's placement.

        Autograd leaves gradients in whatever placement they were computed in (`Partial` for a norm over a sharded
        sequence). One that is to be brought over makes all workers of the parameter's mesh exchange it, so those must
        ask in the same order: the hooks ask when it arrives.
        """
        grad: Any = self.whole.grad
        if not is_dtensor(grad):
            return grad  # type: ignore[no-any-return]
        placements = self.whole.placements  # type: ignore[attr-defined]
        if grad.placements != placements:
            with torch.no_grad():
                grad = grad.redistribute(placements=placements)
                local_tensor(grad)
            self.whole.grad = grad
        return local_tensor(grad)

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        self.whole.grad = None if grad is None else as_dtensor(grad, self.whole)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """The DTensor's."""
        return self.whole.requires_grad

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """The DTensor's; `hook` is given this parameter, its gradient in its placement."""

        def arrived(_whole: Tensor) -> None:
            _ = self.grad
            hook(self)

        handle: RemovableHandle = self.whole.register_post_accumulate_grad_hook(arrived)
        return handle


def local_param(param: nn.Parameter) -> nn.Parameter:
    """`param` as the engine sees it: itself, or what this worker holds of it."""
    return LocalParam.of(param) if is_dtensor(param) else param


def whole_param(param: Any) -> Any:
    """What module and optimizer know `param` by."""
    return param.whole if isinstance(param, LocalParam) else param


def local_part(tensor: Tensor) -> Tensor:
    """What this worker holds of any tensor: of a DTensor its own shard, which shares its memory."""
    return local_tensor(tensor) if is_dtensor(tensor) else tensor
