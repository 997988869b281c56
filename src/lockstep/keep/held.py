"""What one worker holds of a parameter: which of its elements, and how they lie; and whole tensors of all parts.

A worker may hold a fragment (of what is split), a shard (of a DTensor), or a fragment of a shard. Where its elements
follow one another row by row in the whole, they are a run, and are written and read as they are; else they are
scattered.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.keep.checkpoint import Checkpoint
from lockstep.replica.layout import in_memory_order, view_like
from lockstep.replica.local_params import local_part
from lockstep.replica.model_mesh import shard_begins
from lockstep.torch_private import is_dtensor
from lockstep.world import World


@dataclass(frozen=True, slots=True)
class Held:
    """What this worker holds of one parameter: elements from `offset` on of what is here at all."""

    name: str
    whole: nn.Parameter
    """The parameter itself, for its shape."""
    key: Tensor
    """What the optimizer knows it by: the parameter, or a fragment of it."""
    offset: int
    strides: tuple[int, ...]
    """How it lies in memory here; what it shows now may be a stand-in (zero=3)."""
    speaks: bool = True
    """Whether this worker's elements are the ones to be written, where others have copies of them."""

    @property
    def own(self) -> Tensor:
        """The memory that the optimizer works on."""
        return local_part(self.key)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter, in real numbers."""
        return real_shape(self.whole)

    @property
    def box(self) -> "Box":
        """Which elements of the parameter are here."""
        begins = shard_begins(self.whole) if is_dtensor(self.whole) else (0,) * self.whole.dim()
        return Box(begins, tuple(local_part(self.whole).shape))

    @property
    def is_first(self) -> bool:
        """Whether this worker speaks for the parameter where something exists once."""
        return self.speaks and self.offset == 0 and not any(self.box.begins)

    @property
    def is_scattered(self) -> bool:
        """Whether the elements do not follow one another row by row in the parameter."""
        lies_otherwise = self.own.dim() < len(self.strides) and not self.box.laid(self.strides).is_contiguous()
        return lies_otherwise or not self.box.is_run(self.whole.shape)

    @property
    def begin(self) -> int:
        """The number of the first element in the parameter, unless they are scattered."""
        return self.box.first(self.shape) + self.offset

    def stored(self, checkpoint: Checkpoint, name: str) -> Tensor:
        """What `checkpoint` has under `name` for what this worker holds, flat."""
        if not self.is_scattered:
            return checkpoint.read(name, self.begin, self.begin + flattened(self.own).numel())
        whole = checkpoint.read_whole(name)
        shaped = (torch.view_as_complex(whole) if self.whole.is_complex() else whole)[self.box.slices]
        if self.own.dim() == len(self.strides):
            return flattened(shaped)
        return in_memory_order(shaped, self.strides)[self.offset : self.offset + self.own.numel()]


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor, by its first index and its length in every dimension."""

    begins: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """To cut it out."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.begins, self.sizes, strict=True))

    def is_run(self, shape: Sequence[int]) -> bool:
        """Whether its elements follow one another in a tensor of this shape."""
        cut = [dim for dim, size in enumerate(self.sizes) if size != shape[dim]]
        return not cut or math.prod(self.sizes[: cut[-1]]) == 1 or not math.prod(self.sizes)

    def laid(self, strides: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of it without memory, as a worker has it."""
        return torch.empty_strided(self.sizes, strides, dtype=dtype, device="meta")

    def first(self, shape: Sequence[int]) -> int:
        """The number of its first element in a tensor of this shape, which may have two reals for each of its own."""
        number = 0
        for dim, length in enumerate(shape):
            number = number * length + (self.begins[dim] if dim < len(self.begins) else 0)
        return number


@dataclass(frozen=True, slots=True)
class Part:
    """Elements that some worker holds of a tensor which is put together."""

    param: str
    """The parameter's name."""
    box: Box
    offset: int
    strides: tuple[int, ...]
    is_ordered: bool
    """Whether they lie row by row already."""
    flat: Tensor

    @staticmethod
    def exchange(world: World | None, mine: "Sequence[Part]") -> "Sequence[Part]":
        """The parts of all workers of `world`, where there is one; each of these calls this."""
        if world is None:
            return mine
        said = [[p.param, p.box.begins, p.box.sizes, p.offset, p.strides, p.is_ordered] for p in mine]
        told, flats = world.gather_json(said), world.gather_tensors([part.flat for part in mine])
        return [
            Part(param, Box(tuple(begins), tuple(sizes)), offset, tuple(strides), is_ordered, flat)
            for theirs, of_worker in zip(told, flats, strict=True)
            for (param, begins, sizes, offset, strides, is_ordered), flat in zip(theirs, of_worker, strict=True)
        ]


def together(param: Tensor, parts: Sequence[Part]) -> Tensor:
    """A whole tensor like `param`, row by row, of all its parts."""
    whole = torch.empty(real_shape(param), dtype=parts[0].flat.dtype.to_real())
    for box in dict.fromkeys(part.box for part in parts):
        here = sorted((part for part in parts if part.box == box), key=lambda part: part.offset)
        flat = torch.cat([flattened(part.flat) for part in here])
        held = flat if here[0].is_ordered else flattened(view_like(flat, 0, box.laid(here[0].strides, param.dtype)))
        place = whole[box.slices]
        place.copy_(held.view(place.shape))
    return whole.view(-1)


def in_reals(tensor: Tensor) -> Tensor:
    """`tensor` in real numbers; a complex one has two for each of its own."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def real_shape(tensor: Tensor) -> tuple[int, ...]:
    """Its shape in real numbers."""
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


def flattened(tensor: Tensor) -> Tensor:
    """Its elements in real numbers, row by row."""
    return in_reals(tensor).reshape(-1)
