"""Who failed first, and how: what a worker said last, as it is kept, compared and shown. Pure.

When one worker fails, others fail because of it, and may even be seen to end before it. What counts as first is
therefore not who ended first: a failure that names another one as its cause comes after any that does not, and among
equals the time counts at which the traceback began.

The error of one worker shows up in all of them, with dozens of frames that say how the wait for it was carried out. The
user's own frames say where in the script it was: so frames of this package are folded. `LOCKSTEP_TRACEBACK=full` shows
all.
"""

import re
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_CONSEQUENCES = (
    "lockstep.errors.WorkerLost",
    "lockstep.errors.StepVoid",
    "lockstep.comm.generations.Stopped",
    "torch.distributed.DistBackendError",
)
"""How a traceback's last lines begin if a peer was the cause."""
_WITHIN = (
    "Connection closed by peer",
    "Connection reset by peer",
    "when running the callback: WorkerLost: ",
    "parts of the model's state were lost: ",
)
"""What is said inside an error if a peer is gone: by Gloo, by a future of backend shm, by `elastic.snapshots`."""

_HINTS = {
    "SIGKILL": "often because memory ran out",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "native code gave up; its stderr says why",
    "SIGBUS": "often because shared memory, /dev/shm, is full",
}

_PACKAGE = re.escape(str(Path(__file__).parents[1]))
_OURS = re.compile(rf'  File "{_PACKAGE}[/\\]')
_OURS_OR_TORCHS = re.compile(rf'  File "(?:{_PACKAGE}|[^"]*-packages[/\\]torch)[/\\]')
_CHAIN_LINES = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_CHAINED = re.compile(rf"\n\n({'|'.join(_CHAIN_LINES)})\n\n")
_OUR_ERROR = "lockstep.errors."

_TRACEBACK_BYTES = 4 << 20
"""Room for a traceback with its chain. A recursion of depth 1000 that Python does not fold takes 0.2 MB."""
_MESSAGE_BYTES = 1 << 16
"""Room for what follows a traceback's frames: a message of several lines, what is said while the process ends."""
_NUM_RECENT = 50
_RECENT_BYTES = 1 << 12
"""How many other lines are kept, and how much of each."""

_TRACEBACK_BEGINS = (b"Traceback (most recent call last)", b"  + Exception Group Traceback", b"Fatal Python error")


@dataclass(frozen=True, slots=True)
class Failure:
    """How one worker failed."""

    rank: int
    time: float
    """When it showed, on the monotonic clock: the beginning of its traceback if there is one, else its end."""
    code: int
    """Its exit code; minus the number of the signal that killed it."""
    stderr: str = ""
    """Its traceback, or the last lines of its stderr."""
    was_told_to_end: bool = False
    """Whether it had failed, as its traceback tells, and had not ended when the launcher ended it."""
    culprit: str = ""
    """The worker that it lost, and what became of that, where that is the cause: `worker 1, which had finished`."""
    host: int | None = None
    """The host that it was on, in a run over several."""

    @property
    def name(self) -> str:
        """Which worker it is, for people."""
        return f"worker {self.rank}" if self.host is None else f"worker {self.rank} on host {self.host}"

    @property
    def is_consequence(self) -> bool:
        """Whether a peer's failure was the cause, as its traceback tells it."""
        return self.code >= 0 and is_consequence(self.stderr)

    @property
    def status(self) -> int:
        """The exit code that a shell reports for it: 128 plus the signal for a killed process."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        return how(self.code)


def first(failures: Iterable[Failure]) -> Failure | None:
    """The failure that the others followed from, as far as can be told; None if there is none."""
    # A traceback of a worker that went on until it was told to end may have been of something that was caught.
    return min(failures, key=lambda failed: (failed.is_consequence, failed.was_told_to_end, failed.time), default=None)


def was_asked_to_end(code: int) -> bool:
    """Whether a worker has ended by SIGTERM: somebody wanted that, and its script has not failed."""
    return code in (-signal.SIGTERM, 128 + signal.SIGTERM)


def is_consequence(text: str) -> bool:
    """Whether a traceback says that a peer's failure was the cause."""
    return any(
        line.startswith(_CONSEQUENCES) or (line[:1].strip() and any(part in line for part in _WITHIN))
        for line in text.splitlines()
    )


def lost_ranks(text: str) -> list[int]:
    """The workers that a traceback's last WorkerLost names as missing."""
    lost = [line for line in text.splitlines() if line.startswith(_CONSEQUENCES[0])]
    return [int(rank) for rank in re.findall(r"\bworker (\d+) \(pid ", lost[-1])] if lost else []


def how(code: int) -> str:
    """An exit code in words: `exit code 3`, `killed by SIGKILL, often because memory ran out`."""
    if code >= 0:
        return f"exit code {code}"
    name = _name(-code)
    return f"killed by {name}, {_HINTS[name]}" if name in _HINTS else f"killed by {name}"


