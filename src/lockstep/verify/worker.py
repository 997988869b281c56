"""Runs a script as `python script.py args` would, with a recorder beside it: `python -m lockstep.verify.worker ...`."""

import argparse
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep import seeds
from lockstep.verify.training_recorder import Enough, TrainingRecorder

SEED = 0
"""What scripts that set no seed of their own are seeded with."""

_INTERRUPTED = 130
"""The exit code that a shell reports after Ctrl-C."""


def main(argv: Sequence[str]) -> int:
    """Run the script until it ends or has made its steps, then have the recorder write; returns the exit code."""
    parser = argparse.ArgumentParser(prog="lockstep.verify.worker")
    for flag in ("--chaos", "--sync-batch-norm", "--float64", "--show", "--module"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    recorder, record = _recorder(args)
    seeds.seed_everything(SEED)
    recorder.install()
    if not args.show:
        discard_stdout()
    status = run_script(args.script, args.args, as_module=args.module)
    if not status:
        record.save(args.folder)
    return status


def _recorder(args: argparse.Namespace) -> Any:
    """What is beside the script, and what is saved if it ends well."""
    if args.chaos:
        from lockstep.verify import chaos

        recorder = chaos.Recorder(args.folder)
        return recorder, recorder
    rank = int(os.environ.get("RANK", "0"))
    training = TrainingRecorder(rank, args.steps, syncs_batch_norm=args.sync_batch_norm, in_float64=args.float64)
    return training, training.record


def discard_stdout() -> None:
    """Let nothing that the script prints be seen: it runs two times or more, and a verdict is to come."""
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def run_script(script: str, args: Sequence[str], *, as_module: bool) -> int:
    """Run it as `python script.py args` would; returns its exit code."""
    sys.argv = [script, *args]
    try:
        if as_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)  # What `python script.py` has there.
            runpy.run_path(script, run_name="__main__")
    except Enough:
        return 0
    except SystemExit as left:
        if left.code is None or isinstance(left.code, int):
            return left.code or 0
        print(left.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:
        traceback.print_exception(type(error), error, _scripts_own(error.__traceback__))
        return 1
    return 0


def _scripts_own(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in ours:
        inner = inner.tb_next
    return inner or trace


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
