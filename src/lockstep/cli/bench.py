"""`lockstep bench`: what things take on this machine, side by side in one run."""

import argparse
import sys
from typing import TYPE_CHECKING

from lockstep.cli import bench_step

if TYPE_CHECKING:
    from lockstep.bench.comm import Results, Row
    from lockstep.bench.request import Request

_INTERRUPTED = 130
_UNREAD = 141
"""The exit codes that a shell reports after Ctrl-C, and when nobody reads the output any more."""

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

Naive and ring use the backend's send and receive; the bytes and messages that a worker sent are counted where they
are handed over, not computed. The time is the median, of the slowest worker. Bus bandwidth is 2(N-1)/N * M / time for
all three: by messages, workers cannot send less on average. The ratio is the time in units of the backend's own,
compared within rounds, with a 95 % interval.
"""

_COLUMNS = ("size", "backend", "algorithm", "time", "bytes sent", "messages", "bus GB/s", "time / own (95 % interval)")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure on this machine: Lockstep against its peers, and what communication takes",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="benchmark")
    bench_step.add_step(benchmarks)
    bench_step.add_gpu(benchmarks)
    _add_comm(benchmarks)


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns 1 if a worker failed, or nothing could be measured."""
    from lockstep.errors import WorkerFailed, WorkerLost

    try:
        return _run_comm(args) if args.benchmark == "comm" else bench_step.run(args)
    except KeyboardInterrupt:
        print("\nlockstep bench: interrupted; no worker is left.", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        sys.stdout = None  # Or Python tries to write what is left, and complains.
        return _UNREAD
    except (WorkerLost, WorkerFailed) as error:
        print(f"\nlockstep bench: {error}", file=sys.stderr)
        return 1


def _run_comm(args: argparse.Namespace) -> int:
    from lockstep.bench import request

    asked = request.checked(args.workers, args.sizes, args.backends, args.rounds)
    target = None if args.json is None else request.writable(args.json)
    print(opening(asked), end="\n\n", flush=True)
    from lockstep.bench import comm  # Takes seconds, since torch comes with it.

    results = comm.run(asked)
    if target is not None:
        target.write_text(results.as_json())
    print("\n".join([*table(results.rows), "", *closing(results)]))
    return 0


def opening(asked: "Request") -> str:
    """What is said before the workers start."""
    return (
        f"Summing float32 tensors of {', '.join(map(size_text, asked.sizes))} over {asked.workers} workers of this "
        f"host. Rounds: {asked.rounds}."
    )


def table(rows: "tuple[Row, ...]") -> list[str]:
    """A line of column names, then one per row; a blank one between sizes."""
    lines = [_line(_COLUMNS)]
    for before, row in zip((None, *rows), rows, strict=False):
        if before is not None and before.num_bytes != row.num_bytes:
            lines.append("")
        lines.append(_line(_cells(row)))
    return lines


def closing(results: "Results") -> list[str]:
    """What the numbers rest on."""
    counted = [f"{size_text(num_bytes)}: {text}" for num_bytes, text in results.rounds.items()]
    return [*counted, ", ".join(f"{name}: {fact}" for name, fact in results.machine.items())]


def size_text(num_bytes: int) -> str:
    """As on the command line: 64K, 16M."""
    for unit, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if num_bytes % unit == 0:
            return f"{num_bytes // unit}{letter}"
    return str(num_bytes)


def time_text(seconds: float) -> str:
    """In the unit in which it has one to three digits before the point."""
    for unit, letters in ((1, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.2f} {letters}"
    return f"{seconds * 1e6:.1f} us"


def _add_comm(benchmarks: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = benchmarks.add_parser(
        "comm",
        help="naive and ring all-reduce against the backend's own",
        description=_COMM_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-n",
        "--workers",
        type=int,
        metavar="N",
        help="number of workers, 2 or more (default: one per core, at least 2)",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=["1K", "64K", "1M", "16M"],
        metavar="M",
        help="bytes of the tensors, with K, M or G (default: 1K 64K 1M 16M)",
    )
    parser.add_argument(
        "--backends", nargs="+", metavar="B", help="shm, gloo or both (default: gloo, and shm where it works)"
    )
    parser.add_argument("--rounds", type=int, default=20, metavar="K", help="rounds to time (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the results there too, as JSON")


def _cells(row: "Row") -> tuple[str, ...]:
    sent, ratio = row.sent, row.ratio
    return (
        size_text(row.num_bytes),
        row.backend,
        row.algorithm,
        time_text(row.seconds),
        "-" if sent is None else f"{sent.num_bytes}",
        "-" if sent is None else f"{sent.num_messages}",
        f"{row.bus_bandwidth:.3f}",
        f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})",
    )


def _line(cells: tuple[str, ...]) -> str:
    size, backend, algorithm, time, num_bytes, messages, bandwidth, ratio = cells
    return (
        f"{size:>6}  {backend:<8}{algorithm:<10}{time:>11}{num_bytes:>13}{messages:>10}{bandwidth:>10}{ratio:>28}"
    ).rstrip()
