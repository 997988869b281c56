"""`lockstep verify` on a gallery of right and wrong scripts, in processes of its own."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from amount import some
from processes import FromServer

import lockstep
from lockstep.cli.main import main
from lockstep.start.command import RunOutcome
from lockstep.start.failure import Failure
from lockstep.verify import session

pytestmark = pytest.mark.timeout(240)

GALLERY = Path(__file__).parent.parent / "gallery"
VERIFY = [sys.executable, "-c", "import sys; from lockstep.cli.main import main; sys.exit(main())", "verify"]
ENVIRON = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
DEADLINE_S = 220

RIGHT = {
    "right_plain": (
        "equal within float tolerance",
        "Dropout was off",
        "torch.compile was left out",
        "2 steps compared",
    ),
    "right_split": ("equal within float tolerance", "The script sets no seed", "3 steps compared"),
    "right_trainer": ("bit-identical", "same bits"),
    **{f"right_cnn {seed}": ("equal within float tolerance", "in float64", "So it is rounding") for seed in range(5)},
}
WRONG = {
    "batch_norm": ("batch norm without sync", "step 0", "SyncBatchNorm.convert"),
    "mean_of_means": ("mean of means", "0.667 : 0.333, and they were combined as 0.500 : 0.500", "lockstep.backward("),
    "sampler_padding": ("sampler padding", "1 samples on one worker, from 2 on 2", "lockstep.shard("),
    "not_sharded": ("the loader is not sharded", "the same 8 samples", "lockstep.shard("),
    "dropout_seed": ("the same dropout seed on every worker", "workers 0 and 1", "join(seed=...)"),
    "buffer": ("a forgotten all-reduce of a buffer", "buffer 'centre' after step 0", "world.mean("),
    "lr_not_scaled": ("learning rate not scaled", "8 samples on one worker, from 16 on 2", "lockstep.scale_lr"),
    "before_sync early_clip": ("gradients used before sync", "clipped inside no_sync()", "model.clip_grad_norm_"),
    "before_sync bypass": ("gradients used before sync", "past lockstep.DataParallel", "not model.module(x)"),
}


SOME = ["batch_norm", "sampler_padding", "before_sync bypass"]
"""Causes that are found in another way each: by a run of its own, in samples, in what was called. All that is told from
a record is tried on records too, in tests/test_verify.py."""

REAL = ["right_plain"]
"""What is run in fresh interpreters, which torch's compiler must not slow down; the others in forks."""


def verify(*words):
    """In processes of its own, as users run it."""
    return subprocess.run(
        [*VERIFY, *words], cwd=GALLERY, env=ENVIRON, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def verify_in_forks(folder, *words):
    """With workers that are forks: what is recorded, compared and said is the same."""
    ended = FromServer(folder, _verify_in_forks, words).wait()
    return subprocess.CompletedProcess(words, ended.code, ended.out, ended.err)


def _verify_in_forks(words):
    session.command.run = _run_in_forks
    os.chdir(GALLERY)
    return main(["verify", *words])


def _run_in_forks(command, *, workers, threads):
    from lockstep.verify import worker

    assert threads is None or threads == 1
    codes = lockstep.launch(lambda: worker.main(command[3:]), workers)
    failures = [Failure(rank, 0.0, code) for rank, code in enumerate(codes) if code]
    return RunOutcome(workers, next(iter(failures), None))


@pytest.fixture(scope="module")
def ended(request, tmp_path_factory):
    """How each script of the gallery that a test asks for has ended; two run at a time, one per core."""
    folder = tmp_path_factory.mktemp("ended")
    asked = [item.callspec.params["case"] for item in request.session.items if _asks(item, request.module)]
    with ThreadPoolExecutor(2) as executor:
        futures = {}
        for case in asked:
            script, *args = case.split()
            words = ["-n", "2", "--steps", "4" if "cnn" in case else "3", f"{script}.py", *args]
            if case in REAL:
                futures[case] = executor.submit(verify, *words)
            else:
                futures[case] = executor.submit(verify_in_forks, folder / case, *words)
        yield lambda case: futures[case].result()
        executor.shutdown(cancel_futures=True)


def _asks(item, module):
    return item.module is module and "case" in getattr(getattr(item, "callspec", None), "params", ())


def flat(text):
    return " ".join(text.split())


@pytest.mark.parametrize("case", some(["right_cnn 0"], RIGHT))
def test_right_scripts_are_told_right(ended, case):
    done = ended(case)
    assert (done.returncode, done.stderr) == (0, ""), done
    verdict, *said = RIGHT[case]
    assert f"Verdict: {verdict}." in done.stdout
    assert "cause" not in done.stdout
    assert ("The script sets no seed" in done.stdout) == (case == "right_split")  # The others call join(seed=...).
    for words in said if "once more" in done.stdout or "cnn" not in case else ():
        assert words in flat(done.stdout)


@pytest.mark.parametrize("case", some(SOME, WRONG))
def test_wrong_scripts_are_told_wrong_and_why(ended, case):
    done = ended(case)
    assert done.returncode == 1, done
    assert not done.stderr or "UserWarning: all 2 workers train on the same samples" in done.stderr  # Also at runtime.
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
    words = [str(folder / "fails.py"), "--lr", "3"]
    with ThreadPoolExecutor(2) as executor:
        fails = executor.submit(verify, "-n", "2", *words)
        idle = executor.submit(verify_in_forks, folder / "forks", "-n", "2", "--output", str(folder / "idle.py"))
        return {"fails": fails.result(), "idle": idle.result()}


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
