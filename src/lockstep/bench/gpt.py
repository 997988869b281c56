"""The language models that benchmarks train: one compact GPT in several named sizes.

Pre-norm blocks, fused causal attention, a GELU MLP, and a head that shares the token embedding's weights (so the
largest gradient arrives last, in two portions: the usual case, and the hard one for overlap).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Size:
    """The dimensions of a GPT."""

    vocab: int
    context: int
    """The longest sequence."""
    layers: int
    heads: int
    width: int


SIZES = {
    "gpt-10m": Size(vocab=4096, context=128, layers=7, heads=5, width=320),
    "gpt-40m": Size(vocab=8192, context=128, layers=11, heads=8, width=512),
    "gpt2-124m": Size(vocab=50304, context=1024, layers=12, heads=12, width=768),
    "gpt2-350m": Size(vocab=50304, context=1024, layers=24, heads=16, width=1024),
}


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm_mlp = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of the shape of its input."""
        x = x + self._attention(self.norm_attention(x))
        mixed: Tensor = self.down(functional.gelu(self.up(self.norm_mlp(x))))
        return x + mixed

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class GPT(nn.Module):
    """Tokens and the tokens that follow them in, the mean cross-entropy out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
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

    def units(self) -> Sequence[nn.Module]:
        """What is gathered together where parameters are split: a block."""
        return list(self.blocks)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
