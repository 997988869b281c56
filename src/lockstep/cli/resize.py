"""`lockstep resize`: more or fewer workers for an elastic run under way."""

import argparse

from lockstep.cli.arguments import at_least

_DESCRIPTION = """\
Have N workers in a run that was started by `lockstep run --elastic` on this host, from now on. More are started beside
the training and let in at its next step, up to --max; of fewer, those that were started last leave after their step,
down to --min. No step is lost or made twice, and the result keeps its bits.
"""

_EPILOG = """\
examples:
  lockstep run -n 4 --elastic --max 8 --name gpt train.py
  lockstep resize gpt 8
  lockstep resize 31415 2     # by the process id of `lockstep run`
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "resize", help="more or fewer workers for an elastic run under way", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("run", metavar="RUN", help="the launcher's process id, or what `lockstep run --name` gave it")
    parser.add_argument("workers", metavar="N", type=at_least(1), help="how many workers there are to be")


def run(args: argparse.Namespace) -> int:
    """Ask, and say what came of it; returns 0."""
    from lockstep.start import control

    print(f"lockstep resize: {control.resize(args.run, args.workers)}")
    return 0
