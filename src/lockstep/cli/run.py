"""`lockstep run`: start workers on this host, relay their output, report the first failure."""

import argparse
import signal
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lockstep.start.supervisor import NOTICE

if TYPE_CHECKING:
    from lockstep.start.command import Outcome

_DESCRIPTION = """\
Run a script, or with -m a module, as N workers of this host.

Their output is relayed line by line, each line with the worker's number; a single worker has the terminal to itself.
If a worker fails, the others get a few seconds to notice, then are ended; what the first to fail said last is printed
at the very end, and its exit code becomes that of this command (128 plus the signal if it was killed). However this
command ends, no worker is left behind.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "run",
        help="start workers on this host and run a script on each",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-n", "--workers", type=int, metavar="N", help="number of workers (default: one per GPU, or per core without)"
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument(
        "--threads",
        type=int,
        metavar="T",
        help="compute threads per worker (default: OMP_NUM_THREADS if set, else cores divided by workers)",
    )
    parser.add_argument(
        "--watch",
        action="store_const",
        const="run",
        help="record where the time goes and who is slow, in the folder `run`, or FOLDER with --watch=FOLDER",
    )
    _allow_value(parser, "--watch", "--watch-in")
    parser.add_argument("--no-prefix", action="store_true", help="relay lines without the worker's number")
    parser.add_argument(
        "--notice",
        type=float,
        default=NOTICE.total_seconds(),
        metavar="SECONDS",
        help="how long the other workers may go on when one has failed (default: %(default)g)",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python script, or a module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def _allow_value(parser: argparse.ArgumentParser, option: str, inner: str) -> None:
    """Let `option=VALUE` be as good as `option`: argparse alone would take the script for the value."""
    parser.add_argument(inner, dest=option.strip("-"), help=argparse.SUPPRESS)
    parse = parser._parse_optional

    def parse_optional(word: str) -> Any:
        return parse(inner + word[len(option) :] if word.startswith(f"{option}=") else word)

    parser._parse_optional = parse_optional  # type: ignore[method-assign, assignment]


def run(args: argparse.Namespace) -> int:
    """Run the workers; returns the exit code of the first failure, or 0."""
    from lockstep.start import command

    outcome = command.run(
        command.python_command(args.script, args.args, as_module=args.module),
        workers=args.workers,
        threads=args.threads,
        prefix=not args.no_prefix,
        notice=timedelta(seconds=args.notice),
        watch=args.watch,
    )
    for words in closing_words(outcome):
        print(words, file=sys.stderr)
    return outcome.status


def closing_words(outcome: "Outcome") -> list[str]:
    """What is said after the workers' own output. The first failure's last words come last."""
    said = []
    if outcome.signum and outcome.signum != signal.SIGPIPE:  # After SIGPIPE, nobody listens.
        said.append(f"lockstep run: ended by {signal.Signals(outcome.signum).name}; no worker is left.")
    failure = outcome.failure
    if failure is None:
        return said
    if outcome.size == 1:
        # It had the terminal to itself, and has said there what there was to say; only a killed one could not.
        return [*said, f"lockstep run: the worker was {failure}."] if failure.code < 0 else said
    what = f"lockstep run: worker {failure.rank} failed first ({failure})"
    if not failure.words:
        return [*said, f"{what}; it said nothing on stderr."]
    return [*said, f"{what}; its last words:", failure.words]
