"""Steps in detail: timelines for the page of a run, and a Chrome trace that Perfetto and chrome://tracing open.

A timeline has a track per worker, its buckets beneath, and the reductions that all of them wait for. A reduction begins
when the last worker has handed its bucket over.

In the trace a worker is a process with three groups of tracks: the step's spans, its buckets (from when they are full
until they are handed over) and its reductions (from then until the sum is there); an arrow leads from a bucket to its
reduction. Throughput and efficiency are counters of a process of their own. Times are microseconds since the run began.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.watching.number_format import milliseconds, size
from lockstep.watching.run_folder import RunFolder, StepTrace, WorkerTrace
from lockstep.watching.run_report import RunReport
from lockstep.watching.step_record import SHARES

_MOST_TRACKS = 16
"""Workers that a timeline shows."""
_MOST_MARKS = 4000
"""Of all timelines of a page: about 500 kB."""
_MOST_ROWS = 4
"""Rows of buckets in a timeline that are on their way at the same time."""
_MOST_EVENTS = 150_000
"""About 17 MB: what browsers open without trouble. Of longer runs, only every k-th step with detail is taken."""
_MOST_COUNTS = 5000
"""Values of a counter."""
_MOST_LANES = 16
_STEP, _BUCKETS, _REDUCTIONS = 1, 100, 200
"""Track numbers within a worker; buckets and reductions have as many as overlap."""

TraceRow = dict[str, Any]


# Of the page


@dataclass(frozen=True, slots=True)
class ReductionSpan:
    """A bucket's sum over the workers, as far as it can be told from their times, in microseconds."""

    place: int
    num_bytes: int
    begin: float
    """When the last worker had handed it over."""
    end: float
    last_rank: int
    """That worker."""


def reductions(workers: Iterable[WorkerTrace]) -> list[ReductionSpan]:
    """The reductions of a step, in the order in which they began."""
    flights: dict[int, list[tuple[float, float, int, int]]] = {}
    for worker in workers:
        for each in worker.flights:
            flights.setdefault(each.place, []).append((each.launched, each.reduced, worker.rank, each.num_bytes))
    found = []
    for place, parts in flights.items():
        launched, _, rank, num_bytes = max(parts, key=lambda part: part[0])
        found.append(ReductionSpan(place, num_bytes, launched, max(reduced for _, reduced, _, _ in parts), rank))
    return sorted(found, key=lambda reduction: reduction.begin)


def lanes(stretches: Sequence[tuple[float, float]], most: int = _MOST_ROWS) -> list[int]:
    """A row for each stretch of time, so that those in one row do not overlap, as far as rows last."""
    ends: list[float] = []
    rows = [0] * len(stretches)
    for place in sorted(range(len(stretches)), key=lambda place: stretches[place]):
        begin, end = stretches[place]
        row = next((row for row, until in enumerate(ends) if until <= begin), len(ends))
        if row == most:
            row = ends.index(min(ends))
        if row == len(ends):
            ends.append(end)
        rows[place], ends[row] = row, max(end, ends[row])
    return rows


def timelines(report: RunReport) -> list[dict[str, Any]]:
    """The steps that have detail, as many as are affordable; places are in per cent of the step."""
    took = dict(zip(report.steps.tolist(), report.columns["wall_ms"].tolist(), strict=True))
    shown: list[dict[str, Any]] = []
    marks = 0
    for trace in report.traces:
        counts = sorted((len(each.spans) + 2 * len(each.flights) for each in trace.workers), reverse=True)
        marks += sum(counts[:_MOST_TRACKS])
        if shown and marks > _MOST_MARKS:
            break
        if counts and counts[0]:
            role = (" (a typical one)", " (the slowest with detail)")[len(shown)] if len(shown) < 2 else ""
            time = f", {milliseconds(took[trace.step])}" if trace.step in took else ""
            shown.append(_timeline(report, trace, f"step {trace.step:,}{time}{role}"))
    return shown


