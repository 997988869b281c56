"""`lockstep bench`: what things take on this machine, side by side in one run."""

import argparse
import sys
import textwrap
from typing import TYPE_CHECKING

from lockstep import terminal
from lockstep.bench import catalogue, request
from lockstep.cli.arguments import at_least, writable
from lockstep.watching.number_format import milliseconds

if TYPE_CHECKING:
    from lockstep.bench.comm import CommResults, CommRow
    from lockstep.bench.request import CommRequest

_DESCRIPTION = """\
Measure on this machine. What is compared takes turns in one run, in an order that is shuffled anew in every round,
since two runs on one machine differ by more than what is compared. Rounds in which other programs took more than 5 %
of the cores do not count, if enough others are left.
"""

_COMM_DESCRIPTION = """\
Compare three ways to sum a tensor over N workers of this host, for every backend and size M:

  naive   everyone sends its whole tensor to everyone: 1 step, a worker sends (N-1) * M bytes
  ring    chunks travel around a ring, twice: 2(N-1) steps, a worker sends 2(N-1)/N * M bytes
  own     the backend's own all_reduce

Bytes and messages are counted where they are handed over, not computed. The time is the median, of the slowest worker.
Bus bandwidth is 2(N-1)/N * M / time: by messages, workers cannot send less on average.
"""

_STEP_DESCRIPTION = """\
Compare a step of training (forward, backward, update) on workers of this host's cores: Lockstep, torch's own ways, and
those of Accelerate, Lightning Fabric and DeepSpeed where they are installed. Every variant has workers, model and fused
AdamW of its own. Printed are the median, the ratios to the limit (no communication) and to torch's DDP with 95 %
intervals, and the memory of a worker. Who cannot run here is listed, with the reason. See docs/benchmarks.md.
"""

_GPU_DESCRIPTION = """\
As `lockstep bench step`, on GPUs and in bfloat16 autocast; all variants live in the same workers. Several workers may
share one GPU: they say to be different hosts then (NCCL refuses that otherwise), and talk over loopback sockets. Read
such a run as a comparison of the variants, not as a speed of NCCL. With one worker, nocomm is the plain loop.
"""

_STEP_EXAMPLES = """\
examples:
  lockstep bench step                                             gpt-10m, 2 workers, all variants
  lockstep bench step --workload mlp recommender --json out.json --plot out.svg
  lockstep bench step -n 4 --workload gpt-40m --variants nocomm ddp/gloo lockstep zero3 fsdp2
"""

_GPU_EXAMPLES = """\
examples:
  lockstep bench gpu                                              gpt2-124m, one worker per GPU
  lockstep bench gpu -n 2 --variants nocomm ddp ddp-bf16 lockstep half int8 zero3 fsdp2
  lockstep bench gpu --workload gpt2-124m gpt2-350m --steps 60 --json out.json
"""

_COLUMNS = ("size", "backend", "algorithm", "time", "bytes sent", "messages", "bus GB/s", "time / own (95 % interval)")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure on this machine: Lockstep against its peers, and what communication takes",
        description=_DESCRIPTION,
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="benchmark")
    _add_contest(
        benchmarks, "step", "a step of Lockstep against torch DDP, FSDP2, DeepSpeed and others, on CPU workers",
        _STEP_DESCRIPTION, _STEP_EXAMPLES, "2", "gpt-10m", 30,
    )  # fmt: skip
    _add_contest(
        benchmarks, "gpu", "the same on CUDA, with one or several workers on a GPU",
        _GPU_DESCRIPTION, _GPU_EXAMPLES, "one per GPU", "gpt2-124m", 40,
    )  # fmt: skip
    _add_comm(benchmarks)


