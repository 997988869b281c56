"""Programs as people write them, with the smallest change: N workers train what one trains, however that is split.

`docs/works_with.md` has the table of what was run; a test holds the two together.
"""

import ast
import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from amount import some
from models import difference, weights_of
from torch import nn
from vision import mend_torchvision

PROGRAMS = Path(__file__).parents[1] / "programs"
TITLES = {
    "nanogpt": "nanoGPT's loop: micro-batches by `require_backward_grad_sync`, GradScaler, clipping",
    "imagenet": "ImageNet script: SyncBatchNorm, moving averages, validation over all workers",
    "timm_ema": "timm: ViT, its optimizer, ModelEmaV3",
    "gan": "GAN: two models, two optimizers",
    "detection": "detection: lists of images and of dicts, dicts of losses",
    "lora": "adapters of low rank, a layer unfrozen later",
    "contrastive": "contrastive learning: gradients through `all_gather`",
    "rnn": "LSTM on packed sequences",
    "switch": "experts as in Switch, with the balancing loss",
    "mixtral": "transformers: Mixtral",
    "t5": "transformers: T5",
    "vit": "transformers: ViT",
}
NAMES = {
    "nanogpt": {},
    "imagenet": {},
    "timm_ema": {},
    "gan": {},
    "detection": {},
    "lora": {},
    "contrastive": {},
    "rnn": {},
    "switch": {},
    "mixtral": {"kind": "mixtral"},
    "t5": {"kind": "t5"},
    "vit": {"kind": "vit"},
}
"""Every program, and what it is started with; those with a `kind` are in hugging.py."""
NEEDS = {"timm_ema": "timm", "mixtral": "transformers", "t5": "transformers", "vit": "transformers"}
DOUBLE = 1e-7
"""T5 computes some of it in single precision."""


def file_of(name):
    return PROGRAMS / f"{'hugging' if 'kind' in NAMES[name] else name}.py"


def require(name):
    if name in NEEDS:
        mend_torchvision()
        pytest.importorskip(
            NEEDS[name], reason=f"needs the package {NEEDS[name]}", exc_type=(ImportError, RuntimeError)
        )


def mistakes(name):
    """What may be done wrong in a program, and what `lockstep verify` calls that."""
    for node in ast.parse(file_of(name).read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "MISTAKES":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{name} has no MISTAKES")


def load(name):
    if name in NEEDS:
        mend_torchvision()
    if str(PROGRAMS) not in sys.path:
        sys.path.insert(0, str(PROGRAMS))
    spec = importlib.util.spec_from_file_location(name, file_of(name))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(world, name, options):
    """The weights that a program ends with, and those of its moving average."""
    before = torch.get_default_dtype()
    warnings.filterwarnings("ignore", ".*(stand-in|is deprecated).*")
    try:
        made = load(name).main(**NAMES[name], **options)
    finally:
        torch.set_default_dtype(before)
    found = {}
    for number, model in enumerate(made if isinstance(made, tuple) else (made,)):
        with model.whole_params():
            net = model.module
            found |= {f"{number}.{key.replace('_orig_mod.', '')}": each for key, each in weights_of(net).items()}
        if isinstance(getattr(model, "average", None), nn.Module):
            found |= {f"average.{key}": each for key, each in weights_of(model.average).items()}
    return found


def assert_trains_alike(pool, name, workers, options, backend=None):
    require(name)
    expected = pool.run(1, run, name, {})[0]
    extra = {"backend": backend} if backend else {}
    if options.get("compiled"):
        extra["timeout"] = 90
    for result in pool.run(workers, run, name, options, **extra):
        assert difference(result, expected) < DOUBLE


@pytest.mark.parametrize("zero", some([0, 3], [0, 1, 2, 3]))
@pytest.mark.parametrize("name", NAMES)
def test_two_workers_train_as_one(pool, name, zero):
    assert_trains_alike(pool, name, 2, {"zero": zero})


@pytest.mark.parametrize("zero", some([3], [0, 1, 2, 3]))
@pytest.mark.parametrize("backend", some(["gloo"], ["shm", "gloo"]))
@pytest.mark.parametrize("name", some(["nanogpt", "detection"], NAMES))
def test_three_workers_train_as_one(pool, name, backend, zero):
    assert_trains_alike(pool, name, 3, {"zero": zero}, backend=backend)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", some([], NAMES))
def test_two_workers_over_gloo_train_as_one(pool, name, zero):
    assert_trains_alike(pool, name, 2, {"zero": zero}, backend="gloo")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", some([], NAMES))
def test_compiled(pool, name):
    assert_trains_alike(pool, name, 2, {"zero": 0, "compiled": 1})


MENDING = """
import runpy
from vision import mend_torchvision

mend_torchvision()
runpy.run_path({path!r}, run_name="__main__")
"""


def verified(folder, name, *words):
    """What `lockstep verify` says of a program."""
    script = file_of(name)
    if name in NEEDS:
        script = folder / script.name
        script.write_text(MENDING.format(path=str(file_of(name))))
    given = [f"{key}={value}" for key, value in NAMES[name].items()]
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "verify",
        "-n",
        "2",
        "--steps",
        "4",
        str(script),
        *given,
        *words,
    ]
    folders = [str(PROGRAMS), str(PROGRAMS.parent), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", some([], NAMES))
def test_verify_finds_the_right_one_equal(tmp_path, name):
    require(name)
    ended = verified(tmp_path, name)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "equal" in ended.stdout or "bit-identical" in ended.stdout


@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", some([], NAMES))
def test_verify_names_the_planted_mistake(tmp_path, name):
    require(name)
    for mistake, cause in mistakes(name).items():
        ended = verified(tmp_path, name, f"mistake={mistake}")
        assert ended.returncode == 1, ended.stdout + ended.stderr
        assert any(each in ended.stdout for each in cause.split("|")), ended.stdout


def table():
    """What is run with FULL=1, as docs/works_with.md shows it."""
    rows = [
        "| program | 2 and 3 workers, shm and gloo, zero=0 to 3 | torch.compile | `lockstep verify` names |",
        "|---|---|---|---|",
    ]
    for name, title in TITLES.items():
        found = ", ".join(f"`{each}`" for each in mistakes(name))
        rows.append(f"| {title} | the same | the same | {found} |")
    return "\n".join(rows)


def test_the_table_in_the_docs_is_that_of_these_tests():
    page = (Path(__file__).parents[2] / "docs" / "works_with.md").read_text()
    assert table() in page, table()
