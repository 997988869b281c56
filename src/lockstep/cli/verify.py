"""`lockstep verify`: is N workers the same training as one? If not, what differs first, and why."""

import argparse
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.verify.cause import Cause
    from lockstep.verify.comparison import Comparison, Difference
    from lockstep.verify.verdict import Verdict

_DESCRIPTION = """\
Run a training script on one worker and on N, with the same global batches, and compare gradients, weights and buffers
step by step. The verdict is one of:

  bit-identical                 every bit is the same                                      exit code 0
  equal within float tolerance  the same training; sums were rounded in another order      exit code 0
  different                     with the first step and tensor that differ, the likely     exit code 1
                                cause, and how to mend it

A script that fails, or never makes a step, is exit code 2.

The script runs as under `lockstep run`, unchanged, and is ended after K steps. It runs for real: what it writes, it
writes, so give it a folder to play in. Dropout is off in all runs, since many workers cannot draw the masks of one; and
torch.compile is left out. A script that sets no seed is seeded.
"""

_EPILOG = """\
example:
  lockstep verify -n 4 --steps 5 train.py --batch-size 32 --out /tmp/try
"""

FAILED = 2
"""The exit code for a script that fails, as for a request that cannot be right."""

_INTERRUPTED = 130
"""The exit code that a shell reports after Ctrl-C."""

_WIDTH = 110
"""Of lines, in characters."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "verify",
        help="is N workers the same training as one? if not, what differs first, and why",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-n",
        "--workers",
        type=int,
        metavar="N",
        help="number of workers to compare with one (default: one per GPU, or per core without; at least 2)",
    )
    parser.add_argument(
        "--steps", type=int, default=10, metavar="K", help="optimizer steps to compare (default: %(default)s)"
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument(
        "--threads", type=int, metavar="T", help="compute threads per worker (default: cores divided by workers)"
    )
    parser.add_argument("--output", action="store_true", help="show what the script prints; its stderr is always shown")
    parser.add_argument("script", metavar="SCRIPT", help="a Python script, or a module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Verify, and print the verdict; returns 0 for the same training, 1 for another, 2 if the script fails."""
    from lockstep.errors import WorkerFailed
    from lockstep.start import host
    from lockstep.verify import session

    workers = max(2, host.num_workers(None)) if args.workers is None else args.workers
    request = session.checked(
        session.Request(args.script, args.args, workers, args.steps, args.module, args.threads, args.output)
    )
    try:
        verdict = session.verify(request, announce=lambda what: print(f"lockstep verify: {what}", flush=True))
    except WorkerFailed as error:
        print(f"lockstep verify: {error}", file=sys.stderr)
        return FAILED
    except (session.Interrupted, KeyboardInterrupt) as interrupted:
        print("\nlockstep verify: interrupted; no worker is left.", file=sys.stderr)
        return getattr(interrupted, "status", _INTERRUPTED)
    print("\n" + "\n".join([*notes(verdict.comparison), "", *table(verdict.comparison), "", *closing(verdict)]))
    return 0 if verdict.is_same else 1


def notes(comparison: "Comparison") -> list[str]:
    """What the comparison rests on."""
    one, many = comparison.one.records[0], comparison.many
    said = [f"{_counted(comparison.num_steps, 'step')} compared, on 1 worker and on {many.size}."]
    if any(step.drops for record in many.records for step in record.steps):
        said.append("Dropout was off in all runs: many workers cannot draw the masks of one.")
    if not one.is_seeded:
        said.append("The script sets no seed: torch, numpy and random were seeded with 0 in all runs.")
    if one.is_compiled:
        said.append("torch.compile was left out.")
    return said


def table(comparison: "Comparison") -> list[str]:
    """A line per step: both losses, and the largest relative difference of gradients, weights and buffers."""
    lines = [f"{'step':>5}{'loss on 1':>16}{f'loss on {comparison.many.size}':>16}{'gradients':>12}{'weights':>12}"]
    has_buffers = any(each.kind == "buffer" for each in comparison.differences)
    if has_buffers:
        lines[0] += f"{'buffers':>12}"
    for step in range(comparison.num_steps):
        losses = "".join(f"{_loss(run.loss(step)):>16}" for run in (comparison.one, comparison.many))
        kinds = ("gradient", "weight", "buffer") if has_buffers else ("gradient", "weight")
        lines.append(f"{step:>5}{losses}" + "".join(f"{_largest(comparison, step, kind):>12}" for kind in kinds))
    return lines


def closing(verdict: "Verdict") -> list[str]:
    """The verdict, and what stands behind it."""
    comparison, largest = verdict.comparison, verdict.comparison.largest
    said = f"Verdict: {verdict.kind.value}."
    if not verdict.is_same:
        return [said, *_difference(comparison), *(line for cause in verdict.causes for line in _cause(cause))]
    if largest is None or largest.same_bits:
        return [said]
    allowed = comparison.tolerance(largest.step)
    what = f"  The largest relative difference is {largest.relative:.1e}, {_where(largest)}; rounding may make"
    return [said, *_wrapped(f"{what} {allowed:.1e}.")]


def _difference(comparison: "Comparison") -> list[str]:
    first = comparison.first
    if first is None:
        return ["  No gradient, weight or buffer differs beyond rounding; and yet:"]
    alike = [e for e in comparison.beyond_rounding if (e.step, e.kind) == (first.step, first.kind)]
    others = f" It is the largest of {len(alike)} that differ there." if len(alike) > 1 else ""
    return _wrapped(
        f"  First difference: {_where(first)}, by {first.relative:.1e} of its size (rounding may make "
        f"{comparison.tolerance(first.step):.1e}).{others}"
    )


def _cause(cause: "Cause") -> list[str]:
    return [
        f"  Likely cause: {cause.name}.",
        *_wrapped(f"    Found: {cause.found}."),
        *_wrapped(f"    To mend it: {cause.mend}."),
    ]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="      ", break_on_hyphens=False, break_long_words=False)


def _where(difference: "Difference") -> str:
    if difference.kind == "initial weight":
        return f"weight '{difference.name}' before step 0"
    moment = "after" if difference.kind in ("weight", "buffer") else "of"
    return f"{difference.kind} '{difference.name}' {moment} step {difference.step} on worker {difference.worker}"


def _largest(comparison: "Comparison", step: int, kind: str) -> str:
    found = [each for each in comparison.differences if (each.step, each.kind) == (step, kind)]
    if not found or all(each.same_bits for each in found):
        return "same bits" if found else "-"
    return f"{max(each.relative for each in found):.1e}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.8g}"


def _counted(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"
