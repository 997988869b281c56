"""The same bits on 1, 2 and 4 workers over NCCL: a GPT with dropout under bfloat16 autocast."""

import hashlib
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHARDS, VOCABULARY, LENGTH = 4, 512, 64


class Block(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model, tokens):
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train(zero, fused):
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_HOSTID=os.environ.get("RANK", "0"))
    world = lockstep.join(seed=0, timeout=120)
    torch.manual_seed(3)
    net = GPT().to(world.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
    trainer = lockstep.Trainer(net, optimizer, loss_fn, shards=SHARDS, clip=0.5, zero=zero, seed=5, bucket_cap_mb=0.5)
    data = torch.randint(VOCABULARY, (90, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    losses = []
    for batch in trainer.batches(data, batch_size=16, epochs=2):
        losses.append(trainer.step(batch).loss)
    sha = hashlib.sha256()
    for name, tensor in sorted(trainer.state_dict()["tensors"].items()):
        sha.update(name.encode() + tensor.numpy().tobytes())
    return sha.hexdigest(), losses


@pytest.fixture(scope="module")
def expected():
    """What one worker comes to."""
    return lockstep.launch(train, workers=1, args=(0, True))[0]


def test_one_worker_twice(expected):
    assert expected[1][-1] < expected[1][0]
    assert lockstep.launch(train, workers=1, args=(0, True))[0] == expected


@pytest.mark.parametrize(("workers", "zero"), [(2, 0), (4, 0), (2, 1), (2, 2), (2, 3), (4, 3)])
def test_any_number_of_workers(workers, zero, expected):
    assert lockstep.launch(train, workers=workers, args=(zero, True)) == [expected] * workers
