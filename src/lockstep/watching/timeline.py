"""From the moments of a step to the stretches of time between them. Pure.

Each moment either begins something or ends it; what lies between two moments belongs to what was begun last, and what
nothing was begun for is `other`. So the stretches of a step leave no gap and never overlap, whatever a script does.

The time between the model's return and its first gradient (the loss) counts as forward if a backward pass follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.events import Event, Kind
from lockstep.watching.record import SYNC, Record, Sent, Span

_LOSS = "loss"
_OTHER = "other"

_BEGINS = {
    Kind.LOADING: "data",
    Kind.LOADED: _OTHER,
    Kind.COPYING: "copy",
    Kind.COPIED: _OTHER,
    Kind.FORWARD: "forward",
    Kind.FORWARDED: _LOSS,
    Kind.BACKWARD: "backward",
    Kind.WAITING: SYNC,
    Kind.SYNCED: _OTHER,
    Kind.ENDED: _OTHER,
    Kind.OPTIMIZER: "optimizer",
    Kind.UPDATED: _OTHER,
}
"""What begins at a moment."""


@dataclass(frozen=True, slots=True)
class Moment:
    """An event, and when it took place on the clock that counts: the device's, where that is another."""

    event: Event
    time: int


def record(step: int, begin: int, moments: Sequence[Moment], noted: dict[str, float], taken: int = 0) -> Record:
    """The record of a step that ran from `begin` to the last of `moments`."""
    end = moments[-1].time if moments else begin
    samples = sum(moment.event.num_samples for moment in moments)
    return Record(step, begin, end - begin, _spans(begin, moments), _buckets(begin, moments), samples, noted, taken)


def _spans(begin: int, moments: Sequence[Moment]) -> list[Span]:
    spans: list[Span] = []
    name, since = _OTHER, 0
    for moment in moments:
        follows = _BEGINS.get(moment.event.kind)
        if follows is None:
            continue
        now = max(moment.time - begin, since)
        if name == _LOSS:
            name = "forward" if follows == "backward" else _OTHER
        if follows == "backward" and name == "backward":
            continue  # Several models, or a pass within a pass: one stretch.
        _append(spans, name, since, now)
        name, since = follows, now
    return spans


def _append(spans: list[Span], name: str, begin: int, end: int) -> None:
    if end == begin:
        return
    if spans and spans[-1].name == name:
        begin = spans.pop().begin
    spans.append(Span(name, begin, end))


def _buckets(begin: int, moments: Sequence[Moment]) -> list[Sent]:
    full: dict[tuple[int, int], int] = {}
    sent: list[Sent] = []
    on_their_way: dict[tuple[int, int], Sent] = {}
    for moment in moments:
        event, now = moment.event, moment.time - begin
        key = (event.step, event.bucket)
        if event.kind is Kind.FULL:
            full[key] = now
        elif event.kind is Kind.LAUNCHED:
            each = Sent(event.bucket, event.num_bytes, full.pop(key, now), now, now)
            sent.append(each)
            on_their_way[key] = each
        elif event.kind is Kind.REDUCED and key in on_their_way:
            on_their_way.pop(key).reduced = now
    return sent
