"""A script's tensors as they are recorded: their sketches, their names in the model, the samples of a batch."""

import gc
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data import tree
from lockstep.replica.data_parallel import DataParallel
from lockstep.replica.layout import in_memory_order, strides_of
from lockstep.verify.worker_record import Sketch, Sketches, joined, positions, sketch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_KNOWS = {torch.float16, torch.float32, torch.float64}
_WRAPPERS = ("module.", "_orig_mod.")
"""What torch's own wrappers put before names; scripts may use them on many workers only."""
_HIDDEN_NUMEL = 1 << 20
"""The largest tensor that is looked at where a module keeps one without having registered it."""


def sketch_of(tensor: Tensor, offset: int = 0, numel: int = -1) -> Sketch:
    """The sketch of `tensor`, or of a fragment that begins at element `offset` of a tensor of `numel` elements."""
    flat = flat_on_host(tensor)
    bits = flat.view(_INTEGERS[flat.element_size()]).numpy()
    is_odd = flat.is_floating_point() and flat.dtype not in _NUMPY_KNOWS
    values = (flat.to(torch.float32) if is_odd else flat).numpy()
    return sketch(values, bits, offset=offset, numel=numel)


def sample_of(tensor: Tensor) -> Sketch:
    """The sample alone, without fingerprint and norm: takes no time however large the tensor is."""
    if tensor.layout != torch.strided or tensor.is_complex():
        return sketch_of(tensor)
    flat = in_memory_order(tensor.detach(), strides_of(tensor))
    places = torch.from_numpy(positions(flat.numel())).to(flat.device)
    sample = flat[places].to(torch.float64).cpu().numpy()
    return Sketch(flat.numel(), flat.numel(), 0, 0.0, 0, sample)


def flat_on_host(tensor: Tensor) -> Tensor:
    """All elements in one row in host memory, as they lie in theirs; complex ones as pairs."""
    dense = tensor.detach()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    dense = dense.resolve_conj()
    return in_memory_order(dense, strides_of(dense)).cpu().resolve_neg().contiguous()


def num_elements(tensor: Tensor) -> int:
    """How many numbers `sketch_of` sees in it."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor of an optimizer belongs."""

    name: str
    """Of the parameter."""
    offset: int
    """The parameter's element that the tensor begins with."""
    numel: int
    """How many elements the parameter has."""


def places(models: Iterable[DataParallel]) -> dict[int, TensorPlace]:
    """By id: the parameters of `models`, and this worker's fragments of them where they are split."""
    found: dict[int, TensorPlace] = {}
    for number, model in enumerate(models):
        named = {id(param): (name, num_elements(param)) for name, param in named_params(number, model)}
        found.update({key: TensorPlace(name, 0, numel) for key, (name, numel) in named.items()})
        for part in model._engine.parts or ():
            name, numel = named[id(part.param)]
            found[id(part.own)] = TensorPlace(name, part.offset, numel)
    return found


def place_outside(tensor: Tensor, number: int) -> TensorPlace:
    """The place of a tensor that is in no wrapped model: by the outermost module that has it, else by its number."""
    names = [
        name
        for module in gc.get_objects()
        if issubclass(type(module), nn.Module)
        for name, param in module.named_parameters()
        if param is tensor
    ]
    name = max(names, key=len, default=f"parameter {number}")
    return TensorPlace(unprefixed(name), 0, num_elements(tensor))


def unprefixed(name: str) -> str:
    """A parameter's or buffer's name without what torch's own wrappers put before it."""
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


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


def _prefixed(number: int, name: str) -> str:
    return f"model {number}: {name}" if number else name


def sketches_of(owned: Iterable[tuple[TensorPlace, Tensor]]) -> Sketches:
    """The sketches of tensors, by the name of the parameter that each is a part of."""
    pieces: dict[str, list[Sketch]] = {}
    for place, tensor in owned:
        pieces.setdefault(place.name, []).append(sketch_of(tensor, place.offset, place.numel))
    return {name: joined(found) for name, found in pieces.items()}


def digests(inputs: Any, size: int | None) -> list[str]:
    """A digest of each sample in a model's inputs; of all of them together if they have no dimension of samples.

    size: how many samples there are, where that is known. Else the first dimension of the first tensor counts.
    """
    listed = _listed(inputs, size) if size is not None else None
    if listed is not None:
        return [hashlib.blake2b(_rows(each[None])[0], digest_size=8).hexdigest() for each in listed]
    tensors = [leaf.detach() for leaf in tree.leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    if size is None or not any(_dimension(each, size) is not None for each in tensors):
        size = tensors[0].shape[0] if tensors else None
    if size is None:
        return [hashlib.blake2b(repr(inputs).encode(), digest_size=8).hexdigest()]
    # The first tensor that has samples must do: a mask of the length of texts may by chance have as many rows.
    each, dimension = next((each, d) for each in tensors if (d := _dimension(each, size)) is not None)
    return [hashlib.blake2b(row, digest_size=8).hexdigest() for row in _rows(each.movedim(dimension, 0))]


def _listed(node: Any, size: int) -> list[Tensor] | None:
    """The first list of `size` tensors, one a sample, as detectors take pictures; None if there is none."""
    held = tree.children(node)
    if held is None:
        return None
    if isinstance(node, list) and len(held) == size and all(isinstance(each, Tensor) and each.dim() for each in held):
        dims = {each.dim() for each in held}
        # Else it may be the columns of so many samples.
        if len(dims) == 1 and (max(dims) > 2 or any(each.shape[0] != size for each in held)):
            return [each.detach() for each in held]
    return next((found for each in held if (found := _listed(each, size)) is not None), None)


def _dimension(tensor: Tensor, size: int) -> int | None:
    """Which dimension has the samples: the first, or the second as recurrent networks have it."""
    return next((d for d in range(min(2, tensor.dim())) if tensor.shape[d] == size), None)


def _rows(tensor: Tensor) -> list[bytes]:
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.reshape(tensor.shape[0], -1) if tensor.numel() else tensor.new_zeros(tensor.shape[0], 1)
    data = flat.cpu().contiguous().view(torch.uint8).numpy() if flat.dtype != torch.bool else flat.cpu().numpy()
    # Zeros at the end do not count: a part is padded to its own longest sample, the whole batch to that of all.
    return [row.tobytes().rstrip(b"\0") for row in data]
