"""What NCCL was given to do, call by call: tells of workers that are out of step where their hosts have long gone on.

On a GPU a collective returns at once, and one that only some workers call pairs with whatever the others call next. The
device then waits for ever, at a place that says nothing about the line that was wrong. torch keeps the last calls of
every group, with sizes and stacks (its flight recorder, which is on by default); the first number at which workers
have called different things is that line.

Read only in a hang. It takes a millisecond without the stacks; with them, the first time, seconds in which torch
imports its compiler: in a thread of its own, that delays nobody.
"""

import math
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._C import _distributed_c10d

from lockstep.watching import hang_stack

MOST = 128
"""How many of the last calls of a group are told."""
_EQUAL_SIZES = frozenset({"all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base"})
"""Calls that have the same size on all workers."""
_SENDER = ("lockstep/replica/traffic.py", "send")
"""Who sends buckets."""


@dataclass(frozen=True, slots=True)
class Queued:
    """One collective that a worker has called."""

    group: str
    number: int
    """How many of the group's collectives it is."""
    what: str
    """The same on all workers of the group."""
    at: str
    """Where it was called, in the script's own code; empty where that is not known."""
    later_buckets: int
    """If it was a bucket of Lockstep's: how many more of them were sent since; else -1."""

    @property
    def is_bucket(self) -> bool:
        """Whether it carried gradients."""
        return self.later_buckets >= 0


def read(*, with_lines: bool) -> tuple[Queued, ...]:
    """This worker's last calls, by group; none where torch does not keep them."""
    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    if dump is None:
        return ()
    try:
        return tuple(calls(pickle.loads(dump(True, with_lines, False))))
    except Exception:  # No promise of torch's: another version may tell it otherwise.
        return ()


def calls(kept: Mapping[str, Any]) -> list[Queued]:
    """The last calls of each group, of what the flight recorder keeps."""
    groups = defaultdict(list)
    members = _members(kept.get("pg_config"))
    for entry in kept.get("entries", []):
        if not entry["is_p2p"]:
            name = entry["process_group"][0]
            groups[f"{name} of {members.get(name, '')}"].append(entry)  # Several may have one name.
    return [queued for group, found in groups.items() for queued in _of_group(group, found)]


def _members(groups: Any) -> dict[str, str]:
    """The ranks in each group, by its name."""
    known = groups.items() if isinstance(groups, dict) else ()
    return {name: str(group.get("ranks", "")) for name, group in known if isinstance(group, dict)}


def precedent(history: Sequence[Queued]) -> Queued | None:
    """What followed when the same calls had been made before, as far back as they are the same; None if never."""
    best, longest = None, 0
    for end in range(len(history) - 1, 0, -1):
        same = 0
        while same < end and _kind(history[end - 1 - same]) == _kind(history[-1 - same]):
            same += 1
        if same > longest:
            best, longest = history[end], same
    return best


def _kind(call: Queued) -> tuple[str, str]:
    return call.what, call.at


def _of_group(group: str, entries: list[Mapping[str, Any]]) -> list[Queued]:
    later, found = 0, []
    for entry in reversed(entries[-MOST:]):
        frames = entry.get("frames", [])
        is_bucket = any(_is_sender(frame) for frame in frames)
        at = "a bucket of gradients" if is_bucket else _at(frames)
        found.append(Queued(group, entry["collective_seq_id"], _what(entry), at, later if is_bucket else -1))
        later += is_bucket
    return found[::-1]


def _what(entry: Mapping[str, Any]) -> str:
    name = str(entry["profiling_name"]).removeprefix("nccl:")
    if name not in _EQUAL_SIZES:
        return name
    numel = sum(math.prod(size) for size in entry["input_sizes"])
    return f"{name.strip('_')} of {numel} x {entry['input_dtypes'][0].lower()}"


def _is_sender(frame: Mapping[str, Any]) -> bool:
    return str(frame["filename"]).endswith(_SENDER[0]) and bool(frame["name"] == _SENDER[1])


def _at(frames: list[Mapping[str, Any]]) -> str:
    own = next((frame for frame in frames if hang_stack.is_own_file(frame["filename"])), None)
    return hang_stack.words(own["filename"], own["line"], own["name"]) if own is not None else ""
