"""A GAN: two models with an optimizer each, of which one's loss goes through the other."""

import torch
import torch.nn.functional as F
from options import double, program
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

MISTAKES = {"bypassed": "gradients used before sync"}


def main(zero=0, mistake=None, compiled=0, steps=5):
    lockstep.join()
    generator = double(1)
    torch.manual_seed(0)
    real = torch.randn(40, 6, generator=generator) * 2 + 1
    noise = torch.randn(40, 4, generator=generator)
    maker = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 6))
    judge = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    maker_steps = torch.optim.Adam(maker.parameters(), lr=1e-2, betas=(0.5, 0.9))
    judge_steps = torch.optim.Adam(judge.parameters(), lr=1e-2, betas=(0.5, 0.9))
    making = lockstep.DataParallel(
        torch.compile(maker, backend="aot_eager") if compiled else maker, optimizer=maker_steps, zero=zero
    )
    judging = lockstep.DataParallel(
        torch.compile(judge, backend="aot_eager") if compiled else judge, optimizer=judge_steps, zero=zero
    )
    loader = lockstep.shard(DataLoader(TensorDataset(real, noise), 7))
    for _, (x, z) in zip(range(steps), loader, strict=False):
        made = maker(z) if mistake == "bypassed" else making(z)
        fake = judging(made.detach())
        loss = F.binary_cross_entropy_with_logits(judging(x), torch.ones_like(fake))
        (loss + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))).backward()
        judge_steps.step()
        judge_steps.zero_grad()
        judge.requires_grad_(False)
        judged = judging(made)
        F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged)).backward()
        judge.requires_grad_(True)
        maker_steps.step()
        maker_steps.zero_grad()
        judge_steps.zero_grad()
    return making, judging


if __name__ == "__main__":
    program(main)
