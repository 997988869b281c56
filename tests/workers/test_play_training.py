"""The playground against the engine: what its page computes is what Trainer and the ring of comm/ come to."""

import play_reference
import pytest
import torch
import torch.distributed as dist
from report_browser import CHROMIUM, Browser
from torch import nn

import lockstep
from lockstep.cli.main import main
from lockstep.comm.ring import ring_all_reduce

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

SETTING = {"batch": 50, "width": 16, "rate": 0.2, "reduction": "tree"}
STEPS = 25


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    folder = tmp_path_factory.mktemp("play")
    assert main(["play", "--no-browser", "--out", str(folder / "play.html")]) == 0
    browser = Browser(folder / "profile", deadline=110)
    browser.show(folder / "play.html", 800)
    yield browser
    browser.close()


def losses_of_trainer(world, setting, steps):
    width, seed = setting["width"], 0
    net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    with torch.no_grad():
        for param, value in zip(net.parameters(), play_reference.initial_weights(seed, width), strict=True):
            param.copy_(torch.from_numpy(value))
    x, y = (torch.from_numpy(each) for each in play_reference.spirals(seed))
    optimizer = torch.optim.SGD(net.parameters(), lr=setting["rate"], momentum=0.9)

    def loss_fn(model, shard):
        points, targets = shard
        return nn.functional.binary_cross_entropy_with_logits(model(points)[:, 0], targets)

    trainer = lockstep.Trainer(net, optimizer, loss_fn, shards=play_reference.SHARDS)
    losses = []
    for number in range(steps):
        samples = play_reference.global_batch(seed, setting["batch"], number)
        losses.append(float(trainer.step((x[samples], y[samples])).loss))
    return losses


def test_losses_are_trainers(pool, browser):
    found = browser.value(
        f"(() => {{ const training = new playground.Training({{ ...playground.START, ...{SETTING!r}, workers: 2 }});"
        f" return Array.from({{ length: {STEPS} }}, () => training.step().loss); }})()"
    )
    for losses in pool.run(2, losses_of_trainer, SETTING, STEPS):
        assert losses == pytest.approx(found, abs=1e-6)


def around_the_ring(world, contributions):
    own = torch.tensor(contributions[world.rank], dtype=torch.float32)
    traffic = ring_all_reduce(own, dist.new_group(backend="gloo"))
    return own.tolist(), traffic.num_bytes, traffic.num_messages


@pytest.mark.parametrize("workers", [3, 4])
def test_the_ring_is_the_engines(pool, browser, workers):
    contributions, sums, sent, messages = browser.value(
        f"(() => {{ const training = new playground.Training({{ ...playground.START, workers: {workers} }});"
        " const step = training.step(); const messages = step.rounds.flatMap((round) => round.messages);"
        " return [step.contributions.map(({ values }) => [...values]), Object.values(step.sums).map((sum) => [...sum]),"
        " step.bytes, training.workers.map((worker) => messages.filter(({ from }) => from === worker).length)]; })()"
    )
    for rank, (total, num_bytes, num_messages) in enumerate(pool.run(workers, around_the_ring, contributions)):
        assert total == sums[rank]
        assert num_bytes == sent[str(rank)] and num_messages == messages[rank]
