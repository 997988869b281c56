"""What the package promises about itself: its names, its imports, its weight."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.errors import CheckpointError

SOURCE = Path(lockstep.__file__).parent

ORDER = [
    {
        "errors",
        "events",
        "environment",
        "faults",
        "files",
        "frames",
        "limits",
        "seeds",
        "terminal",
        "torch_private",
        "weight",
    },
    {"comm"},
    {"world"},
    {"data", "wire"},
    {"replica"},
    {"keep"},
    {"elastic"},
    {"watching"},
    {"train"},
    {"start"},
    {"integrations", "verify"},
    {"demo", "bench"},
    {"cli", "__main__"},
]
"""Rooms from the ground up: imports point to the same room or to an earlier one."""

NAMES_A_MODULE = re.compile(r"lockstep(\.\w+)+")


def test_public_names():
    assert sorted(lockstep.__all__) == [
        "Async", "CheckpointError", "DataParallel", "DiLoCo", "Elastic", "LaunchError", "LocalSGD",
        "LockstepError", "ModelMismatch", "Precision", "ReplicaDiffers", "StepVoid", "SyncBatchNorm", "Trainer",
        "UsageError", "WorkerFailed", "WorkerLost", "World", "backward", "join", "launch", "load", "save", "scale_lr",
        "shard", "watch",
    ]  # fmt: skip
    for name in lockstep.__all__:
        assert getattr(lockstep, name).__doc__


def room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lockstep":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("lockstep."))
        elif isinstance(node, ast.Constant) and NAMES_A_MODULE.fullmatch(str(node.value)):  # For import_module.
            yield str(node.value).split(".")[1]


def test_imports_point_down():
    floor = {name: height for height, names in enumerate(ORDER) for name in names}
    for path in SOURCE.rglob("*.py"):
        if room(path) == "__init__":
            continue
        for other in imported_rooms(path):
            if other in floor:
                assert floor[other] <= floor[room(path)], f"{path.name} imports {other}, which stands above it"


def test_import_needs_torch_and_numpy_only():
    code = (
        "import sys, torch, numpy; before = set(sys.modules); import lockstep;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names) - {'torch', 'numpy', 'lockstep'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_import_opens_nothing():
    code = (
        "import lockstep, torch.distributed as dist, threading; print(dist.is_initialized(), threading.active_count())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "1"]


@pytest.mark.parametrize(
    "error",
    [
        lockstep.LaunchError,
        lockstep.UsageError,
        lockstep.ModelMismatch,
        lockstep.ReplicaDiffers,
        lockstep.WorkerLost,
        CheckpointError,
    ],
)
def test_errors_are_one_tree_and_documented(error):
    assert issubclass(error, lockstep.LockstepError)
    documented = (SOURCE.parent.parent / "docs" / "troubleshooting.md").read_text()
    assert f"## {error.__name__}" in documented
