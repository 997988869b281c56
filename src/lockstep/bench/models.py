"""The work that every variant does: models and their batches, made by the names of the catalogue.

A model takes the tensors of a batch and returns the loss. Batches are random, a few of them, taken in turn: what is
measured is the step, and not the data.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from lockstep.bench.catalogue import WORKLOADS
from lockstep.demo.gpt import Block, Shape

Batch = tuple[Tensor, ...]

NUM_BATCHES = 4
NUM_DENSE = 13
"""Features of the recommender that are numbers."""
_NUM_ROWS = 50_000
"""Of each of its tables."""
_WIDTHS = (64, 128, 256, 512)
"""Channels of the four stages of the ResNet; each stage after the first halves the picture."""
_BLOCKS_PER_STAGE = 2


GPT2_SIZES = {
    "gpt-10m": Shape(vocab=4096, context=128, layers=7, heads=5, width=320),
    "gpt-40m": Shape(vocab=8192, context=128, layers=11, heads=8, width=512),
    "gpt2-124m": Shape(vocab=50304, context=1024, layers=12, heads=12, width=768),
    "gpt2-350m": Shape(vocab=50304, context=1024, layers=24, heads=16, width=1024),
}


class GPT2(nn.Module):
    """Tokens and the tokens that follow them in, the mean cross-entropy out.

    Pre-norm blocks, fused causal attention, a GELU MLP, and a head that shares the token embedding's weights (so the
    largest gradient arrives last, in two portions: the usual case, and the hard one for overlap).
    """

    def __init__(self, size: Shape) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size, bias=True) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)
        self.apply(_initialise)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of one batch."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


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
    """Vectors and their classes in, the mean cross-entropy out.

    Many small layers, in which what a parameter costs by itself outweighs its bytes and its arithmetic.
    """

    def __init__(self, width: int = 64, stages: int = 16, layers: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(width, layers) for _ in range(stages))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        """The loss of one batch."""
        for stage in self.stages:
            x = stage(x)
        return functional.cross_entropy(self.head(x), classes)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around which the input is added, by way of a 1x1 convolution where its shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or channels != width:
            projection = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.short = nn.Sequential(projection, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """A picture of `width` channels."""
        y = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(y)) + self.short(x))


class ResNet(nn.Module):
    """Pictures and their classes in, the mean cross-entropy out.

    Like ResNet-18, with batch norms, and so buffers to agree on. The stem is a 3x3 convolution without pooling, as
    usual for pictures of 32 x 32; the rest is the published network.
    """

    def __init__(self, classes: int = 10, widths: Sequence[int] = _WIDTHS) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        before = (widths[0], *widths[:-1])
        self.blocks = nn.ModuleList(
            ResidualBlock(width if number else channels, width, 2 if number == 0 and stage else 1)
            for stage, (channels, width) in enumerate(zip(before, widths, strict=True))
            for number in range(_BLOCKS_PER_STAGE)
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, pictures: Tensor, classes: Tensor) -> Tensor:
        """The loss of one batch."""
        x = functional.relu(self.stem_norm(self.stem(pictures)))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.mean(dim=(2, 3))), classes)


class Recommender(nn.Module):
    """Dense and categorical features and clicks in, the mean binary cross-entropy out.

    Nearly all of it is embedding tables, of which a batch touches few rows, yet gradients are dense. Dense features go
    through a small MLP, each categorical one is a row of its table, and a second MLP predicts a click from all of them
    side by side.
    """

    def __init__(self, tables: int = 8, rows: int = _NUM_ROWS, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(NUM_DENSE, 64), nn.ReLU(), nn.Linear(64, width))
        self.top = nn.Sequential(nn.Linear((tables + 1) * width, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, dense: Tensor, categories: Tensor, clicks: Tensor) -> Tensor:
        """The loss of one batch."""
        rows = [table(column) for table, column in zip(self.tables, categories.unbind(dim=1), strict=True)]
        logits = self.top(torch.cat([self.bottom(dense), *rows], dim=1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, clicks)


def build(workload: str) -> nn.Module:
    """A new model, its weights drawn from torch's generator."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "gpt-40m-small": lambda: GPT2(GPT2_SIZES["gpt-40m"]),
        "resnet18": ResNet,
        "mlp": MLP,
        "recommender": Recommender,
        "tiny": lambda: MLP(width=16, stages=2, layers=2),
    }
    return GPT2(GPT2_SIZES[workload]) if workload in GPT2_SIZES else makers[workload]()


def units(model: nn.Module) -> list[nn.Module]:
    """What is gathered together where parameters are split: a model's blocks, stages or tables, its one list."""
    return [unit for each in model.children() if isinstance(each, nn.ModuleList) for unit in each]


def batches(workload: str, size: int, rank: int, device: torch.device, count: int = NUM_BATCHES) -> list[Batch]:
    """`count` batches of `size` samples for one worker, different on every worker."""
    generator = Generator().manual_seed(1 + rank)
    drawn = [_batch(workload, size, generator) for _ in range(count)]
    return [tuple(tensor.to(device) for tensor in batch) for batch in drawn]


def sequences(vocab: int, batch: int, length: int, generator: Generator) -> Batch:
    """Random tokens, and those that follow them."""
    tokens = torch.randint(vocab, (batch, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _batch(workload: str, size: int, generator: Generator) -> Batch:
    if workload.startswith("gpt"):
        vocab = GPT2_SIZES[workload.removesuffix("-small")].vocab
        return sequences(vocab, size, WORKLOADS[workload].length, generator)
    if workload == "recommender":
        categories = torch.randint(_NUM_ROWS, (size, 8), generator=generator)
        clicks = torch.randint(2, (size,), generator=generator).float()
        return torch.randn(size, NUM_DENSE, generator=generator), categories, clicks
    shape = {"resnet18": (3, 32, 32), "mlp": (64,), "tiny": (16,)}[workload]
    classes = torch.randint(10, (size,), generator=generator)
    return torch.randn(size, *shape, generator=generator), classes
