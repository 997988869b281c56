"""Workers killed at random moments while they save, again and again: a whole checkpoint is there each time."""

import os
import random
import time

import pytest
import torch
from amount import some
from processes import fork_context
from test_failure import free_port

import lockstep


def build():
    net = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(4)))
    optimizer = torch.optim.Adam(net.parameters())
    return net, optimizer


def save_without_end(environ, folder):
    """Worker: all weights are the number of the step, and so is the optimizer's state."""
    os.environ.update(environ)
    torch.set_num_threads(1)
    lockstep.join(timeout=20)
    net, optimizer = build()
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=3)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()  # Makes the optimizer's state.
    optimizer.zero_grad()
    for step in range(1, 10**6):
        model._engine.before_load()
        with torch.no_grad():
            for part in model._engine.parts:
                part.own.fill_(step)
                optimizer.state[part.own]["exp_avg"].fill_(step)
        model._engine.after_load()
        lockstep.save(folder, model, optimizer, step=step, extra={"step": step}, keep_last=2, wait=step % 2 == 0)


def start(folder):
    context = fork_context()
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = [
        context.Process(target=save_without_end, args=({"RANK": str(rank), **common}, folder)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    return processes


def await_first(folder, processes):
    give_up = time.monotonic() + 60
    while not any(folder.glob("step-*")):
        assert time.monotonic() < give_up and all(process.is_alive() for process in processes)
        time.sleep(0.001)


@pytest.mark.parametrize("seed", some((0, 3), range(50)))
def test_a_checkpoint_is_there_whenever_they_are_killed(tmp_path, seed):
    chance = random.Random(seed)
    processes = start(str(tmp_path))
    try:
        await_first(tmp_path, processes)
        time.sleep(chance.uniform(0, 0.1))
        for process in chance.choice([processes, processes[:1], processes[1:]]):
            process.kill()
    finally:
        for process in processes:
            process.join(30)
            process.kill()
            process.join()
    net, optimizer = build()
    resumed = lockstep.load(tmp_path, net, optimizer)
    assert resumed.step == resumed.extra["step"]
    for param in net.parameters():
        assert (param == resumed.step).all() and (optimizer.state[param]["exp_avg"] == resumed.step).all()
