"""The page of a run: one HTML file that needs no network, made from `assets/page.html`.

Python works out what is shown and the template says how; charts are drawn in the browser by uPlot, and timelines by the
page's own script, from numbers that the page carries as JSON. The folder of a run may be a stranger's: jinja2 escapes
everything that is put into the template, the JSON cannot end its element, the script makes no markup of it, and the
page's policy forbids every request and every script but the two it brings.
"""

import base64
import hashlib
import importlib.resources
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from lockstep.watching.number_format import NONE, count, counted, duration, milliseconds, number, percent, size
from lockstep.watching.run_report import Numbers, RunReport, verdict
from lockstep.watching.step_record import SHARES
from lockstep.watching.timelines import timelines

_COLUMNS = 360
"""A chart is about as many pixels wide on a phone, and twice as many on a desk."""
_TABLE_ROWS = 9
"""Of the table that says the same as a chart."""
_MOST_BARS, _MOST_BUCKETS, _MOST_STACKS = 32, 64, 16
_MOST_LETTERS = 20_000
"""Of one stack."""
_LARGEST = 1e290
"""Values beyond are taken for infinite, or their scale could not be computed."""
_LOG_FROM = 100.0
"""Values that span more than this factor are shown on a logarithmic scale."""

Chart = dict[str, Any]
"""What the template is told of a chart; `plot` is what its script draws."""

_MEANINGS = {
    "data": "waiting for the loader",
    "copy": "moving the batch to the device",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "exposed": "communication that nothing hides",
    "waiting": "for a slower worker",
    "optimizer": "the update of the weights",
    "other": "everything else",
}


def page(report: RunReport, version: str = "") -> str:
    """The whole page; with a version, one that asks where it came from for a newer one."""
    speed, training, sent = _speed(report), _training(report), _communication(report)
    charts = [*speed, *training, *(sent["charts"] if sent is not None else ())]
    for place, chart in enumerate(charts):
        chart["place"] = place
    # Those that wait least are those that the others wait for.
    most_busy = sorted(report.shares, key=lambda each: each.shares_ms["waiting"])
    scripts = [_asset("uPlot.iife.min.js"), _asset("page.js")]
    kinds = (f".k-{kind} {{ fill: var(--{kind}); background: var(--{kind}) }}\n" for kind in (*SHARES, "hidden"))
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.from_string(_asset("page.html")).render(
        report=report,
        said=verdict(report),
        facts=_facts(report),
        tiles=_tiles(report),
        timelines=timelines(report),
        shares=sorted(most_busy[:_MOST_BARS], key=lambda each: each.rank),
        lateness={each.rank: each for each in report.lateness},
        speed=speed,
        training=training,
        sent=sent,
        generations=_generations(report),
        stacks=list(report.hang.stacks.items())[:_MOST_STACKS] if report.hang is not None else [],
        plots=[chart["plot"] for chart in charts],
        kinds=SHARES,
        meanings=_MEANINGS,
        most_buckets=_MOST_BUCKETS,
        most_letters=_MOST_LETTERS,
        counted=counted,
        milliseconds=milliseconds,
        number=number,
        percent=percent,
        size=size,
        version=version,
        policy=_policy(scripts, "connect-src 'self'; " if version else ""),
        styles=Markup(_asset("uPlot.min.css") + _asset("page.css") + "".join(kinds)),
        license=Markup(_asset("uPlot.LICENSE.txt")),
        scripts=[Markup(script) for script in scripts],
    )


def _asset(name: str) -> str:
    return importlib.resources.files("lockstep.watching").joinpath("assets", name).read_text(encoding="utf-8")


def _policy(scripts: Iterable[str], more: str) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; {more}style-src 'unsafe-inline'; img-src data:; script-src {allowed}"


# The top of the page


def _facts(report: RunReport) -> list[str]:
    """The line under the title."""
    run = report.run
    hosts = len(set(run.hosts))
    facts = [counted(run.size, "worker") + (f" on {hosts} hosts" if hosts > 1 else "")]
    facts += [each for each in (run.device, run.backend) if each]
    if run.num_params:
        facts.append(f"{count(run.num_params)} parameters")
    if run.started:
        facts.append(f"started {run.started.replace('T', ' ').replace('Z', ' UTC')}")
    return facts


def _tiles(report: RunReport) -> list[tuple[str, str, str]]:
    """The figures that a run is judged by: name, value, note."""
    single, batch, mfu = report.run.single_ms, report.settled("batch"), report.settled("mfu")
    alone = f"a worker alone takes {milliseconds(single)}" if single else "of one worker's speed, times their number"
    last = f"in {duration(report.seconds)}; the last is step {report.steps[-1]:,.0f}" if report.steps.size else ""
    is_every_one = not report.steps.size or report.steps.size > report.steps[-1] - report.steps[0]
    tiles = [
        ("Steps" if is_every_one else "Steps recorded", f"{report.steps.size:,}", last),
        (
            "Throughput",
            number(report.samples_per_s),
            f"samples/s, global batch {count(batch[-1])}" if batch.size else "samples/s",
        ),
        ("Efficiency", percent(report.efficiency), alone),
        ("Step", milliseconds(report.step_ms), "mean, of the slowest worker"),
        ("Exposed communication", percent(report.part("exposed")), "of all workers' time"),
        ("Waiting for others", percent(report.part("waiting")), "of all workers' time"),
        ("Model FLOPS", percent(float(mfu.mean()) if mfu.size else None), "of what the devices can do"),
    ]
    return [tile for tile in tiles if tile[1] != NONE]