def to_peers(code: int) -> str:
    """The same for peers that miss the worker, as what is said after its name."""
    if code >= 0:
        return f"ended with {how(code)}" if code else "has finished: its program came to its end, with exit code 0"
    name = _name(-code)
    return f"was killed by {name} ({_HINTS[name]})" if name in _HINTS else f"was killed by {name}"


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class StderrTail:
    """The end of a worker's stderr, kept until it is known who failed first.

    The last traceback is kept whole, from its first line on, together with those it is chained to; of all the rest, the
    last lines. Memory is bounded: a run may write to stderr for weeks.
    """

    def __init__(self) -> None:
        self.traceback_at: float | None = None
        """When the traceback that is kept began, on the caller's clock; None if there was none."""
        self.num_tracebacks = 0
        """How many there have been; those of one chain count as one."""
        self._traceback: list[bytes] = []
        self._room_bytes = 0
        self._recent: deque[bytes] = deque(maxlen=_NUM_RECENT)
        self._num_left_out = 0
        self._last_text = b""

    def feed(self, line: bytes, now: float) -> None:
        """Take in the next line of stderr, without its end."""
        if line.startswith(_TRACEBACK_BEGINS):
            self._begin(self._lines() if self._last_text.decode(errors="replace") in _CHAIN_LINES else [], now)
        elif line and not line[:1].isspace():  # The exception itself: the frames are over.
            self._room_bytes = min(self._room_bytes, _MESSAGE_BYTES)
        self._keep(line)
        self._last_text = line.strip() or self._last_text

    def text(self) -> str:
        """The last traceback and what came after it, or the last lines."""
        return b"\n".join(self._lines()).decode(errors="replace").strip("\n")

    def _lines(self) -> list[bytes]:
        left_out = [b"... %d lines ..." % self._num_left_out] if self._num_left_out else []
        return [*self._traceback, *left_out, *self._recent]

    def _keep(self, line: bytes) -> None:
        if self._room_bytes > len(line) and not self._recent:
            self._traceback.append(line)
            self._room_bytes -= len(line) + 1
            return
        self._num_left_out += len(self._recent) == _NUM_RECENT
        self._recent.append(line[:_RECENT_BYTES])

    def _begin(self, chain: list[bytes], now: float) -> None:
        """A traceback begins, alone or as the next of a chain; what was kept of earlier ones can go."""
        if not chain:
            self.traceback_at = now
            self.num_tracebacks += 1
        self._traceback = chain
        self._recent.clear()
        self._num_left_out = 0
        self._room_bytes = _TRACEBACK_BYTES


def fold(text: str) -> str:
    """`text` with runs of our own frames as one line each.

    Where the error is one of ours, torch's frames say no more than ours do and are folded too, and an error that it is
    chained to is left out if no frame of the user's is in it. Frames of anybody else always stay.
    """
    first, *rest = _CHAINED.split(text)
    is_ours = any(line.startswith(_OUR_ERROR) for line in (rest or [first])[-1].splitlines())
    foldable = _OURS_OR_TORCHS if is_ours else _OURS
    shown = ""
    for chain, section in zip(["", *rest[::2]], [first, *rest[1::2]], strict=True):
        is_last = len(rest) == 0 or section is rest[-1]
        folded, has_others = _fold_section(section, foldable)
        if is_last or has_others or not is_ours:
            shown += f"\n\n{chain}\n\n{folded}" if shown else folded
    return shown


def error_line(text: str) -> str:
    """The first line of the error that a traceback ends with; of other text, its last line."""
    lines = _CHAINED.split(text)[-1].splitlines()
    begins = next((number for number, line in enumerate(lines) if line.startswith("Traceback ")), None)
    if begins is None:
        return lines[-1] if lines else ""
    return next((line for line in lines[begins + 1 :] if line[:1].strip()), lines[-1])


def _fold_section(text: str, foldable: re.Pattern[str]) -> tuple[str, bool]:
    """One traceback with its error, and whether it has a frame that was not folded."""
    shown: list[str] = []
    has_others = False
    num_folded = 0
    for frame in _frames(text.splitlines()):
        if foldable.match(frame[0]):
            num_folded += 1
            continue
        has_others |= frame[0].startswith('  File "')
        shown += _placeholder(num_folded) + frame
        num_folded = 0
    return "\n".join(shown + _placeholder(num_folded)), has_others


def _placeholder(num_frames: int) -> list[str]:
    return [f"  ... of lockstep, {num_frames} deep: LOCKSTEP_TRACEBACK=full shows it ..."] if num_frames else []


def _frames(lines: list[str]) -> Iterator[list[str]]:
    """The lines of a traceback, frame by frame; others one by one. What follows the error line is no frame."""
    frame: list[str] = []
    has_begun = is_over = False
    for line in lines:
        is_inside = frame and line.startswith(("    ", "  [Previous line repeated"))
        if is_inside and not is_over:
            frame.append(line)
            continue
        if frame:
            yield frame
            frame = []
        is_over |= has_begun and bool(line[:1].strip())
        has_begun |= line.startswith("Traceback ")
        if line.startswith('  File "') and not is_over:
            frame = [line]
        else:
            yield [line]
    if frame:
        yield frame
