"""`lockstep play`: the playground, in a browser."""

import argparse
import tempfile
import webbrowser
from pathlib import Path

from lockstep.cli.arguments import write

_DESCRIPTION = """\
Open a page that trains a small network by 1 to 16 workers, in the browser: batches, gradients and bytes as they travel,
what changes the result and what does not, ten lessons. The page is one file that needs no network.
"""

_EPILOG = """\
examples:
  lockstep play
  lockstep play --out play.html --no-browser
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "play",
        help="see data-parallel training at work: a page in the browser",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write the page (default: a new temporary folder)"
    )
    parser.add_argument("--no-browser", action="store_true", help="write the page and do not show it")


def run(args: argparse.Namespace) -> int:
    """Write the page, and show it."""
    from lockstep.play.page import page

    # A folder that only this user can write to: nobody else can put another page there before the browser reads it.
    target = args.out or Path(tempfile.mkdtemp(prefix="lockstep-play-")) / "play.html"
    write(target, "--out", page())
    address = target.resolve().as_uri()
    if not args.no_browser and not webbrowser.open(address):
        print("No browser could be started.")
    print(f"page: {target}")
    return 0
