"""A model of timm's with its own moving average and its own optimizer and schedule, as timm's train.py puts them."""

import timm
import torch
import torch.nn.functional as F
from options import double, program
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch.utils.data import DataLoader, TensorDataset

import lockstep

MISTAKES = {"not_sharded": "the loader is not sharded"}


def main(zero=0, mistake=None, compiled=0, steps=5):
    lockstep.join()
    generator = double(1)
    torch.manual_seed(0)
    x = torch.randn(40, 3, 32, 32, generator=generator)
    y = torch.randint(4, (40,), generator=generator)
    net = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=4, embed_dim=24, depth=2, num_heads=2)
    optimizer = create_optimizer_v2(net, opt="adamw", lr=1e-2, weight_decay=0.05, filter_bias_and_bn=True)
    average = ModelEmaV3(net, decay=0.9)
    model = lockstep.DataParallel(
        torch.compile(net, backend="aot_eager") if compiled else net, optimizer=optimizer, zero=zero
    )
    loader = DataLoader(TensorDataset(x, y), 7)
    for _, (images, labels) in zip(range(steps), loader if mistake else lockstep.shard(loader), strict=False):
        F.cross_entropy(model(images), labels).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        with model.whole_params():
            average.update(net)
    model.average = average
    return model


if __name__ == "__main__":
    program(main)
