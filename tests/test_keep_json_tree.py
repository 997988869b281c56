import json
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import UsageError
from lockstep.keep import json_tree

keys = (
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["$float", "$dict"]) | st.tuples(st.text())
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.floats(width=32).map(np.float32)
trees = st.recursive(
    leaves | st.integers(0, 255).map(np.uint8) | st.dictionaries(keys, st.integers()).map(Counter),
    lambda t: st.lists(t, max_size=4) | st.dictionaries(keys, t, max_size=4) | st.lists(t, max_size=3).map(tuple),
    max_leaves=20,
)


@settings(deadline=None)
@given(trees)
def test_trees_come_back_as_they_were(content):
    text = json.dumps(json_tree.encode(content), allow_nan=False)
    assert repr(json_tree.decode(json.loads(text))) == repr(content)


def contains_itself():
    content = []
    content.append(content)
    return content


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"a": [1, OrderedDict()]}, r"tree\['a'\]\[1\] is a OrderedDict"),
        ({"a": {1, 2}}, r"tree\['a'\] is a set"),
        ({"a": {frozenset(): 2}}, r"tree\['a'\]'s key frozenset\(\) is a frozenset"),
        ([np.longdouble(1.0)], r"tree\[0\] is a longdouble"),
        (torch.ones(1), "tree is a Tensor.*give tensors as pieces"),
        (b"x", "is a bytes"),
        (contains_itself(), "nested too deeply"),
    ],
)
def test_what_json_would_change_is_refused(content, text):
    with pytest.raises(UsageError, match=text):
        json_tree.encode(content)


def test_equal_trees_compare_equal():
    assert json_tree.canonical({"a": 1, "b": [2.0]}) == json_tree.canonical({"b": [2.0], "a": 1})
