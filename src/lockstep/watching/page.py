"""The page of a run: one HTML file that needs nothing else, no network and no JavaScript.

Everything that comes from the run is escaped where it is put into the page (`page_words.escaped`), and the page's own
policy forbids every request and every script but the one it brings.
"""

import base64
import hashlib

from lockstep.watching import page_sections as sections
from lockstep.watching.page_shares import shares
from lockstep.watching.page_style import SCRIPT, style
from lockstep.watching.page_timeline import timelines
from lockstep.watching.page_words import counted, escaped
from lockstep.watching.report import Report
from lockstep.watching.report_verdict import verdict

_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath fill='%230072b2' "
    "d='M2 3h8v4H2z'/%3E%3Cpath fill='%23e69f00' d='M6 9h8v4H6z'/%3E%3C/svg%3E"
)
"""Or browsers ask for one."""


def page(report: Report) -> str:
    """The whole page."""
    name = escaped(report.run.script)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{name}: lockstep report</title>'
        f'<link rel="icon" href="{_ICON}"><style>{style()}</style></head><body>'
        f'<header><p class="over">lockstep report</p><h1>{name}</h1><p class="facts">{sections.facts(report)}</p>'
        f"{_verdict(report)}{sections.tiles(report)}</header><main>{_main(report)}</main>"
        f"<footer>{_footer(report)}</footer><script>{SCRIPT}</script></body></html>\n"
    )


def _policy() -> str:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"


def _verdict(report: Report) -> str:
    said = verdict(report)
    detail = f"<p>{escaped(said.detail)}</p>" if said.detail else ""
    own = ""
    if report.verdict and report.hang is None:
        own = f"<p><small>The run itself said last: “{escaped(report.verdict)}”</small></p>"
    mood = " good" if said.is_good else ""
    headline = f"<b>{escaped(said.headline)}</b>"
    return f'<section class="verdict{mood}" aria-label="Verdict">{headline}{detail}{own}</section>'


def _main(report: Report) -> str:
    hang = "" if report.hang is None else sections.hang_section(report.hang)
    parts = [
        (
            "A step, worker by worker",
            "What every worker did, and which bucket waited for whom.",
            timelines(report),
            True,
        ),
        ("Where the time goes", "", shares(report), True),
        ("Speed", "", sections.speed(report), False),
        ("Training", "", sections.training(report), False),
        ("Communication", "", sections.communication(report), False),
        ("The hang", "What was found when the workers did not go on.", hang, True),
    ]
    return "".join(_section(title, lead, body, in_card) for title, lead, body, in_card in parts if body)


def _section(title: str, lead: str, body: str, in_card: bool) -> str:
    inner = f'<div class="card">{body}</div>' if in_card else body
    said = f'<p class="lead">{lead}</p>' if lead else '<p class="lead"></p>'
    return f"<section><h2>{title}</h2>{said}{inner}</section>"


def _footer(report: Report) -> str:
    run = report.run
    skipped = ""
    if report.num_skipped:
        skipped = (
            f"<p><b>{counted(report.num_skipped, 'line')} of the folder could not be read</b> and is left out.</p>"
        )
        if report.num_skipped > 1:
            skipped = skipped.replace("is left out", "are left out")
    return (
        f"{skipped}<p>Lockstep {escaped(run.lockstep)}, torch {escaped(run.torch)}. For all steps with detail, open "
        f"trace.json in Perfetto.</p>"
    )
