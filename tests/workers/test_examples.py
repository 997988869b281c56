"""The examples and the tutorial run as they stand, alone and on several workers, with the results that they promise."""

import contextlib
import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from amount import some
from processes import FromServer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
FULL = pytest.mark.skipif("FULL" not in os.environ, reason="takes a minute; FULL=1")
RUN = [sys.executable, "-m", "lockstep", "run", "--no-prefix"]
ENVIRON = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}

LAST_WORDS = {
    "cnn.py": r"(4[0-9]\d|50\d) of 502 images right",
    "detection.py": r"epoch 2: found [01]\.\d+, kind 0\.\d+, place \d\.\d+",
    "elastic_training.py": r"weights: [0-9a-f]{16}",
    "gan.py": r"from the middle: (0\.[6-9]|1\.[0-4])\d",
    "gpt.py": r"step 60: loss 2\.\d+.*weights: [0-9a-f]{16}",
    "lora.py": r"second task: 9\d% right, with 4,240 of 79,508 .* as they were",
    "recommender.py": r"epoch 3: off by 0\.[0-7]\d+",
    "slow_network.py": r"loss 0\.\d+ after 40 steps\n(wire=\"auto\" chose|gradients travel as they are)",
    "streaming.py": r"16 steps, loss from .*loaded, after step 16\n16 steps, loss from 0\.[1-5]",
    "zero3_meta.py": r"3,167,498 parameters, loss 1?\d?\.\d+.* of AdamW's 6,334,996 numbers",
}
"""What each has said at its end, as a pattern."""


def run_example(path, *words):
    """As `python PATH`, in a process that has torch imported."""
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="__main__")
    return 0


def example_in_world(world, path, folder):
    """As one of the workers, whose world is there already; what it prints."""
    os.chdir(folder)
    sys.argv = [path]
    said = Path(folder, f"said-{world.rank}")
    # Loader processes as a script has them: those of a process that came from a fork server would be servers' too.
    usual = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    try:
        with said.open("w") as file, contextlib.redirect_stdout(file):
            runpy.run_path(path, run_name="__main__")
    finally:
        multiprocessing.set_start_method(usual, force=True)
    return said.read_text()


def test_all_examples_are_tried_and_described():
    assert set(SCRIPTS) == set(LAST_WORDS)
    page = (ROOT / "docs" / "examples.md").read_text()
    for name in [*SCRIPTS, "notebook.ipynb"]:
        assert f"`{name}`" in page
    for name in SCRIPTS:
        text = (EXAMPLES / name).read_text()
        assert f"    python examples/{name}\n    lockstep run -n 2 examples/{name}\n" in text


@pytest.mark.parametrize("name", some(["lora.py", "streaming.py"], SCRIPTS))
def test_an_example_runs_on_two_workers(pool, tmp_path, name):
    said, silent = pool.run(2, example_in_world, str(EXAMPLES / name), str(tmp_path), timeout=60)
    assert re.search(LAST_WORDS[name], said, re.DOTALL), said
    assert silent == ""


@pytest.mark.parametrize("name", some(["zero3_meta.py"], SCRIPTS))
def test_an_example_runs_alone(tmp_path, name):
    ended = FromServer(tmp_path, run_example, str(EXAMPLES / name)).wait()
    assert ended.code == 0, ended.err
    assert re.search(LAST_WORDS[name], ended.out, re.DOTALL), ended.out


@FULL
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs_by_its_command(tmp_path, name):
    """In fresh interpreters, as a reader would start it."""
    command = [*RUN, "-n", "2", str(EXAMPLES / name)]
    ended = subprocess.run(command, cwd=tmp_path, env=ENVIRON, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert re.search(LAST_WORDS[name], ended.stdout, re.DOTALL), ended.stdout


def weights(text):
    return re.search(r"weights: ([0-9a-f]{16})", text)[1]


@pytest.mark.parametrize("name", some(["elastic_training.py"], ["elastic_training.py", "gpt.py"]))
def test_the_same_weights_on_any_number_of_workers(pool, tmp_path, name):
    found = set()
    for workers in (1, 2, 3):
        (folder := tmp_path / str(workers)).mkdir()
        found.add(weights(pool.run(workers, example_in_world, str(EXAMPLES / name), str(folder), timeout=60)[0]))
    assert len(found) == 1, found


@pytest.mark.skipif("FULL" not in os.environ, reason="takes seconds; run it with FULL=1")
def test_a_worker_of_the_elastic_example_is_killed_and_the_weights_are_the_same(pool, tmp_path):
    path = str(EXAMPLES / "elastic_training.py")
    alone = pool.run(1, example_in_world, path, str(tmp_path))[0]
    command = [*RUN, "-n", "2", "--elastic", path, "--kill", "7"]
    ended = subprocess.run(command, cwd=tmp_path, env=ENVIRON, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert signal.SIGKILL.name in ended.stderr
    assert weights(ended.stdout) == weights(alone)


def run_cells(path):
    """What a notebook does with its cells, without one."""
    namespace = {"__name__": "__main__"}
    for cell in json.loads(Path(path).read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "cell", "exec"), namespace)
    return 0


def test_the_notebook_runs(tmp_path):
    ended = FromServer(tmp_path, run_cells, str(EXAMPLES / "notebook.ipynb")).wait()
    assert ended.code == 0, ended.err
    assert re.search(r"^0 \[.*^1 \[.*^(7|8|9)\d% right", ended.out, re.DOTALL | re.MULTILINE), ended.out


# The tutorial

LISTINGS = [part.partition("\n```")[0] for part in (ROOT / "docs" / "tutorial.md").read_text().split("```python\n")[1:]]


def listing_in_world(world, number, folder):
    path = Path(folder, f"train-{world.rank}.py")
    path.write_text(LISTINGS[number])
    return example_in_world(world, str(path), folder)


def test_the_first_listing_of_the_tutorial_runs(tmp_path):
    (tmp_path / "train.py").write_text(LISTINGS[0])
    ended = FromServer(tmp_path, run_example, str(tmp_path / "train.py")).wait()
    assert ended.code == 0, ended.err
    assert re.search(r"epoch 2: loss \d\.\d+\n\d+ of 250 right", ended.out), ended.out


@pytest.mark.parametrize("workers", some([2], [1, 2, 3, 8]))
def test_listings_of_the_tutorial_run(pool, tmp_path, workers):
    assert len(LISTINGS) == 6
    said = []
    for number in range(1, 6):
        (folder := tmp_path / str(number)).mkdir()
        said.append(pool.run(workers, listing_in_world, number, str(folder), timeout=60))
    plain, exact, first_half, large, bits = (each[0] for each in said)
    assert plain.count("epoch") == 3
    assert re.search(r"epoch 2: loss \d\.\d+, \d+ of 250 right", exact), exact
    assert "48 steps, of which 0 were made before" in first_half
    again = pool.run(workers, listing_in_world, 3, str(tmp_path / "3"), timeout=60)[0]
    assert "48 steps, of which 40 were made before" in again
    assert f"at learning rate {3e-3 * workers**0.5:.4f}" in large, large
    assert re.search(r"right, weights [0-9a-f]{16}", bits), bits


@FULL
def test_the_last_listing_has_the_same_bits_on_any_number_of_workers(pool, tmp_path):
    one, three = (pool.run(each, listing_in_world, 5, str(tmp_path))[0] for each in (1, 3))
    assert one == three
