"""A network of many small layers, in which what a parameter costs by itself outweighs its bytes and its arithmetic."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class Stage(nn.Module):
    """A few layers of one width, each around a residual."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """As wide as it came."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / 8
        return x


class MLP(nn.Module):
    """Vectors and their classes in, the mean cross-entropy out."""

    def __init__(self, width: int = 64, stages: int = 16, layers: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(width, layers) for _ in range(stages))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """The loss of one batch."""
        for stage in self.stages:
            x = stage(x)
        return functional.cross_entropy(self.head(x), classes)

    def units(self) -> Sequence[nn.Module]:
        """What is gathered together where parameters are split: a stage, since a layer alone is tiny."""
        return list(self.stages)