# Where the time goes


def _generations(report: RunReport) -> list[list[str]]:
    """A row for each generation of an elastic run."""
    rows = []
    for each in report.generations:
        changes = [
            f"{word} {', '.join(map(str, members))}"
            for word, members in (("lost", each.lost), ("left", each.left), ("joined", each.joined))
            if members
        ]
        happened = "; ".join(changes) or ("began" if each.number == 1 else "shards moved")
        after_s = each.at_s - report.generations[0].at_s
        shards = ", ".join(map(str, each.shards))
        members = ", ".join(map(str, each.members))
        row = [each.number, f"{number(after_s)} s", members, happened, milliseconds(each.took_s * 1e3), each.replayed]
        rows.append([*map(str, row), shards])
    return rows


# Charts over the steps


@dataclass(frozen=True, slots=True)
class Envelope:
    """Values per column of a chart; a column without any is left out."""

    x: Numbers
    low: Numbers
    mean: Numbers
    high: Numbers

    @property
    def is_thinned(self) -> bool:
        """Whether a column stands for several values."""
        return bool(np.any(self.low != self.high))


def thinned(x: Numbers, y: Numbers, columns: int) -> Envelope:
    """Lowest, mean and highest value per column; values that are not finite, or nearly so, are left out."""
    there = np.abs(y) < _LARGEST
    x, y = x[there], y[there]
    if x.size <= columns:
        return Envelope(x, y, y, y)
    place = np.minimum((x - x[0]) / (x[-1] - x[0] or 1.0) * columns, columns - 1).astype(np.int64)
    begins = np.flatnonzero(np.diff(place, prepend=-1))
    counts = np.diff(begins, append=x.size)
    return Envelope(
        x=np.add.reduceat(x, begins) / counts,
        low=np.minimum.reduceat(y, begins),
        mean=np.add.reduceat(y, begins) / counts,
        high=np.maximum.reduceat(y, begins),
    )


def value_range(low: float, high: float, *, from_zero: bool = False) -> tuple[float, float, bool]:
    """What an axis has to show for values from `low` to `high`, and whether it is logarithmic."""
    if not from_zero and low > 0 and high / low >= _LOG_FROM:
        # Whole decades; beyond 1e-300 numbers lose their digits.
        return 10.0 ** math.floor(math.log10(max(low, 1e-300))), 10.0 ** math.ceil(math.log10(high)), True
    if low >= 0 and (from_zero or low < 0.25 * high):
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-280):
        around = abs(high) / 2 if abs(high) > 1e-280 else 1.0
        low, high = low - around, high + around
    room = 0.05 * (high - low)
    return (0.0 if low == 0.0 else low - room), high + room, False


def _chart(
    report: RunReport,
    title: str,
    unit: str,
    column: str,
    text: Callable[[float], str] = number,
    *,
    unit_size: float = 1.0,
    from_zero: bool = False,
    if_varies: bool = False,
    reference: tuple[float, str] | None = None,
    say: str = "",
) -> list[Chart]:
    """A chart of a column over the steps; none if there is no value to show. `text` says a value without its unit."""
    steps, values = report.steps, report.columns[column] / unit_size
    shown = thinned(steps, values, _COLUMNS)
    if not shown.x.size:
        return []
    low, high = float(shown.low.min()), float(shown.high.max())
    if if_varies and high - low <= 0.01 * abs(high):
        return []
    if from_zero:
        high = min(high, _usual_top(shown))
    if reference is not None:
        low, high = min(low, reference[0]), max(high, reference[0])
    low, high, is_log = value_range(low, high, from_zero=from_zero)
    plot = {
        "steps": [steps[0], steps[-1]] if steps[-1] > steps[0] else [steps[0] - 0.5, steps[0] + 0.5],
        "range": [low, high],
        "log": is_log,
        "percent": text is percent,
        "end": text(float(shown.mean[-1])),
        "reference": reference,
        "x": shown.x.tolist(),
        "mean": _digits(shown.mean),
        **({"low": _digits(shown.low), "high": _digits(shown.high)} if shown.is_thinned else {}),
    }
    rows = np.unique(np.linspace(0, shown.x.size - 1, _TABLE_ROWS).round().astype(int)).tolist()
    return [
        {
            "plot": plot,
            "title": title,
            "notes": _notes(unit, is_log, shown, steps, values, high, text),
            "say": say,
            "label": _description(title, unit, shown, text),
            "heads": ["Step", f"{title} ({unit})" if unit else title],
            "rows": [(f"{shown.x[row]:,.0f}", text(float(shown.mean[row]))) for row in rows],
        }
    ]


