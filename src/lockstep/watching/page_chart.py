"""A line over the steps of a run, as HTML around a small SVG; what does not fit into the columns is an envelope.

The picture is stretched to the width there is, and text is HTML beside it: so letters keep their size on a phone.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from lockstep.watching.page_scale import Envelope, Scale, scale, thinned, ticks_within
from lockstep.watching.page_words import escaped, number, percent, rounded
from lockstep.watching.report import Numbers, first_not_finite

_COLUMNS = 360
"""A chart is about as many pixels wide on a phone, and twice as many on a desk."""
_FEW = 20
"""Values up to this number are shown as dots too."""
_ROWS = 9
"""Of the table that says the same as the chart."""


@dataclass(frozen=True, slots=True)
class Chart:
    """What a chart shows."""

    title: str
    unit: str
    steps: Numbers
    values: Numbers
    """nan for gaps, inf where a value was not finite."""
    text: Callable[[float], str] = number
    """A value in words, without the unit."""
    tick: Callable[[float], str] = rounded
    """A round value in words, at the axis."""
    from_zero: bool = False
    reference: tuple[float, str] | None = None
    """A value to compare with, as a line of its own, and its name."""
    note: str = ""
    """A sentence beneath the title."""


def line_chart(chart: Chart) -> str:
    """The chart; "" if there is no value to show."""
    shown = thinned(chart.steps, chart.values, _COLUMNS)
    if not shown.x.size:
        return ""
    upright = _scale(chart, shown)
    first, last = float(chart.steps[0]), float(chart.steps[-1])
    return (
        f'<figure class="card chart"><figcaption><h3>{escaped(chart.title)}</h3>'
        f'<output class="at" aria-hidden="true"></output>{_note(chart, shown, upright)}</figcaption>'
        f'<div class="plot" role="img" aria-label="{escaped(_description(chart, shown))}">'
        f'<div class="ys">{"".join(_tick(chart, upright, tick) for tick in upright.ticks)}</div>'
        f'<div class="field" {"data-percent " if chart.text is percent else ""}data-points="{_points(chart, shown)}">'
        f"{_picture(chart, shown, upright)}{_reference(chart, shown, upright)}"
        f'<i class="cross" hidden></i></div>'
        f'<div class="ends"><b style="top:{_down(upright, shown.mean[-1]):.1f}%">{_end(chart, shown)}</b></div>'
        f'<div class="xs">{_step_ticks(first, last)}</div></div>{_table(chart, shown)}</figure>'
    )


def _scale(chart: Chart, shown: Envelope) -> Scale:
    low, high = float(shown.low.min()), float(shown.high.max())
    if chart.from_zero:
        high = min(high, _top(shown))
    if chart.reference is not None:
        low, high = min(low, chart.reference[0]), max(high, chart.reference[0])
    return scale(low, high, from_zero=chart.from_zero, log_allowed=not chart.from_zero)


def _top(shown: Envelope) -> float:
    """Where the chart ends: one slow step (the first, or one that wrote a checkpoint) must not flatten all others."""
    usual = float(np.percentile(shown.mean, 98))
    return 1.25 * usual if 0 < 2 * usual < shown.high.max() else float("inf")


def _picture(chart: Chart, shown: Envelope, upright: Scale) -> str:
    first, span = chart.steps[0], float(chart.steps[-1] - chart.steps[0]) or 1.0
    xs = [f"{1000 * (x - first) / span:.0f}" for x in shown.x.tolist()]
    middle, low, high = ([_up(upright, y) for y in ys.tolist()] for ys in (shown.mean, shown.low, shown.high))
    grid = "".join(f"M0 {_up(upright, tick)}H1000" for tick in upright.ticks)
    band = ""
    if shown.is_thinned:
        points = [*zip(xs, high, strict=True), *reversed(list(zip(xs, low, strict=True)))]
        band = f'<path class="band" d="M{_path(points)}Z"/>'
    line = f'<path class="line" d="M{_path(zip(xs, middle, strict=True))}"/>' if len(xs) > 1 else ""
    dots = ""
    if len(xs) <= _FEW:
        dots = f'<path class="dots" d="{"".join(f"M{x} {y}h0" for x, y in zip(xs, middle, strict=True))}"/>'
    return (
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true"><path class="grid" d="{grid}"/>'
        f"{band}{line}{dots}</svg>"
    )


def _path(points: Iterable[tuple[str, str]]) -> str:
    return "L".join(f"{x} {y}" for x, y in points)


def _up(upright: Scale, value: float) -> str:
    return f"{1000 * (1 - upright.place(value)):.0f}"


def _down(upright: Scale, value: float) -> float:
    return 100 * (1 - upright.place(float(value)))


def _tick(chart: Chart, upright: Scale, value: float) -> str:
    return f'<span style="top:{_down(upright, value):.1f}%">{escaped(chart.tick(value))}</span>'


def _reference(chart: Chart, shown: Envelope, upright: Scale) -> str:
    if chart.reference is None:
        return ""
    value, name = chart.reference
    down = _down(upright, value)
    # On the side where the line is not, if there is room for it.
    is_under = down < 15 or (float(shown.mean[-1]) > value and down < 86)
    side = "under" if is_under else "over"
    return f'<div class="ref {side}" style="top:{down:.1f}%"><span>{escaped(name)}</span></div>'


def _end(chart: Chart, shown: Envelope) -> str:
    return escaped(chart.text(float(shown.mean[-1])))


def _step_ticks(first: float, last: float) -> str:
    spans = []
    ticks = [step for step in ticks_within(first, last, most=4) if step - first > 0.15 * (last - first)]
    for place, step in enumerate([first, *ticks]):
        left = 100 * (step - first) / ((last - first) or 1.0)
        side = " class=first" if left < 4 else " class=last" if left > 94 else ""
        name = f"step {step:,.0f}" if place == 0 else f"{step:,.0f}"
        spans.append(f'<span{side} style="left:{left:.1f}%">{name}</span>')
    return "".join(spans)


def _note(chart: Chart, shown: Envelope, upright: Scale) -> str:
    unit = [chart.unit] if chart.unit else []
    if upright.is_log:
        unit.append("logarithmic")
    if shown.is_thinned:
        unit.append("line: mean, band: lowest to highest")
    sentences = [", ".join(unit)] if unit else []
    if chart.from_zero and float(shown.high.max()) > upright.high:
        peak = int(np.argmax(np.where(np.isfinite(chart.values), chart.values, -np.inf)))
        highest = chart.text(float(chart.values[peak]))
        sentences.append(f"Highest: {highest} at step {chart.steps[peak]:,.0f}, beyond the top.")
    lost = first_not_finite(chart.steps, chart.values)
    if lost is not None:
        sentences.append(f"Not finite in {lost[0]:,} steps, the first time at step {lost[1]:,}.")
    text = "".join(f"<p>{escaped(each)}</p>" for each in sentences)
    return text + (f'<p class="say">{escaped(chart.note)}</p>' if chart.note else "")


def _description(chart: Chart, shown: Envelope) -> str:
    unit = f" {chart.unit}" if chart.unit else ""
    begin, end, low, high = (
        chart.text(float(value)) for value in (shown.mean[0], shown.mean[-1], shown.low.min(), shown.high.max())
    )
    return (
        f"{chart.title} over steps {shown.x[0]:,.0f} to {shown.x[-1]:,.0f}: begins at {begin}{unit}, ends at {end}"
        f"{unit}; lowest {low}, highest {high}."
    )


def _points(chart: Chart, shown: Envelope) -> str:
    """For the script: the ends of the axis, then steps and values."""
    points = [[float(chart.steps[0]), float(chart.steps[-1])]]
    points += [[round(x), float(f"{y:.4g}")] for x, y in zip(shown.x.tolist(), shown.mean.tolist(), strict=True)]
    return escaped(json.dumps(points, separators=(",", ":")))


def _table(chart: Chart, shown: Envelope) -> str:
    places = np.unique(np.linspace(0, shown.x.size - 1, _ROWS).round().astype(int)).tolist()
    rows = "".join(
        f"<tr><th scope=row>{shown.x[place]:,.0f}</th><td>{escaped(chart.text(float(shown.mean[place])))}</td></tr>"
        for place in places
    )
    unit = f" ({escaped(chart.unit)})" if chart.unit else ""
    return (
        f"<details><summary>As a table</summary><table><thead><tr><th scope=col>Step</th>"
        f"<th scope=col>{escaped(chart.title)}{unit}</th></tr></thead><tbody>{rows}</tbody></table></details>"
    )
