"""What the tensors that an optimizer updates are called in their model, and which part of them this worker has."""

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.replica.batch_norm import SyncBatchNorm
from lockstep.replica.data_parallel import DataParallel
from lockstep.verify.tensor import num_elements

_WRAPPERS = ("module.", "_orig_mod.")
"""What torch's own wrappers put before names; scripts may use them on many workers only."""
_HIDDEN_NUMEL = 1 << 20
"""The largest tensor that is looked at where a module keeps one without having registered it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of an optimizer belongs."""

    name: str
    """Of the parameter."""
    offset: int
    """The parameter's element that the tensor begins with."""
    numel: int
    """How many elements the parameter has."""
    is_wrapped: bool = True
    """Whether it is in a model that lockstep.DataParallel has wrapped."""


def places(models: Iterable[DataParallel]) -> dict[int, Place]:
    """By id: the parameters of `models`, and this worker's fragments of them where they are split."""
    found: dict[int, Place] = {}
    for number, model in enumerate(models):
        named = {id(param): (name, num_elements(param)) for name, param in named_params(number, model)}
        found.update({key: Place(name, 0, numel) for key, (name, numel) in named.items()})
        for param, fragment, offset in model.parts or ():
            found[id(fragment)] = Place(named[id(param)][0], offset, named[id(param)][1])
    return found


def place_outside(tensor: Tensor, number: int) -> Place:
    """The place of a tensor that is in no wrapped model: by the outermost module that has it, else by its number."""
    names = [
        name
        for module in gc.get_objects()
        if issubclass(type(module), nn.Module)
        for name, param in module.named_parameters()
        if param is tensor
    ]
    name = max(names, key=len, default=f"parameter {number}")
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return Place(name, 0, num_elements(tensor), is_wrapped=False)


def named_params(number: int, model: DataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of the model that was wrapped as number `number`."""
    for name, param in model.module.named_parameters():
        yield _prefixed(number, name), param


def named_buffers(number: int, model: DataParallel) -> Iterator[tuple[str, Tensor]]:
    """Its buffers."""
    for name, buffer in model.module.named_buffers():
        yield _prefixed(number, name), buffer


def hidden_state(number: int, model: DataParallel) -> Iterator[tuple[str, Tensor]]:
    """Floats and tensors that its modules keep as plain attributes: no wrapper can know of them."""
    for prefix, module in model.module.named_modules():
        for name, value in vars(module).items():
            full_name = _prefixed(number, f"{prefix}.{name}" if prefix else name)
            if isinstance(value, float):
                yield full_name, torch.tensor(value, dtype=torch.float64)
            elif isinstance(value, Tensor) and value.numel() <= _HIDDEN_NUMEL and not value.is_meta:
                yield full_name, value


def has_synced_batch_norm(model: DataParallel) -> bool:
    """Whether a batch norm in training looks at all workers' samples."""
    return any(isinstance(each, SyncBatchNorm | nn.SyncBatchNorm) and each.training for each in model.module.modules())


def batch_norms(model: DataParallel) -> Iterator[str]:
    """Batch norms in training that do not look beyond their worker."""
    for name, module in model.module.named_modules():
        is_plain = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if is_plain and not isinstance(module, SyncBatchNorm | nn.SyncBatchNorm) and module.training:
            yield name or type(module).__name__


def _prefixed(number: int, name: str) -> str:
    return f"model {number}: {name}" if number else name
