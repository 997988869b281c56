"""Detection: batches are lists of images and of dicts of boxes, and the model returns a dict of losses.

The losses are means over the boxes, of which every image has its own number.
"""

import torch
import torch.nn.functional as F
from options import double, program
from torch import nn
from torch.utils.data import DataLoader

import lockstep

MISTAKES = {"mean_of_means": "mean of means"}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.boxes, self.classes = nn.Linear(96 + 4, 4), nn.Linear(96 + 4, 3)

    def forward(self, images, targets):
        seen = torch.stack([self.body(image[None])[0] for image in images])
        rows = torch.cat([seen[number].expand(len(each["boxes"]), -1) for number, each in enumerate(targets)])
        boxes = torch.cat([each["boxes"] for each in targets])
        labels = torch.cat([each["labels"] for each in targets])
        asked = torch.cat([rows, boxes.round()], 1)
        return {
            "box": F.smooth_l1_loss(self.boxes(asked), boxes, reduction="sum") / max(1, len(boxes)),
            "class": F.cross_entropy(self.classes(asked), labels, reduction="sum") / max(1, len(boxes)),
        }


def main(zero=0, mistake=None, compiled=0, steps=5):
    lockstep.join()
    generator = double(1)
    torch.manual_seed(0)

    def sample(number):
        size = 8 + number % 3
        count = number * 7 % 5
        boxes = torch.randn(count, 4, generator=generator)
        target = {"boxes": boxes, "labels": torch.randint(3, (count,), generator=generator)}
        return torch.randn(3, size, size, generator=generator), target

    samples = [sample(number) for number in range(40)]
    net = Detector()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = lockstep.DataParallel(
        torch.compile(net, backend="aot_eager") if compiled else net, optimizer=optimizer, zero=zero
    )
    loader = lockstep.shard(DataLoader(samples, 7, collate_fn=lambda batch: tuple(zip(*batch, strict=True))))
    for _, (images, targets) in zip(range(steps), loader, strict=False):
        losses = model(list(images), list(targets))
        count = sum(len(each["boxes"]) for each in targets)
        lockstep.backward(sum(losses.values()), weight=None if mistake else count)
        optimizer.step()
        optimizer.zero_grad()
    return model


if __name__ == "__main__":
    program(main)
