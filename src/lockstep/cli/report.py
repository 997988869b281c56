"""`lockstep report`: where the time of a watched run went, as a page."""

import argparse
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.watching.run_report import RunReport

_DESCRIPTION = """\
Make a page of the folder that a watched run wrote: who holds the others up, where each worker's time goes, the timeline
of a step, efficiency and throughput, loss, the largest batch that still pays, communication, hangs. The page is one
file that needs no network. The run may still be going on.

Beside it goes trace.json, for https://ui.perfetto.dev or chrome://tracing.
"""

_EPILOG = """\
example:
  lockstep run -n 4 --watch=run/ train.py
  lockstep report run/ --open
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "report",
        help="where the time of a watched run went, who is slow, who was stuck: a page",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what a watched run wrote")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page (default: FOLDER/report.html)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the trace (default: FOLDER/trace.json)")
    parser.add_argument("--open", action="store_true", help="show the page in a browser")


def run(args: argparse.Namespace) -> int:
    """Write the page and the trace, and say the verdict."""
    from lockstep.watching.page import page
    from lockstep.watching.run_folder import RunFolder
    from lockstep.watching.run_report import read_report
    from lockstep.watching.timelines import write_trace

    folder = RunFolder(args.folder)
    found = read_report(folder)
    target = args.output or args.folder / "report.html"
    _write(target, "--output", lambda path: path.write_text(page(found), encoding="utf-8"))
    detail = args.trace or args.folder / "trace.json"
    _write(detail, "--trace", lambda path: write_trace(path, folder, found))
    print("\n".join([*summary(found), f"page:  {target}", f"trace: {detail} (open it in https://ui.perfetto.dev)"]))
    if args.open:
        webbrowser.open(target.resolve().as_uri())
    return 0


def summary(found: "RunReport") -> list[str]:
    """The run in a few lines: what it was, how fast, and the verdict."""
    from lockstep.watching.number_format import counted, number, percent
    from lockstep.watching.run_report import verdict

    run, said = found.run, verdict(found)
    speed = [
        f"{number(found.samples_per_s)} samples/s" if found.samples_per_s > 0 else "",
        f"efficiency {percent(found.efficiency)}" if found.efficiency > 0 else "",
    ]
    what = [f"{run.script} on {counted(run.size, 'worker')}", counted(found.steps.size, "step"), *filter(None, speed)]
    skipped = [f"{counted(found.num_skipped, 'line')} could not be read."] if found.num_skipped else []
    return [", ".join(what), said.headline, *filter(None, [said.detail]), *skipped]


def _write(path: Path, option: str, write: "Callable[[Path], object]") -> None:
    from lockstep.errors import UsageError

    try:
        write(path)
    except OSError as error:
        raise UsageError(
            f"'{path}' cannot be written ({error.strerror}): give {option} a file in a folder that exists and is yours."
        ) from error
