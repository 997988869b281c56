"""Fine-tuning with frozen parts (LoRA): only the adapters have gradients, so only they travel.

    python examples/lora.py
    lockstep run -n 2 examples/lora.py

A network learns one task. Then its weights are frozen, every linear layer gets a low-rank adapter, and the adapters
learn a second task. Frozen parameters need no flag. Half-way the bias of the last layer is unfrozen, which needs none
either.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class LoRA(nn.Module):
    """A frozen linear layer, and beside it a product of two thin matrices that learns."""

    def __init__(self, base: nn.Linear, rank: int = 4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the frozen layer at first."""
        return self.base(x) + self.up(self.down(x))


def network(device: torch.device) -> nn.Sequential:
    """What is trained first, and adapted then."""
    layers = [nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4)]
    return nn.Sequential(*layers).to(device)


def task(number: int) -> TensorDataset:
    """Points, and which of four directions each is nearest to."""
    dice = torch.Generator().manual_seed(number)
    x, directions = torch.randn(1024, 32, generator=dice), torch.randn(32, 4, generator=dice)
    return TensorDataset(x, (x @ directions).argmax(1))


def train(world: lockstep.World, net: nn.Module, data: TensorDataset, epochs: int, lr: float) -> float:
    """Train what is not frozen; returns the share of right answers."""
    model = lockstep.DataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)  # Frozen parameters get no gradient and stay as they are.
    loader = lockstep.shard(DataLoader(data, batch_size=64, shuffle=True))
    for epoch in range(epochs):
        if epoch == epochs // 2:
            net[-1].requires_grad_(True) if isinstance(net[-1], nn.Linear) else net[-1].base.bias.requires_grad_(True)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        hits = [(model(x).argmax(1) == y)[: loader.num_samples].sum() for x, y in loader]
    return float(world.sum(torch.stack(hits).sum())) / len(data)


def main() -> None:
    """Learn, freeze, adapt."""
    world = lockstep.join(seed=0)
    base = network(world.device)
    first = train(world, base, task(1), epochs=5, lr=1e-3)

    adapted = network(world.device)
    adapted.load_state_dict(base.state_dict())
    for place, layer in enumerate(adapted):
        if isinstance(layer, nn.Linear):
            adapted[place] = LoRA(layer).to(world.device)
    before = {name: value.clone() for name, value in adapted.state_dict().items() if ".base.weight" in name}
    learns = sum(param.numel() for param in adapted.parameters() if param.requires_grad)
    second = train(world, adapted, task(2), epochs=12, lr=5e-3)

    kept = all(torch.equal(adapted.state_dict()[name], value) for name, value in before.items())
    if world.is_main:
        everything = sum(param.numel() for param in adapted.parameters())
        print(f"first task: {first:.0%} right")
        print(f"second task: {second:.0%} right, with {learns:,} of {everything:,} parameters on the wire")
        print("frozen weights:", "as they were" if kept else "CHANGED")


if __name__ == "__main__":
    main()
