"""A GPT trained as nanoGPT does it: random crops, micro-batches, a gradient scaler, clipping, warm-up and cosine.

The wrapper is told by `require_backward_grad_sync` which micro-batch is the last.
"""

import math

import torch
import torch.nn.functional as F
from options import double, program, rows_of
from torch import nn

import lockstep

MISTAKES = {"never_synced": "gradients used before sync", "mean_of_means": "mean of means"}
LENGTH, WORDS, WIDTH = 8, 24, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens, targets):
        x = self.words(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(zero=0, mistake=None, compiled=0, steps=5, backend=None):
    world = lockstep.join()
    generator = double(1)
    torch.manual_seed(0)
    text = torch.randint(WORDS, (400,), generator=generator)
    net = GPT()
    decayed = [param for param in net.parameters() if param.dim() > 1]
    others = [param for param in net.parameters() if param.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu")
    model = lockstep.DataParallel(
        torch.compile(net, backend="aot_eager") if compiled else net, optimizer=optimizer, zero=zero
    )

    def get_batch(size):
        begins = torch.randint(len(text) - LENGTH - 1, (size,), generator=generator)
        crops = torch.stack([text[begin : begin + LENGTH + 1] for begin in begins])
        return rows_of(world, crops[:, :-1], crops[:, 1:])

    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (step + 1) / 3 if step < 3 else 5e-3 * (1 + math.cos(math.pi * step / steps))
        for micro in range(2):
            model.require_backward_grad_sync = micro == 1 and mistake != "never_synced"
            tokens, targets = get_batch(5)
            _, loss = model(tokens, targets)
            loss = scaler.scale(loss / 2)
            lockstep.backward(loss, weight=None if mistake == "mean_of_means" else len(tokens))
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return model


if __name__ == "__main__":
    program(main)
