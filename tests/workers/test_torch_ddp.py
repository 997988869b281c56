"""torch's own tests: of DDP with `lockstep.DataParallel` in its place, of collectives on backend shm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from amount import some

pytest.importorskip("expecttest", reason="torch's tests need it")

RUNNER = Path(__file__).parents[1] / "torch_ddp.py"

WANT_ERRORS = {
    "test_DistributedDataParallel_requires_grad": "wants a model without trained parameters to be refused",
    "test_static_graph_api_cpu": "wants an error when static_graph is set late, which has no effect here",
    "test_invalid_static_graph": "wants an error where the graph changes under static_graph=True",
    "test_ddp_unused_params_rebuild_buckets_exception": "wants an error for unused parameters",
    "test_ddp_control_flow_same_across_ranks": "wants an error for unused parameters",
    "test_ddp_control_flow_different_across_ranks": "wants an error for unused parameters",
    "test_ddp_multiple_nested_unused_params_error": "wants an error for unused parameters",
    "test_ddp_multiple_nested_unused_params_err_ignore_params": "wants an error for unused parameters",
    "test_ddp_device_mesh_initialization": "wants a mesh of two dimensions to be refused, which works here",
}
"""Errors that Lockstep promises not to raise."""
HANDFUL = [
    *("test_DistributedDataParallelCPU", "test_ddp_hook_parity_powerSGD", "test_ddp_join_model_equivalence"),
    *("test_ddp_apply_optim_in_backward_ignored_params", "test_ddp_static_graph_nested_types", "test_ddp_inference"),
    *("test_DistributedDataParallel_SyncBatchNorm", "test_ddp_uneven_inputs_stop_iteration_sync_bn"),
    *("test_ddp_logging_data_cpu", "test_skip_all_reduce_unused_parameters"),
    *("test_ddp_profiling_torch_profiler", "test_ddp_native_mixed_precision_ignored_params"),
]
COLLECTIVES = ["test_all_to_all", "test_sparse_all_reduce_sum"]
GLOO_ALONE = {
    "test_monitored_barrier_gloo": "torch offers it for gloo by name",
    "test_monitored_barrier_gloo_subgroup": "torch offers it for gloo by name",
    "test_monitored_barrier_gloo_rank_0_timeout": "torch offers it for gloo by name",
}
TOO_LARGE = "test_ddp_uneven_inputs"
"""Convolutions of a million pixels: with torch's DDP it had not ended after 15 minutes on two busy cores."""
FULL = "FULL" in os.environ


def outcomes(folder, *arguments):
    """What became of the tests, by name and by what took the place."""
    file = folder / "outcomes.json"
    command = [sys.executable, RUNNER, "--json", file, *arguments]
    subprocess.run(command, check=True, timeout=3000, stdout=None if FULL else subprocess.DEVNULL)
    return {(each["name"], each["place"] or each["backend"]): each for each in json.loads(file.read_text())}


def expect_no_less(found, ours, theirs, excused):
    """What passes with `theirs` passes with `ours`, but for what is listed with a reason; and the list is true."""
    names = {name for name, _ in found}
    passed = {place: {name for name in names if found[name, place]["verdict"] == "passed"} for place in (ours, theirs)}
    lost = passed[theirs] - passed[ours]
    assert not lost - excused.keys(), "\n".join(found[name, ours]["text"] for name in lost - excused.keys())
    assert not passed[ours] & excused.keys()


@pytest.mark.timeout(3600 if FULL else 200)
@pytest.mark.parametrize("backend", some(["gloo"], ["gloo", "shm"]))
def test_torchs_tests_of_ddp(tmp_path, backend):
    if not FULL:
        found = outcomes(tmp_path, "--place", "lockstep", "--tests", *HANDFUL, "test_invalid_static_graph")
        failed = [each for (name, _), each in found.items() if each["verdict"] != "passed" and name in HANDFUL]
        assert not failed, failed[0]["text"]
        assert "not raised" in found["test_invalid_static_graph", "lockstep"]["text"]
        return
    found = outcomes(tmp_path, "--place", "torch", "lockstep", "--backend", backend, "--without", TOO_LARGE)
    expect_no_less(found, "lockstep", "torch", WANT_ERRORS)
    batch_norms = [each for (name, place), each in found.items() if "SyncBatchNorm" in name and place == "lockstep"]
    assert len(batch_norms) >= 9 and all(each["verdict"] == "passed" for each in batch_norms)


@pytest.mark.timeout(3600 if FULL else 200)
def test_torchs_tests_of_collectives_on_shm(tmp_path):
    if not FULL:
        found = outcomes(tmp_path, "--kind", "collectives", "--backend", "shm", "--tests", *COLLECTIVES)
        assert all(each["verdict"] == "passed" for each in found.values()), found
        return
    expect_no_less(outcomes(tmp_path, "--kind", "collectives", "--backend", "gloo", "shm"), "shm", "gloo", GLOO_ALONE)
