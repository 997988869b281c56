"""`lockstep demo`: train something real on this machine, now, and say what was checked."""

import argparse
import sys
from typing import TYPE_CHECKING

from lockstep.cli.arguments import at_least
from lockstep.watching.number_format import counted, milliseconds, number, percent

if TYPE_CHECKING:
    from lockstep.demo.examiner import Findings
    from lockstep.demo.gpt import Recipe

_PRINTABLE = {chr(byte) for byte in range(32, 127)} | {"\n"}

_DESCRIPTION = """\
Train a byte-level GPT on the source code of Python's standard library, with as many workers as there are cores or
GPUs, and check what Lockstep promises while doing so: that all workers end with the same weights to the bit, and that
their first steps are those of a single worker on the whole batch. It measures throughput, scaling and communication
in the same run. About two minutes on 2 cores. Exit code 1 if a check fails.
"""

_NEXT = """\
Now yours. Three lines in a training script:

    world  = lockstep.join()
    model  = lockstep.DataParallel(net.to(world.device))
    loader = lockstep.shard(loader)          # batch_size is now the global batch

and start it with:  lockstep run -n {workers} train.py"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command."""
    parser = subparsers.add_parser("demo", help="train something real on this machine, now", description=_DESCRIPTION)
    parser.add_argument(
        "-n", "--workers", type=int, metavar="N", help="number of workers (default: one per GPU, or per core without)"
    )
    parser.add_argument("--steps", type=at_least(1), default=300, metavar="K", help="updates (default: %(default)s)")
    parser.add_argument(
        "--model",
        choices=("tiny", "small", "medium", "large"),
        default="small",
        help="0.1, 3, 11 or 86 million parameters (default: %(default)s)",
    )
    parser.add_argument(
        "--batch", type=at_least(1), metavar="B", help="samples in the global batch (default: 8 for each worker)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Train, and say what was checked; returns 1 if a check failed."""
    import lockstep
    from lockstep.demo import gpt, train_gpt
    from lockstep.start import host

    workers = host.num_workers(args.workers)
    batch = 8 * workers if args.batch is None else args.batch  # About as long a step on any number of workers.
    chosen = gpt.Recipe(args.model, args.steps, batch, args.seed)
    num_bytes = len(train_gpt.read_corpus(train_gpt.corpus_folder()))
    print(opening(chosen, workers, num_bytes), end="\n\n", flush=True)
    findings = lockstep.launch(train_gpt.train, workers, args=(chosen,))[0]
    assert findings is not None
    print("\n" + "\n".join([*checked(findings), "", *measured(findings), "", *written(findings.sample)]), end="\n\n")
    if not findings.is_as_promised:
        print("lockstep demo: NOT as promised; the lines marked FAILED say what. Please report this.", file=sys.stderr)
        return 1
    print(_NEXT.format(workers=workers))
    return 0


def opening(chosen: "Recipe", workers: int, num_bytes: int) -> str:
    """What is said before the workers start."""
    from lockstep.demo import gpt

    params = gpt.num_params(chosen.shape) / 1e6
    return (
        f"Training a byte-level GPT of {params:.1f} million parameters on Python's standard library "
        f"({num_bytes / 1e6:.1f} MB) with {counted(workers, 'worker')}:\n"
        f"{chosen.steps} steps, global batch {chosen.batch} x {chosen.shape.context} bytes, seed {chosen.seed}."
    )


def checked(findings: "Findings") -> list[str]:
    """One statement per check, and whether it holds."""
    return ["Checked in this run:", _replicas(findings), _exactness(findings), _losses(findings)]


def measured(findings: "Findings") -> list[str]:
    """One statement per measurement."""
    found = findings.summary
    if not found.wall_ms:
        return ["Measured in this run: nothing, it had too few steps."]
    lines = [
        "Measured in this run:",
        f"  throughput          {number(found.samples_per_s)} samples/s, {milliseconds(found.wall_ms)} a step",
        f"  scaling efficiency  {percent(found.efficiency)}: of a step, what a worker takes for its part by itself",
        f"  communication       {percent(found.exposed_ms / found.wall_ms)} of the time, besides what the backward "
        f"pass hides; waiting for a slower worker {percent(found.waiting_ms / found.wall_ms)}",
    ]
    return [*lines, *([f"  {found.verdict}"] if found.verdict else [])]


def written(sample: bytes) -> list[str]:
    """The first lines of what the model writes, safe for a terminal."""
    text = "".join(chr(byte) if chr(byte) in _PRINTABLE else "?" for byte in sample)
    lines = [line[:100].rstrip() for line in text.split("\n")]
    return ["What the model writes now:", *[f"    {line}" for line in lines if line][:5]]


def _replicas(findings: "Findings") -> str:
    digests = findings.digests
    if findings.are_identical:
        what = f"all weights after {findings.steps} steps have SHA-256 {digests[0][:16]}... on each of {len(digests)}"
        return _statement(True, "replicas are bit-identical", what)
    named = ", ".join(f"worker {rank}: {text[:16]}..." for rank, text in enumerate(digests))
    return _statement(False, "replicas are bit-identical", f"SHA-256 of all weights: {named}")


def _exactness(findings: "Findings") -> str:
    from lockstep.demo.examiner import TOLERANCE

    parity = findings.parity
    return _statement(
        parity.is_close,
        f"the first {parity.steps} steps are one worker's on the same {parity.batch}-sample batches",
        f"weights differ by {parity.weights:.1e}, losses by {parity.losses:.1e} (relative, largest; "
        f"allowed {TOLERANCE:.0e})",
    )


def _losses(findings: "Findings") -> str:
    tail = findings.losses[-max(1, findings.steps // 20) :]
    return _statement(
        findings.is_finite,
        "the loss is a number in every step",
        f"from {findings.losses[0]:.3f} to {sum(tail) / len(tail):.3f} nats per byte",
    )


def _statement(holds: bool, claim: str, evidence: str) -> str:
    return f"  {'ok    ' if holds else 'FAILED'}  {claim}:\n          {evidence}"
