"""An ImageNet script: SGD, a schedule, batch norm, moving averages of the weights, validation over all workers."""

import torch
import torch.nn.functional as F
from options import double, program
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

MISTAKES = {"batch_norm": "batch norm without sync", "not_sharded": "the loader is not sharded"}


def network():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.GELU(),
        nn.Conv2d(6, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.GELU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def main(zero=0, mistake=None, compiled=0, epochs=2):
    world = lockstep.join()
    generator = double(1)
    torch.manual_seed(0)
    images = torch.randn(37, 3, 8, 8, generator=generator)
    labels = torch.randint(4, (37,), generator=generator)
    net = network()
    if mistake != "batch_norm":
        net = lockstep.SyncBatchNorm.convert(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)
    model = lockstep.DataParallel(
        torch.compile(net, backend="aot_eager") if compiled else net, optimizer=optimizer, zero=zero
    )
    loader = DataLoader(TensorDataset(images, labels), 8, shuffle=mistake != "not_sharded")
    train_loader = loader if mistake == "not_sharded" else lockstep.shard(loader)
    test_loader = lockstep.shard(DataLoader(TensorDataset(images[:14], labels[:14]), 6))
    for _ in range(epochs):
        model.train()
        for x, y in train_loader:
            F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
            optimizer.step()
            optimizer.zero_grad()
            with model.whole_params():
                average.update_parameters(net)
        schedule.step()
        model.eval()
        right = seen = 0
        with torch.no_grad():
            for x, y in test_loader:
                right += int((model(x).argmax(1) == y)[: test_loader.num_samples].sum())
                seen += test_loader.num_samples
        assert world.sum(seen) == 14
        model.right = world.sum(right)
    model.average = average
    return model


if __name__ == "__main__":
    program(main)
