"""Detection: samples are images of several sizes with any number of boxes, batches are lists of dicts.

    python examples/detection.py
    lockstep run -n 2 examples/detection.py

`lockstep.shard` cuts the samples before they are collated, so your `collate_fn` is used as it is. The losses are means
over images, and 15 do not divide by 2: each worker counts by the images that it has, as one worker would.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep

Sample = tuple[torch.Tensor, dict[str, torch.Tensor]]
STRIDE = 8
"""The network answers for every square of so many pixels."""


class Squares(Dataset):
    """Noise with up to three bright squares in it; some images have none."""

    def __len__(self) -> int:
        return 402

    def __getitem__(self, place: int) -> Sample:
        dice = torch.Generator().manual_seed(place)
        size = 48 + 16 * (place % 2)
        image = 0.3 * torch.randn(3, size, size, generator=dice)
        boxes = []
        for _ in range(place % 4):
            x, y, side = (*torch.randint(4, size - 16, (2,), generator=dice).tolist(), 12)
            image[place % 3, y : y + side, x : x + side] += 2
            boxes.append([x, y, x + side, y + side])
        labels = torch.full((len(boxes),), place % 3)
        return image, {"boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), "labels": labels}


def collate(samples: list[Sample]) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Two lists: images differ in size, targets in their number of boxes."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


class Detector(nn.Module):
    """For each square of the image: is a box's middle in it, of which kind, and where exactly."""

    def __init__(self):
        super().__init__()
        channels = (3, 16, 32, 32)
        convs = [nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(channels)]
        self.body = nn.Sequential(*[module for conv in convs for module in (conv, nn.ReLU())])
        self.head = nn.Conv2d(32, 1 + 3 + 4, 3, padding=1)

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The losses by name, each a mean over the images."""
        sums = {name: images[0].new_zeros(()) for name in ("found", "kind", "place")}
        for image, target in zip(images, targets, strict=True):
            out = self.head(self.body(image[None]))[0]
            middles = (target["boxes"][:, :2] + target["boxes"][:, 2:]) / 2
            column, row = (middles / STRIDE).long().unbind(1)
            there = torch.zeros_like(out[0])
            there[row, column] = 1
            at_boxes = out[:, row, column].T
            sums["found"] = sums["found"] + F.binary_cross_entropy_with_logits(out[0], there, reduction="sum")
            sums["kind"] = sums["kind"] + F.cross_entropy(at_boxes[:, 1:4], target["labels"], reduction="sum")
            sums["place"] = sums["place"] + F.l1_loss(at_boxes[:, 4:], target["boxes"] / STRIDE, reduction="sum")
        return {name: value / len(images) for name, value in sums.items()}


def main() -> None:
    """Train, and say the losses."""
    world = lockstep.join(seed=0)
    model = lockstep.DataParallel(Detector().to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = lockstep.shard(DataLoader(Squares(), batch_size=15, shuffle=True, collate_fn=collate))
    for epoch in range(3):
        for images, targets in loader:
            losses = model(images, targets)
            sum(losses.values()).backward()
            model.clip_grad_norm_(5.0)
            optimizer.step()
            optimizer.zero_grad()
        said = {name: world.mean(value.detach(), weight=len(images)) for name, value in losses.items()}
        if world.is_main:
            print(f"epoch {epoch}:", ", ".join(f"{name} {float(value):.3f}" for name, value in said.items()))


if __name__ == "__main__":
    main()
