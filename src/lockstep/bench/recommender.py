"""A recommender: nearly all of it is embedding tables, of which a batch touches few rows, yet gradients are dense.

Dense features go through a small MLP, each categorical one is a row of its table, and a second MLP predicts a click
from all of them side by side.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_DENSE = 13
"""Features that are numbers."""


class Recommender(nn.Module):
    """Dense and categorical features and clicks in, the mean binary cross-entropy out."""

    def __init__(self, tables: int = 8, rows: int = 50_000, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(NUM_DENSE, 64), nn.ReLU(), nn.Linear(64, width))
        self.top = nn.Sequential(nn.Linear((tables + 1) * width, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, dense: Tensor, categories: Tensor, clicks: Tensor) -> Tensor:
        """The loss of one batch."""
        rows = [table(column) for table, column in zip(self.tables, categories.unbind(dim=1), strict=True)]
        logits = self.top(torch.cat([self.bottom(dense), *rows], dim=1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, clicks)

    def units(self) -> Sequence[nn.Module]:
        """What is gathered together where parameters are split: a table."""
        return list(self.tables)
