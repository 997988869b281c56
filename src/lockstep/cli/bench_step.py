"""`lockstep bench step` and `lockstep bench gpu`: the step of Lockstep and of its peers, side by side in one run."""

import argparse
import sys
import textwrap

from lockstep.bench import catalogue

_STEP_DESCRIPTION = """\
Compare a step of training (forward, backward, update) on workers of this host's cores: Lockstep, torch's own ways, and
those of Accelerate, Lightning Fabric and DeepSpeed where they are installed.

Every variant has its own model and fused AdamW, starts from the same weights and takes the same batches. They take
turns, step by step, in an order that is shuffled anew in every round: on the CPU each in workers of its own, with an
untimed step before each timed one; on GPUs all in the same workers. A step lasts until the slowest worker is done.
Printed are the median, the ratios to the limit (no communication) and to torch's DDP, compared
within rounds, with 95 % intervals, and the memory of a worker. Who cannot run here is listed, with the reason.
"""

_GPU_DESCRIPTION = """\
Compare a step of training (forward, backward, update) on GPUs: Lockstep, torch's own ways, and those of Accelerate,
Lightning Fabric and DeepSpeed where they are installed; in bfloat16 autocast, with fused AdamW.

Several workers may share one GPU. NCCL refuses that unless they say to be different hosts, so they do (each has its
own NCCL_HOSTID), and then talk over loopback sockets: read such a run as a comparison of the variants, not as a speed
of NCCL. With one worker, nocomm is the plain loop. Otherwise as `lockstep bench step`.
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


def add_step(benchmarks: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `bench step`."""
    parser = benchmarks.add_parser(
        "step",
        help="a step of Lockstep against torch DDP, FSDP2, DeepSpeed and others, on CPU workers",
        description=_STEP_DESCRIPTION + _listed(on_gpu=False),
        epilog=_STEP_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(parser, "number of workers (default: 2)", "gpt-10m", 30)


def add_gpu(benchmarks: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `bench gpu`."""
    parser = benchmarks.add_parser(
        "gpu",
        help="the same on CUDA, with one or several workers on a GPU",
        description=_GPU_DESCRIPTION + _listed(on_gpu=True),
        epilog=_GPU_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(parser, "number of workers; they may share a GPU (default: one per GPU)", "gpt2-124m", 40)


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns 1 if nothing could be measured."""
    from lockstep.bench import contest, request

    device = "cuda" if args.benchmark == "gpu" else "cpu"
    asked = contest.checked(
        device, args.workers, args.workload, args.variants, args.steps, args.warmup, args.batch, args.crews
    )
    files = {option: getattr(args, option) for option in ("json", "plot")}
    targets = {option: request.writable(path, f"--{option}") for option, path in files.items() if path is not None}
    from lockstep.bench import plot, results, step, table  # Takes seconds, since torch comes with it.

    found = []
    for each in asked:
        found.append(step.run(each, announce=_announce))
        print("\n".join(["", *table.lines(found[-1]), ""]), flush=True)
        # After each: what was measured is kept if a later one is interrupted.
        if "json" in targets:
            targets["json"].write_text(results.as_json(found))
        if "plot" in targets:
            targets["plot"].write_text(plot.svg(found))
    return 0 if all(each.rows for each in found) else 1


def _announce(what: str) -> None:
    print(f"lockstep bench: {what}", file=sys.stderr, flush=True)


def _listed(*, on_gpu: bool) -> str:
    """Workloads and variants, a line each."""
    lines = ["", "workloads:"]
    lines += [f"  {name:17}{catalogue.WORKLOADS[name].about}" for name in catalogue.workloads(on_gpu=on_gpu)]
    lines += ["", "variants:"]
    lines += [f"  {name:17}{about}" for name, about in catalogue.KINDS.items() if name not in ("limit", "plain")]
    lines += [f"  @MB, as in ddp@4: the size of a bucket ({', '.join(catalogue.BUCKETED)})"]
    if not on_gpu:
        lines += [f"  /gloo or /shm: what it runs over ({', '.join(catalogue.MOVABLE)});"]
        lines += ["  if not said, Lockstep runs over shm and all others over gloo"]
    usual = textwrap.wrap(f"by default: {', '.join(catalogue.ON_GPU if on_gpu else catalogue.ON_CPU)}", 108)
    return "\n".join([*lines, *(f"  {line}" for line in usual)]) + "\n"


def _add_options(parser: argparse.ArgumentParser, workers: str, workload: str, steps: int) -> None:
    parser.add_argument("-n", "--workers", type=int, metavar="N", help=workers)
    parser.add_argument(
        "--workload",
        nargs="+",
        default=[workload],
        metavar="NAME",
        help="what to train, one after the other (default: %(default)s)".replace("%(default)s", workload),
    )
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="who takes part (default: see above)")
    parser.add_argument(
        "--steps", type=int, default=steps, metavar="K", help="timed steps of each variant (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup", type=int, default=3, metavar="K", help="steps before those, not timed (default: %(default)s)"
    )
    parser.add_argument(
        "--crews",
        type=int,
        default=1,
        metavar="K",
        help="start all workers anew K times, each for so many steps: how fast a process is differs by a few percent "
        "(default: %(default)s)",
    )
    parser.add_argument("--batch", type=int, metavar="B", help="samples per worker and step (default: the workload's)")
    parser.add_argument("--json", metavar="FILE", help="write everything there too: all times, the machine, versions")
    parser.add_argument("--plot", metavar="FILE", help="draw the ratios there, as SVG")