def _speed(report: RunReport) -> list[Chart]:
    return [
        *_chart(report, "Efficiency", "T₁ / T_N", "efficiency", percent, from_zero=True, reference=(1.0, "no loss")),
        *_chart(report, "Throughput", "samples/s", "samples_per_s", from_zero=True),
        *_chart(report, "Step", "ms, of the slowest worker", "wall_ms", from_zero=True),
        *_chart(report, "Lateness of the last worker", "ms after the others", "late_ms", from_zero=True),
    ]


def _training(report: RunReport) -> list[Chart]:
    return [
        *_chart(report, "Loss", "", "loss"),
        *_chart(report, "Gradient norm", "", "grad_norm"),
        *_noise_scale(report),
        *_chart(report, "Learning rate", "", "lr", lambda rate: f"{rate:.3g}", from_zero=True, if_varies=True),
    ]


def _noise_scale(report: RunReport) -> list[Chart]:
    noise, batch = report.settled("noise_scale"), report.settled("batch")
    say, reference = "", None
    if noise.size:
        say = f"The largest batch that still pays: {float(f'{noise[-1]:.2g}'):,.0f}"
        say += f"; yours: {count(batch[-1])}." if batch.size else "."
        last = report.steps[np.isfinite(report.columns["noise_scale"])][-1]
        if last - report.steps[0] < 0.9 * (report.steps[-1] - report.steps[0]):
            say += f" Last known at step {last:,.0f}."
    if batch.size and 0 < batch[-1] < _LARGEST:
        reference = float(batch[-1]), f"your batch: {count(batch[-1])}"
    return _chart(report, "Gradient noise scale", "samples", "noise_scale", reference=reference, say=say)


def _usual_top(shown: Envelope) -> float:
    """Where a chart ends: one slow step (the first, or one that wrote a checkpoint) must not flatten all others."""
    usual = float(np.percentile(shown.mean, 98))
    return 1.25 * usual if 0 < 2 * usual < shown.high.max() else math.inf


def _digits(values: Numbers) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]


def _notes(
    unit: str, is_log: bool, shown: Envelope, steps: Numbers, values: Numbers, top: float, text: Callable[[float], str]
) -> list[str]:
    """What has to be said about a chart: its unit, and what it does not show."""
    about = [unit] if unit else []
    if is_log:
        about.append("logarithmic")
    if shown.is_thinned:
        about.append("line: mean, band: lowest to highest")
    notes = [", ".join(about)] if about else []
    if float(shown.high.max()) > top:
        peak = int(np.argmax(np.where(np.isfinite(values), values, -np.inf)))
        notes.append(f"Highest: {text(float(values[peak]))} at step {steps[peak]:,.0f}, beyond the top.")
    lost = steps[np.isinf(values)]
    if lost.size:
        notes.append(f"Not finite in {lost.size:,} steps, the first time at step {lost[0]:,.0f}.")
    return notes


def _description(title: str, unit: str, shown: Envelope, text: Callable[[float], str]) -> str:
    """A chart for those who hear it."""
    unit = f" {unit}" if unit else ""
    begin, end, low, high = (
        text(float(value)) for value in (shown.mean[0], shown.mean[-1], shown.low.min(), shown.high.max())
    )
    return (
        f"{title} over steps {shown.x[0]:,.0f} to {shown.x[-1]:,.0f}: begins at {begin}{unit}, ends at {end}{unit}; "
        f"lowest {low}, highest {high}."
    )


# Communication


def _communication(report: RunReport) -> dict[str, Any] | None:
    """What travels, how fast, and in which buckets."""
    sent = report.columns["sent_bytes"]
    sent = sent[np.isfinite(sent)]
    if report.run.size == 1 or not sent.size:
        return None
    hidden = float(np.mean([each.hidden_ms for each in report.shares])) if report.shares else 0.0
    exposed = float(np.mean([each.shares_ms["exposed"] for each in report.shares])) if report.shares else 0.0
    return {
        "bytes_per_step": float(np.median(sent)),
        "bytes_in_all": float(sent.sum()),
        "hidden_ms": hidden,
        "exposed_ms": exposed,
        "charts": [
            *_chart(report, "Bus bandwidth", "GB/s", "bus_gb_per_s", from_zero=True),
            *_chart(
                report, "Sent by a worker", "MB per step", "sent_bytes", unit_size=1e6, from_zero=True, if_varies=True
            ),
        ],
        "in_flight_ms": _times_in_flight(report),
    }


def _times_in_flight(report: RunReport) -> dict[int, float]:
    """Of each bucket, by its place: how long it usually is on its way, in milliseconds."""
    took: dict[int, list[float]] = {}
    for trace in report.traces:
        for worker in trace.workers:
            for flight in worker.flights:
                took.setdefault(flight.place, []).append((flight.reduced - flight.launched) / 1e3)
    return {place: float(np.median(each)) for place, each in took.items()}
