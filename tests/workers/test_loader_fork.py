"""Loader processes that are forked from a worker which has left a world: its garbage is not theirs to collect."""

import gc
import os

import torch

import lockstep


class Collecting(torch.utils.data.Dataset):
    """Collects garbage whenever a sample is fetched, as the interpreter does now and then."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        gc.collect()
        return torch.ones(3)


def abandon(world):
    """Leave the world, whose group is from now on garbage in a cycle: nobody has it, and it has not been ended."""
    cycle = [world.group, world.host_group]
    cycle.append(cycle)
    world.leave()


def load_alone():
    net = torch.nn.Linear(3, 1)
    trainer = lockstep.Trainer(
        net, torch.optim.SGD(net.parameters(), lr=0.1), lambda model, x: model(x).mean(), shards=2
    )
    feed = trainer.batches(Collecting(), batch_size=4, epochs=2, num_workers=2, multiprocessing_context="fork")
    return sum(trainer.step(batch).weight for batch in feed)


def load_after_a_world(world):
    """How many samples were loaded, in a world of one after that of all; and whether the garbage was there then."""
    gc.collect()
    gc.disable()  # It is to be garbage when the loader processes start, whatever else is allocated before.
    try:
        abandon(world)
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        with lockstep.join(seed=0):
            num_samples = load_alone()
        return num_samples, gc.collect() > 0
    finally:
        gc.enable()


def test_loader_processes_do_not_collect_groups_that_were_left(pool):
    assert pool.run(2, load_after_a_world, backend="gloo") == [(16, True)] * 2
