"""The folder that a watched run writes, as it is read: `run.json`, `steps.jsonl`, `trace.jsonl` and `hangs/`.

Lines are read one at a time, since a run of 100,000 steps does not fit into memory as objects. A run may still be going
on, or may have been cut off: a last line without an end is left out, and a line that cannot be read is counted. The
folder may be a stranger's: what is read is bounded, and only from regular files. Needs no torch.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from lockstep import files
from lockstep.errors import UsageError
from lockstep.watching.step_record import Flight, TimeSpan

VERSION = 1
"""The newest format that can be read."""

NUMBERS = (
    "wall_ms", "loss", "grad_norm", "lr", "batch", "samples_per_s", "efficiency", "sent_bytes", "bus_gb_per_s", "mfu",
    "noise_scale",
)  # fmt: skip
"""Of a step, all but what is said per worker."""

_MOST_BYTES = 1 << 28
"""Of a line, and of a file that is read as a whole: more than 16,384 workers need, and no more than memory has."""
_MOST_WORKERS = 1 << 17
"""A line of the trace is written for each."""
_MOST_COUNTED = 2**63
"""Bytes, and parameters."""
_MOST_US = 1e15
"""Thirty years."""
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
"""What reading a line raises that is not as it should be."""

_Parsed = TypeVar("_Parsed")

StepLine = dict[str, Any]
"""A line of steps.jsonl, as `run_writer.step_line` makes it."""


@dataclass(frozen=True, slots=True)
class BucketFacts:
    """A bucket of gradients, as the run had it."""

    place: int
    num_bytes: int
    params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What does not change from step to step."""

    lockstep: str
    torch: str
    started: str
    """Date and time in UTC, as ISO 8601."""
    script: str
    size: int
    device: str
    backend: str
    hosts: tuple[str, ...]
    """One per worker."""
    num_params: int
    grad_bytes: int
    buckets: tuple[BucketFacts, ...]
    single_ms: float | None
    """A worker's own step without communication, measured in the same run."""

    def host(self, rank: int) -> str:
        """Where a worker runs; "" if not known, or if it tells nobody apart since all are there."""
        return self.hosts[rank] if 0 <= rank < len(self.hosts) and len(set(self.hosts)) > 1 else ""


