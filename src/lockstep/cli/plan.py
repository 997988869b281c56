"""`lockstep plan`: what fits, how fast it will be, how far it scales, what to choose."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import terminal
from lockstep.cli.arguments import write
from lockstep.errors import UsageError
from lockstep.watching.number_format import count, duration, milliseconds, number, percent, size

if TYPE_CHECKING:
    from lockstep.plan.outcome import Plan

_DESCRIPTION = """\
Predict, before it is run, what a training needs and how fast it is: memory by component, the time of a step and what of
it is communication, efficiency on 1 to 16,384 workers, and what to choose, each choice with its reason. Every plan says
how far such predictions were off on published runs. Nothing is started but a script that is given.

What is trained: a script with DataParallel or Trainer, a model by name, or a size.
"""

_EPILOG = """\
examples:
  lockstep plan --on 8xA100-80 train.py --epochs 3            a script of yours, run on fake tensors
  lockstep plan --model gpt2-xl --on 64xH100/8@400Gb --batch 512
  lockstep plan --params 7.5B --layers 32 --hidden 4096 --seq 2048 --on 64xA100-80/8@1600Gb --html plan.html
  lockstep plan --model resnet50 --on my.toml --units 115M --price 2.5
  lockstep plan --model llama-8b --on 1024xH100 --mtbf 50000 --units 1T
  lockstep plan --calibrate mine.csv --predict theirs.csv --json out.json
  lockstep plan --check run/                                   a prediction against a run that was watched

machines: WORKERSxDEVICE/PER_HOST@RATE (64xH100/8@400Gb: 64 workers, 8 a host, 400 Gbit/s each host), or a TOML file.
See docs/plan.md for the formulas, their errors, and where not to trust them.
"""

_OPTIONS = (
    "params", "layers", "hidden", "seq", "vocab", "batch", "micro_batch", "zero", "precision", "optimizer",
    "checkpointing", "wire", "bucket_mb", "straggler", "units", "elastic", "price", "run", "base_batch", "base_lr",
)  # fmt: skip
"""Those that `lockstep.plan` takes by the same names."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "plan",
        help="what fits, how fast it will be, how far it scales, what to choose, before it is run",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    what = parser.add_argument_group("what is trained")
    what.add_argument("script", nargs="?", type=Path, help="a script of yours, after all options of this command")
    what.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments")
    what.add_argument("--model", metavar="NAME", help="a model of the catalogue, as gpt2-xl, llama-8b or resnet50")
    what.add_argument("--params", metavar="N", help="parameters of a transformer, as 7.5B")
    for name, text in (("layers", "its blocks"), ("hidden", "its width"), ("seq", "tokens of a sample")):
        what.add_argument(f"--{name}", type=int, metavar="N", help=text)
    what.add_argument("--vocab", type=int, metavar="N", help="its vocabulary")
    how = parser.add_argument_group("how (what is not said is chosen)")
    how.add_argument("--batch", type=int, metavar="B", help="the global batch, in samples")
    how.add_argument("--micro-batch", type=int, metavar="B", help="samples of a forward pass on one worker")
    how.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="what is split over the workers")
    how.add_argument("--checkpointing", choices=("none", "selective", "full"), help="of activations")
    how.add_argument("--precision", metavar="P", help="fp32, tf32, amp, bf16, fp16 or fp8")
    how.add_argument("--optimizer", metavar="NAME", help="adamw (default), sgd, sgd-momentum, ...")
    how.add_argument("--wire", default="none", help="none, half, int8, sign, topk or lowrank (default: none)")
    how.add_argument("--bucket-mb", type=float, metavar="MB", help="the cap of a bucket (default: the engine's)")
    where = parser.add_argument_group("on what")
    where.add_argument("--on", metavar="MACHINE", help="as 64xH100/8@400Gb, or a TOML file (default: this machine)")
    where.add_argument("--measure", action="store_true", help="measure this machine first, which takes some seconds")
    where.add_argument("--straggler", type=float, default=1.0, metavar="X", help="a worker takes X times as long")
    where.add_argument("--loader-ms", type=float, default=0.0, metavar="MS", help="what the loader takes for a sample")
    end = parser.add_argument_group("to what end")
    end.add_argument("--units", metavar="N", help="tokens or samples of the whole training: its time, energy, price")
    end.add_argument("--price", type=float, metavar="X", help="of a device for an hour")
    end.add_argument("--mtbf", type=float, metavar="HOURS", help="between two faults of one worker")
    end.add_argument("--elastic", action="store_true", help="the others go on when a worker fails")
    end.add_argument("--run", type=Path, metavar="FOLDER", help="a watched run, for its gradient noise scale")
    end.add_argument("--base-batch", type=int, metavar="B", help="a batch for which a learning rate was tuned")
    end.add_argument("--base-lr", type=float, metavar="LR", help="that learning rate")
    told = parser.add_argument_group("what is told")
    told.add_argument("--html", type=Path, metavar="FILE", help="a page: the scaling curve, memory, a step's timeline")
    told.add_argument("--json", type=Path, metavar="FILE", help="everything, as JSON")
    told.add_argument("--table", action="store_true", help="the error of each published row, too")
    checks = parser.add_argument_group("checking it")
    checks.add_argument("--predict", type=Path, metavar="TABLE", help="predict the runs of a CSV table (with --json)")
    checks.add_argument("--calibrate", type=Path, metavar="TABLE", help="from those of this one (default: published)")
    checks.add_argument("--check", type=Path, metavar="FOLDER", help="hold a prediction against a watched run")