def _timeline(report: RunReport, trace: StepTrace, name: str) -> dict[str, Any]:
    there = [each for each in trace.workers if each.spans or each.flights]
    ready_last = sorted(
        there,
        key=lambda each: max((flight.launched for flight in each.flights), default=each.spans[-1].end),
        reverse=True,
    )[:_MOST_TRACKS]
    workers = sorted(ready_last, key=lambda each: each.rank)
    moments = [moment for each in workers for span in each.spans for moment in (span.begin, span.end)]
    moments += [moment for each in workers for flight in each.flights for moment in (flight.ready, flight.reduced)]
    begin, end = min(moments), max(max(moments), min(moments) + 1)

    def x(moment: float) -> float:
        return round(100 * (moment - begin) / (end - begin), 2)

    found = reductions(trace.workers)
    rows = lanes([(each.begin, each.end) for each in found])
    note = f"{len(workers)} of {len(trace.workers)} workers: those that were ready last."
    return {
        "step": trace.step,
        "name": name,
        "label": f"Timeline of step {trace.step:,}. " + " ".join(_told(each) for each in workers),
        "note": note if len(workers) < len(trace.workers) else "",
        "ms": (end - begin) / 1e3,
        "workers": [_track(report, each, x) for each in workers],
        "reductions": [
            (
                row,
                each.place,
                x(each.begin),
                x(each.end),
                each.last_rank,
                f"bucket {each.place}, {size(each.num_bytes)}: {milliseconds((each.end - each.begin) / 1e3)} after "
                f"worker {each.last_rank} had handed it over, the last one",
            )
            for each, row in zip(found, rows, strict=True)
        ],
        "num_lanes": max(rows, default=-1) + 1,
    }


def _track(report: RunReport, worker: WorkerTrace, x: Callable[[float], float]) -> dict[str, Any]:
    host = report.run.host(worker.rank)
    is_straggler = report.straggler is not None and report.straggler.rank == worker.rank
    spans = []
    for span in worker.spans:
        name, took = span.name if span.name in SHARES else "other", milliseconds(span.length / 1e3)
        title = f"worker {worker.rank}: {name}, {took}"
        spans.append((name, x(span.begin), round(x(span.end) - x(span.begin), 2), took, title))
    rows = lanes([(flight.ready, flight.reduced) for flight in worker.flights])
    flights = []
    for flight, row in zip(worker.flights, rows, strict=True):
        title = (
            f"worker {worker.rank}: bucket {flight.place} ({size(flight.num_bytes)}) waited "
            f"{milliseconds((flight.launched - flight.ready) / 1e3)} for its turn, then "
            f"{milliseconds((flight.reduced - flight.launched) / 1e3)} until reduced"
        )
        flights.append((row, x(flight.ready), x(flight.launched), x(flight.reduced), title))
    where = f" on {host}" if host else ""
    return {
        "rank": worker.rank,
        "name": f"worker {worker.rank}{where}{' · the straggler' if is_straggler else ''}",
        "spans": spans,
        "flights": flights,
        "num_lanes": max(rows, default=-1) + 1,
    }


def _told(worker: WorkerTrace) -> str:
    sums: dict[str, float] = {}
    for span in worker.spans:
        sums[span.name] = sums.get(span.name, 0.0) + span.length / 1e3
    return f"Worker {worker.rank}: {', '.join(f'{name} {milliseconds(ms)}' for name, ms in sums.items())}."


# The trace


