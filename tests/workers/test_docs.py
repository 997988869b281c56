"""The Python of the docs runs as it stands there: each block by itself, with what it takes for granted."""

import ast
import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

GIVEN = {
    "torch": "__import__('torch')",
    "nn": "torch.nn",
    "F": "torch.nn.functional",
    "lockstep": "__import__('lockstep')",
    "DataLoader": "torch.utils.data.DataLoader",
    "Net": "lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))",
    "Model": "Net",
    "net": "Net()",
    "optimizer": "torch.optim.AdamW(net.parameters(), lr=0.01)",
    "schedule": "torch.optim.lr_scheduler.MultiStepLR(optimizer, [2])",
    "model": "lockstep.DataParallel(net, optimizer=optimizer, zero=3)",
    "dataset": "torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(0, 3, (40,)))",
    "test_set": "dataset",
    "loader": "lockstep.shard(DataLoader(dataset, batch_size=8))",
    "loss_fn": "lambda net, shard: F.cross_entropy(net(shard[0]), shard[1])",
    "world": "lockstep.join()",
    "lightning": "__import__('lightning')",
    "module": "__import__('test_lightning').module_class()(batch_norm=False)",
    "train_loader": "DataLoader(__import__('test_lightning').data(20), batch_size=8)",
    "language_model": "__import__('test_transformers').gpt()",
    "sentences": "__import__('test_transformers').sentences(22)",
    "training_args": "__import__('test_transformers').arguments('out', 2, eval_strategy='no')",
    "train": "lambda steps: steps",
}
"""What a reader has: modules, a model, data. Evaluated where a block uses the name and does not make it."""


def blocks(path):
    """The blocks of a page that are meant to run: not those with an ellipsis for the reader's own."""
    texts = [part.partition("\n```")[0] for part in (ROOT / path).read_text().split("```python\n")[1:]]
    return [text for text in texts if not any(_is_ellipsis(node) for node in ast.walk(ast.parse(text)))]


def _is_ellipsis(node):
    return isinstance(node, ast.Constant) and node.value is ...


def run_page(world, path, folder):
    os.chdir(folder)
    for text in blocks(path):
        namespace = {}
        needs = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        made = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if path == "docs/transformers.md":
            __import__("test_transformers").forget()
        give(needs - made, namespace)
        exec(compile(text, path, "exec"), namespace)
    os.chdir(ROOT)


def give(names, namespace):
    for name in [each for each in GIVEN if each in names and each not in namespace]:
        give({node.id for node in ast.walk(ast.parse(GIVEN[name])) if isinstance(node, ast.Name)} - {name}, namespace)
        namespace[name] = eval(GIVEN[name], namespace)


PAGES = [
    "zero",
    "trainer",
    "model_does_not_fit",
    "slow_network",
    "machine_dies",
    "learning_rate",
    "batch_norm",
    "coming_from",
]
NEEDS = {
    "docs/lightning.md": ["lightning"],
    "docs/transformers.md": ["transformers", "accelerate", "datasets"],
    "docs/trackers.md": ["tensorboard"],
}


@pytest.mark.parametrize("path", [*(f"docs/{page}.md" for page in PAGES), *NEEDS])
def test_the_blocks_of_a_page_run(pool, tmp_path, path):
    for package in NEEDS.get(path, ()):
        pytest.importorskip(package, reason=f"needs the package {package}", exc_type=(ImportError, RuntimeError))
    pool.run(2, run_page, path, str(tmp_path))


def notebook(world, folder):
    """The cells of docs/notebooks.md that define something, and what `launch` would call."""
    cell = blocks("docs/notebooks.md")[0]
    namespace = {"dataset": eval(GIVEN["dataset"], {"torch": torch})}
    exec(cell, namespace)
    return namespace["train"](3)


def test_the_cells_of_the_notebooks_page_run(pool, tmp_path):
    assert len(pool.run(2, notebook, str(tmp_path))) == 2
