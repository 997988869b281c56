"""A convolutional network on 28 x 28 images, with batch norm over the global batch, a warm-up and a test set.

    python examples/cnn.py
    lockstep run -n 2 examples/cnn.py

The images are made here, so nothing is downloaded: ten blurred shapes, shifted, with noise. Replace `pictures` by
torchvision's MNIST and nothing else changes.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

EPOCHS, BATCH, BASE_BATCH = 2, 128, 64
"""The learning rate below was tuned for batches of 64; `scale_lr` makes of it that for 128."""


def pictures(count: int, seed: int) -> TensorDataset:
    """Images of ten kinds, the same on every worker."""
    shapes = F.interpolate(torch.randn(10, 1, 7, 7, generator=torch.Generator().manual_seed(0)), size=28)
    dice = torch.Generator().manual_seed(seed)
    kinds = torch.randint(10, (count,), generator=dice)
    shifts = torch.randint(-3, 4, (count, 2), generator=dice).tolist()
    images = torch.stack([shapes[kind].roll(shift, (1, 2)) for kind, shift in zip(kinds, shifts, strict=True)])
    return TensorDataset(images + 3 * torch.randn(images.shape, generator=dice), kinds)


def main() -> None:
    """Train, and say the accuracy on images that were not trained on."""
    world = lockstep.join(seed=0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.2), nn.LazyLinear(10)),
    )
    net(torch.zeros(2, 1, 28, 28))  # Lazy layers get their shapes before the model is wrapped.
    net = lockstep.SyncBatchNorm.convert(net)
    model = lockstep.DataParallel(net.to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    schedule = lockstep.scale_lr(optimizer, base_batch=BASE_BATCH, batch=BATCH, warmup_steps=10)

    loader = lockstep.shard(DataLoader(pictures(3000, seed=1), batch_size=BATCH, shuffle=True))
    for epoch in range(EPOCHS):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        mean = world.mean(loss.detach(), weight=len(x))  # Every worker calls this.
        if world.is_main:
            print(f"epoch {epoch}: loss {mean:.3f}")

    model.eval()
    tests, correct, count = lockstep.shard(DataLoader(pictures(502, seed=2), batch_size=100)), 0, 0
    with torch.no_grad():
        for x, y in tests:
            # The last batch may have fewer samples than there are workers: a stand-in does not count.
            correct += (model(x).argmax(1) == y)[: tests.num_samples].sum().item()
            count += tests.num_samples
    correct, count = world.sum(correct), world.sum(count)
    if world.is_main:
        print(f"{correct} of {count} images right")


if __name__ == "__main__":
    main()
