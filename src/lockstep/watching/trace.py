"""The run's detail as a Chrome trace, which Perfetto and chrome://tracing open.

A process per worker with three groups of tracks: the step's spans, its buckets (from when they are full until they are
handed over) and its reductions (from then until the sum is there); an arrow leads from a bucket to its reduction.
Throughput and efficiency are counters of a process of their own. Times are microseconds since the run began.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.watching.page_timeline import lanes
from lockstep.watching.page_words import size
from lockstep.watching.report import Report, ranks_of
from lockstep.watching.run_folder import RunFolder
from lockstep.watching.run_record import Trace, WorkerTrace

_MOST_EVENTS = 150_000
"""About 17 MB: what browsers open without trouble. Of longer runs, only every k-th step with detail is taken."""
_MOST_COUNTS = 5000
"""Values of a counter."""
_MOST_LANES = 16
_STEP, _BUCKETS, _REDUCTIONS = 1, 100, 200
"""Track numbers within a worker; buckets and reductions have as many as overlap."""

Event = dict[str, Any]


def write(path: Path, folder: RunFolder, report: Report) -> None:
    """Write the whole trace, one event a line, without ever holding it."""
    facts = {"script": report.run.script, "lockstep": report.run.lockstep, "torch": report.run.torch}
    with path.open("w", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(facts)}, "traceEvents": [\n')
        for place, event in enumerate(events(folder, report)):
            file.write((",\n" if place else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def events(folder: RunFolder, report: Report) -> Iterator[Event]:
    """Everything there is to show, names first."""
    ranks = ranks_of(report.traces) | set(range(report.run.size))
    for rank in sorted(ranks):
        yield from _names(rank, report.run.host(rank))
    yield from counters(report, process=max(ranks, default=0) + 1)
    places = sorted(folder.trace_places().values())
    every = _every(report.traces, len(places))
    for place in places[::every]:
        yield from step_events(folder.trace_at(place))


def step_events(trace: Trace) -> Iterator[Event]:
    """A step on all workers."""
    for worker in trace.workers:
        if worker.spans:
            begin, end = min(s.begin_us for s in worker.spans), max(s.end_us for s in worker.spans)
            yield _slice(worker.rank, _STEP, f"step {trace.step}", begin, end)
        for span in worker.spans:
            yield _slice(worker.rank, _STEP, span.kind, span.begin_us, span.end_us)
        yield from _flights(trace.step, worker)


def counters(report: Report, process: int) -> Iterator[Event]:
    """Throughput and efficiency, where they are known, at the beginning of their steps."""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": "run"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": -1}}
    every = -(-report.steps.size // _MOST_COUNTS) or 1
    for name, title in (("samples_per_s", "throughput (samples/s)"), ("efficiency", "efficiency")):
        pairs = zip(report.begins_us[::every].tolist(), report.columns[name][::every].tolist(), strict=True)
        for begin, value in pairs:
            if math.isfinite(begin) and math.isfinite(value):
                yield {"ph": "C", "name": title, "pid": process, "ts": _us(begin), "args": {"value": round(value, 4)}}


def _flights(step: int, worker: WorkerTrace) -> Iterator[Event]:
    """Slices that overlap on one track are not drawn, so each goes to a track where there is room."""
    held = lanes([(each.ready_us, each.launched_us) for each in worker.flights], _MOST_LANES)
    flying = lanes([(each.launched_us, each.reduced_us) for each in worker.flights], _MOST_LANES)
    for flight, above, below in zip(worker.flights, held, flying, strict=True):
        name = f"bucket {flight.place}"
        facts = {"size": size(flight.num_bytes), "step": step}
        bucket, reduction = _BUCKETS + above, _REDUCTIONS + below
        yield _slice(worker.rank, bucket, name, flight.ready_us, flight.launched_us, facts)
        yield _slice(worker.rank, reduction, f"reduce {name}", flight.launched_us, flight.reduced_us, facts)
        flow = {"cat": "bucket", "name": "launched", "id": f"{step}.{worker.rank}.{flight.place}", "pid": worker.rank}
        # An arrow is tied to the slice around its time: its beginning belongs to it, its end does not.
        yield {"ph": "s", **flow, "tid": bucket, "ts": _us(flight.ready_us)}
        yield {"ph": "f", "bp": "e", **flow, "tid": reduction, "ts": _us(flight.launched_us)}


def _names(rank: int, host: str) -> Iterator[Event]:
    title = f"worker {rank}" + (f" ({host})" if host else "")
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": title}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    tracks = [(_STEP, "step")]
    for first, name in ((_BUCKETS, "buckets"), (_REDUCTIONS, "reductions")):
        tracks += [(first + lane, f"{name} {lane + 1}" if lane else name) for lane in range(_MOST_LANES)]
    for track, name in tracks:
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": track, "args": {"sort_index": track}}


def _slice(pid: int, tid: int, name: str, begin_us: float, end_us: float, facts: Event | None = None) -> Event:
    event = {"ph": "X", "name": name, "cat": "lockstep", "pid": pid, "tid": tid, "ts": _us(begin_us)}
    event["dur"] = max(0.0, _us(_us(end_us) - _us(begin_us)))
    return {**event, "args": facts} if facts else event


def _every(traces: tuple[Trace, ...], num_steps: int) -> int:
    """Which steps to take so that the trace stays small enough."""
    per_step = max((sum(1 for _ in step_events(trace)) for trace in traces[:1]), default=0)
    return max(1, -(-num_steps * per_step // _MOST_EVENTS))


def _us(value: float) -> float:
    return round(value, 3)
