"""Collectives of the shared-memory backend against gloo and against a plain memory copy, on one host.

    python bench/collectives.py                      2 workers, float32, 1 KB to 100 MB
    python bench/collectives.py --sizes 25M --ops all_reduce --rounds 60

For every operation and size, in one run and interleaved round by round (see lockstep.bench.interleave):

gloo       torch's gloo
in place   backend shm on memory from `shm.allocate`: nothing is staged
staged     backend shm on ordinary tensors
copy       each worker copies as many bytes from one place in its memory to another, both at once: what memory allows

reduce_scatter puts the result elsewhere; all_gather finds each worker's part in its place in the whole;
all_reduce_async is started with async_op=True and waited for at once.

Small operations are repeated within a round, so that a round is long enough to be timed. Printed are medians of the
per-round ratios with 95 % bootstrap intervals, and whether what docs/benchmarks.md claims holds.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lockstep
from lockstep.bench import interleave, machine
from lockstep.bench.interleave import Estimate
from lockstep.comm import shm

ROUND_BYTES = 64 << 20
"""Small operations are repeated until a round of one variant moves about this much."""
MOST_REPEATS = 200
MB = 1 << 20

Run = Callable[[Tensor, Tensor, Any], None]
"""Carries out one operation: the whole tensor, this worker's part of one, the group."""

_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # As before torch 2.12.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _own(whole: Tensor, group: Any) -> Tensor:
    """This worker's part of `whole`, where it lies, as an optimizer that updates a part leaves it."""
    return whole.chunk(dist.get_world_size(group))[dist.get_rank(group)]


OPS: dict[str, Run] = {
    "all_reduce": lambda whole, _part, group: dist.all_reduce(whole, group=group),
    "all_reduce_async": lambda whole, _part, group: dist.all_reduce(whole, group=group, async_op=True).wait(),
    "reduce_scatter": lambda whole, part, group: _REDUCE_SCATTER(part, whole, group=group),
    "all_gather": lambda whole, part, group: _ALL_GATHER(whole, _own(whole, group), group=group),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What was measured for one operation and size."""

    op: str
    num_bytes: int
    seconds: dict[str, float]
    """Median time of one operation, by variant."""
    faster: dict[str, Estimate]
    """How many times faster than gloo, by variant."""
    to_copy: Estimate
    """Time in place, in units of the copy."""
    rounds: str


def main() -> None:
    """Start the workers and print what they measured."""
    options = _options()
    rows, facts = lockstep.launch(measure, workers=options.workers, args=(options,))[0]
    print(", ".join(f"{name}: {fact}" for name, fact in facts.items()))
    _print(rows)
    if options.json:
        Path(options.json).write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")


def measure(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """What one worker does: every operation and size in turn."""
    torch.set_num_threads(max(1, machine.cores() // options.workers))
    shm.register()
    world = lockstep.join(device="cpu", backend="gloo")
    group = dist.new_group(backend="shm")
    assert isinstance(group, dist.ProcessGroup)
    largest = max(options.sizes) // 4
    shared = shm.allocate(group, largest, torch.float32), shm.allocate(group, largest, torch.float32)
    plain = torch.zeros(largest), torch.zeros(largest)
    rows = []
    for op in options.ops:
        for num_bytes in options.sizes:
            actions, repeats = _actions(world, OPS[op], num_bytes // 4, plain, shared, group)
            measured = interleave.measure(world, actions, rounds=options.rounds, warmup=3)
            rows.append(_row(op, num_bytes, measured, repeats))
    return rows, machine.describe(world)


def _actions(
    world: lockstep.World,
    run: Run,
    numel: int,
    plain: tuple[Tensor, Tensor],
    shared: tuple[Tensor, Tensor],
    group: dist.ProcessGroup,
) -> tuple[dict[str, interleave.Action], int]:
    numel = numel // world.size * world.size
    repeats = max(1, min(MOST_REPEATS, ROUND_BYTES // (4 * numel)))
    part = slice(world.rank * (numel // world.size), (world.rank + 1) * (numel // world.size))
    source, target = plain[0][:numel], plain[1][:numel]

    def repeated(whole: Tensor, apart: Tensor, over: Any) -> interleave.Action:
        def act(_number: int) -> None:
            for _ in range(repeats):
                run(whole, apart, over)

        return act

    def copy(_number: int) -> None:
        for _ in range(repeats):
            target.copy_(source)

    return {
        "gloo": repeated(source, target[part], world.group),
        "in place": repeated(shared[0][:numel], shared[1][:numel][part], group),
        "staged": repeated(source, target[part], group),
        "copy": copy,
    }, repeats


def _row(op: str, num_bytes: int, measured: interleave.Measured, repeats: int) -> Row:
    times = measured.times
    return Row(
        op,
        num_bytes,
        {name: interleave.spread(seconds)[1] / repeats for name, seconds in times.items()},
        {name: interleave.compare(times, interleave.ratio, "gloo", name) for name in ("in place", "staged")},
        interleave.compare(times, interleave.ratio, "in place", "copy"),
        str(measured),
    )


def _print(rows: list[Row]) -> None:
    print(f"\n{'':15}{'size':>8}{'gloo us':>10}{'in place':>10}{'staged':>10}{'copy':>10}", end="")
    print(f"{'in place faster':>24}{'staged faster':>24}{'in place / copy':>24}  claim")
    for row in rows:
        times = "".join(f"{1e6 * row.seconds[name]:10.0f}" for name in ("gloo", "in place", "staged", "copy"))
        ratios = "".join(f"{_text(each):>24}" for each in (*row.faster.values(), row.to_copy))
        print(f"{row.op:15}{_size(row.num_bytes):>8}{times}{ratios}  {_verdict(row)}")
    print("\n" + "\n".join(sorted({f"{row.op} {_size(row.num_bytes)}: {row.rounds}" for row in rows})))


def _verdict(row: Row) -> str:
    """Which of the claims of docs/benchmarks.md this row is about, and whether they hold."""
    is_small = row.num_bytes <= MB
    in_place, staged = row.faster["in place"].median, row.faster["staged"].median
    claims = {}
    if row.op == "all_reduce":
        if is_small or row.num_bytes >= 25 * MB:
            least = 8 if is_small else 4.5
            claims[f"in place >= {least}x"] = in_place >= least
        least = 5 if is_small else 2
        claims[f"staged >= {least}x"] = staged >= least
        if row.num_bytes >= 25 * MB:
            claims["<= 1.5 copies"] = row.to_copy.median <= 1.5
    elif row.num_bytes == 25 * MB:
        claims["in place >= 5x"] = in_place >= 5
    return "; ".join(f"{claim}: {'holds' if holds else 'DOES NOT HOLD'}" for claim, holds in claims.items())


def _text(estimate: Estimate) -> str:
    return f"{estimate.median:.2f} ({estimate.low:.2f}-{estimate.high:.2f})"


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MB} MB" if num_bytes >= MB else f"{num_bytes >> 10} KB"


def _parse_size(text: str) -> int:
    units = {"K": 1 << 10, "M": MB}
    return int(text[:-1]) * units[text[-1].upper()]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    sizes = [_parse_size(size) for size in ("1K", "16K", "128K", "1M", "4M", "25M", "100M")]
    parser.add_argument("--sizes", nargs="+", type=_parse_size, default=sizes, help="as 16K or 25M")
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds of each variant (default 40)")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