def _add_comm(benchmarks: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = benchmarks.add_parser(
        "comm", help="naive and ring all-reduce against the backend's own", description=_COMM_DESCRIPTION
    )
    parser.add_argument(
        "-n",
        "--workers",
        type=at_least(2),
        metavar="N",
        help="number of workers, 2 or more (default: one per core, at least 2)",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=request.parse_size,
        default=[1 << 10, 1 << 16, 1 << 20, 1 << 24],
        metavar="M",
        help="bytes of the tensors, with K, M or G (default: 1K 64K 1M 16M)",
    )
    parser.add_argument(
        "--backends", nargs="+", choices=request.BACKENDS, help="(default: gloo, and shm where it works)"
    )
    parser.add_argument(
        "--rounds", type=at_least(1), default=20, metavar="K", help="rounds to time (default: %(default)s)"
    )
    parser.add_argument("--json", type=writable, metavar="FILE", help="write the results there too, as JSON")


def _listed(*, on_gpu: bool) -> str:
    """Workloads and variants, a line each."""
    lines = ["", "workloads:"]
    lines += [f"  {name:17}{catalogue.WORKLOADS[name].about}" for name in catalogue.workloads(on_gpu=on_gpu)]
    lines += ["", "variants:"]
    lines += [f"  {name:17}{about}" for name, about in catalogue.KINDS.items()]
    lines += [f"  @MB, as in ddp@4: the size of a bucket ({', '.join(catalogue.BUCKETED)})"]
    if not on_gpu:
        lines += [f"  /gloo or /shm: what it runs over ({', '.join(catalogue.MOVABLE)});"]
        lines += ["  if not said, Lockstep runs over shm and all others over gloo"]
    usual = textwrap.wrap(f"by default: {', '.join(catalogue.ON_GPU if on_gpu else catalogue.ON_CPU)}", 108)
    return "\n".join([*lines, *(f"  {line}" for line in usual)]) + "\n"


def _add_contest(
    benchmarks: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    description: str,
    examples: str,
    workers: str,
    workload: str,
    steps: int,
) -> None:
    """One of the two contests; `workers`, `workload` and `steps` are what they do if nothing else is said."""
    on_gpu = name == "gpu"
    description += _listed(on_gpu=on_gpu)
    parser = benchmarks.add_parser(name, help=text, description=description, epilog=examples)
    known = catalogue.workloads(on_gpu=on_gpu)

    add, count = parser.add_argument, at_least(1)
    add("-n", "--workers", type=count, metavar="N", help=f"of them; on GPUs they may share one (default: {workers})")
    add("--workload", nargs="+", default=[workload], choices=known, metavar="NAME", help=f"(default: {workload})")
    add("--variants", nargs="+", metavar="NAME", help="who takes part (default: see above)")
    add("--steps", type=count, default=steps, metavar="K", help=f"timed steps of each variant (default: {steps})")
    add("--warmup", type=at_least(0), default=3, metavar="K", help="steps before those, not timed (default: 3)")
    add("--crews", type=count, default=1, metavar="K", help="start all workers anew K times, each for so many steps")
    add("--batch", type=count, metavar="B", help="samples per worker and step (default: the workload's)")
    add("--json", type=writable, metavar="FILE", help="write everything there too: all times, the machine, versions")
    add("--plot", type=writable, metavar="FILE", help="draw the ratios there, as SVG")


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns 1 if nothing could be measured."""
    return _run_comm(args) if args.benchmark == "comm" else _run_step(args)


def _run_step(args: argparse.Namespace) -> int:
    device = "cuda" if args.benchmark == "gpu" else "cpu"
    asked = request.checked_contests(
        device, args.workers, args.workload, args.variants, args.steps, args.warmup, args.batch, args.crews
    )
    from lockstep.bench import plot, results, step  # Takes seconds, since torch comes with it.

    line = terminal.ProgressLine(sys.stderr)

    def progress(done: int, total: int, what: str) -> None:
        if line.is_live:
            line.show(done, total, [what])

    found = []
    for each in asked:
        try:
            found.append(step.run(each, lambda what: line.write(f"lockstep bench: {what}"), progress))
        finally:
            line.erase()
        print("\n".join(["", *results.lines(found[-1]), ""]), flush=True)
        # After each: what was measured is kept if a later one is interrupted.
        if args.json is not None:
            args.json.write_text(results.as_json(found))
        if args.plot is not None:
            args.plot.write_text(plot.svg(found))
    return 0 if all(each.rows for each in found) else 1


def _run_comm(args: argparse.Namespace) -> int:
    asked = request.checked_comm(args.workers, args.sizes, args.backends, args.rounds)
    print(opening(asked), end="\n\n", flush=True)
    from lockstep.bench import comm  # Takes seconds, since torch comes with it.

    results = comm.run(asked)
    if args.json is not None:
        args.json.write_text(results.as_json())
    print("\n".join([*table(results.rows), "", *closing(results)]))
    return 0


def opening(asked: "CommRequest") -> str:
    """What is said before the workers start."""
    return (
        f"Summing float32 tensors of {', '.join(map(size_text, asked.sizes))} over {asked.workers} workers of this "
        f"host. Rounds: {asked.rounds}."
    )


def table(rows: "tuple[CommRow, ...]") -> list[str]:
    """A line of column names, then one per row; a blank one between sizes."""
    cells: list[tuple[str, ...]] = []
    for before, row in zip((None, *rows), rows, strict=False):
        if before is not None and before.num_bytes != row.num_bytes:
            cells.append(())
        cells.append(_cells(row))
    return terminal.table(_COLUMNS, cells, text=(1, 2))


def closing(results: "CommResults") -> list[str]:
    """What the numbers rest on."""
    counted = [f"{size_text(num_bytes)}: {text}" for num_bytes, text in results.rounds.items()]
    return [*counted, ", ".join(f"{name}: {fact}" for name, fact in results.machine.items())]


def size_text(num_bytes: int) -> str:
    """As on the command line: 64K, 16M."""
    for unit, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if num_bytes % unit == 0:
            return f"{num_bytes // unit}{letter}"
    return str(num_bytes)


def _cells(row: "CommRow") -> tuple[str, ...]:
    sent, ratio = row.sent, row.ratio
    return (
        size_text(row.num_bytes),
        row.backend,
        row.algorithm,
        milliseconds(1e3 * row.seconds),
        "-" if sent is None else f"{sent.num_bytes}",
        "-" if sent is None else f"{sent.num_messages}",
        f"{row.bus_bandwidth:.3f}",
        f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})",
    )
