import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import UsageError
from lockstep.keep import tree

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
trees = st.recursive(
    leaves, lambda t: st.lists(t, max_size=4) | st.dictionaries(st.text(), t, max_size=4), max_leaves=20
)


@settings(deadline=None)
@given(trees)
def test_trees_come_back_as_they_were(content):
    if "$float" in repr(content):
        return
    text = json.dumps(tree.encode(content), allow_nan=False)
    assert repr(tree.decode(json.loads(text))) == repr(content)


def contains_itself():
    content = []
    content.append(content)
    return content


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"a": [1, (2, 3)]}, r"tree\['a'\]\[1\] is a tuple"),
        ({"a": {1, 2}}, r"tree\['a'\] is a set"),
        ({1: 2}, "key 1: .* Use '1'"),
        ([np.float64(1.0)], r"tree\[0\] is a float64"),
        (torch.ones(1), "tree is a Tensor.*give tensors as pieces"),
        (b"x", "is a bytes"),
        ({"$float": 1}, "stands for a number"),
        (contains_itself(), "nested too deeply"),
    ],
)
def test_what_json_would_change_is_refused(content, text):
    with pytest.raises(UsageError, match=text):
        tree.encode(content)


def test_equal_trees_compare_equal():
    assert tree.canonical({"a": 1, "b": [2.0]}) == tree.canonical({"b": [2.0], "a": 1})
