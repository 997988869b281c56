"""`lockstep report`: where the time of a watched run went, as a page."""

import argparse
import contextlib
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.arguments import write
from lockstep.errors import UsageError
from lockstep.watching.number_format import counted, number, percent

if TYPE_CHECKING:
    from lockstep.watching.run_report import RunReport

_DESCRIPTION = """\
Make a page of the folder that a watched run wrote: who holds the others up, where each worker's time goes, the timeline
of a step, efficiency and throughput, loss, the largest batch that still pays, communication, hangs. The page is one
file that needs no network. The run may still be going on. Beside the page goes trace.json, for
https://ui.perfetto.dev or chrome://tracing.

With --live nothing is written. The page is served to browsers of this machine, at an address that only you are told,
and follows the run until you press Ctrl-C. From elsewhere: ssh -L 8000:127.0.0.1:PORT HOST
"""

_EPILOG = """\
example:
  lockstep run -n 4 --watch=run/ train.py
  lockstep report run/ --open
  lockstep report run/ --live --open      # while it goes on
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "report",
        help="where the time of a watched run went, who is slow, who was stuck: a page",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what a watched run wrote")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page (default: FOLDER/report.html)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the trace (default: FOLDER/trace.json)")
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    parser.add_argument("--live", action="store_true", help="serve the page here, and have it follow the run")
    parser.add_argument("--port", type=int, metavar="P", help="with --live: the port of 127.0.0.1 (default: any)")


def run(args: argparse.Namespace) -> int:
    """Write the page and the trace, and say the verdict; or serve the page."""
    if args.live:
        return _serve(args)
    if args.port is not None:
        raise UsageError("--port is for --live: without it the page is a file.")
    from lockstep.watching.page import page
    from lockstep.watching.run_folder import RunFolder
    from lockstep.watching.run_report import read_report
    from lockstep.watching.timelines import write_trace

    folder = RunFolder(args.folder)
    found = read_report(folder)
    target = args.output or args.folder / "report.html"
    write(target, "--output", page(found))
    detail = args.trace or args.folder / "trace.json"
    write(detail, "--trace", lambda path: write_trace(path, folder, found))
    print("\n".join([*summary(found), f"page:  {target}", f"trace: {detail} (open it in https://ui.perfetto.dev)"]))
    if args.open:
        webbrowser.open(target.resolve().as_uri())
    return 0


def _serve(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    from lockstep.watching.live_page import LiveServer

    if args.output is not None or args.trace is not None:
        raise UsageError("--output and --trace are for a page that is written, and --live writes none: leave them out.")
    with LiveServer(args.folder, args.port or 0) as server, tempfile.TemporaryDirectory() as private:
        to_come = "" if args.folder.is_dir() else f" There is no folder '{args.folder}' yet: it is waited for."
        print(f"live: {server.address}\nFor browsers of this machine, until Ctrl-C.{to_come}", flush=True)
        if args.open:
            # Other users can read a browser's command line, but not this file, which leads to the address.
            way = Path(private, "live.html")
            way.write_text(f'<meta http-equiv="refresh" content="0; url={server.address}">')
            webbrowser.open(way.as_uri())
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def summary(found: "RunReport") -> list[str]:
    """The run in a few lines: what it was, how fast, and the verdict."""
    from lockstep.watching.run_report import verdict

    run, said = found.run, verdict(found)
    speed = [
        f"{number(found.samples_per_s)} samples/s" if found.samples_per_s > 0 else "",
        f"efficiency {percent(found.efficiency)}" if found.efficiency > 0 else "",
    ]
    what = [f"{run.script} on {counted(run.size, 'worker')}", counted(found.steps.size, "step"), *filter(None, speed)]
    skipped = [f"{counted(found.num_skipped, 'line')} could not be read."] if found.num_skipped else []
    # A folder may be a stranger's, and a terminal obeys what is not printable.
    return [_printable(text) for text in (", ".join(what), said.headline, said.detail, *skipped) if text]


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)
