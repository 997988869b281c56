"""torch's own tests of DDP and of collectives, which ship in its wheel, on CPUs and with what is to take DDP's place.

    python tests/torch_ddp.py --place torch lockstep --backend gloo        # the tests of DDP, side by side
    python tests/torch_ddp.py --place lockstep --tests NAME ...             # some of them
    python tests/torch_ddp.py --kind collectives --backend gloo shm        # backend shm in gloo's place

Every test runs in processes of its own, which are forks of this one. They were written for GPUs: here "cuda" means the
CPU (`OnCPU`), `device_ids` is left out, and torch's seeds for GPUs are not set. Nothing else of a test is changed.
"""

import argparse
import contextlib
import inspect
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import unittest
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

DEADLINE_S = 90
SLOW = {"test_ddp_uneven_inputs": 1800, "test_ddp_profiling_torch_profiler": 300}
ERROR = re.compile(r"[\w.]*(Error|Exception|Lost|Mismatch|Void)\b")
SIZES = (2, 4)
"""Numbers of workers: the first that a test takes counts."""


@dataclass(frozen=True)
class Outcome:
    """What became of one test."""

    name: str
    place: str
    backend: str
    size: int
    verdict: str
    """passed, failed, skipped or hung."""
    why: str = ""
    """The last line of what the first failed worker said."""
    text: str = ""
    """All of it."""
    seconds: float = 0.0


