"""The containers that batches are made of: dicts, lists, tuples, named tuples, dataclasses, nested at will."""

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any, TypeGuard


def children(node: Any) -> list[Any] | None:
    """What the container `node` holds, in order; None if it is not a container."""
    if isinstance(node, Mapping):
        return list(node.values())
    if isinstance(node, list | tuple):
        return list(node)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [getattr(node, field.name) for field in dataclasses.fields(node)]
    return None


def rebuild(node: Any, values: list[Any]) -> Any:
    """A container like `node` that holds `values` in place of its children. `node` itself does not change."""
    if isinstance(node, Mapping):
        return _mapping(node, dict(zip(node, values, strict=True)))
    if isinstance(node, tuple):
        return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)
    clone = copy.copy(node)
    if isinstance(clone, list):
        clone[:] = values
        return clone
    for field, value in zip(dataclasses.fields(node), values, strict=True):
        object.__setattr__(clone, field.name, value)  # Frozen ones too, and without a second __init__.
    return clone


def leaves(node: Any) -> list[Any]:
    """Everything in `node` that is not a container, in order."""
    held = children(node)
    return [node] if held is None else [leaf for child in held for leaf in leaves(child)]


def is_plain_sequence(node: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Whether `node` is a list or a tuple without names: the columns of a batch, or a column of samples."""
    return isinstance(node, list | tuple) and not hasattr(node, "_fields")


def _mapping(node: Mapping[Any, Any], content: dict[Any, Any]) -> Any:
    if isinstance(node, MutableMapping):
        clone = copy.copy(node)  # Keeps what a mapping has besides its items, like a default factory.
        clone.update(content)
        return clone
    return type(node)(content)  # type: ignore[call-arg]