@dataclass(frozen=True, slots=True)
class WorkerTrace:
    """The detail of one step on one worker, in microseconds since the run began."""

    rank: int
    spans: tuple[TimeSpan, ...]
    flights: tuple[Flight, ...]


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One line of trace.jsonl."""

    step: int
    workers: tuple[WorkerTrace, ...]


GENERATIONS = "generations.jsonl"
"""Written by the launcher of an elastic run, a line for each generation."""
_RANKS = ("members", "lost", "left", "joined", "shards")


@dataclass(frozen=True, slots=True)
class HangFacts:
    """A hang, as it was reported."""

    step: int | None
    bucket: int | None
    params: tuple[str, ...]
    missing: tuple[int, ...]
    text: str
    """The whole report."""
    stacks: Mapping[str, str]
    """What each worker was doing, by the name of its file."""


@dataclass(frozen=True, slots=True)
class GenerationFacts:
    """One generation of an elastic run: who trained, and what it took to come to that."""

    number: int
    at_s: float
    """When it was decided, in seconds since 1970."""
    members: tuple[int, ...]
    lost: tuple[int, ...]
    left: tuple[int, ...]
    joined: tuple[int, ...]
    shards: tuple[int, ...]
    """How many each member has; empty where that is not known."""
    took_s: float
    """From when worker 0 knew of the change until it trained again."""
    replayed: int
    """Steps that were made again, besides the one under way."""


class RunFolder:
    """A run's folder: `steps` and `trace_places` go through a file, and count the lines that they skip."""

    def __init__(self, folder: Path) -> None:
        """Read what does not change; raises UsageError if this is not the folder of a run that can be read."""
        self.folder = folder
        self.run = _read_run(folder)
        self._skipped: dict[str, int] = {}
        self._places: dict[int, int] | None = None

    @property
    def num_skipped(self) -> int:
        """Lines that could not be read, in the last pass over each file."""
        return sum(self._skipped.values())

    def num_lines(self) -> int:
        """About how many steps there are: fast, since nothing is read into objects."""
        with contextlib.suppress(OSError), files.open_regular(self.folder / "steps.jsonl") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
        return 0

    def steps(self) -> Iterator[StepLine]:
        """Every step, in the order written; each number of it can be computed with."""
        return (step for _, step in self._placed("steps.jsonl", _step))

    def trace_places(self) -> dict[int, int]:
        """Where in the file each step's detail begins, for `trace_at`."""
        if self._places is None:
            placed = self._placed("trace.jsonl", _trace)
            self._places = {trace.step: place for place, trace in placed if trace.workers}
        return self._places

    def trace_at(self, place: int) -> StepTrace:
        """The detail that begins there."""
        with files.open_regular(self.folder / "trace.jsonl") as file:
            file.seek(place)
            return _trace(json.loads(file.readline(_MOST_BYTES)))

    def generations(self) -> list[GenerationFacts]:
        """Those of an elastic run, which its launcher has written down; none for any other."""
        return [facts for _, facts in self._placed(GENERATIONS, _generation)]

    def hang(self) -> HangFacts | None:
        """The hang that was reported, if any."""
        # The files are there, empty, while all is well.
        texts = {path.stem: _text(path) for path in sorted(self.folder.glob("hangs/worker-*.txt"), key=_rank)}
        stacks = {name: text for name, text in texts.items() if text.strip()}
        text = _text(self.folder / "hangs" / "hang.json")
        if not text:
            return HangFacts(None, None, (), (), "", stacks) if stacks else None
        try:
            facts = json.loads(text)
            step, bucket = (None if facts.get(name) is None else int(facts[name]) for name in ("step", "bucket"))
            params, missing = map(str, facts.get("params") or ()), map(int, facts.get("missing") or ())
            return HangFacts(step, bucket, tuple(params), tuple(missing), str(facts.get("text") or ""), stacks)
        except _DAMAGE:
            return HangFacts(None, None, (), (), text, stacks)

    def _placed(self, name: str, parse: Callable[[Any], _Parsed]) -> Iterator[tuple[int, _Parsed]]:
        """The lines of a file, each with the place of its first byte; none if it cannot be opened."""
        self._skipped[name] = place = 0
        try:
            file = files.open_regular(self.folder / name)
        except OSError:
            return
        with file:
            for line in iter(lambda: file.readline(_MOST_BYTES), b""):
                try:
                    yield place, parse(json.loads(line))
                except _DAMAGE:
                    # The end of a file that is still being written is no damage.
                    self._skipped[name] += line.endswith(b"\n") and not line.isspace()
                place += len(line)


# Parsing: each raises one of _DAMAGE where something is not as it should be.


def _read_run(folder: Path) -> RunFacts:
    path = folder / "run.json"
    if not path.exists():
        what = f"'{folder}' is not the folder of a watched run: it has no run.json"
        if not folder.is_dir():
            what = f"there is no folder '{folder}'"
        raise UsageError(
            f"{what}. Give the folder itself that was named to `lockstep run --watch=FOLDER` or to "
            f"lockstep.watch(model, folder=...)."
        )
    try:
        facts = json.loads(files.read_bounded(path, _MOST_BYTES))
        version = int(facts["version"])
        run = _run(facts) if version <= VERSION else None
    except (OSError, *_DAMAGE) as error:
        raise UsageError(
            f"'{path}' cannot be read ({type(error).__name__}: {error}), and without it nothing can be said of the "
            f"run. If the run is starting just now, try again; else the file is damaged."
        ) from error
    if run is None:
        raise UsageError(
            f"'{folder}' was written by Lockstep {facts.get('lockstep', '?')} in format {version}, and this one reads "
            f"formats up to {VERSION}. Install that version or a newer one: pip install -U lockstep-torch."
        )
    return run


