"""What a run shows while it goes on: a line in the terminal, numbers in TensorBoard and in other trackers.

Worker 0's background thread calls the views with what it writes into `steps.jsonl`, so they must be cheap.
"""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any, Protocol, TextIO

from lockstep.terminal import LOG_EVERY_S, ProgressLine

CELL_S = 0.5
"""Between two lines in a notebook's cell, where each takes the place of the one before it."""
_LEAST_VERDICT = 40
"""Columns, with the space before it: "worker 12 holds everyone up by 190 ms"."""
_GROUPS = {
    "loss": "training", "grad_norm": "training", "lr": "training", "batch": "training", "noise_scale": "training",
    "samples_per_s": "speed", "efficiency": "speed", "wall_ms": "speed", "mfu": "speed",
    "sent_bytes": "communication", "bus_gb_per_s": "communication",
}  # fmt: skip
"""Which group of charts in TensorBoard a number of a step belongs to."""

StepLine = Mapping[str, Any]
"""A line of `steps.jsonl`, as a dict."""


class View(Protocol):
    """Who is shown the steps of a run."""

    def show(self, line: StepLine) -> None:
        """Take the newest step."""

    def close(self) -> None:
        """The run has ended, however it did."""


class StatusLine:
    """The run in one line. A run does not end because its terminal was closed."""

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] = time.monotonic, *, log_every_s: float = LOG_EVERY_S
    ) -> None:
        self._line = ProgressLine(stream, clock, log_every_s=log_every_s)

    def show(self, line: StepLine) -> None:
        """Take the newest step, and show it if it is time for it."""
        with contextlib.suppress(OSError, ValueError):
            self._line.tell(lambda width: status(line, width))

    def close(self) -> None:
        """Show the last step if it has not been shown, and begin a new line."""
        with contextlib.suppress(OSError, ValueError):
            self._line.close()


def status(line: StepLine, width: int | None = None) -> str:
    """A step in at most `width` columns; half a verdict still names the worker, so numbers make room for it."""
    facts, verdict = (
        describe(line),
        "".join(letter for letter in str(line.get("verdict") or "") if letter.isprintable()),
    )
    if width is None:
        return "  ".join([*facts, verdict] if verdict else facts)
    needed = min(len(verdict) + 2, _LEAST_VERDICT) if verdict else 0
    while len(facts) > 1 and len("  ".join(facts)) + needed > width:
        facts.pop()
    text = "  ".join(facts)[:width]
    room = width - len(text) - 2
    if not verdict or room < needed - 2:
        return text
    return f"{text}  {verdict if len(verdict) <= room else verdict[: room - 3] + '...'}"


def describe(line: StepLine) -> list[str]:
    """The step's numbers, the most important first; what is not known is left out."""
    facts = [f"step {line['step']}"]
    known = {name: line.get(name) for name in ("loss", "samples_per_s", "efficiency")}
    words = {"loss": "loss {:.4g}", "samples_per_s": "{:.4g} samples/s", "efficiency": "efficiency {:.0%}"}
    facts += [words[name].format(value).replace("%", " %") for name, value in known.items() if value is not None]
    exposed = [worker["shares_ms"].get("exposed", 0.0) for worker in line.get("workers") or ()]
    if len(exposed) > 1:
        facts.append(f"exposed {sum(exposed) / len(exposed):.3g} ms")
    return facts


class Tracker(Protocol):
    """Who keeps the numbers of runs, and compares them: see `lockstep.integrations.trackers`, or bring one of your own.

    Made on all workers, and used on worker 0 alone: opened and closed in the training thread, and called from one
    background thread in between.
    """

    def open(self) -> None:
        """A run begins: import and start what it takes."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """The numbers of a step, by names like `training/loss` and `speed/samples_per_s`."""

    def tell(self, step: int, verdict: str) -> None:
        """Who holds everyone up by now, and why; called when that changes."""

    def close(self) -> None:
        """The run has ended, however it did."""


class Tracked:
    """Shows steps to a tracker. One that fails in between is let go of, with a warning: the run goes on."""

    def __init__(self, tracker: Tracker) -> None:
        tracker.open()
        self._tracker: Tracker | None = tracker
        self._verdict = ""

    def show(self, line: StepLine) -> None:
        """Pass on the numbers of a step, and a new verdict."""
        if self._tracker is None:
            return
        step, verdict = int(line["step"]), str(line.get("verdict") or "")
        try:
            self._tracker.log(step, dict(scalars(line)))
            if verdict != self._verdict:
                self._verdict = verdict
                self._tracker.tell(step, verdict)
        except Exception as error:
            self._let_go(error)

    def close(self) -> None:
        """Let it end its run."""
        if self._tracker is not None:
            try:
                self._tracker.close()
            except Exception as error:
                self._let_go(error)

    def _let_go(self, error: Exception) -> None:
        name = type(self._tracker).__name__
        self._tracker = None
        warnings.warn(
            f"{name} took no numbers ({type(error).__name__}: {error}), and is given no more of this run. The training "
            "goes on; `lockstep report` shows the same numbers, where the run has a folder.",
            stacklevel=2,
        )


class TensorBoard:
    """Numbers as charts, verdicts as text, in `folder`: a `Tracker`."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        self._folder = str(folder)
        self._writer: Any = None

    def open(self) -> None:
        """Begin to write; without tensorboard, raises ImportError."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, global_step=step)

    def tell(self, step: int, verdict: str) -> None:
        """Write a verdict."""
        self._writer.add_text("verdict", verdict or "nobody holds the others up", global_step=step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def scalars(line: StepLine) -> Iterator[tuple[str, float]]:
    """The numbers of a step, by the names they get: finite ones, and the loss whatever it is."""
    for name, group in _GROUPS.items():
        value = line.get(name)
        if value is not None and (name == "loss" or math.isfinite(value)):
            yield f"{group}/{name}", float(value)
    workers = line.get("workers") or ()
    kinds = dict.fromkeys(kind for worker in workers for kind in worker["shares_ms"])
    for kind in kinds:
        yield f"time/{kind}_ms", sum(worker["shares_ms"].get(kind, 0.0) for worker in workers) / len(workers)
    if line.get("last") is not None:
        yield "straggler/worker", float(line["last"]["worker"])
        yield "straggler/late_ms", float(line["last"]["late_ms"])
