"""A small GPT on the bytes of text files, trained to the same bits on any number of workers.

    python examples/gpt.py
    lockstep run -n 2 examples/gpt.py
    lockstep run -n 2 examples/gpt.py FOLDER/*.txt --steps 500

Without files it reads some of Python's own library. The last line is a hash of the weights: it is the same however many
workers ran this, which is what `lockstep.Trainer` is for.
"""

import argparse
import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import lockstep

CONTEXT, WIDTH, BATCH = 64, 64, 16


class Windows(torch.utils.data.Dataset):
    """Every run of CONTEXT + 1 bytes, one after the other."""

    def __init__(self, text: bytes):
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, place: int) -> torch.Tensor:
        return self.tokens[place * CONTEXT :][: CONTEXT + 1].long()


class GPT(nn.Module):
    """Two layers of attention over bytes."""

    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        ]
        self.layers, self.norm, self.head = nn.ModuleList(layers), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        self.register_buffer("mask", torch.full((CONTEXT, CONTEXT), -torch.inf).triu(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of each next byte."""
        length = tokens.shape[1]
        x = self.bytes(tokens) + self.places.weight[:length]
        for layer in self.layers:
            x = layer(x, self.mask[:length, :length])
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, shard: torch.Tensor) -> torch.Tensor:
    """The mean over a shard's bytes."""
    return F.cross_entropy(model(shard[:, :-1]).flatten(0, 1), shard[:, 1:].flatten())


def main() -> None:
    """Train, and show what the model writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    files = args.files or sorted(Path(argparse.__file__).parent.glob("[a-d]*.py"))
    text = b"\n".join(path.read_bytes() for path in files)

    world = lockstep.join(seed=0)
    net = GPT().to(world.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    trainer = lockstep.Trainer(net, optimizer, loss_fn, shards=4, clip=1.0)
    windows = Windows(text)
    epochs = 1 + args.steps * BATCH // len(windows)
    for batch in trainer.batches(windows, batch_size=BATCH, epochs=epochs, shuffle=True):
        out = trainer.step(batch)
        if world.is_main and out.step % 20 == 0:
            print(f"step {out.step}: loss {out.loss:.3f}, {out.loss / 0.6931:.2f} bits a byte")
        if out.step == args.steps:
            break

    net.eval()
    dice, tokens = torch.Generator().manual_seed(0), torch.tensor([list(b"def ")])
    with torch.no_grad():
        for _ in range(CONTEXT - tokens.shape[1]):
            odds = net(tokens.to(world.device))[:, -1].softmax(1).cpu()
            tokens = torch.cat([tokens, torch.multinomial(odds, 1, generator=dice)], 1)
    sha = hashlib.sha256(b"".join(param.detach().cpu().numpy().tobytes() for param in net.parameters()))
    if world.is_main:
        print("it writes:", repr(bytes(tokens[0].tolist()).decode(errors="replace")))
        print("weights:", sha.hexdigest()[:16])


if __name__ == "__main__":
    main()
