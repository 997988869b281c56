"""Steps recorded as CUDA graphs: the same bits as when they run as they are, on one worker and on two."""

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


class Net(nn.Module):
    """Dropout, batch norm, attention-free: everything that has state or draws numbers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.norm = nn.BatchNorm1d(64)
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 64))
        self.head = nn.Linear(64, 50)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens).mean(1))
        return self.head(x + self.body(x))


def plain_loss(model, shard):
    with torch.autocast("cuda", torch.bfloat16):
        return F.cross_entropy(model(shard[:, :-1]).float(), shard[:, -1])


def token_loss(model, shard):
    tokens, mask = shard["tokens"], shard["mask"]
    losses = F.cross_entropy(model(tokens[:, :-1]), tokens[:, -1], reduction="none")
    return (losses * mask).sum() / mask.sum(), mask.sum()


def optimizers(net):
    return {
        "adamw": lambda: torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True),
        "adam": lambda: torch.optim.Adam(net.parameters(), lr=1e-2),
        "sgd": lambda: torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9),
        "fused sgd": lambda: torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, fused=True),
    }


def make(optimizer, shards, loss_fn, **more):
    torch.manual_seed(3)
    net = Net().to(lockstep.join().device)
    made = optimizers(net)[optimizer]()
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
    more = {"clip": 0.3, "seed": 5} | more
    return lockstep.Trainer(net, made, loss_fn, shards=shards, scheduler=schedule, check_every=0, **more)


def data(weighed):
    tokens = torch.randint(50, (75, 9), generator=torch.Generator().manual_seed(1))
    if not weighed:
        return tokens
    mask = (torch.rand(75, generator=torch.Generator().manual_seed(2)) > 0.3).float()
    return [{"tokens": row, "mask": keep} for row, keep in zip(tokens, mask, strict=True)]


def train(graph, optimizer="adamw", shards=2, weighed=False, watch=False):
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_HOSTID=os.environ.get("RANK", "0"))
    lockstep.join(seed=0, timeout=120)
    trainer = make(optimizer, shards, token_loss if weighed else plain_loss, cuda_graph=graph, watch=watch)
    found = []
    for batch in trainer.batches(data(weighed), batch_size=16, epochs=4):  # The last of an epoch is smaller.
        out = trainer.step(batch)
        found.append((out.loss, out.grad_norm, out.weight, out.lr))
    graphed = trainer._stepper._graphed
    count = len(graphed.passes.graphs) if graphed is not None else 0
    return digest(trainer), found, count


def digest(trainer):
    sha = hashlib.sha256()
    for name, tensor in sorted(trainer.state_dict()["tensors"].items()):
        sha.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("shards", [1, 4])
def test_one_worker_and_two(shards, weighed):
    """Two workers run as they are, with rates in tensors: the reference for replays on one."""
    alone, losses, count = lockstep.launch(train, workers=1, args=(True, "adamw", shards, weighed))[0]
    assert count == 2 if shards == 1 else count > 0
    assert losses[-1][0] < losses[0][0]
    watched = lockstep.launch(train, workers=1, args=(True, "adamw", shards, weighed, True))[0]
    assert watched == (alone, losses, 0)  # Somebody listens: nothing is recorded.
    if shards > 1:
        for digest, found, _ in lockstep.launch(train, workers=2, args=(True, "adamw", shards, weighed)):
            assert (digest, found) == (alone, losses)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "fused sgd"])
def test_other_optimizers(optimizer):
    recorded = lockstep.launch(train, workers=1, args=(True, optimizer))[0]
    as_it_is = lockstep.launch(train, workers=1, args=(True, optimizer, 2, False, True))[0]
    assert recorded[:2] == as_it_is[:2]


def run(trainer, count):
    for number, batch in enumerate(trainer.batches(data(False), batch_size=16, epochs=4), 1):
        trainer.step(batch)
        if number == count:
            break
    return trainer


def test_resumed():
    through = digest(run(make("adamw", 2, plain_loss, cuda_graph=True), 100))
    trainer = run(make("adamw", 2, plain_loss, cuda_graph=True), 9)
    state = trainer.state_dict()
    for fresh in (trainer, make("adamw", 2, plain_loss, cuda_graph=True)):
        fresh.load_state_dict(state)
        assert digest(run(fresh, 100)) == through


def change(watch):
    trainer = make("adamw", 1, plain_loss, cuda_graph=True, watch=watch)
    net = trainer.model.module
    for step in range(24):
        if step == 8:
            net.embed.weight.requires_grad_(False)
        if step == 12:
            net.norm.eval()
        if step == 16:
            trainer.optimizer.param_groups[0]["betas"] = (0.8, 0.9)
        if step == 20:
            net.head.weight.data = net.head.weight.data.clone()
        trainer.step(data(False)[:16])
    return digest(trainer)


def test_what_changes_is_seen():
    assert lockstep.launch(change, workers=1, args=(False,)) == lockstep.launch(change, workers=1, args=(True,))


def test_a_loss_that_reads_the_device_is_refused():
    def reading(model, shard):
        loss = plain_loss(model, shard)
        return loss if loss.item() > 0 else -loss

    trainer = make("adamw", 1, reading, cuda_graph=True)
    with pytest.raises(lockstep.UsageError, match="the model do cannot be recorded as a CUDA graph"):
        for _ in range(5):
            trainer.step(data(False)[:16])


def test_with_a_strategy_is_refused():
    with pytest.raises(lockstep.UsageError, match="cuda_graph=True with strategy"):
        make("adamw", 1, plain_loss, cuda_graph=True, strategy=lockstep.LocalSGD(every=2))
