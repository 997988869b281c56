"""`lockstep.launch` in a notebook, with a real kernel: fresh interpreters, output by worker, a line of progress."""

import os
import subprocess
import sys
import textwrap

import pytest

CELLS = [
    """
    import torch, lockstep
    torch.set_num_threads(2)
    torch.randn(300, 300) @ torch.randn(300, 300)      # This process has compute threads now.
    factor = 3

    class Answer:
        def __init__(self, value):
            self.value = value

    def train(steps):
        threads = torch.get_num_threads()
        world = lockstep.join(seed=0)
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loss_fn = lambda model, shard: model(shard[0]).square().mean()
        trainer = lockstep.Trainer(net, optimizer, loss_fn, shards=2, watch=True)
        rows = torch.utils.data.TensorDataset(torch.randn(64, 4))
        for number, batch in enumerate(trainer.batches(rows, batch_size=8)):
            if number == steps:
                break
            trainer.step(batch)
        print("worker", world.rank, "of", world.size, "has", threads, "threads")
        return Answer(factor * world.rank)
    """,
    """
    results = lockstep.launch(train, workers=2, args=(4,), threads=2)
    print(sorted(each.value for each in results), all(isinstance(each, Answer) for each in results))
    """,
]


@pytest.mark.timeout(240)
def test_a_cell(tmp_path):
    for package in ("nbclient", "ipykernel", "cloudpickle"):
        pytest.importorskip(package, reason=f"needs {package}")
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in CELLS])
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = notebook.cells[1].outputs
    printed = "".join(each.text for each in outputs if each.output_type == "stream" and each.name == "stdout")
    assert all(f"[{rank}] worker {rank} of 2 has 2 threads\n" in printed for rank in range(2)), printed
    assert printed.endswith("[0, 3] True\n")
    shown = [each.data for each in outputs if each.output_type == "display_data"]
    assert len(shown) == 1 and shown[0]["text/plain"].startswith("step 4  loss ") and "<table>" in shown[0]["text/html"]


PROMPT = """
import lockstep

def rank():
    world = lockstep.join()
    return world.rank

print(lockstep.launch(rank, workers=2))
"""


def test_a_function_of_a_prompt(tmp_path):
    """Also where the program comes from a pipe, and no notebook is about."""
    pytest.importorskip("cloudpickle", reason="needs cloudpickle")
    ended = subprocess.run(
        [sys.executable, "-"], input=PROMPT, capture_output=True, text=True, timeout=110, cwd=tmp_path
    )
    assert ended.stdout == "[0, 1]\n", ended.stderr
