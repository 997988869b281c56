"""Operations of all workers that this one waits for at once."""

from collections.abc import Callable
from typing import Any

import torch

from lockstep.comm.group import waited_for
from lockstep.comm.peers import Doing
from lockstep.world import World


def finish(start: Callable[[], Any], world: World, device: torch.device, doing: Doing) -> None:
    """Start an operation on tensors of `device`, and return when it is over; on a GPU the stream waits, not the host.

    start: calls one of torch.distributed with `async_op=True`, and returns what that returns.
    """
    with waited_for():
        work = start()
    if device.type == "cpu":
        world.wait(work, doing)
    elif work is not None:
        work.wait()
