"""What a launched worker sends back, once, through its pipe: a result or an exception.

On the wire: 8 bytes of length, then one letter that says what it is, then a pickle. The launcher reads whatever has
arrived whenever it looks, so that a large result never blocks it, nor the worker for long.
"""

import os
import pickle
import traceback
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lockstep.errors import WorkerFailed

_CHUNK_BYTES = 1 << 20
_LENGTH_BYTES = 8


class Kind(Enum):
    """What a report says."""

    RETURNED = b"r"
    """The function returned: the pickle is its result."""
    RAISED = b"x"
    """The function raised: the pickle is a `Raised`."""
    NOT_LOADED = b"n"
    """The function could not be loaded in the worker: the pickle is a `Raised`."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception on its way to another process."""

    summary: str
    """Its type and message."""
    trace: str
    """Its traceback in the worker, with all it is chained to."""
    pickled: bytes | None
    """The exception itself, if it can be pickled."""


class Outbox:
    """The worker's end of the pipe."""

    def __init__(self, fd: int, rank: int) -> None:
        self._fd = fd
        self._rank = rank

    def returned(self, result: Any) -> None:
        """Send the function's result; one that cannot be pickled becomes a failure that says so."""
        try:
            pickled = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            failed = WorkerFailed(
                f"worker {self._rank} returned a {type(result).__qualname__} that cannot be sent to the process that "
                f"launched it: {error}. Return numbers, strings, tensors, or containers of them."
            )
            self.raised(failed.with_traceback(error.__traceback__))
        else:
            self._send(Kind.RETURNED, pickled)

    def raised(self, error: BaseException, kind: Kind = Kind.RAISED) -> None:
        """Send an exception, as itself where possible."""
        try:
            pickled = pickle.dumps(error, pickle.HIGHEST_PROTOCOL)
        except Exception:
            pickled = None
        summary = "".join(traceback.format_exception_only(error)).strip()
        self._send(kind, pickle.dumps(Raised(summary, "".join(traceback.format_exception(error)), pickled)))

    def _send(self, kind: Kind, pickled: bytes) -> None:
        for part in ((len(pickled) + 1).to_bytes(_LENGTH_BYTES), kind.value, pickled):
            unsent = memoryview(part)
            while unsent:
                unsent = unsent[os.write(self._fd, unsent[:_CHUNK_BYTES]) :]
        os.close(self._fd)


class Inbox:
    """The launcher's end of the pipe of one worker."""

    def __init__(self, rank: int, fd: int) -> None:
        self.rank = rank
        self.fd = fd
        self.is_open = True
        """Whether more may come."""
        self._received = bytearray()
        os.set_blocking(fd, False)

    def receive(self) -> None:
        """Take in what has arrived, without waiting."""
        while self.is_open:
            try:
                data = os.read(self.fd, _CHUNK_BYTES)
            except BlockingIOError:
                return
            self._received += data
            if not data or self.is_complete:
                self.close()

    def close(self) -> None:
        """Take no more."""
        if self.is_open:
            self.is_open = False
            os.close(self.fd)

    @property
    def is_complete(self) -> bool:
        """Whether the whole report has arrived."""
        length = self._received[:_LENGTH_BYTES]
        return len(length) == _LENGTH_BYTES and len(self._received) - _LENGTH_BYTES >= int.from_bytes(length)

    @property
    def kind(self) -> Kind | None:
        """What the report says; None while it is not complete."""
        return Kind(bytes(self._received[_LENGTH_BYTES : _LENGTH_BYTES + 1])) if self.is_complete else None

    def open_report(self) -> Any:
        """What was sent. For results this runs what the result's type says about unpickling, and may raise."""
        return pickle.loads(memoryview(self._received)[_LENGTH_BYTES + 1 :])