def load(size):
    """torch's module of tests, as it is for `size` workers on CPUs."""
    os.environ.update(
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
        BACKEND="gloo",
        WORLD_SIZE=str(size),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    import torch

    torch.set_num_threads(1)
    from torch.testing._internal.distributed import distributed_test
    from vision import import_torchvision

    import lockstep.replica.data_parallel  # noqa: F401  # Once, for all forks.

    with contextlib.suppress(ImportError):
        distributed_test.torchvision = import_torchvision()  # Where only one test needs it, and no operator.
    return distributed_test


def names_of(kind):
    """The tests of a kind, `ddp` or `collectives`."""
    tests = load(SIZES[0]).DistributedTest._DistTestBase
    found = [name for name in vars(tests) if name.startswith("test_")]
    return [name for name in found if is_of_ddp(tests, name) == (kind == "ddp")]


def is_of_ddp(tests, name):
    """Whether a test wraps a model: it, or what it calls of the class, names DDP or SyncBatchNorm."""
    seen, todo = set(), [name]
    while todo:
        each = todo.pop()
        if each in seen or not callable(getattr(tests, each, None)):
            continue
        seen.add(each)
        source = inspect.getsource(inspect.unwrap(getattr(tests, each)))
        if "DistributedDataParallel" in source or "SyncBatchNorm" in source:
            return True
        todo += [other for other in vars(tests) if f"self.{other}(" in source]
    return False


def on_cpu(size):
    """Let "cuda" mean the CPU in this process: everywhere where a test may say so."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.testing._internal import common_distributed

    cpu, cuda = torch.device("cpu"), torch.cuda

    def is_gpu(device):
        if isinstance(device, bool):
            return False
        if isinstance(device, str):
            return device.startswith("cuda")
        return isinstance(device, int) or (isinstance(device, torch.device) and device.type == "cuda")

    class OnCPU(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.device and is_gpu(args[0]):
                return cpu
            if is_gpu(kwargs.get("device")):
                kwargs["device"] = cpu
            place = {torch.Tensor.to: 1, torch._C._nn._parse_to: 0}.get(func, len(args))
            if place < len(args) and is_gpu(args[place]):
                args = (*args[:place], cpu, *args[place + 1 :])
            return func(*args, **kwargs)

    OnCPU().__enter__()
    common_distributed.TEST_CUDA = True
    cuda.is_available = lambda: sys._getframe(1).f_globals["__name__"].startswith("torch.testing")
    cuda.device_count = lambda: size
    cuda.current_device = lambda: cpu
    torch.accelerator.current_device_index = lambda: 0
    for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all", "empty_cache"):
        setattr(cuda, name, lambda *_, **__: None)


def put_in_place(place, distributed_test):
    """What the tests take for DDP from here on."""
    import torch
    from torch import nn

    import lockstep

    class Places:
        """As DDP, on the CPU: a module there has no `device_ids`."""

        def __init__(self, module, device_ids=None, output_device=None, **options):
            super().__init__(module, **options)

    wrapper = nn.parallel.DistributedDataParallel if place == "torch" else lockstep.DataParallel
    made = type("DistributedDataParallel", (Places, wrapper), {"__module__": "torch.nn.parallel.distributed"})
    for module in (distributed_test, nn.parallel, nn.parallel.distributed):
        module.DistributedDataParallel = made
    if place == "lockstep":
        torch.nn.SyncBatchNorm = lockstep.SyncBatchNorm


def be_worker(name, place, backend, rank, size, folder):
    """One test on one worker; returns its verdict and what it says."""
    distributed_test = load(size)
    import torch.distributed as dist
    from torch.testing._internal import common_utils

    distributed_test.BACKEND = backend
    os.environ.update(BACKEND=backend, TEMP_DIR=str(folder), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ["INIT_METHOD"] = f"file://{folder}/store"
    kind = type("Test", (distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase), {})
    timeout = timedelta(seconds=distributed_test.CUSTOM_PG_TIMEOUT.get(name, distributed_test.default_pg_timeout))
    dist.init_process_group(backend, f"file://{folder}/store", timeout, size, rank)
    if place == "lockstep":
        import lockstep

        lockstep.join(device="cpu")
    if place is not None:
        put_in_place(place, distributed_test)
        on_cpu(size)
    test = kind(name)
    test.rank, test.file_name = rank, f"{folder}/store"
    common_utils.set_rng_seed()
    try:
        getattr(test, name)()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        codes = {skip.exit_code: skip.message for skip in common_skips().values()}
        if end.code in codes:
            return "skipped", codes[end.code]
        return ("failed", f"exit code {end.code}") if end.code else ("passed", "")
    except BaseException:
        return "failed", traceback.format_exc()
    dist.barrier()
    return "passed", ""


def common_skips():
    from torch.testing._internal import common_distributed

    return common_distributed.TEST_SKIPS


def fork(folder, rank, *args):
    pid = os.fork()
    if pid:
        return pid
    verdict = ("failed", "")
    try:
        os.setpgid(0, 0)
        fd = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        name, place, backend, size = args
        verdict = be_worker(name, place, backend, rank, size, folder)
        (folder / f"{rank}.json").write_text(json.dumps(verdict))
    except BaseException:
        (folder / f"{rank}.json").write_text(json.dumps(["failed", traceback.format_exc()]))
    finally:
        os._exit(0)


def run(name, place, backend, size):
    """One test on `size` workers."""
    begun, deadline_s = time.monotonic(), SLOW.get(name, DEADLINE_S)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        for each in ("barrier", "test_dir", "init_dir"):
            (folder / each).mkdir()
        pids = [fork(folder, rank, name, place, backend, size) for rank in range(size)]
        left = set(pids)
        while left and time.monotonic() - begun < deadline_s:
            left = {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0}
            time.sleep(0.01)
        for pid in left:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        verdicts = []
        for rank in range(size):
            file, log = folder / f"{rank}.json", (folder / f"{rank}.log").read_text(errors="replace")
            said = json.loads(file.read_text()) if file.exists() else ["hung" if left else "failed", "died\n" + log]
            verdicts.append((said[0], f"{log}\n{said[1]}" if said[0] == "failed" else said[1]))
    worst = min(verdicts, key=lambda each: ["failed", "hung", "skipped", "passed"].index(each[0]))
    lines = [line.strip() for line in worst[1].splitlines() if line.strip()]
    text = worst[1] if worst[0] in ("failed", "hung") else ""
    why = ([line for line in lines if ERROR.match(line)] or lines or [""])[-1]
    return Outcome(name, place or "", backend, size, worst[0], why, text, round(time.monotonic() - begun, 1))


def table(outcomes):
    """Where two columns differ, or a test fails in both, as Markdown; and how many pass in each."""
    columns = list(dict.fromkeys(each.place or each.backend for each in outcomes))
    rows = {}
    for each in outcomes:
        rows.setdefault(each.name, {})[each.place or each.backend] = each.verdict
    counts = [sum(row.get(column) == "passed" for row in rows.values()) for column in columns]
    lines = [f"| test | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    lines.append(f"| passed | {' | '.join(map(str, counts))} |")
    for name, row in sorted(rows.items()):
        if set(row.values()) not in ({"passed"}, {"skipped"}):
            lines.append(f"| `{name}` | {' | '.join(row.get(column, '') for column in columns)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tests", nargs="+", dest="names", metavar="NAME", help="some of them; all if not given")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="all but these")
    parser.add_argument("--kind", choices=("ddp", "collectives"), default="ddp")
    parser.add_argument("--place", nargs="+", choices=("torch", "lockstep"), default=["torch", "lockstep"])
    parser.add_argument("--backend", nargs="+", default=["gloo"])
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    load(given.size)
    outcomes = []
    for name in (each for each in given.names or names_of(given.kind) if each not in given.without):
        for backend in given.backend:
            for place in given.place if given.kind == "ddp" else [None]:
                outcome = run(name, place, backend, given.size)
                outcomes.append(outcome)
                print(f"{outcome.verdict:8}{outcome.seconds:6}  {place or '':9}{backend:5} {name}  {outcome.why[:150]}")
                sys.stdout.flush()
                if given.verbose:
                    print(outcome.text)
    print(table(outcomes))
    if given.json:
        given.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))


if __name__ == "__main__":
    main()
