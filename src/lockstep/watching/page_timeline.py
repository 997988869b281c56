"""The timeline of a step: a track per worker, its buckets beneath, and the reductions that all of them wait for.

Places are in per cent of the width and heights in pixels, so that text keeps its size. A reduction begins when the last
worker has handed its bucket over; an arrow leads to it from that worker.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.watching.page_scale import ticks_within
from lockstep.watching.page_words import escaped, milliseconds, rounded, size
from lockstep.watching.report import Report
from lockstep.watching.run_record import KINDS, Flight, Trace, WorkerTrace

MOST_WORKERS = 16
"""Tracks that a timeline shows."""
_MOST_MARKS = 4000
"""Of all timelines of a page: about 800 kB."""
_MOST_LANES = 4
"""Rows of buckets that are on their way at the same time."""

_TOP, _NAME, _BAR, _LANE, _GAP = 24, 17, 22, 9, 12
"""Heights in pixels: of the axis, a worker's name, its bar, a row of buckets, and what is between workers."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """A bucket's sum over the workers, as far as it can be told from their times."""

    place: int
    num_bytes: int
    begin_us: float
    """When the last worker had handed it over."""
    end_us: float
    last_rank: int
    """That worker."""


@dataclass(frozen=True, slots=True)
class _Frame:
    begin_us: float
    end_us: float

    def x(self, us: float) -> float:
        return 100 * (us - self.begin_us) / (self.end_us - self.begin_us)


def timelines(report: Report) -> str:
    """The steps that have detail, the first one visible, and a way to pick another (which needs JavaScript)."""
    shown = _affordable(report.traces)
    if not shown:
        return ""
    names = {int(step): float(ms) for step, ms in zip(report.steps, report.columns["wall_ms"], strict=True)}
    options = "".join(
        f'<option value="{trace.step}">step {trace.step:,}{_took(names.get(trace.step))}{_role(place)}</option>'
        for place, trace in enumerate(shown)
    )
    figures = "".join(_figure(report, trace, hidden=place > 0) for place, trace in enumerate(shown))
    return (
        f'<p class="pick" hidden><label>Show <select id="pick">{options}</select></label></p>{figures}'
        f'<p class="note hint">Swipe sideways for the rest of the step.</p>{_legend()}'
    )


def reductions(workers: Iterable[WorkerTrace]) -> list[Reduction]:
    """The reductions of a step, in the order in which they began."""
    flights: dict[int, list[tuple[int, Flight]]] = {}
    for worker in workers:
        for flight in worker.flights:
            flights.setdefault(flight.place, []).append((worker.rank, flight))
    found = []
    for place, each in flights.items():
        rank, last = max(each, key=lambda pair: pair[1].launched_us)
        found.append(Reduction(place, last.num_bytes, last.launched_us, max(f.reduced_us for _, f in each), rank))
    return sorted(found, key=lambda reduction: reduction.begin_us)


def lanes(stretches: Sequence[tuple[float, float]], most: int = _MOST_LANES) -> list[int]:
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


def _affordable(traces: Sequence[Trace]) -> list[Trace]:
    shown: list[Trace] = []
    marks = 0
    for trace in traces:
        counts = sorted((len(each.spans) + 2 * len(each.flights) for each in trace.workers), reverse=True)
        marks += sum(counts[:MOST_WORKERS])
        if shown and marks > _MOST_MARKS:
            break
        if counts and counts[0]:
            shown.append(trace)
    return shown


def _took(ms: float | None) -> str:
    return "" if ms is None else f", {milliseconds(ms)}"


def _role(place: int) -> str:
    return (" (a typical one)", " (the slowest with detail)")[place] if place < 2 else ""


def _figure(report: Report, trace: Trace, *, hidden: bool) -> str:
    workers = _tracks(trace)
    moments = [us for each in workers for span in each.spans for us in (span.begin_us, span.end_us)]
    moments += [us for each in workers for flight in each.flights for us in (flight.ready_us, flight.reduced_us)]
    frame = _Frame(min(moments), max(max(moments), min(moments) + 1))
    marks, tops, down = [], {}, _TOP
    for worker in workers:
        tops[worker.rank] = down
        body, height = _track(report, worker, frame, down)
        marks.append(body)
        down += height + _GAP
    shared, height = _reduction_track(reductions(trace.workers), frame, tops, down)
    down += height
    left_out = len(trace.workers) - len(workers)
    note = f"<p>{len(workers)} of {len(trace.workers)} workers: those that were ready last.</p>" if left_out else ""
    text = f"Timeline of step {trace.step:,}. " + " ".join(_told(each) for each in workers)
    return (
        f'<figure class="step" data-step="{trace.step}"{" hidden" if hidden else ""}>{note}'
        f'<div class="scroll" tabindex="0" role="group" aria-label="Timeline of step {trace.step}, scrolls sideways">'
        f'<svg class="timeline" height="{down}" role="img" aria-label="{escaped(text)}">'
        f'<defs><marker id="head{trace.step}" markerUnits="userSpaceOnUse" markerWidth="8" markerHeight="8" refX="7" '
        f'refY="4" orient="auto"><path d="M0 0L8 4L0 8Z"/></marker></defs>'
        f"{_axis(frame, down)}{''.join(marks)}{shared.replace('#head', f'#head{trace.step}')}</svg></div></figure>"
    )


def _tracks(trace: Trace) -> list[WorkerTrace]:
    there = [each for each in trace.workers if each.spans or each.flights]
    chosen = sorted(there, key=_ready, reverse=True)[:MOST_WORKERS]
    return sorted(chosen, key=lambda each: each.rank)


def _ready(worker: WorkerTrace) -> float:
    if worker.flights:
        return max(flight.launched_us for flight in worker.flights)
    return max(span.end_us for span in worker.spans)


def _axis(frame: _Frame, height: int) -> str:
    marks = []
    for ms in ticks_within(0, (frame.end_us - frame.begin_us) / 1e3, most=6):
        x = frame.x(frame.begin_us + 1e3 * ms)
        anchor = "start" if x < 3 else "end" if x > 96 else "middle"
        marks.append(f'<line class="grid" x1="{x:.2f}%" x2="{x:.2f}%" y1="16" y2="{height}"/>')
        marks.append(f'<text class="tick" x="{x:.2f}%" y="11" text-anchor="{anchor}">{rounded(ms)} ms</text>')
    return "".join(marks)


def _track(report: Report, worker: WorkerTrace, frame: _Frame, top: int) -> tuple[str, int]:
    host = report.run.host(worker.rank)
    straggler = report.straggler is not None and report.straggler.rank == worker.rank
    name = f"worker {worker.rank}" + (f" on {escaped(host)}" if host else "")
    marks = [f'<text class="name" x="0" y="{top + 12}">{name}{" · the straggler" if straggler else ""}</text>']
    for span in worker.spans:
        marks.append(_span(worker.rank, span.kind, span.begin_us, span.end_us, frame, top + _NAME))
    rows = lanes([(flight.ready_us, flight.reduced_us) for flight in worker.flights])
    below = top + _NAME + _BAR + 3
    for flight, row in zip(worker.flights, rows, strict=True):
        marks.append(_flight(worker.rank, flight, frame, below + row * _LANE))
    return "".join(marks), _NAME + _BAR + 3 + _LANE * (max(rows) + 1 if rows else 0)


def _span(rank: int, kind: str, begin_us: float, end_us: float, frame: _Frame, top: int) -> str:
    kind = kind if kind in KINDS else "other"
    x, width, ms = frame.x(begin_us), frame.x(end_us) - frame.x(begin_us), (end_us - begin_us) / 1e3
    title = f"worker {rank}: {kind}, {milliseconds(ms)}"
    rect = f'<rect class="k-{kind}" x="{x:.2f}%" y="{top}" width="{width:.2f}%" height="{_BAR}">'
    rect += f"<title>{title}</title></rect>"
    text = f"{kind} {milliseconds(ms)}" if width >= 14 else kind if width >= 9 else ""
    if not text:
        return rect
    return f'{rect}<text class="in-{kind}" x="{x:.2f}%" dx="6" y="{top + 15}">{text}</text>'


def _flight(rank: int, flight: Flight, frame: _Frame, top: int) -> str:
    ready, launched, reduced = map(frame.x, (flight.ready_us, flight.launched_us, flight.reduced_us))
    title = (
        f"worker {rank}: bucket {flight.place} ({size(flight.num_bytes)}) waited "
        f"{milliseconds((flight.launched_us - flight.ready_us) / 1e3)} for its turn, then "
        f"{milliseconds((flight.reduced_us - flight.launched_us) / 1e3)} until reduced"
    )
    held = f'<rect class="held" x="{ready:.2f}%" y="{top + 2}" width="{launched - ready:.2f}%" height="3"/>'
    flying = (
        f'<rect class="k-hidden" x="{launched:.2f}%" y="{top}" width="{reduced - launched:.2f}%" height="7" rx="2">'
    )
    return f"{held if launched - ready > 0.05 else ''}{flying}<title>{title}</title></rect>"


def _reduction_track(found: list[Reduction], frame: _Frame, tops: dict[int, int], top: int) -> tuple[str, int]:
    if not found:
        return "", 0
    rows = lanes([(each.begin_us, each.end_us) for each in found])
    marks = [f'<text class="name" x="0" y="{top + 12}">reductions of all workers</text>']
    bars = top + _NAME + 4
    room: dict[int, float] = {}  # Where the next one in a row begins.
    for each, row in reversed(list(zip(found, rows, strict=True))):
        x, width, y = frame.x(each.begin_us), frame.x(each.end_us) - frame.x(each.begin_us), bars + row * 18
        title = (
            f"bucket {each.place}, {size(each.num_bytes)}: {milliseconds((each.end_us - each.begin_us) / 1e3)} after "
        )
        title += f"worker {each.last_rank} had handed it over, the last one"
        if each.last_rank in tops:
            begin = tops[each.last_rank] + _NAME + _BAR
            marks.append(
                f'<line class="arrow" x1="{x:.2f}%" x2="{x:.2f}%" y1="{begin}" y2="{y}" marker-end="url(#head)"/>'
            )
        marks.append(f'<rect class="k-hidden" x="{x:.2f}%" y="{y}" width="{max(width, 0.1):.2f}%" height="15" rx="2">')
        marks.append(f"<title>{title}</title></rect>")
        marks.append(_bucket_name(each.place, x, x + width, room.get(row, 100.0) - x - width, y + 12))
        room[row] = x
    return "".join(marks), _NAME + 4 + 18 * (max(rows) + 1)


def _bucket_name(place: int, begin: float, end: float, room: float, down: int) -> str:
    """The name of a reduction, as long as there is room for: in it, or after it, or before it at the right end."""
    if end - begin > 9:
        return f'<text class="in-hidden" x="{begin:.2f}%" dx="6" y="{down}">bucket {place}</text>'
    if end > 91:
        return f'<text class="tick" x="{begin:.2f}%" dx="-5" y="{down}" text-anchor="end">{place}</text>'
    name = f"bucket {place}" if room > 9 else f"{place}" if room > 3 else ""
    return f'<text class="tick" x="{end:.2f}%" dx="4" y="{down}">{name}</text>' if name else ""


def _told(worker: WorkerTrace) -> str:
    sums: dict[str, float] = {}
    for span in worker.spans:
        sums[span.kind] = sums.get(span.kind, 0.0) + (span.end_us - span.begin_us) / 1e3
    return f"Worker {worker.rank}: {', '.join(f'{kind} {milliseconds(ms)}' for kind, ms in sums.items())}."


def _legend() -> str:
    kinds = "".join(f'<li><i class="k-{kind}"></i>{kind}</li>' for kind in KINDS)
    return (
        f'<ul class="legend">{kinds}<li><i class="k-hidden"></i>bucket on its way</li>'
        f'<li><i class="held"></i>bucket ready, not yet handed over</li>'
        f"<li>↓ the worker that a reduction waited for</li></ul>"
    )
