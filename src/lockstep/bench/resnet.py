"""A convolutional network like ResNet-18, for small pictures: 11M parameters, batch norms, and so buffers to agree on.

The stem is a 3x3 convolution without pooling, as usual for pictures of 32 x 32; the rest is the published network.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

WIDTHS = (64, 128, 256, 512)
"""Channels of the four stages; each stage after the first halves the picture."""
PER_STAGE = 2
"""Blocks of a stage."""


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around which the input is added, by way of a 1x1 convolution where its shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.short = nn.Identity() if stride == 1 and channels == width else _projection(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """A picture of `width` channels."""
        y = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(y)) + self.short(x))


class ResNet(nn.Module):
    """Pictures and their classes in, the mean cross-entropy out."""

    def __init__(self, classes: int = 10, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        before = (widths[0], *widths[:-1])
        self.blocks = nn.ModuleList(
            ResidualBlock(width if number else channels, width, 2 if number == 0 and stage else 1)
            for stage, (channels, width) in enumerate(zip(before, widths, strict=True))
            for number in range(PER_STAGE)
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, pictures: Tensor, classes: Tensor) -> Tensor:
        """The loss of one batch."""
        x = functional.relu(self.stem_norm(self.stem(pictures)))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.mean(dim=(2, 3))), classes)

    def units(self) -> Sequence[nn.Module]:
        """What is gathered together where parameters are split: a block."""
        return list(self.blocks)


def _projection(channels: int, width: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
