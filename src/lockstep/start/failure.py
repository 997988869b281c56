"""Who failed first, and how, in words. Pure.

When one worker fails, others fail because of it, and may even be seen to end before it. What counts as first is
therefore not who ended first: a failure that names another one as its cause comes after any that does not, and
among equals the time counts at which the traceback began.
"""

import signal
from collections.abc import Iterable
from dataclasses import dataclass

_CONSEQUENCES = ("lockstep.errors.WorkerLost", "lockstep.errors.StepVoid", "torch.distributed.DistBackendError")
"""How a traceback's last lines begin if a peer was the cause."""
_WITHIN = ("Connection closed by peer", "Connection reset by peer", "when running the callback: WorkerLost: ")
"""What is said inside a RuntimeError if a peer is gone: by Gloo, and by a future of backend shm."""

_HINTS = {
    "SIGKILL": "often because memory ran out",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "native code gave up; its stderr says why",
    "SIGBUS": "often because shared memory, /dev/shm, is full",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """How one worker failed."""

    rank: int
    time: float
    """When it showed, on the monotonic clock: the beginning of its traceback if there is one, else its end."""
    code: int
    """Its exit code; minus the number of the signal that killed it."""
    words: str = ""
    """Its traceback, or the last lines of its stderr."""

    @property
    def is_consequence(self) -> bool:
        """Whether a peer's failure was the cause, as its words tell it."""
        return self.code >= 0 and is_consequence(self.words)

    @property
    def status(self) -> int:
        """The exit code that a shell reports for it: 128 plus the signal for a killed process."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        return how(self.code)


def first(failures: Iterable[Failure]) -> Failure | None:
    """The failure that the others followed from, as far as can be told; None if there is none."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.time), default=None)


def is_consequence(words: str) -> bool:
    """Whether a traceback says that a peer's failure was the cause."""
    return any(
        line.startswith(_CONSEQUENCES) or (line[:1].strip() and any(part in line for part in _WITHIN))
        for line in words.splitlines()
    )


def how(code: int) -> str:
    """An exit code in words: `exit code 3`, `killed by SIGKILL, often because memory ran out`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = _HINTS.get(name)
    return f"killed by {name}, {hint}" if hint else f"killed by {name}"
