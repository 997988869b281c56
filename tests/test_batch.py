"""Batches of every make: cut and moved."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lockstep.data import batch as batches
from lockstep.data import tree
from lockstep.data.order import Part, cut
from lockstep.errors import UsageError

Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Frozen:
    x: Any
    name: str = "name"
    made: int = field(default=3, init=False)


class Ragged:
    """A batch of the user's own that can be cut."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, which: slice) -> "Ragged":
        return Ragged(self.samples[which])


# --- Containers ---

CONTAINERS = [
    {"a": 1, "b": 2},
    OrderedDict(b=1, a=2),
    defaultdict(list, a=1, b=2),
    UserDict(a=1, b=2),
    MappingProxyType({"a": 1, "b": 2}),
    [1, 2],
    (1, 2),
    Point(1, 2),
]


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda c: type(c).__name__)
def test_containers_are_opened_and_rebuilt_in_kind(container: Any) -> None:
    assert tree.children(container) == [1, 2]
    rebuilt = tree.rebuild(container, [3, 4])
    assert type(rebuilt) is type(container)
    assert tree.children(rebuilt) == [3, 4]
    assert tree.children(container) == [1, 2], "the original must not change"


def test_dataclasses_are_rebuilt_even_if_frozen() -> None:
    one = Frozen(torch.ones(1), "one")
    rebuilt = tree.rebuild(one, [2, "two", 4])
    assert (rebuilt.x, rebuilt.name, rebuilt.made) == (2, "two", 4)
    assert one.name == "one" and one.made == 3


def test_a_default_factory_survives() -> None:
    rebuilt = tree.rebuild(defaultdict(list, a=1), [2])
    assert rebuilt["missing"] == []


# --- Ready batches ---

READY: list[tuple[str, Any]] = [
    ("tensor", lambda lo, hi: torch.arange(10)[lo:hi]),
    ("array", lambda lo, hi: numpy.arange(10)[lo:hi]),
    ("columns", lambda lo, hi: [torch.arange(10)[lo:hi], torch.ones(10, 3)[lo:hi]]),
    ("pair of pairs", lambda lo, hi: (((torch.arange(10)[lo:hi], torch.ones(10)[lo:hi])), torch.ones(10)[lo:hi])),
    ("strings", lambda lo, hi: list("abcdefghij")[lo:hi]),
    ("texts", lambda lo, hi: {"words": [["a"] * i for i in range(10)][lo:hi], "class": list("abcdefghij")[lo:hi]}),
    ("dict", lambda lo, hi: {"x": torch.ones(10, 2)[lo:hi], "name": list("abcdefghij")[lo:hi], "scale": 2.5}),
    ("records", lambda lo, hi: {"x": torch.ones(10)[lo:hi], "meta": [{"id": i} for i in range(10)][lo:hi]}),
    ("other list", lambda lo, hi: {"x": torch.ones(10)[lo:hi], "classes": ["cat", "dog"]}),
    ("ragged", lambda lo, hi: {"y": torch.ones(10)[lo:hi], "x": [torch.ones(3, i) for i in range(10)][lo:hi]}),
    ("detection", lambda lo, hi: ([torch.ones(3, i) for i in range(10)][lo:hi], list(range(10))[lo:hi])),
    ("named", lambda lo, hi: Point(torch.ones(10)[lo:hi], torch.tensor(3))),
    ("dataclass", lambda lo, hi: Frozen({"x": torch.ones(10)[lo:hi]})),
]


@pytest.mark.parametrize("make", [make for _, make in READY], ids=[name for name, _ in READY])
@pytest.mark.parametrize("size", [1, 3, 11])
def test_a_ready_batch_is_cut_along_its_samples(make: Any, size: int) -> None:
    batch = make(0, 10)
    assert batches.length(batch) == 10
    for rank in range(size):
        part = cut(10, size, rank)
        torch.testing.assert_close(plain(batches.take(batch, part)), plain(make(part.start, part.stop)))


def plain(batch: Any) -> Any:
    """`batch` as lists of tensors and numbers, which assert_close compares."""
    if isinstance(batch, str):
        return [ord(letter) for letter in batch]
    held = tree.children(batch)
    return batch if held is None else [type(batch).__name__ == "tuple", *(plain(child) for child in held)]


def test_a_ready_batch_of_the_users_own_is_cut_by_slicing() -> None:
    batch = {"graphs": Ragged(list(range(5)))}
    assert batches.length(batch) == 5
    assert batches.take(batch, Part(1, 3, 5))["graphs"].samples == [1, 2]


@pytest.mark.parametrize(
    "batch",
    [
        5,
        "text",
        {"n": torch.tensor(5)},
        {"tokens": torch.ones(100), "offsets": torch.ones(5)},
        {"texts": ["a", "b"], "labels": ["c"]},
        (["a", "b"], ["c", "d"]),
    ],
    ids=str,
)
def test_a_ready_batch_without_one_length_is_refused(batch: Any) -> None:
    with pytest.raises(UsageError, match="batch_size=None"):
        batches.length(batch)


@pytest.mark.parametrize("images", [[torch.ones(4, 2)] * 4, [torch.ones(3, 2)] * 5])
def test_a_list_that_may_be_samples_or_columns_is_refused(images: Any) -> None:
    batch = {"images": images, "labels": torch.ones(4)}
    with pytest.raises(UsageError, match="samples or columns"):
        batches.take(batch, Part(0, 2, batches.length(batch)))


# --- Moving ---


def test_everything_that_can_be_moved_is() -> None:
    class Mover:
        def to(self, device: torch.device) -> Any:
            return "moved to", device.type

    batch = {
        "a": [torch.ones(2), "text", 3],
        "b": Point(torch.ones(1), Frozen(torch.ones(1))),
        "packed": pack_sequence([torch.ones(2)]),
        "own": Mover(),
    }
    moved = batches.move(batch, torch.device("meta"), non_blocking=True)
    assert moved["a"][0].is_meta and moved["a"][1:] == ["text", 3]
    assert moved["b"].x.is_meta and moved["b"].y.x.is_meta
    assert moved["packed"].data.is_meta
    assert moved["own"] == ("moved to", "meta")
    assert not batch["a"][0].is_meta, "the original must not change"


def test_the_whole_way_there_without_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(kwargs["non_blocking"])
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    for non_blocking in (True, False):
        batches.move([torch.ones(1)], torch.device("meta"), non_blocking=non_blocking)
    assert seen == [True, False]
