"""How a process gets its group: alone, by meeting the others, or from a torch.distributed that is up already."""

import contextlib
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.comm import backend as backends
from lockstep.comm import shm
from lockstep.comm.peers import Peer, Peers
from lockstep.environment import Launch
from lockstep.errors import LaunchError


@dataclass(frozen=True, slots=True)
class Arrival:
    """A worker's place, and what it needs to talk to the others."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    """What carries tensors of `device`."""
    peers: Peers
    group: dist.ProcessGroup | None
    """For tensors on `device`; None for a lone worker without a network."""
    host_group: dist.ProcessGroup | None
    """For tensors in host memory."""
    owns_group: bool
    """Whether torch.distributed was initialised here, and is to be ended with the world."""


def alone(device: torch.device, timeout: timedelta) -> Arrival:
    """A world of one. It opens a group if it can, for scripts that call torch.distributed themselves."""
    name = backends.choose(device, on_one_host=False)  # Any will do; gloo is always there.
    group: dist.ProcessGroup | None = None
    try:
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        group = dist.group.WORLD
    except RuntimeError:
        pass  # No network interface at all, not even loopback: nothing here needs the group.
    return _single(device, _plain(name), group, timeout, owns_group=group is not None)


def meet(launch: Launch, device: torch.device, backend: str | None, timeout: timedelta) -> Arrival:
    """Meet the other workers where the launcher said, and open the group."""
    store = _generation(backends.open_store(launch, timeout), launch.rank)
    backends.await_workers(store, launch, timeout)
    peers = _introduce(store, launch.rank, launch.size)
    on_one_host = all(peer.host == peers[launch.rank].host for peer in peers)
    name = backend or backends.choose(device, on_one_host=on_one_host)
    shm.register()
    try:
        dist.init_process_group(
            name, store=dist.PrefixStore("group", store), rank=launch.rank, world_size=launch.size, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        raise LaunchError(f"worker {launch.rank}: backend {name!r} could not be opened: {error}") from error
    return _in_default_group(device, Peers(peers[launch.rank], peers, store, timeout), launch)


def adopt(device: torch.device, timeout: timedelta) -> Arrival:
    """Take torch's default group as it is."""
    if dist.get_world_size() == 1:
        return _single(device, _plain(str(dist.get_backend())), dist.group.WORLD, timeout, owns_group=False)
    store = _generation(dist.distributed_c10d._get_default_store(), dist.get_rank())
    peers = _introduce(store, dist.get_rank(), dist.get_world_size())
    return _in_default_group(device, Peers(peers[dist.get_rank()], peers, store, timeout), None)


def choose_device(asked: str | torch.device | None, local_rank: int | None) -> torch.device:
    """The device asked for, else this worker's GPU, else the CPU; a GPU becomes the current one."""
    device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cuda":
        return device
    if device.index is None:
        device = torch.device("cuda", _gpu(local_rank))
    torch.cuda.set_device(device)
    return device


def end_groups(*, are_broken: bool) -> None:
    """End torch.distributed; without the goodbye that a dead peer would never answer, where there is one."""
    if not dist.is_initialized():
        return
    if not are_broken:
        dist.destroy_process_group()
        return
    with contextlib.suppress(RuntimeError):  # What cannot even be aborted goes with the process.
        dist.distributed_c10d._abort_process_group()


def _single(
    device: torch.device, backend: str, group: dist.ProcessGroup | None, timeout: timedelta, *, owns_group: bool
) -> Arrival:
    me = Peer.me(0)
    return Arrival(0, 1, 0, 1, device, backend, Peers(me, (me,), None, timeout), group, group, owns_group)


def _introduce(store: dist.Store, rank: int, size: int) -> tuple[Peer, ...]:
    """Who is behind each rank, once everybody has said which process it is."""
    store.set(f"peer/{rank}", Peer.me(rank).format())
    return tuple(Peer.parse(store.get(f"peer/{other}").decode()) for other in range(size))


def _in_default_group(device: torch.device, peers: Peers, launch: Launch | None) -> Arrival:
    """This worker's place in torch's default group."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    on_host = [peer.rank for peer in peers.all if peer.host == peers.me.host]
    local_rank, local_size = (launch.local_rank, launch.local_size) if launch else (None, None)
    return Arrival(
        rank,
        size,
        on_host.index(rank) if local_rank is None else local_rank,
        len(on_host) if local_size is None else local_size,
        device,
        _plain(str(dist.get_backend_config(group) if device.type == "cuda" else dist.get_backend(group))),
        peers,
        group,
        backends.host_group(group),
        owns_group=launch is not None,
    )


def _generation(store: dist.Store, rank: int) -> dist.Store:
    """A part of the store for this time of joining: what an earlier world left there must not be read again."""
    return dist.PrefixStore(f"lockstep/{store.add(f'lockstep/joins/{rank}', 1)}", store)


def _gpu(local_rank: int | None) -> int:
    if local_rank is None:
        return torch.cuda.current_device()
    count = torch.cuda.device_count()
    if local_rank < count:
        return local_rank
    if "NCCL_HOSTID" in os.environ:  # The user says that workers share devices; NCCL then lets them.
        return local_rank % count
    raise LaunchError(
        f"local worker {local_rank} finds {count} GPU(s) on this host, and NCCL allows one worker per GPU. "
        f"Start at most {count} workers per host, or join(device='cpu')."
    )


def _plain(backend: str) -> str:
    """The part of torch's backend string that says what carries the device's tensors."""
    return "nccl" if "nccl" in backend else backend.rpartition(":")[2]
