"""`lockstep verify` on a gallery of right and wrong scripts, in processes of its own."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from amount import some

pytestmark = pytest.mark.timeout(120)

GALLERY = Path(__file__).parent.parent / "gallery"
VERIFY = [sys.executable, "-c", "import sys; from lockstep.cli.main import main; sys.exit(main())", "verify"]
ENVIRON = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
DEADLINE_S = 100

RIGHT = {
    "right_plain": (
        "equal within float tolerance",
        "Dropout was off",
        "torch.compile was left out",
        "2 steps compared",
    ),
    "right_split": ("equal within float tolerance", "The script sets no seed", "3 steps compared"),
    "right_trainer": ("bit-identical", "same bits"),
}
WRONG = {
    "batch_norm": ("batch norm without sync", "step 0", "SyncBatchNorm.convert"),
    "mean_of_means": ("mean of means", "0.667 : 0.333, and they were combined as 0.500 : 0.500", "lockstep.backward("),
    "sampler_padding": ("sampler padding", "1 samples on one worker, from 2 on 2", "lockstep.shard("),
    "not_sharded": ("the loader is not sharded", "the same 8 samples", "lockstep.shard("),
    "dropout_seed": ("the same dropout seed on every worker", "workers 0 and 1", "seed once"),
    "buffer": ("a forgotten all-reduce of a buffer", "buffer 'centre' after step 0", "world.mean("),
    "lr_not_scaled": ("learning rate not scaled", "8 samples on one worker, from 16 on 2", "lockstep.scale_lr"),
    "before_sync early_clip": ("gradients used before sync", "clipped inside no_sync()", "model.clip_grad_norm_"),
    "before_sync bypass": ("gradients used before sync", "past lockstep.DataParallel", "not model.module(x)"),
}


SOME = ["batch_norm", "sampler_padding", "before_sync bypass"]
"""Causes that are found in another way each: by a run of its own, in samples, in what was called. All that is told from
a record is tried on records too, in tests/test_verify.py."""


def verify(*words):
    return subprocess.run(
        [*VERIFY, *words], cwd=GALLERY, env=ENVIRON, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


@pytest.fixture(scope="module")
def ended(request):
    """How each script of the gallery that a test asks for has ended; two run at a time, one per core."""
    asked = [item.callspec.params["case"] for item in request.session.items if _asks(item, request.module)]
    with ThreadPoolExecutor(2) as executor:
        futures = {}
        for case in asked:
            script, *args = case.split()
            futures[case] = executor.submit(verify, "-n", "2", "--steps", "3", f"{script}.py", *args)
        yield lambda case: futures[case].result()
        executor.shutdown(cancel_futures=True)


def _asks(item, module):
    return item.module is module and "case" in getattr(getattr(item, "callspec", None), "params", ())


def flat(text):
    return " ".join(text.split())


@pytest.mark.parametrize("case", RIGHT)
def test_right_scripts_are_told_right(ended, case):
    done = ended(case)
    assert (done.returncode, done.stderr) == (0, ""), done
    verdict, *said = RIGHT[case]
    assert f"Verdict: {verdict}." in done.stdout
    assert "cause" not in done.stdout
    for words in said:
        assert words in flat(done.stdout)


@pytest.mark.parametrize("case", some(SOME, WRONG))
def test_wrong_scripts_are_told_wrong_and_why(ended, case):
    done = ended(case)
    assert (done.returncode, done.stderr) == (1, ""), done
    cause, found, mend = WRONG[case]
    assert "Verdict: different." in done.stdout
    assert done.stdout.count("Likely cause: ") == 1, done.stdout
    assert f"Likely cause: {cause}." in done.stdout
    assert found in flat(done.stdout)
    assert mend in done.stdout.partition("To mend it: ")[2]


@pytest.fixture(scope="module")
def unfit(tmp_path_factory):
    """How scripts that cannot be compared have ended, both run at the same time."""
    folder = tmp_path_factory.mktemp("unfit")
    (folder / "fails.py").write_text("import sys\nprint('hidden')\nraise ValueError(f'no {sys.argv[1:]}')\n")
    (folder / "idle.py").write_text("print(__name__)")
    words = {"fails": [str(folder / "fails.py"), "--lr", "3"], "idle": ["--output", str(folder / "idle.py")]}
    with ThreadPoolExecutor(2) as executor:
        return dict(zip(words, executor.map(lambda case: verify("-n", "2", *words[case]), words), strict=True))


def test_a_script_that_fails_is_relayed(unfit):
    done = unfit["fails"]
    assert (done.returncode, done.stdout) == (2, "lockstep verify: running on 1 worker\n"), done
    words = done.stderr.splitlines()
    assert words[0] == "Traceback (most recent call last):"
    assert "fails.py" in words[1]
    assert words[-2] == "ValueError: no ['--lr', '3']"
    assert "failed on 1 worker (exit code 1)" in words[-1]


def test_a_script_that_never_steps(unfit):
    done = unfit["idle"]
    assert done.returncode == 2
    assert done.stdout == "lockstep verify: running on 1 worker\n__main__\n"
    assert done.stderr.count("\n") == 1
    assert "made no step of a torch optimizer on 1 worker" in done.stderr