def run(args: argparse.Namespace) -> int:
    """Plan, print, write."""
    if args.predict is not None or args.calibrate is not None:
        return _predict(args)
    if args.check is not None:
        return _check(args)
    made = _plan(args)
    print("\n".join(told(made, with_rows=args.table)))
    if args.json is not None:
        write(args.json, "--json", json.dumps(made.to_json(), indent=1) + "\n")
    if args.html is not None:
        from lockstep.plan.page import page

        write(args.html, "--html", page(made))
        print(f"page: {args.html}")
    return 0


def _plan(args: argparse.Namespace) -> "Plan":
    from lockstep.plan.outcome import plan

    model: Any = args.model
    on: Any = args.on
    if args.measure:
        from lockstep.plan.measure import measured_machine

        if on is not None:
            raise UsageError("--measure measures this machine, and --on names another: leave one of them out.")
        on = measured_machine()
    if args.script is not None:
        from lockstep.plan.script import workload_of_script

        model = workload_of_script(args.script, args.script_args)
    options = {name: getattr(args, name) for name in _OPTIONS}
    loader_s, mtbf_hours = args.loader_ms / 1e3, args.mtbf
    return plan(model, on=on, loader_s=loader_s, mtbf_hours=mtbf_hours, **options)


# In words


def told(made: "Plan", *, with_rows: bool = False) -> list[str]:
    """The plan as lines for a terminal."""
    from lockstep.plan.page import errors, scaling

    (sizes, *speeds), (columns, *sources) = scaling(made), errors(made)
    work, machine = made.workload, made.machine
    kept = "" if work.checkpointing == "none" else f", {work.checkpointing} checkpointing"
    lines = [
        f"{work.name or 'model'}: {count(work.num_params)} parameters, {work.precision}, {work.optimizer}, "
        f"batch {work.batch:,} = {machine.workers:,} workers x {work.accumulation} x {work.micro_batch}, "
        f"zero={work.zero}{kept}",
        f"{machine.name}: {machine.workers:,} x {machine.device.name} on {machine.hosts:,} "
        f"host{'s' * (machine.hosts != 1)}, {machine.intra.name} within"
        + (f", {machine.inter.name} a host between" if machine.hosts > 1 else ""),
        "",
        *_memory(made),
        "",
        *_times(made),
        "",
        "scaling",
        *terminal.table(sizes, speeds, text=()),
        *_effort(made),
        "",
        *_advice(made),
        "",
        "how far such predictions were off, on published runs",
        *terminal.table(columns, sources),
        *(_errors(made) if with_rows else []),
    ]
    if made.remarks:
        lines += ["", "assumed:", *(f"  {remark}" for remark in made.remarks)]
    if made.machine.measured is None:
        share = percent(made.deviation)
        lines += ["", f"Of published runs of the like, two in three were within {share} of such a speed."]
    return lines


def _memory(made: "Plan") -> list[str]:
    memory = made.memory
    parts = [f"{name} {size(amount)}" for name, amount in memory.components() if amount >= 0.005 * memory.total]
    fits = "fits" if memory.fits else "DOES NOT FIT"
    lines = [f"memory of a worker: {size(memory.total)} of {size(memory.capacity)}, {fits}", f"  {', '.join(parts)}"]
    rows = [
        [
            f"  zero={way.workload.zero}",
            way.workload.checkpointing,
            f"{way.workload.micro_batch}",
            size(way.memory.states),
            size(way.memory.total),
            "fits" if way.memory.fits else "no",
            f"{way.speed.units_per_s:,.0f}",
        ]
        for way in made.shown_ways
    ]
    header = ["  split", "checkpointing", "micro-batch", "states", "peak", "", f"{made.workload.unit}/s"]
    return [*lines, *terminal.table(header, rows, text=(0, 1, 5))]


