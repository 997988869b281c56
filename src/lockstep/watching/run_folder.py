"""The folder that a watched run writes, as it is read: `run.json`, `steps.jsonl`, `trace.jsonl` and `hangs/`.

Lines are read one at a time, since a run of 100,000 steps does not fit into memory as objects. A run may still be going
on, or may have been cut off: a last line without an end is left out, and a line that cannot be read is counted.
Needs no torch.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import UsageError
from lockstep.watching.run_record import (
    NUMBERS,
    Bucket,
    Flight,
    Hang,
    Last,
    Run,
    Span,
    Step,
    Trace,
    WorkerTime,
    WorkerTrace,
)

VERSION = 1
"""The newest format that can be read."""

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
"""What reading a line raises that is not as it should be."""

_Record = TypeVar("_Record")


class RunFolder:
    """A run's folder: `steps()` and `traces()` read it anew each time, and count what they skip."""

    def __init__(self, folder: Path) -> None:
        """Read what does not change; raises UsageError if this is not the folder of a run that can be read."""
        self.folder = folder
        self.run = _read_run(folder)
        self.num_skipped = 0
        """Lines that could not be read, in the last pass over each file."""
        self._skipped: dict[str, int] = {}
        self._places: dict[int, int] | None = None

    def num_lines(self) -> int:
        """About how many steps there are: fast, since nothing is read into objects."""
        path = self.folder / "steps.jsonl"
        if not path.is_file():
            return 0
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))

    def steps(self) -> Iterator[Step]:
        """Every step, in the order written."""
        return (step for _, step in self._placed("steps.jsonl", _step))

    def traces(self) -> Iterator[Trace]:
        """The detail of the steps that have one, in the order written."""
        return (trace for _, trace in self._placed("trace.jsonl", _trace))

    def trace_places(self) -> dict[int, int]:
        """Where in the file each step's detail begins, for `trace_at`."""
        if self._places is None:
            placed = self._placed("trace.jsonl", _trace)
            self._places = {trace.step: place for place, trace in placed if trace.workers}
        return self._places

    def trace_at(self, place: int) -> Trace:
        """The detail that begins there."""
        with (self.folder / "trace.jsonl").open("rb") as file:
            file.seek(place)
            return _trace(json.loads(file.readline()))

    def hang(self) -> Hang | None:
        """The hang that was reported, if any."""
        # The files are there, empty, while all is well.
        texts = {path.stem: _text(path) for path in sorted(self.folder.glob("hangs/worker-*.txt"), key=_rank)}
        stacks = {name: text for name, text in texts.items() if text.strip()}
        path = self.folder / "hangs" / "hang.json"
        try:
            return _hang(json.loads(path.read_bytes()), stacks)
        except FileNotFoundError:
            return Hang(None, None, (), (), "", stacks) if stacks else None
        except _DAMAGE:
            return Hang(None, None, (), (), _text(path), stacks)

    def _placed(self, name: str, parse: Callable[[Any], _Record]) -> Iterator[tuple[int, _Record]]:
        """The records of a file, each with the place of its first byte."""
        path, skipped, place = self.folder / name, 0, 0
        if path.is_file():
            with path.open("rb") as file:
                for line in file:
                    try:
                        yield place, parse(json.loads(line))
                    except _DAMAGE:
                        # The end of a file that is still being written is no damage.
                        skipped += line.endswith(b"\n") and not line.isspace()
                    place += len(line)
        self._skipped[name] = skipped
        self.num_skipped = sum(self._skipped.values())


def _read_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise UsageError(
            f"there is no folder '{folder}'. Give the folder that a watched run wrote: one that was started by "
            f"`lockstep run --watch=FOLDER ...` or that calls lockstep.watch(model, folder=...)."
        )
    path = folder / "run.json"
    if not path.is_file():
        raise UsageError(
            f"'{folder}' is not the folder of a watched run: it has no run.json. Give the folder itself that was named "
            f"to `lockstep run --watch=FOLDER` or to lockstep.watch."
        )
    try:
        facts = json.loads(path.read_bytes())
        version = int(facts["version"])
        written_by = str(facts.get("lockstep", "?"))
        run = _run(facts) if version <= VERSION else None
    except _DAMAGE as error:
        raise UsageError(
            f"'{path}' cannot be read ({type(error).__name__}: {error}), and without it nothing can be said of the "
            f"run. If the run is starting just now, try again; else the file is damaged."
        ) from error
    if run is None:
        raise UsageError(
            f"'{folder}' was written by Lockstep {written_by} in format {version}, and this one reads formats up to "
            f"{VERSION}. Install that version or a newer one: pip install -U lockstep-torch."
        )
    return run


def _run(facts: Any) -> Run:
    return Run(
        lockstep=str(facts.get("lockstep", "?")),
        torch=str(facts.get("torch", "?")),
        started=str(facts.get("started") or ""),
        script=str(facts.get("script") or "training"),
        size=int(facts["size"]),
        device=str(facts.get("device") or ""),
        backend=str(facts.get("backend") or ""),
        hosts=tuple(map(str, facts.get("hosts") or ())),
        num_params=int(facts.get("num_params") or 0),
        grad_bytes=int(facts.get("grad_bytes") or 0),
        buckets=tuple(_bucket(each) for each in facts.get("buckets") or ()),
        single_ms=_number(facts.get("single_ms")),
    )


def _bucket(facts: Any) -> Bucket:
    return Bucket(int(facts["place"]), int(facts["num_bytes"]), tuple(map(str, facts.get("params") or ())))


def _step(facts: Any) -> Step:
    last = facts.get("last")
    return Step(
        step=int(facts["step"]),
        time=_number(facts.get("time")),
        numbers={name: _number(facts.get(name)) for name in NUMBERS},
        last=None if last is None else Last(int(last["worker"]), float(last["late_ms"]), str(last["cause"])),
        verdict=str(facts.get("verdict") or ""),
        workers=tuple(map(_worker_time, facts["workers"])),
    )


def _worker_time(facts: Any) -> WorkerTime:
    shares = facts["shares_ms"]
    float(sum(shares.values()))  # Fails if one is no number; a copy of each would take longer than all else.
    hidden = float(facts.get("hidden_ms") or 0.0)
    return WorkerTime(int(facts["rank"]), float(facts["begin_us"]), float(facts["wall_ms"]), hidden, shares)


def _trace(facts: Any) -> Trace:
    return Trace(int(facts["step"]), tuple(map(_worker_trace, facts["workers"])))


def _worker_trace(facts: Any) -> WorkerTrace:
    spans = tuple(Span(str(kind), float(begin), float(end)) for kind, begin, end in facts["spans"])
    flights = (_flight(each) for each in facts.get("buckets") or ())
    return WorkerTrace(int(facts["rank"]), spans, tuple(each for each in flights if each is not None))


def _flight(facts: Any) -> Flight | None:
    times = [facts[name] for name in ("ready_us", "launched_us", "reduced_us")]
    if None in times:  # A bucket that never came back.
        return None
    return Flight(int(facts["place"]), int(facts["num_bytes"]), *map(float, times))


def _hang(facts: Any, stacks: Mapping[str, str]) -> Hang:
    step, bucket = (None if facts.get(name) is None else int(facts[name]) for name in ("step", "bucket"))
    params, missing = tuple(map(str, facts.get("params") or ())), tuple(map(int, facts.get("missing") or ()))
    return Hang(step, bucket, params, missing, str(facts.get("text") or ""), stacks)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _rank(path: Path) -> tuple[int, str]:
    digits = path.stem.removeprefix("worker-")
    return (int(digits) if digits.isdecimal() else 0, digits)
