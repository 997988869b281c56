"""What a checkpoint holds beside tensors, as JSON: nested dicts and lists of text, numbers, booleans and None.

What comes back equals what went in: types that JSON would change on the way (tuples, sets, integer keys, numpy
numbers) are refused with their place, not converted. Infinities and NaN, which JSON has no words for, are written
as `{"$float": "inf"}`, so that every JSON reader can read the file.
"""

import json
import math
from typing import Any

from lockstep.errors import UsageError

MARK = "$float"


def encode(tree: object) -> Any:
    """`tree` as values that strict JSON can hold. Raises UsageError naming the place of what it cannot hold."""
    try:
        return _encode(tree, "tree")
    except RecursionError:
        raise UsageError("the tree is nested too deeply for a checkpoint, or contains itself.") from None


def decode(plain: Any) -> Any:
    """The tree that `encode` was given."""
    if isinstance(plain, dict):
        if plain.keys() == {MARK}:
            return float(plain[MARK])
        return {key: decode(value) for key, value in plain.items()}
    return [decode(value) for value in plain] if isinstance(plain, list) else plain


def canonical(plain: Any) -> bytes:
    """The same bytes for equal trees, whatever the order of their keys: what workers compare."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def _encode(tree: object, place: str) -> Any:
    # By exact type: a subclass (a numpy float, an IntEnum, an OrderedDict) would come back as another type.
    if tree is None or type(tree) in (bool, int, str):
        return tree
    if type(tree) is float:
        return tree if math.isfinite(tree) else {MARK: repr(tree)}
    if type(tree) is list:
        return [_encode(value, f"{place}[{index}]") for index, value in enumerate(tree)]
    if type(tree) is dict:
        return {_key(key, tree, place): _encode(value, f"{place}[{key!r}]") for key, value in tree.items()}
    raise UsageError(
        f"{place} is a {type(tree).__name__}, which would not come back from a checkpoint as itself. Use dicts with "
        "string keys, lists, str, int, float, bool and None; give tensors as pieces."
    )


def _key(key: object, tree: dict[Any, Any], place: str) -> str:
    if type(key) is not str:
        raise UsageError(f"{place} has the key {key!r}: in a checkpoint keys are strings. Use {str(key)!r}.")
    if key == MARK and len(tree) == 1:
        raise UsageError(f"{place} has {MARK!r} as its only key, which stands for a number. Use another key.")
    return key