def write_trace(path: Path, folder: RunFolder, report: RunReport) -> None:
    """Write the whole trace, one event a line, without ever holding it."""
    facts = {"script": report.run.script, "lockstep": report.run.lockstep, "torch": report.run.torch}
    with path.open("w", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(facts)}, "traceEvents": [\n')
        for place, event in enumerate(_events(folder, report)):
            file.write((",\n" if place else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def _events(folder: RunFolder, report: RunReport) -> Iterator[TraceRow]:
    """Everything there is to show, names first."""
    ranks = {worker.rank for trace in report.traces for worker in trace.workers} | set(range(report.run.size))
    for rank in sorted(ranks):
        yield from _names(rank, report.run.host(rank))
    yield from _counters(report, process=max(ranks, default=0) + 1)
    places = sorted(folder.trace_places().values())
    every = _every(report.traces, len(places))
    for place in places[::every]:
        yield from _step_events(folder.trace_at(place))


def _step_events(trace: StepTrace) -> Iterator[TraceRow]:
    """A step on all workers."""
    for worker in trace.workers:
        if worker.spans:
            begin, end = min(s.begin for s in worker.spans), max(s.end for s in worker.spans)
            yield _slice(worker.rank, _STEP, f"step {trace.step}", begin, end)
        for span in worker.spans:
            yield _slice(worker.rank, _STEP, span.name, span.begin, span.end)
        yield from _flights(trace.step, worker)


def _counters(report: RunReport, process: int) -> Iterator[TraceRow]:
    """Throughput and efficiency, where they are known, at the beginning of their steps."""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": "run"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": -1}}
    every = -(-report.steps.size // _MOST_COUNTS) or 1
    for name, title in (("samples_per_s", "throughput (samples/s)"), ("efficiency", "efficiency")):
        pairs = zip(report.begins_us[::every].tolist(), report.columns[name][::every].tolist(), strict=True)
        for begin, value in pairs:
            if math.isfinite(begin) and math.isfinite(value):
                yield {"ph": "C", "name": title, "pid": process, "ts": _us(begin), "args": {"value": round(value, 4)}}


def _flights(step: int, worker: WorkerTrace) -> Iterator[TraceRow]:
    """Slices that overlap on one track are not drawn, so each goes to a track where there is room."""
    held = lanes([(each.ready, each.launched) for each in worker.flights], _MOST_LANES)
    flying = lanes([(each.launched, each.reduced) for each in worker.flights], _MOST_LANES)
    for flight, above, below in zip(worker.flights, held, flying, strict=True):
        name = f"bucket {flight.place}"
        facts = {"size": size(flight.num_bytes), "step": step}
        bucket, reduction = _BUCKETS + above, _REDUCTIONS + below
        yield _slice(worker.rank, bucket, name, flight.ready, flight.launched, facts)
        yield _slice(worker.rank, reduction, f"reduce {name}", flight.launched, flight.reduced, facts)
        flow = {"cat": "bucket", "name": "launched", "id": f"{step}.{worker.rank}.{flight.place}", "pid": worker.rank}
        # An arrow is tied to the slice around its time: its beginning belongs to it, its end does not.
        yield {"ph": "s", **flow, "tid": bucket, "ts": _us(flight.ready)}
        yield {"ph": "f", "bp": "e", **flow, "tid": reduction, "ts": _us(flight.launched)}


def _names(rank: int, host: str) -> Iterator[TraceRow]:
    title = f"worker {rank}" + (f" ({host})" if host else "")
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": title}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    tracks = [(_STEP, "step")]
    for first, name in ((_BUCKETS, "buckets"), (_REDUCTIONS, "reductions")):
        tracks += [(first + lane, f"{name} {lane + 1}" if lane else name) for lane in range(_MOST_LANES)]
    for track, name in tracks:
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": track, "args": {"sort_index": track}}


def _slice(pid: int, tid: int, name: str, begin_us: float, end_us: float, facts: TraceRow | None = None) -> TraceRow:
    event = {"ph": "X", "name": name, "cat": "lockstep", "pid": pid, "tid": tid, "ts": _us(begin_us)}
    event["dur"] = max(0.0, _us(_us(end_us) - _us(begin_us)))
    return {**event, "args": facts} if facts else event


def _every(traces: tuple[StepTrace, ...], num_steps: int) -> int:
    """Which steps to take so that the trace stays small enough."""
    per_step = max((sum(1 for _ in _step_events(trace)) for trace in traces[:1]), default=0)
    return max(1, -(-num_steps * per_step // _MOST_EVENTS))


def _us(value: float) -> float:
    return round(value, 3)
