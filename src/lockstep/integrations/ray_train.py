"""ray.train's TorchTrainer starts the workers, and `lockstep.join()` forms the world: `LockstepConfig`."""

import os
import secrets
import socket
from dataclasses import dataclass
from typing import Any

import ray.train
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from lockstep import world as worlds
from lockstep.comm.channel import SECRET_BYTES
from lockstep.environment import SECRET


@dataclass
class LockstepConfig(TorchConfig):  # type: ignore[misc]
    """For `TorchTrainer(train, torch_config=LockstepConfig(), ...)`: in `train`, `lockstep.join()` forms the world.

    It takes torch's process group's place: the workers meet in Lockstep's own store, for which each run has a secret,
    and CPU workers of one host talk through shared memory. Without it `join()` uses the group that Ray has made.
    """

    @property
    def backend_cls(self) -> type[Backend]:
        """What sets up Ray's workers."""
        return _LockstepBackend


class _LockstepBackend(Backend):  # type: ignore[misc]
    """Tells Ray's workers what a launcher would."""

    share_cuda_visible_devices = True
    """All workers of a node see its GPUs, of which `join` takes the one with the worker's local rank."""

    def on_start(self, worker_group: Any, backend_config: LockstepConfig) -> None:
        """On the driver, when the workers are there."""
        address, port = worker_group.execute_single(0, _free_place)
        shared = {"MASTER_ADDR": address, "MASTER_PORT": str(port), SECRET: secrets.token_hex(SECRET_BYTES)}
        worker_group.execute(_take_place, shared)

    def on_shutdown(self, worker_group: Any, backend_config: LockstepConfig) -> None:
        """On the driver, before the workers end."""
        worker_group.execute(_leave)


def _free_place() -> tuple[str, int]:
    """On worker 0: its address, and a port that is free there."""
    with socket.create_server(("", 0)) as probe:
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def _take_place(shared: dict[str, str]) -> None:
    """On each worker: what it is told by its environment, torchrun's variables among it."""
    context = ray.train.get_context()
    os.environ.update(shared)
    os.environ["RANK"] = str(context.get_world_rank())
    os.environ["WORLD_SIZE"] = str(context.get_world_size())
    os.environ["LOCAL_RANK"] = str(context.get_local_rank())
    os.environ["LOCAL_WORLD_SIZE"] = str(context.get_local_world_size())
    os.environ["NODE_RANK"] = str(context.get_node_rank())


def _leave() -> None:
    """On each worker: the world ends with the training, and not with Ray's process."""
    if (world := worlds.current()) is not None:
        world.leave()
