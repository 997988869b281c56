"""Named moments at which a process can be made to fail, so that tests and `lockstep verify --chaos` meet each of them.

LOCKSTEP_FAULT holds entries like `worker 2: die at vote of step 7`, with `;` between them. What can happen: `die`
(SIGKILL), `stop` (SIGSTOP), `raise`, `exit`. `worker 2` is the third that was started; one that takes another's
place has a number of its own. Without the variable a moment costs one look at a cached None.
"""

import functools
import os
import re
import signal
import sys
from dataclasses import dataclass

from lockstep.environment import MEMBER
from lockstep.errors import UsageError

FAULT = "LOCKSTEP_FAULT"
POINTS = (
    "join",
    "compute",
    "exchange",
    "vote",
    "commit",
    "boundary",
    "regroup",
    "sending state",
    "receiving state",
    "snapshot",
    "replay",
)
"""All that have a name."""
_ENTRY = re.compile(
    r"\s*worker (?P<member>\d+): (?P<action>die|stop|raise|exit) at (?P<point>[a-z ]+?)(?: of step (?P<step>\d+))?\s*"
)


@dataclass(slots=True)
class Planned:
    """The faults of this process."""

    faults: list["Fault"]
    step: int | None = None
    """The step that is under way, for moments of it that do not know its number."""


@dataclass(slots=True)
class Fault:
    """What is to happen to this process, once."""

    point: str
    step: int | None
    """The step of which it is the moment; None: the first time."""
    action: str
    is_over: bool = False


def parse(text: str, member: str) -> list[Fault]:
    """The faults of one worker; raises UsageError for what is no entry."""
    faults = []
    for entry in filter(str.strip, text.split(";")):
        match = _ENTRY.fullmatch(entry)
        if match is None or match["point"] not in POINTS:
            raise UsageError(
                f"{FAULT}: {entry.strip()!r} is no fault. Write `worker 2: die at vote of step 7`, with one of "
                f"die, stop, raise, exit, at one of: {', '.join(POINTS)}."
            )
        if match["member"] == member:
            faults.append(Fault(match["point"], int(match["step"]) if match["step"] else None, match["action"]))
    return faults


@functools.cache
def _planned() -> Planned | None:
    faults = parse(os.environ.get(FAULT, ""), os.environ.get(MEMBER, os.environ.get("RANK", "0")))
    return Planned(faults) if faults else None


def at(point: str, step: int | None = None) -> None:
    """This process has come to a named moment, of the step that was named last if not of `step`."""
    planned = _planned()
    if planned is None:
        return
    planned.step = planned.step if step is None else step
    for fault in planned.faults:
        if not fault.is_over and fault.point == point and fault.step in (None, planned.step):
            fault.is_over = True
            _happen(fault)


def _happen(fault: Fault) -> None:
    if fault.action == "raise":
        raise RuntimeError(f"a fault that {FAULT} asked for, at {fault.point}")
    if fault.action == "exit":
        sys.exit(7)
    os.kill(os.getpid(), signal.SIGKILL if fault.action == "die" else signal.SIGSTOP)
