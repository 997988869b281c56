"""A plan as a page: one file that needs no network. The pictures are SVG, drawn here."""

import math
from collections.abc import Iterable, Sequence
from html import escape

from lockstep.plan.outcome import Plan
from lockstep.plan.simulation import Span
from lockstep.plan.timing import Speed
from lockstep.watching.number_format import count, milliseconds, number, percent, size

_WIDTH, _HEIGHT = 860, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 40
_PARTS = (
    "parameters", "gradients", "optimizer", "master", "buckets", "gathered", "accumulated", "activations", "batch",
    "buffers", "fragmentation", "context",
)  # fmt: skip
_COLOURS = (
    "#3b6fb6", "#d98324", "#4f9d69", "#8a63b3", "#b3574b", "#59a5b1", "#a0882f", "#c66f9b", "#7b7f86", "#98a24a",
    "#c2a58b", "#4d5a6a",
)  # fmt: skip
_SPAN_COLOURS = {
    "forward": "#4f9d69", "backward": "#3b6fb6", "passes": "#9db8d9", "update": "#d98324", "reduce": "#b3574b",
    "gather": "#8a63b3",
}  # fmt: skip
_STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--paper:#fff;--soft:#667085;--line:#d5dae1;--band:#3b6fb6}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--paper:#14181e;--soft:#98a2b3;--line:#333b47;--band:#79a7e3}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:900px;margin:2rem auto;
padding:0 1rem}h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}p{margin:.3rem 0}
.soft,svg text.soft{color:var(--soft);fill:var(--soft)}svg{width:100%;height:auto;display:block}
svg text{font-size:12px;fill:var(--ink)}table{border-collapse:collapse;width:100%}
td,th{padding:.25rem .5rem;border-bottom:1px solid var(--line);text-align:right;font-variant-numeric:tabular-nums}
td:first-child,th:first-child,td.text{text-align:left}.key i{display:inline-block;width:.8em;height:.8em;
margin:0 .3em 0 .9em;border-radius:2px}dt{font-weight:600;margin-top:.7rem}dd{margin:0}
"""


def page(made: Plan) -> str:
    """The whole page."""
    work, machine = made.workload, made.machine
    title = f"{work.name or 'model'} on {machine.name}"
    sections = [
        _section("How far it scales", _curve(made), _curve_key(made)),
        _section("What a worker holds", _bars(made), _bars_key(made)),
        _section("One step", _timeline(made), _timeline_words(made)),
        _section("What to choose", _advice(made)),
        _section("In numbers", _tabled(scaling(made))),
        _section("How far such predictions were off", _tabled(errors(made))),
    ]
    if made.remarks:
        sections.append(_section("Assumed", "".join(f"<p>{escape(remark)}</p>" for remark in made.remarks)))
    summary = (
        f"{count(work.num_params)} parameters, {work.precision}, batch {work.batch:,} = {machine.workers:,} workers x "
        f"{work.accumulation} x {work.micro_batch}, zero={work.zero}, {work.checkpointing} checkpointing"
    )
    verdict = (
        f"{number(made.speed.units_per_s)} {work.unit}/s ± {percent(made.deviation)}, "
        f"{milliseconds(1e3 * made.speed.times.step_s)} a step, {size(made.memory.total)} of "
        f"{size(made.memory.capacity)} a worker{'' if made.memory.fits else ': does not fit'}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f'<h1>{escape(title)}</h1><p class="soft">{escape(summary)}</p><p><b>{escape(verdict)}</b></p>'
        f"{''.join(sections)}</body></html>\n"
    )


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def _svg(height: float, parts: Iterable[str], label: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


# The scaling curve


def _x(workers: int, most: int) -> float:
    span = math.log2(most) or 1.0
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log2(workers) / span


def _y(share: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - min(max(share, 0.0), 1.1) / 1.1)


def _curve(made: Plan) -> str:
    most = made.weak[-1].workers
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{100 * share:.0f} %</text>')
    for power in range(0, round(math.log2(most)) + 1, 2):
        x = _x(2**power, most)
        anchor = "end" if 2**power == most else "middle"
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 18}" text-anchor="{anchor}">{2**power:,}</text>')
    parts.append(f'<text class="soft" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end">workers</text>')
    # Errors of scaling, and not of speed: a curve is relative to one worker, which is off by as much.
    off = made.multi_host.median
    upper = [(_x(each.workers, most), _y(1 - (1 - each.efficiency) * 0.75 + _doubt(each, off))) for each in made.weak]
    lower = [(_x(each.workers, most), _y(1 - (1 - each.efficiency) * 1.25 - _doubt(each, off))) for each in made.weak]
    band = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *reversed(lower)])
    parts.append(f'<polygon points="{band}" fill="var(--band)" opacity=".18"/>')
    parts.append(_line([(_x(each.workers, most), _y(each.efficiency)) for each in made.weak], "var(--band)"))
    if made.strong:
        first = made.strong[0].units_per_s
        same = [(_x(each.workers, most), _y(each.units_per_s / first / each.workers)) for each in made.strong]
        parts.append(_line(same, "#d98324"))
    for point in made.points:
        x, y = _x(point.workers, most), _y(point.efficiency)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#b3574b" stroke="var(--paper)">'
            f"<title>{escape(point.label)}: {percent(point.efficiency)}</title></circle>"
        )
    x, y = _x(made.machine.workers, most), _y(made.speed.efficiency)
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="none" stroke="var(--ink)" stroke-width="2"/>')
    return _svg(_HEIGHT, parts, "efficiency over the number of workers")


def _doubt(speed: Speed, off: float) -> float:
    return 0.0 if speed.workers == 1 else off


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>'


def _curve_key(made: Plan) -> str:
    points = "<i style='background:#b3574b'></i>measured runs of the like" if made.points else ""
    return (
        "<p class='key'><i style='background:var(--band)'></i>the same work for each worker, with a band of a quarter "
        f"of what is lost and {percent(made.multi_host.median)}<i style='background:#d98324'></i>the same batch for all"
        f"{points}<i style='border:2px solid var(--ink)'></i>this plan</p>"
    )


# Memory


def _bars(made: Plan) -> str:
    shown = made.shown_ways
    capacity = made.memory.capacity
    most = max([capacity, *(way.memory.total for way in shown)])
    left, row = 290, 24
    scale = (_WIDTH - left - 70) / most
    parts = []
    for place, way in enumerate(shown):
        y = 6 + place * row
        parts.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(way.name)}</text>')
        x = float(left)
        for name, amount in way.memory.components():
            if amount > 0:
                colour = _COLOURS[_PARTS.index(name) % len(_COLOURS)] if name in _PARTS else "#888"
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{amount * scale:.2f}" height="{row - 7}" fill="{colour}">'
                    f"<title>{name}: {size(amount)}</title></rect>"
                )
            x += amount * scale
        parts.append(f'<text x="{x + 5:.1f}" y="{y + 13}">{size(way.memory.total)}</text>')
    height = 12 + len(shown) * row
    x = left + capacity * scale
    parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="var(--ink)" stroke-dasharray="4 3"/>')
    return _svg(height, parts, "memory of a worker for every way to split")


def _bars_key(made: Plan) -> str:
    names = [name for name, amount in made.memory.components() if any(_amount(made, name)) or amount]
    keys = "".join(
        f"<i style='background:{_COLOURS[_PARTS.index(name) % len(_COLOURS)]}'></i>{name}"
        for name in names
        if name in _PARTS
    )
    return f"<p class='key'>{keys}; the dashed line is what a worker has, {size(made.memory.capacity)}.</p>"


def _amount(made: Plan, name: str) -> list[float]:
    return [amount for way in made.ways for each, amount in way.memory.components() if each == name and amount]


# A step


def _timeline(made: Plan) -> str:
    spans = made.speed.times.spans
    end = max((span.end for span in spans), default=1.0) or 1.0
    left = 80
    scale = (_WIDTH - left - 10) / end
    lanes = {"compute": 8, "network": 48}
    parts = [f'<text x="{left - 8}" y="{y + 19}" text-anchor="end">{lane}</text>' for lane, y in lanes.items()]
    parts += [_rect(span, left, scale, lanes[span.lane], end) for span in spans]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = left + share * end * scale
        parts.append(
            f'<text class="soft" x="{x:.1f}" y="102" text-anchor="middle">{milliseconds(1e3 * share * end)}</text>'
        )
    return _svg(110, parts, "a simulated step: computing above, messages below")


def _rect(span: Span, left: float, scale: float, y: float, end: float) -> str:
    width = max((span.end - span.begin) * scale - 0.4, 0.4)
    what = span.name if span.index < 0 else f"{span.name}, bucket {span.index}"
    return (
        f'<rect x="{left + span.begin * scale:.2f}" y="{y}" width="{width:.2f}" height="28" rx="1" '
        f'fill="{_SPAN_COLOURS.get(span.name, "#888")}"><title>{what}: {milliseconds(1e3 * (span.end - span.begin))} '
        f"from {milliseconds(1e3 * span.begin)} of {milliseconds(1e3 * end)}</title></rect>"
    )


def _timeline_words(made: Plan) -> str:
    keys = "".join(f"<i style='background:{colour}'></i>{name}" for name, colour in _SPAN_COLOURS.items())
    times = made.speed.times
    return (
        f"<p class='key'>{keys}</p><p>Of {milliseconds(1e3 * times.step_s)}: computing "
        f"{milliseconds(1e3 * times.compute_s)}, waiting for the slowest {milliseconds(1e3 * times.wait_s)}, "
        f"communication that nothing hides {milliseconds(1e3 * times.exposed_s)}, the update "
        f"{milliseconds(1e3 * times.optimizer_s)}. At most three "
        "micro-batches are drawn.</p>"
    )


# In words and numbers


def _advice(made: Plan) -> str:
    items = []
    for each in made.advice:
        second = f" <span class='soft'>Next: {escape(each.runner_up)}.</span>" if each.runner_up else ""
        items.append(f"<dt>{escape(each.topic)}: {escape(each.choice)}</dt><dd>{escape(each.reason)}{second}</dd>")
    return f"<dl>{''.join(items)}</dl>"


def scaling(made: Plan) -> list[list[str]]:
    """The curve as a table, its first row the names: on the page and in a terminal."""
    strong = {each.workers: each for each in made.strong}
    unit = made.workload.unit
    rows = [["workers", "step", "exposed", "efficiency", f"{unit}/s", "MFU", "step, same batch", f"{unit}/s"]]
    for each in made.weak:
        same = strong.get(each.workers)
        rows.append(
            [
                f"{each.workers:,}",
                milliseconds(1e3 * each.times.step_s),
                milliseconds(1e3 * each.times.exposed_s),
                percent(each.efficiency),
                number(each.units_per_s),
                percent(each.mfu),
                milliseconds(1e3 * same.times.step_s) if same else "",
                number(same.units_per_s) if same else "",
            ]
        )
    return rows


def errors(made: Plan) -> list[list[str]]:
    """How far predictions of published runs were off, its first row the names: on the page and in a terminal."""
    rows = [["published runs", "runs", "median", "worst", "constant efficiency"]]
    for each in (made.multi_host, made.left_out):
        rows.append([each.what, str(each.count), percent(each.median), percent(each.worst), percent(each.baseline)])
        rows += [[f"  {source}", "", percent(error), "", ""] for source, error in each.series.items()]
    return rows


def _tabled(rows: Sequence[Sequence[str]]) -> str:
    """A table, whose first row has the names of its columns; what is indented in a terminal is so here."""
    cells = [[escape(cell).replace("  ", "&emsp;") for cell in row] for row in rows]
    head = "".join(f"<th>{cell}</th>" for cell in cells[0])
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells[1:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
