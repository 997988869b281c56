"""The smaller parts of the page: figures at the top, training, communication, hangs."""

import math

import numpy as np

from lockstep.watching.page_chart import Chart, line_chart
from lockstep.watching.page_words import NONE, count, counted, duration, escaped, milliseconds, number, percent, size
from lockstep.watching.report import Numbers, Report
from lockstep.watching.run_record import Bucket, Hang

_MOST_BUCKETS = 64
_MOST_STACKS = 16
_MOST_LETTERS = 20_000
"""Of one stack."""


def facts(report: Report) -> str:
    """The line under the title."""
    run = report.run
    parts = [counted(run.size, "worker")]
    hosts = len(set(run.hosts))
    if hosts > 1:
        parts[0] += f" on {hosts} hosts"
    parts += [each for each in (run.device, run.backend) if each]
    if run.num_params:
        parts.append(f"{count(run.num_params)} parameters")
    if run.started:
        parts.append(f"started {run.started.replace('T', ' ').replace('Z', ' UTC')}")
    return " · ".join(escaped(part) for part in parts)


def tiles(report: Report) -> str:
    """The figures that a run is judged by."""
    single = report.run.single_ms
    alone = f"a worker alone takes {milliseconds(single)}" if single else "of one worker's speed, times their number"
    last = f"the last is step {report.steps[-1]:,.0f}" if report.steps.size else ""
    shown = [
        ("Steps", f"{report.steps.size:,}", f"in {duration(report.seconds)}; {last}" if last else ""),
        ("Throughput", *_throughput(report)),
        ("Efficiency", percent(report.efficiency), alone),
        ("Step", milliseconds(report.step_ms), "mean, of the slowest worker"),
        ("Exposed communication", percent(report.part("exposed")), "of all workers' time"),
        ("Waiting for others", percent(report.part("waiting")), "of all workers' time"),
    ]
    mfu = report.settled("mfu")
    if mfu.size:
        shown.append(("Model FLOPS", percent(float(mfu.mean())), "of what the devices can do"))
    return '<dl class="tiles">' + "".join(
        f"<div><dt>{name}</dt><dd>{escaped(value)}<small>{escaped(note)}</small></dd></div>"
        for name, value, note in shown
        if value != NONE
    ) + "</dl>"  # fmt: skip


def _throughput(report: Report) -> tuple[str, str]:
    if math.isnan(report.samples_per_s):
        return NONE, ""
    batch = report.settled("batch")
    return (
        f"{number(report.samples_per_s)}",
        f"samples/s, global batch {count(batch[-1])}" if batch.size else "samples/s",
    )


def speed(report: Report) -> str:
    """Efficiency and throughput over time."""
    columns = report.columns
    charts = [
        Chart("Efficiency", "T₁ / T_N", report.steps, columns["efficiency"], percent, percent, True, (1.0, "no loss")),
        Chart("Throughput", "samples/s", report.steps, columns["samples_per_s"], from_zero=True),
        Chart("Step", "ms, of the slowest worker", report.steps, columns["wall_ms"], from_zero=True),
        Chart(
            "Lateness of the last worker",
            "ms after the others",
            report.steps,
            report.columns["late_ms"],
            from_zero=True,
        ),
    ]
    return _grid([line_chart(chart) for chart in charts])


def training(report: Report) -> str:
    """Loss, gradient norm, learning rate, and the batch that still pays."""
    columns = report.columns
    charts = [
        Chart("Loss", "", report.steps, columns["loss"]),
        Chart("Gradient norm", "", report.steps, columns["grad_norm"]),
        _noise(report),
    ]
    if _varies(columns["lr"]):
        charts.append(Chart("Learning rate", "", report.steps, columns["lr"], _three_digits, from_zero=True))
    return _grid([line_chart(chart) for chart in charts])


def _noise(report: Report) -> Chart:
    noise, batch = report.settled("noise_scale"), report.settled("batch")
    yours = float(batch[-1]) if batch.size else math.nan
    note = ""
    if noise.size:
        note = f"The largest batch that still pays: {_round(float(noise[-1]))}"
        note += f"; yours: {count(yours)}." if batch.size else "."
        last = report.steps[np.isfinite(report.columns["noise_scale"])][-1]
        if last - report.steps[0] < 0.9 * (report.steps[-1] - report.steps[0]):
            note += f" Last known at step {last:,.0f}."
    reference = (yours, f"your batch: {count(yours)}") if batch.size and yours > 0 else None
    return Chart(
        "Gradient noise scale", "samples", report.steps, report.columns["noise_scale"], reference=reference, note=note
    )