def _times(made: "Plan") -> list[str]:
    times, speed = made.speed.times, made.speed
    shares = [
        ("computing", times.compute_s),
        ("waiting for the slowest", times.wait_s),
        ("exposed communication", times.exposed_s),
        ("update", times.optimizer_s),
        ("loader", times.data_s),
    ]
    parts = [f"{name} {milliseconds(1e3 * value)}" for name, value in shares if value >= 0.0005 * times.step_s]
    return [
        f"a step: {milliseconds(1e3 * times.step_s)} ({', '.join(parts)})",
        f"  {number(speed.units_per_s)} {made.workload.unit}/s, {number(speed.units_per_s_per_worker)} a worker; "
        f"efficiency {percent(speed.efficiency)}, MFU {percent(speed.mfu)}; each worker sends {size(times.sent_bytes)}",
    ]


def _effort(made: "Plan") -> list[str]:
    effort = made.effort
    if effort is None:
        return []
    parts = [duration(effort.hours * 3600), f"{number(effort.kwh)} kWh"]
    if effort.price is not None:
        parts.append(f"price {number(effort.price)}")
    if effort.goodput < 1:
        parts.append(f"goodput {percent(effort.goodput)}")
    if effort.checkpoint_every_s is not None:
        parts.append(f"a checkpoint every {duration(effort.checkpoint_every_s)}")
    return ["", f"the whole training: {', '.join(parts)}"]


def _advice(made: "Plan") -> list[str]:
    lines = ["advice"]
    for each in made.advice:
        lines.append(f"  {each.topic}: {each.choice}")
        lines.append(f"      {each.reason}")
        if each.runner_up:
            lines.append(f"      next: {each.runner_up}")
    return lines


def _errors(made: "Plan") -> list[str]:
    """The error of every published row."""
    rows = [
        [
            f"  {name}",
            f"{100 * made.multi_host.rows[name]:+.1f} %" if name in made.multi_host.rows else "",
            f"{100 * off:+.1f} %",
        ]
        for name, off in made.left_out.rows.items()
    ]
    return terminal.table(["  row", "from one host", "series left out"], rows)


# Against tables and runs


def _predict(args: argparse.Namespace) -> int:
    from lockstep.plan import published

    if args.predict is None:
        raise UsageError("--calibrate says from what, and nothing says what to predict: add --predict TABLE.csv.")
    runs = published.read_table(args.predict)
    calibration = (
        published.Calibration(published.read_table(args.calibrate))
        if args.calibrate is not None
        else published.built_in().calibration
    )
    predictions = [calibration.predict(each) for each in runs]
    rows = [{"id": each.run.id, "predicted": each.value, "measured": each.run.measured} for each in predictions]
    if args.json is not None:
        write(args.json, "--json", json.dumps({"rows": rows}, indent=1) + "\n")
    shown = []
    for each in predictions:
        error = "" if each.error is None else f"{100 * each.error:+.1f} %"
        value = "-" if each.value is None else f"{each.value:,.1f}"
        measured = "" if each.run.measured is None else f"{each.run.measured:,.1f}"
        what = f"{each.run.model} on {each.run.gpus} {each.run.device or each.run.device_text}"
        shown.append([each.run.id, what, value, measured, error, each.run.unit])
    print("\n".join(terminal.table(["row", "run", "predicted", "measured", "error", "unit"], shown, text=(0, 1, 5))))
    for remark in calibration.remarks:
        print(f"left out of the calibration: {remark}", file=sys.stderr)
    for each in predictions:
        for remark in each.remarks:
            print(f"{each.run.id}: {remark}", file=sys.stderr)
    errors = published.summarised(predictions, calibration)
    if errors.count:
        print(
            f"\nmedian error {percent(errors.median)}, worst {percent(errors.worst)} of {errors.count} runs; constant "
            f"efficiency: {percent(errors.baseline)}; calibrated on {len(calibration.runs)} runs"
        )
    return 0


def _check(args: argparse.Namespace) -> int:
    from lockstep.plan.check import check

    found = check(args.check, on=args.on)
    print("\n".join(found.lines()))
    if args.json is not None:
        write(args.json, "--json", json.dumps(found.to_json(), indent=1) + "\n")
    return 0
