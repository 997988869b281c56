"""Choose a backend and open the groups through which workers talk."""

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm import shm
from lockstep.comm.shm.group import ShmGroup
from lockstep.environment import LOOPBACK, Launch
from lockstep.errors import LaunchError

_LATER = dist.AllreduceOptions()
_LATER.asyncOp = True


def choose(device: torch.device, *, on_one_host: bool) -> str:
    """The backend for tensors on `device`, in torch.distributed's words; host memory always has one too."""
    if device.type == "cuda":
        return "cpu:gloo,cuda:nccl"
    return "shm" if on_one_host and shm.is_supported() else "gloo"


def open_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """The key-value store at the launch's meeting point; worker 0 serves it unless the launcher does."""
    serves = launch.rank == 0 and not launch.store_is_up
    where = f"{launch.address}:{launch.port}"
    try:
        return dist.TCPStore(
            launch.address,
            launch.port,
            launch.size,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_listen_on_loopback(launch) if serves else None,
        )
    except (RuntimeError, OSError) as error:
        what = "could not serve the meeting point at" if serves else "could not reach worker 0 at"
        raise LaunchError(
            f"worker {launch.rank} {what} {where}: {error}. Check that MASTER_ADDR and MASTER_PORT are the same on "
            "all workers, that the port is free, and that all workers were started."
        ) from error


def _listen_on_loopback(launch: Launch) -> int | None:
    """A listening socket on loopback alone; torch's own store would listen on every interface."""
    if launch.address not in (LOOPBACK, "localhost"):
        return None
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((LOOPBACK, launch.port))
    listener.listen(2048)
    return listener.detach()


def await_workers(store: dist.Store, launch: Launch, timeout: timedelta) -> None:
    """Return when all workers have reached the store; at the deadline, name those who have not."""
    store.set(f"joined/{launch.rank}", "1")
    try:
        store.wait([f"joined/{rank}" for rank in range(launch.size)], timeout)
    except RuntimeError as error:
        missing = [rank for rank in range(launch.size) if not store.check([f"joined/{rank}"])]
        raise LaunchError(
            f"worker {launch.rank}: waited {timeout} for {launch.size} workers; missing: "
            f"{', '.join(map(str, missing))}. Start all of them, and give join() a longer timeout if they start slowly."
        ) from error


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same workers that carries host memory: `group` itself where it can."""
    config = dist.get_backend_config(group)
    if "gloo" in config or "shm" in config:
        return group
    return new_group(group, "gloo")


def reduction_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A group for gradients alone, so that what users send in mid-backward can never be taken for a bucket.

    On CUDA the given group itself: a second NCCL communicator would cost memory on every device, and its streams
    keep the order in which operations were issued.
    """
    return group if device.type == "cuda" else new_group(group, dist.get_backend(group))


def moves_parts(group: dist.ProcessGroup) -> bool:
    """Whether the backend has a reduce-scatter and an all-gather of its own.

    gloo makes the one from an all-reduce of a copy and the other by way of a copy: there it is better to all-reduce in
    place, and to broadcast the parts.
    """
    return dist.get_backend(group) != "gloo"


def all_reduce(flat: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start replacing `flat` by the sum of everybody's; returns what to wait for."""
    if isinstance(group, ShmGroup) and flat.is_cpu:
        return group.allreduce([flat], _LATER)  # What torch does around it takes as long as a small message.
    return dist.all_reduce(flat, group=group, async_op=True)


def reduce_scatter(out: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start setting `out` to this worker's part of the sum of everybody's `whole`; returns what to wait for."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # The old name until 2.12.
    return scatter(out, whole, group=group, async_op=True)


def all_gather(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start setting `whole` to everybody's `own`, one behind the other; returns what to wait for."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, own, group=group, async_op=True)


def new_group(group: dist.ProcessGroup, backend: str) -> dist.ProcessGroup:
    """Another group of the workers of `group`; every one of them must call this."""
    opened = dist.new_group(
        dist.get_process_group_ranks(group),
        backend=backend,
        use_local_synchronization=dist.get_world_size() > 1,
    )
    assert isinstance(opened, dist.ProcessGroup)
    return opened