def _three_digits(value: float) -> str:
    return f"{value:.3g}"


def _round(value: float) -> str:
    return f"{float(f'{value:.2g}'):,.0f}"


def communication(report: Report) -> str:
    """What travels, how fast, and in which buckets."""
    sent = report.columns["sent_bytes"]
    there = sent[np.isfinite(sent)]
    if report.run.size == 1 or not there.size:
        return ""
    per_step = float(np.median(there))
    text = (
        f"A worker sends <b>{size(per_step)}</b> per step, {size(float(there.sum()))} in this run, for "
        f"{size(report.run.grad_bytes)} of gradients in {counted(len(report.run.buckets), 'bucket')}."
    )
    hidden, exposed = (float(np.mean([f(each) for each in report.shares])) if report.shares else math.nan
                       for f in (lambda each: each.hidden_ms, lambda each: each.shares_ms["exposed"]))  # fmt: skip
    if hidden + exposed > 0:
        text += (
            f" Of {milliseconds(hidden + exposed)} of communication per step, "
            f"<b>{percent(hidden / (hidden + exposed))}</b> is hidden under the backward pass."
        )
    charts = [Chart("Bus bandwidth", "GB/s", report.steps, report.columns["bus_gb_per_s"], from_zero=True)]
    if _varies(sent):
        charts.append(Chart("Sent by a worker", "MB per step", report.steps, sent / 1e6, from_zero=True))
    return f"<p>{text}</p>{_grid([*map(line_chart, charts), _buckets(report)])}"


def _buckets(report: Report) -> str:
    if not report.run.buckets:
        return ""
    rows = "".join(_bucket_row(report, bucket) for bucket in report.run.buckets[:_MOST_BUCKETS])
    left_out = len(report.run.buckets) - _MOST_BUCKETS
    more = f"<p>{counted(left_out, 'bucket')} more.</p>" if left_out > 0 else ""
    return (
        f'<div class="card"><h3>Buckets</h3><p class="note">in the order in which they travel</p><div class="scroll" '
        f'tabindex="0" role="group" aria-label="Buckets, scrolls sideways"><table class="text"><thead><tr>'
        f"<th scope=col>bucket</th><th scope=col>size</th><th scope=col>on its way</th><th scope=col>parameters</th>"
        f"</tr></thead><tbody>{rows}</tbody></table></div>{more}</div>"
    )


def _bucket_row(report: Report, bucket: Bucket) -> str:
    flights = [
        flight.reduced_us - flight.launched_us
        for trace in report.traces for worker in trace.workers for flight in worker.flights
        if flight.place == bucket.place
    ]  # fmt: skip
    took = milliseconds(float(np.median(flights)) / 1e3) if flights else NONE
    more = f" and {len(bucket.params) - 3:,} more" if len(bucket.params) > 3 else ""
    names = ", ".join(f"<code>{escaped(name[:200])}</code>" for name in bucket.params[:3])
    cells = f"<td>{size(bucket.num_bytes)}</td><td>{took}</td><td>{names}{more}</td>"
    return f"<tr><th scope=row>{bucket.place}</th>{cells}</tr>"


def hang_section(hang: Hang) -> str:
    """The report of a hang, and what every worker was doing."""
    text = f"<pre>{escaped(hang.text[:_MOST_LETTERS])}</pre>" if hang.text else ""
    stacks = "".join(
        f"<details><summary>{escaped(name.replace('-', ' '))}: what it was doing</summary>"
        f"<pre>{escaped(stack[:_MOST_LETTERS])}</pre></details>"
        for name, stack in list(hang.stacks.items())[:_MOST_STACKS]
    )
    left_out = len(hang.stacks) - _MOST_STACKS
    return text + stacks + (f"<p>{counted(left_out, 'stack')} more in hangs/.</p>" if left_out > 0 else "")


def _grid(charts: list[str]) -> str:
    return f'<div class="grid">{"".join(charts)}</div>' if any(charts) else ""


def _varies(values: Numbers) -> bool:
    values = values[np.isfinite(values)]
    return bool(values.size and values.max() - values.min() > 0.01 * abs(values.max()))
