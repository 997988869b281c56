"""What a checkpoint holds beside tensors, as JSON: nested dicts, lists and tuples of text, numbers, booleans and None.

What comes back equals what went in, type by type. What JSON has no word for is written as an object of one key that
begins with a dollar: `{"$float": "inf"}`, `{"$tuple": [1, 2]}`, `{"$dict": [[30, 1]]}` where a key is no text,
`{"$Counter": [[30, 1]]}` (the milestones of a schedule), `{"$numpy": ["float32", 0.5]}`; so every JSON reader can read
the file. Other types are refused with their place, not converted.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.errors import CheckpointError, UsageError

NUMPY = {
    np.dtype(name).type: name
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64",
    )
}  # fmt: skip
"""The numpy numbers that a Python number holds exactly."""

MARKS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda items: tuple(decode(items)),
    "$dict": lambda pairs: dict(_pairs(pairs)),
    "$Counter": lambda pairs: Counter(dict(_pairs(pairs))),
    "$numpy": lambda number: {name: kind for kind, name in NUMPY.items()}[number[0]](decode(number[1])),
}
"""What an object whose only key is one of these stands for."""


def encode(tree: object) -> Any:
    """`tree` as values that strict JSON can hold. Raises UsageError naming the place of what it cannot hold."""
    try:
        return _encode(tree, "tree")
    except RecursionError:
        raise UsageError("the tree is nested too deeply for a checkpoint, or contains itself.") from None


def decode(plain: Any) -> Any:
    """The tree that `encode` was given."""
    if isinstance(plain, dict):
        mark, value = next(iter(plain.items())) if len(plain) == 1 else ("", None)
        if mark in MARKS:
            return MARKS[mark](value)
        return {key: decode(value) for key, value in plain.items()}
    return [decode(value) for value in plain] if isinstance(plain, list) else plain


def canonical(plain: Any) -> bytes:
    """The same bytes for equal trees, whatever the order of their keys: what workers compare."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def field(tree: Any, name: str, kinds: tuple[type, ...], where: object) -> Any:
    """`tree[name]`, if it is of exactly one of `kinds`; raises CheckpointError naming file and field if not.

    For what is read back: a manifest may come from elsewhere. A whole number is one from 0 that 64 bits can hold.
    where: the file, and the place of `tree` in it.
    """
    value = tree.get(name) if isinstance(tree, dict) else None
    is_right = type(value) in kinds and (type(value) is not int or 0 <= value < 2**64)
    if not is_right:
        wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        found = "missing" if not isinstance(tree, dict) or name not in tree else f"{value!r:.80}"
        raise CheckpointError(
            f"{where}: {name!r} is {found}, and {wanted} was expected. The manifest is damaged, was edited, or was "
            "written by something else; nothing was loaded."
        )
    return value


def check_like(stored: Any, live: Any, where: str, *, finite: bool = False) -> None:
    """Raise CheckpointError, naming the place, unless `stored` may take the place of `live`: known keys, same types.

    What is loaded becomes a scheduler's attributes or an optimizer's settings, so a manifest from elsewhere must not
    bring others. Numbers stand for numbers; None, for a flag or where there is None now.

    finite: refuse infinities and NaN.
    """
    if isinstance(live, dict) and type(stored) in (dict, Counter):
        by_name = all(type(key) is str for key in live)  # A Counter's keys are content, not names.
        unknown = [key for key in stored if by_name and key not in live]
        if unknown:
            raise _unlike(f"{where}[{unknown[0]!r}]", stored[unknown[0]], "nothing of that name")
        for key in stored if by_name else ():
            check_like(stored[key], live[key], f"{where}[{key!r}]", finite=finite)
    elif isinstance(live, list | tuple) and type(stored) in (list, tuple):
        if isinstance(live, tuple) and len(live) != len(stored):
            raise _unlike(where, stored, f"{len(live)} values")
        for index, value in enumerate(stored if live else ()):
            check_like(value, live[min(index, len(live) - 1)], f"{where}[{index}]", finite=finite)
    elif not _is_like(stored, live, finite):
        raise _unlike(where, stored, f"a {type(live).__name__} such as {live!r:.40}")


def _is_like(stored: Any, live: Any, finite: bool) -> bool:
    if isinstance(stored, float | int | np.number) and not isinstance(stored, bool):
        is_number = live is None or (isinstance(live, float | int | np.number | Tensor) and not isinstance(live, bool))
        return is_number and (not finite or math.isfinite(stored))
    if stored is None or isinstance(stored, bool | np.bool_):
        return live is None or isinstance(live, bool | np.bool_)
    return isinstance(stored, str) and (live is None or isinstance(live, str))


def _unlike(where: str, stored: Any, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"{where} is {stored!r:.80}, and this run has {wanted} there. Build what was saved, in the same order (a "
        "schedule before loading); or the manifest is damaged or from elsewhere. Nothing was loaded."
    )


def _pairs(pairs: Any) -> list[tuple[Any, Any]]:
    return [(decode(key), decode(value)) for key, value in pairs]


def _encode(tree: object, place: str) -> Any:
    # By exact type: a subclass (an IntEnum, an OrderedDict) would come back as another type.
    if tree is None or type(tree) in (bool, int, str):
        return tree
    if type(tree) is float:
        return tree if math.isfinite(tree) else {"$float": repr(tree)}
    if type(tree) is list:
        return [_encode(value, f"{place}[{index}]") for index, value in enumerate(tree)]
    if type(tree) is tuple:
        return {"$tuple": [_encode(value, f"{place}[{index}]") for index, value in enumerate(tree)]}
    if type(tree) is dict or type(tree) is Counter:
        return _encode_dict(tree, place)
    if type(tree) in NUMPY:
        return {"$numpy": [NUMPY[type(tree)], _encode(tree.item(), place)]}  # type: ignore[attr-defined]
    raise UsageError(
        f"{place} is a {type(tree).__name__}, which would not come back from a checkpoint as itself. Use dicts, lists, "
        "tuples, str, int, float, bool, None and numpy numbers; give tensors as pieces."
    )


def _encode_dict(tree: dict[Any, Any], place: str) -> Any:
    items = [(key, _encode(value, f"{place}[{key!r}]")) for key, value in tree.items()]
    is_counter = type(tree) is Counter
    if not is_counter and all(type(key) is str for key in tree) and not (len(tree) == 1 and items[0][0] in MARKS):
        return dict(items)
    pairs = [[_encode(key, f"{place}'s key {key!r}"), value] for key, value in items]
    return {"$Counter" if is_counter else "$dict": pairs}
