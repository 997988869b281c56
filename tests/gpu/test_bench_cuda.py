"""`lockstep bench gpu`, on a small workload: every variant that needs nothing but torch makes its steps."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

COMMAND = [sys.executable, "-m", "lockstep", "bench", "gpu", "--workload", "tiny", "--steps", "2"]
VARIANTS = ["nocomm", "lockstep", "zero1", "zero2", "zero3", "half", "int8", "ddp", "ddp-bf16", "fsdp2"]


@pytest.mark.parametrize("workers", [1, 2])
def test_every_variant_makes_steps(workers, tmp_path):
    target = tmp_path / "gpu.json"
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    ended = subprocess.run(
        [*COMMAND, "-n", str(workers), "--variants", *VARIANTS, "--json", str(target)],
        capture_output=True, text=True, env=environ,
    )  # fmt: skip
    assert ended.returncode == 0, ended
    (found,) = json.loads(target.read_text())
    assert found["not_run"] == {}
    assert [row["variant"] for row in found["rows"]] == VARIANTS
    assert found["bases"] == ["nocomm", "ddp"]
