"""What can be done to a batch without knowing what it is: cut it, move it to a device."""

from typing import Any

import numpy
import torch
from torch import Tensor

from lockstep.data import tree
from lockstep.data.order import Part
from lockstep.errors import UsageError


def move(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """`batch` with all that can be moved on `device`; what has a `to()` of its own moves itself."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if callable(getattr(type(batch), "to", None)):
        return batch.to(device)
    held = tree.children(batch)
    if held is None:
        return batch
    return tree.rebuild(batch, [move(child, device, non_blocking=non_blocking) for child in held])


def own(batch: Any) -> Any:
    """`batch` with tensors of its own instead of views of others': kernels may round by where a tensor lies."""
    if isinstance(batch, Tensor):
        return batch.clone() if batch._is_view() else batch
    held = tree.children(batch)
    return batch if held is None else tree.rebuild(batch, [own(child) for child in held])


# --- A batch that the data set made itself ---


def length(batch: Any) -> int:
    """How many samples a ready batch has: the first dimension of its tensors, else the length of its lists."""
    if _is_list_of_lists(batch):
        raise _cannot_cut(f"a {type(batch).__name__} of lists could be samples or columns; name the columns in a dict")
    for lengths in (_array_lengths(batch), _other_lengths(batch)):
        if len(lengths) > 1:
            raise _cannot_cut(f"what is in it has different lengths, {sorted(lengths)}")
        if lengths:
            return lengths.pop()
    raise _cannot_cut(f"nothing in it has a length (it is a {type(batch).__name__})")


def take(batch: Any, part: Part) -> Any:
    """The samples of `part` out of a ready batch of `part.total`: tensors are cut along dimension 0."""
    if tree.is_plain_sequence(batch) and _holds_arrays(batch):
        return _take_each(batch, part)  # (x, y): at the top, these are the columns, and never samples.
    return _take(batch, part)


def _take(node: Any, part: Part) -> Any:
    if _is_array(node):
        return part.of(node) if node.ndim else node
    if tree.is_plain_sequence(node):
        return _take_sequence(node, part)
    if tree.children(node) is not None:
        return _take_each(node, part)
    return part.of(node) if _is_sliceable(node) and len(node) == part.total else node


def _take_sequence(node: list[Any] | tuple[Any, ...], part: Part) -> Any:
    """Cut a list of samples; cut each member of a list of columns."""
    are_samples = len(node) == part.total
    if not _holds_arrays(node):
        return part.of(node) if are_samples else node
    sizes = {leaf.shape[0] for leaf in tree.leaves(node) if _is_array(leaf) and leaf.ndim}
    are_columns = sizes == {part.total}
    if are_columns == are_samples:
        raise _cannot_cut(
            f"for a batch of {part.total} samples, a {type(node).__name__} of {len(node)} that holds tensors of "
            f"lengths {sorted(sizes)} could be samples or columns, or neither"
        )
    return part.of(node) if are_samples else _take_each(node, part)


def _take_each(node: Any, part: Part) -> Any:
    return tree.rebuild(node, [_take(child, part) for child in tree.children(node) or ()])


def _array_lengths(batch: Any) -> set[int]:
    """Lengths of the tensors in `batch`, but for those in lists below the top, which may be samples."""
    held = tree.children(batch)
    if held is None:
        return {batch.shape[0]} if _is_array(batch) and batch.ndim else set()
    return {size for child in held if not tree.is_plain_sequence(child) for size in _array_lengths(child)}


def _other_lengths(batch: Any) -> set[int]:
    """Lengths of the lists in `batch` that hold no tensors, and of objects that can be cut."""
    held = tree.children(batch)
    if held is None:
        return {len(batch)} if _is_sliceable(batch) else set()
    if tree.is_plain_sequence(batch) and not _holds_arrays(batch):
        return {len(held)}
    return {size for child in held for size in _other_lengths(child)}


def _is_list_of_lists(batch: Any) -> bool:
    if not tree.is_plain_sequence(batch) or _holds_arrays(batch):
        return False
    return any(tree.is_plain_sequence(child) for child in batch)


def _cannot_cut(found: str) -> UsageError:
    return UsageError(
        f"a batch that the data set made itself (batch_size=None) cannot be cut between the workers: {found}. "
        "Let every tensor in it have the samples along its first dimension; or wrap it in a class with a "
        "__len__ and a __getitem__ that takes slices; or give the DataLoader a batch_size and let it make the "
        "batches."
    )


def _is_array(node: Any) -> bool:
    return isinstance(node, Tensor | numpy.ndarray)


def _holds_arrays(node: Any) -> bool:
    return any(_is_array(leaf) for leaf in tree.leaves(node))


def _is_sliceable(node: Any) -> bool:
    """Whether this is an object of the user's own with samples in it."""
    if _is_array(node) or isinstance(node, str | bytes):
        return False
    return hasattr(node, "__len__") and hasattr(node, "__getitem__")
