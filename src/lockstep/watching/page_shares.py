"""Where each worker's time goes: a bar per worker, and the same as a table."""

from lockstep.watching.page_words import counted, escaped, milliseconds, number, percent
from lockstep.watching.report import Report, Shares
from lockstep.watching.run_record import KINDS

_MOST_WORKERS = 32
"""Rows that are shown."""

MEANINGS = {
    "data": "waiting for the loader",
    "copy": "moving the batch to the device",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "exposed": "communication that nothing hides",
    "waiting": "for a slower worker",
    "optimizer": "the update of the weights",
    "other": "everything else",
}


def shares(report: Report) -> str:
    """The bars and the table; "" if no step says where its time went."""
    if not report.shares:
        return ""
    # Who waits least is who the others wait for.
    shown = sorted(report.shares, key=lambda each: each.shares_ms["waiting"])[:_MOST_WORKERS]
    shown.sort(key=lambda each: each.rank)
    longest = max(each.wall_ms for each in shown) or 1.0
    bars = "".join(_bar(report, each, longest) for each in shown)
    left_out = len(report.shares) - len(shown)
    note = f" Shown are the {len(shown)} of {len(report.shares)} workers that wait least." if left_out else ""
    return f'<p>{_sentence(report)}{note}</p><div class="bars">{bars}</div>{_legend()}{_table(report, shown)}'


def _sentence(report: Report) -> str:
    num_steps = report.steps.size - report.num_warm_up
    left_out = f", without the first {report.num_warm_up}" if report.num_warm_up else ""
    working = report.part("forward", "backward", "optimizer")
    return (
        f"Mean of {counted(num_steps, 'step')}{left_out}. Of all workers' time, <b>{percent(working)}</b> is forward, "
        f"backward and optimizer, <b>{percent(report.part('waiting'))}</b> waiting for others, "
        f"<b>{percent(report.part('data'))}</b> data, <b>{percent(report.part('exposed'))}</b> exposed communication."
    )


def _bar(report: Report, worker: Shares, longest: float) -> str:
    parts = "".join(_part(kind, ms, longest) for kind, ms in worker.shares_ms.items() if ms > 0)
    host = report.run.host(worker.rank)
    told = ", ".join(f"{kind} {milliseconds(ms)}" for kind, ms in worker.shares_ms.items() if ms > 0)
    where = f" <small>{escaped(host)}</small>" if host else ""
    return (
        f'<div class="row"><div class="who">worker {worker.rank}{where}</div>'
        f'<div class="bar" role="img" aria-label="Worker {worker.rank}: {told}">{parts}</div>'
        f'<div class="sum">{milliseconds(worker.wall_ms)}</div></div>'
    )


def _part(kind: str, ms: float, longest: float) -> str:
    width = 100 * ms / longest
    text = number(ms) if width >= 6 else ""
    return f'<span class="k-{kind}" style="width:{width:.2f}%" title="{kind}: {milliseconds(ms)}">{text}</span>'


def _legend() -> str:
    kinds = "".join(f'<li><i class="k-{kind}"></i>{kind} <small>{MEANINGS[kind]}</small></li>' for kind in KINDS)
    return f'<ul class="legend wide">{kinds}</ul>'


def _table(report: Report, shown: list[Shares]) -> str:
    heads = "".join(f"<th scope=col>{name}</th>" for name in (*KINDS, "step", "hidden", "last in", "costs the others"))
    rows = "".join(_row(report, worker) for worker in shown)
    return (
        f'<details open><summary>As a table</summary><p class="note">Milliseconds per step; hidden is communication '
        f'under the backward pass and not part of the sum.</p><div class="scroll" tabindex="0" role="group" '
        f'aria-label="Time per worker, scrolls sideways"><table><thead><tr><th scope=col>worker</th>{heads}'
        f"</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _ms(value: float) -> str:
    """All cells alike, so that a column can be compared."""
    return f"{value:,.1f}"


def _row(report: Report, worker: Shares) -> str:
    late = next((each for each in report.lateness if each.rank == worker.rank), None)
    cells = [_ms(worker.shares_ms[kind]) for kind in KINDS]
    cells += [_ms(worker.wall_ms), _ms(worker.hidden_ms)]
    cells += [percent(late.part_last if late else 0.0), _ms(late.late_ms if late else 0.0)]
    return f"<tr><th scope=row>{worker.rank}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
