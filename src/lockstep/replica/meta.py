"""Models built under `torch.device("meta")`, which have shapes and no memory: given values part by part.

A module's own parameters and buffers are made when a bucket needs one of them, by its `reset_parameters()`, as torch's
modules have it. Each module draws from a generator that is a function of the world's seed and the module's name, so all
workers make the same values, whatever is made when, and nothing has to be sent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.seeds import derive


class Materials:
    """What is still on the meta device."""

    def __init__(self, module: nn.Module, device: torch.device, seed: int) -> None:
        self._device, self._seed = device, seed
        self._names = {owner: name for name, owner in module.named_modules() if _has_meta(owner)}
        self._owners: dict[Tensor, list[nn.Module]] = {}
        for owner in self._names:
            for param in owner._parameters.values():
                if param is not None:
                    self._owners.setdefault(param, []).append(owner)
            if not callable(getattr(owner, "reset_parameters", None)):
                raise UsageError(
                    f"{self._names[owner] or 'the model'!r} ({type(owner).__name__}) has parameters or buffers on the "
                    "meta device and no reset_parameters() that could give them values. Write one, or build the model "
                    "on a real device."
                )

    def make(self, params: Sequence[Tensor]) -> None:
        """Give values to `params`, and to whatever else their modules hold."""
        wanted = {id(owner) for param in params if param.is_meta for owner in self._owners[param]}
        for owner in self._names:
            if id(owner) in wanted:
                self._make(owner)

    def make_rest(self) -> None:
        """Give values to all that is left: modules that have buffers only."""
        for owner in self._names:
            self._make(owner)

    def _make(self, owner: nn.Module) -> None:
        if not _has_meta(owner):
            return  # A tied weight has its values from the first of its modules.
        for param in owner._parameters.values():
            if param is not None and param.is_meta:
                # The object stays: optimizers and wrappers know it.
                made = nn.Parameter(torch.empty_like(param, device=self._device), requires_grad=param.requires_grad)
                torch.utils.swap_tensors(param, made)
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.empty_like(buffer, device=self._device)
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(derive(self._seed, "meta", self._names[owner]))
            owner.reset_parameters()  # type: ignore[operator]  # Checked in the constructor.


def has_meta(module: nn.Module) -> bool:
    """Whether anything of `module` is on the meta device."""
    return any(_has_meta(owner) for owner in module.modules())


def _has_meta(owner: nn.Module) -> bool:
    tensors = [*owner._parameters.values(), *owner._buffers.values()]
    return any(tensor is not None and tensor.is_meta for tensor in tensors)