def _run(facts: Any) -> RunFacts:
    return RunFacts(
        lockstep=str(facts.get("lockstep", "?")),
        torch=str(facts.get("torch", "?")),
        started=str(facts.get("started") or ""),
        script=str(facts.get("script") or "training"),
        size=_within(facts["size"], 1, _MOST_WORKERS, "size"),
        device=str(facts.get("device") or ""),
        backend=str(facts.get("backend") or ""),
        hosts=tuple(map(str, facts.get("hosts") or ())),
        num_params=_within(facts.get("num_params") or 0, 0, _MOST_COUNTED, "num_params"),
        grad_bytes=_within(facts.get("grad_bytes") or 0, 0, _MOST_COUNTED, "grad_bytes"),
        buckets=tuple(
            BucketFacts(*_bucket(each), tuple(map(str, each.get("params") or ())))
            for each in facts.get("buckets") or ()
        ),
        single_ms=_number(facts.get("single_ms")),
    )


def _step(line: Any) -> StepLine:
    line["step"] = _within(line["step"], 0, 2**53, "step")
    line["verdict"] = str(line.get("verdict") or "")
    for name in ("time", *NUMBERS):
        line[name] = _number(line.get(name))
    if last := line.setdefault("last", None):
        line["last"] = {"worker": int(last["worker"]), "late_ms": float(last["late_ms"]), "cause": str(last["cause"])}
    for worker in line["workers"]:
        # Only tried: to convert each share would take longer than all else.
        float(sum(worker["shares_ms"].values()))
        worker["rank"], worker["hidden_ms"] = int(worker["rank"]), float(worker.get("hidden_ms") or 0.0)
        worker["begin_us"], worker["wall_ms"] = float(worker["begin_us"]), float(worker["wall_ms"])
    return cast(StepLine, line)


def _trace(facts: Any) -> StepTrace:
    return StepTrace(_within(facts["step"], 0, 2**53, "step"), tuple(map(_worker_trace, facts["workers"])))


def _worker_trace(facts: Any) -> WorkerTrace:
    spans = tuple(TimeSpan(str(name), _moment(begin), _moment(end)) for name, begin, end in facts["spans"])
    flights = (_flight(each) for each in facts.get("buckets") or ())
    return WorkerTrace(int(facts["rank"]), spans, tuple(each for each in flights if each is not None))


def _flight(facts: Any) -> Flight | None:
    times = [facts[name] for name in ("ready_us", "launched_us", "reduced_us")]
    if None in times:  # A bucket that never came back.
        return None
    return Flight(*_bucket(facts), *map(_moment, times))


def _generation(facts: Any) -> GenerationFacts:
    ranks = {name: tuple(int(each) for each in facts.get(name, ())) for name in _RANKS}
    took_s, replayed = float(facts.get("took_s", 0.0)), int(facts.get("replayed", 0))
    return GenerationFacts(int(facts["number"]), float(facts["at_s"]), **ranks, took_s=took_s, replayed=replayed)


def _bucket(facts: Any) -> tuple[int, int]:
    """Its place in the launch order, and its bytes."""
    return int(facts["place"]), _within(facts["num_bytes"], 0, _MOST_COUNTED, "num_bytes")


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _moment(value: Any) -> float:
    """Microseconds since the run began: a number that can be drawn."""
    if not abs(float(value)) < _MOST_US:
        raise ValueError(f"no moment of a run: {value}")
    return float(value)


def _within(value: Any, least: int, most: int, name: str) -> int:
    if not least <= int(value) <= most:
        raise ValueError(f"{name} is {value}, and {least} to {most} can be")
    return int(value)


def _text(path: Path) -> str:
    try:
        return files.read_bounded(path, _MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _rank(path: Path) -> tuple[int, str]:
    digits = path.stem.removeprefix("worker-")
    return (int(digits) if digits.isdecimal() else 0, digits)
