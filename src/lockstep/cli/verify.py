"""`lockstep verify`: is N workers the same training as one? If not, what differs first, and why."""

import argparse
import sys
import textwrap
from typing import TYPE_CHECKING

from lockstep import terminal
from lockstep.cli.arguments import at_least
from lockstep.errors import UsageError
from lockstep.terminal import Style
from lockstep.watching.number_format import counted, some

if TYPE_CHECKING:
    from lockstep.verify.causes import Cause
    from lockstep.verify.chaos import ChaosRun, ChaosVerdict
    from lockstep.verify.comparison import Comparison, TensorDifference
    from lockstep.verify.session import TrainingVerdict

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

With --chaos, for scripts that train with lockstep.Trainer: run it to its end on N workers, undisturbed, and again while
workers are killed at random moments, each as it is by `kill -9`, and compare the bits of the final weights and of the
optimizer's state. Dropout stays on. Exit code 0 for the same bits, 1 for others, 2 as above.
"""

_EPILOG = """\
example:
  lockstep verify -n 4 --steps 5 train.py --batch-size 32 --out /tmp/try
  lockstep verify --chaos -n 4 --kills 10 train.py --epochs 1 --out /tmp/try-{run}
"""

FAILED = 2
"""The exit code for a script that fails, as for a request that cannot be right."""

_WIDTH = 110
"""Of lines, in characters."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "verify",
        help="is N workers the same training as one? if not, what differs first, and why",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "-n",
        "--workers",
        type=at_least(2),
        metavar="N",
        help="number of workers to compare with one (default: one per GPU, or per core without; at least 2)",
    )
    parser.add_argument(
        "--steps", type=at_least(1), default=10, metavar="K", help="optimizer steps to compare (default: %(default)s)"
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument(
        "--threads", type=int, metavar="T", help="compute threads per worker (default: cores divided by workers)"
    )
    parser.add_argument("--output", action="store_true", help="show what the script prints; its stderr is always shown")
    chaos = parser.add_argument_group("training under kills")
    chaos.add_argument("--chaos", action="store_true", help="undisturbed, and while workers are killed: the same bits?")
    chaos.add_argument(
        "--kills", type=at_least(1), metavar="K", help="kills, one after the other has been replaced (default: 10)"
    )
    chaos.add_argument("--seed", type=int, metavar="S", help="draws when and whom (default: 0)")
    parser.add_argument("script", metavar="SCRIPT", help="a Python script, or a module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Verify, and print the verdict; returns 0 for the same training, 1 for another, 2 if the script fails."""
    from lockstep.errors import WorkerFailed
    from lockstep.start import host
    from lockstep.verify import chaos, session

    if not args.chaos and (args.kills is not None or args.seed is not None):
        raise UsageError("--kills and --seed are for --chaos: give that too.")
    workers = max(2, host.num_workers(None)) if args.workers is None else args.workers
    script = session.VerifiedScript(args.script, args.args, workers, args.module, args.threads, args.output)
    kills = 10 if args.kills is None else args.kills

    def announce(what: str) -> None:
        print(f"lockstep verify: {what}", flush=True)

    verdict: TrainingVerdict | ChaosVerdict
    try:
        if args.chaos:
            verdict = chaos.verify(script, kills, args.seed or 0, announce)
            before, (said, *reasons) = [], closing_of_chaos(verdict, kills)
        else:
            verdict = session.verify(script, args.steps, announce)
            before = [*notes(verdict.comparison), "", *table(verdict.comparison), ""]
            said, *reasons = closing(verdict)
    except WorkerFailed as error:
        print(f"lockstep verify: {error}", file=sys.stderr)
        return FAILED
    except session.Interrupted as interrupted:
        print("\nlockstep verify: interrupted; no worker is left.", file=sys.stderr)
        return interrupted.status
    said = terminal.styled(said, Style.GREEN if verdict.is_same else Style.RED, sys.stdout)
    print("\n" + "\n".join([*before, said, *reasons]))
    return 0 if verdict.is_same else 1


def closing_of_chaos(verdict: "ChaosVerdict", asked: int) -> list[str]:
    """The verdict on a training under kills, and what stands behind it."""
    quiet, storm = verdict.quiet, verdict.storm
    done = f"{counted(len(storm.kills), 'kill')} in {counted(max(quiet.steps), 'step')}"
    few = [f"  {asked} kills were asked for: a longer training has room for more."] if len(storm.kills) < asked else []
    if verdict.is_same:
        return [f"Verdict: the same bits, after {done}: {counted(len(quiet.final), 'tensor')} compared.", *few]
    differing = [name for name in quiet.final if storm.final.get(name) != quiet.final[name]]
    said = [
        f"Verdict: other bits, after {done}.",
        *_wrapped(f"  {len(differing)} of {counted(len(quiet.final), 'tensor')} differ at the end: {some(differing)}."),
        *_wrapped(f"  {_first_difference(quiet, storm)}"),
    ]
    if verdict.again is None or verdict.again.final == quiet.final:
        said += ["  Undisturbed, the script came to the same bits twice: so the kills made the difference."]
    else:
        said += _wrapped(
            "  But undisturbed too it came to other bits when it ran once more: look for what draws random numbers "
            "outside of the trainer, or depends on time, before you blame the kills."
        )
    return [*said, *few]


def _first_difference(quiet: "ChaosRun", storm: "ChaosRun") -> str:
    for step in sorted(quiet.steps.keys() & storm.steps.keys()):
        names = [name for name, value in quiet.steps[step].items() if storm.steps[step].get(name) != value]
        if names:
            before = [kill for kill in storm.kills if kill[0] <= step]
            last = f"after the kill of worker {before[-1][1]} in step {before[-1][0]}" if before else "before any kill"
            return f"First difference: {some(names)} after step {step}, {last}."
    return "No step that was recorded in both runs differs: the difference came at the end."


def notes(comparison: "Comparison") -> list[str]:
    """What the comparison rests on."""
    one, many = comparison.one.records[0], comparison.many
    said = [f"{counted(comparison.num_steps, 'step')} compared, on 1 worker and on {many.size}."]
    if any(step.drops for record in many.records for step in record.steps):
        said.append("Dropout was off in all runs: many workers cannot draw the masks of one.")
    if not one.is_seeded:
        said.append("The script sets no seed: torch, numpy and random were seeded with 0 in all runs.")
    if one.is_compiled:
        said.append("torch.compile was left out.")
    return said


def table(comparison: "Comparison") -> list[str]:
    """A line per step: both losses, and the largest relative difference of gradients, weights and buffers.

    One that does not count against the training, since a gradient that is zero but for rounding made it, has a tilde.
    """
    kinds = {"gradient": "gradients", "weight": "weights"}
    if any(each.kind == "buffer" for each in comparison.differences):
        kinds["buffer"] = "buffers"
    lines = terminal.table(
        ["step", "loss on 1", f"loss on {comparison.many.size}", *kinds.values()],
        [
            [
                str(step),
                *(_loss(run.loss(step)) for run in (comparison.one, comparison.many)),
                *(_largest(comparison, step, kind) for kind in kinds),
            ]
            for step in range(comparison.num_steps)
        ],
        text=(),
        gap=4,
    )
    if any("~" in line for line in lines):
        lines.append("    ~ made by gradients that are zero but for their rounding error; does not count")
    return lines


def closing(verdict: "TrainingVerdict") -> list[str]:
    """The verdict, and what stands behind it."""
    comparison, largest = verdict.comparison, verdict.comparison.largest
    said = f"Verdict: {verdict.kind.value}."
    if not verdict.is_same:
        causes = [line for cause in verdict.causes for line in _cause(cause)]
        return [said, *_difference(verdict.in_float64 or comparison), *_rounding(verdict), *causes]
    if verdict.in_float64 is not None:
        return [said, *_only_rounding(verdict)]
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


def _rounding(verdict: "TrainingVerdict") -> list[str]:
    """What is known of rounding as the cause of a difference."""
    if verdict.in_float64 is not None:
        return ["  This is in float64, in which both runs were repeated: it is not rounding."]
    if verdict.failure:
        return _wrapped(
            "  Not known: whether rounding made it, of which kinks (ReLU, max-pooling) make much. The script does not "
            f"run in float64, which would tell: {verdict.failure}"
        )
    return []


def _only_rounding(verdict: "TrainingVerdict") -> list[str]:
    there, here = verdict.in_float64, verdict.comparison.first
    assert there is not None and here is not None
    largest = max((each.relative for each in there.differences), default=0.0)
    return _wrapped(
        f"  They part by {here.relative:.1e}, {_where(here)}, more than rounding alone makes; but in float64 by "
        f"{largest:.1e} at most. So it is rounding, of which kinks (ReLU, max-pooling) and small batches make much."
    )


def _cause(cause: "Cause") -> list[str]:
    from lockstep.verify.causes import NOT_KNOWN

    if cause.name == NOT_KNOWN:
        return ["  Cause: not known.", *_wrapped(f"    Seen: {cause.found}."), *_wrapped(f"    To try: {cause.mend}.")]
    return [
        f"  Likely cause: {cause.name}.",
        *_wrapped(f"    Found: {cause.found}."),
        *_wrapped(f"    To mend it: {cause.mend}."),
    ]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="      ", break_on_hyphens=False, break_long_words=False)


def _where(difference: "TensorDifference") -> str:
    if difference.kind == "initial weight":
        return f"weight '{difference.name}' before step 0"
    moment = "after" if difference.kind in ("weight", "buffer") else "of"
    return f"{difference.kind} '{difference.name}' {moment} step {difference.step} on worker {difference.worker}"


def _largest(comparison: "Comparison", step: int, kind: str) -> str:
    found = [each for each in comparison.differences if (each.step, each.kind) == (step, kind)]
    if not found or all(each.same_bits for each in found):
        return "same bits" if found else "-"
    counted, seen = max(each.relative for each in found), max(each.seen for each in found)
    if counted:
        return f"{counted:.1e}"
    return f"~{seen:.1e}" if seen > comparison.tolerance(step) else f"{seen:.1e}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.8g}"
