"""The `lockstep` command.

A command is a module of this package with two functions: `add_parser(subparsers)` describes it, and `run(args)`
does it and returns the exit code. A command's module imports what takes long (torch) inside `run`.
"""

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from lockstep import __version__
from lockstep.errors import LaunchError, UsageError, WorkerFailed, WorkerLost

COMMANDS = ("demo", "play", "run", "resize", "verify", "bench", "report", "plan")
"""Names of the modules, in the order in which `lockstep --help` lists them."""

USAGE_ERROR = 2
"""The exit code for a command line, or a request, that cannot be right; argparse has the same."""
INTERRUPTED = 130
UNREAD = 141
"""The exit codes that a shell reports after Ctrl-C, and when nobody reads the output any more."""


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong; shows descriptions as they are written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Only the command that was asked for is imported.
    names = words[:1] if words and words[0] in COMMANDS else COMMANDS
    modules = {name: importlib.import_module(f"lockstep.cli.{name}") for name in names}
    args = make_parser(modules.values()).parse_args(words, argparse.Namespace(words=words[1:]))
    try:
        status: int = modules[args.command].run(args)
    except (LaunchError, UsageError) as error:
        print(f"lockstep {args.command}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(f"\nlockstep {args.command}: interrupted; no worker is left.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stdout = None  # Or Python tries to write what is left, and complains.
        return UNREAD
    except (WorkerLost, WorkerFailed) as error:
        print(f"\nlockstep {args.command}: {error}", file=sys.stderr)
        return 1
    return status


def make_parser(commands: Iterable[ModuleType]) -> argparse.ArgumentParser:
    """What reads a command line, of these commands."""
    parser = _Parser(prog="lockstep", description="Data-parallel training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in commands:
        command.add_parser(subparsers)
    return parser
