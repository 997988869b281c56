"""The samples of a batch, by what is in them, so that batches can be compared however they are cut."""

import hashlib
from typing import Any

import torch
from torch import Tensor

from lockstep.data import tree


def digests(inputs: Any, size: int | None) -> list[str]:
    """A digest of each sample in a model's inputs; of all of them together if they have no dimension of samples.

    size: how many samples there are, where that is known. Else the first dimension of the first tensor counts.
    """
    tensors = [leaf.detach() for leaf in tree.leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    if size is None or not any(_dimension(each, size) is not None for each in tensors):
        size = tensors[0].shape[0] if tensors else None
    if size is None:
        return [hashlib.blake2b(repr(inputs).encode(), digest_size=8).hexdigest()]
    # The first tensor that has samples must do: a mask of the length of texts may by chance have as many rows.
    each, dimension = next((each, d) for each in tensors if (d := _dimension(each, size)) is not None)
    return [hashlib.blake2b(row, digest_size=8).hexdigest() for row in _rows(each.movedim(dimension, 0))]


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
