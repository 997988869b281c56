"""The most important thing about a run, in a sentence: who holds the others up, and what to do about it."""

import math
from dataclasses import dataclass

from lockstep.watching.page_words import milliseconds, percent
from lockstep.watching.report import Lateness, Report

CAUSES = {"data": "data loading", "compute": "computing", "network": "the network"}
"""What the causes are called in sentences."""

_ADVICE = {
    "data": "Give its loader more processes (num_workers), or make its samples cheaper to read: a slow disk, or "
    "samples that are larger than the others', look like this.",
    "compute": "See what else runs on its host, whether its device is throttled, and whether its samples are larger "
    "than the others'.",
    "network": "See the link of its host: its speed, what else uses it, and errors of the interface (ip -s link).",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the page begins with."""

    is_good: bool
    """Whether nothing asks for attention."""
    headline: str
    detail: str
    """More sentences, with what to do; may be empty."""


def verdict(report: Report) -> Verdict:
    """The run in a sentence: a hang before a straggler before none."""
    if report.hang is not None:
        return _stuck(report)
    if report.straggler is not None:
        return _slow(report, report.straggler)
    if report.run.size == 1:
        return Verdict(True, "One worker: nobody waits for anybody.", "")
    return Verdict(True, "Nobody holds the others up.", _closest(report))


def _stuck(report: Report) -> Verdict:
    hang = report.hang
    assert hang is not None
    where = "" if hang.step is None else f" at step {hang.step:,}"
    went_on = hang.step is not None and report.steps.size > 0 and report.steps[-1] > hang.step
    what = f"The run stood still{where}" if went_on else f"The run hung{where}"
    if hang.missing:
        names = ", ".join(map(str, hang.missing))
        who = f"worker {names} did not arrive" if len(hang.missing) == 1 else f"workers {names} did not arrive"
        headline = f"{what}: {who}{' in time' if went_on else ''}."
    else:
        headline = f"{what}."
    if went_on:
        headline += " It went on later."
    waited = f"Bucket {hang.bucket} waited for {_names(hang.params)}. " if hang.bucket is not None else ""
    return Verdict(False, headline, f"{waited}The workers' stacks are at the end of this page.")


def _slow(report: Report, worst: Lateness) -> Verdict:
    cause, part = next(iter(worst.causes.items()), ("", 0.0))
    name = CAUSES.get(cause, cause)
    why = f", {'all' if part > 0.995 else 'most' if part > 0.5 else 'the largest part'} of it by {name}" if name else ""
    host = report.run.host(worst.rank)
    detail = [
        f"It was the last in {percent(worst.part_last)} of the steps{f' (on {host})' if host else ''}, and waiting "
        f"took {percent(report.part('waiting'))} of all workers' time."
    ]
    without = report.step_ms - worst.late_ms
    if without > 0 and not math.isnan(report.samples_per_s):
        detail.append(f"Without that, a step would take about {milliseconds(without)} instead of "
                      f"{milliseconds(report.step_ms)}.")  # fmt: skip
    detail.append(_ADVICE.get(cause, ""))
    headline = f"Worker {worst.rank} holds everyone up by {milliseconds(worst.late_ms)} a step{why}."
    return Verdict(False, headline, " ".join(filter(None, detail)))


def _closest(report: Report) -> str:
    if not report.lateness:
        return ""
    worst = report.lateness[0]
    return (
        f"The most that any worker costs the others is {milliseconds(worst.late_ms)} a step (worker {worst.rank}), "
        f"{percent(worst.late_ms / report.step_ms)} of it."
    )


def _names(params: tuple[str, ...]) -> str:
    if not params:
        return "its gradients"
    more = f" and {len(params) - 3} more" if len(params) > 3 else ""
    return ", ".join(f"'{name}'" for name in params[:3]) + more
