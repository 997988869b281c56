"""The workers that train together, and this worker's place among them.

`join` is called once per process, by the user or by the first thing that needs a world; calling it again gives the
same world until `leave`. It reads the launch environment (nothing else does), meets the other workers, opens the
group and agrees on a seed. Alone, it needs no port, no network and no environment.
"""

import atexit
import importlib
import os
import pickle
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import environment, seeds
from lockstep.comm import arrival
from lockstep.comm import backend as backends
from lockstep.comm.peers import Doing, Peers, Waitable
from lockstep.comm.shm.work import waited_for
from lockstep.errors import UsageError
from lockstep.events import Events
from lockstep.weight import Weight

DEFAULT_TIMEOUT = timedelta(minutes=10)

Number = TypeVar("Number", int, float, Tensor)


class World:
    """The workers that train together now. Made by `join`; also a context manager that leaves at its end."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        local_rank: int,
        local_size: int,
        device: torch.device,
        backend: str,
        seed: int,
        peers: Peers,
        group: dist.ProcessGroup | None,
        host_group: dist.ProcessGroup | None,
        owns_group: bool,
    ) -> None:
        self.rank = rank
        """This worker's number, from 0."""
        self.size = size
        """How many workers there are."""
        self.local_rank = local_rank
        """This worker's number among those of its host."""
        self.local_size = local_size
        """How many workers this host has."""
        self.device = device
        """Where this worker computes."""
        self.backend = backend
        """What carries tensors of `device`: nccl or gloo."""
        self.seed = seed
        """The seed that all workers agreed on."""
        self.peers = peers
        self.group = group
        """The torch process group for tensors on `device`; None in a world of one that has none."""
        self.host_group = host_group
        """The same for tensors in host memory; waits on it have a deadline and name who is missing."""
        self.events = Events()
        self.replicas: weakref.WeakSet[Any] = weakref.WeakSet()
        """The wrapped models of this worker."""
        self.on_wrap: list[Callable[[Any], None]] = []
        """Called with every model that is wrapped from now on."""
        self.on_leave: list[Callable[[], None]] = []
        """Called when this worker's part in the world ends, while it can still talk to the others."""
        self.watcher: Any = None
        """What watches this worker: see `lockstep.watch`."""
        self.accumulation: Any = None
        """Explicit weights of micro-batches that wait for their update: see `lockstep.backward`."""
        self._weight = _Slot()
        self._owns_group = owns_group
        self._left = False

    @property
    def is_main(self) -> bool:
        """Whether this is worker 0, the one that prints and writes."""
        return self.rank == 0

    @property
    def weight(self) -> Weight | None:
        """Weight of the current batch: set by sharded loaders and by `lockstep.backward`."""
        return self._weight.value

    @weight.setter
    def weight(self, weight: Weight | None) -> None:
        self._weight.value = weight

    @property
    def timeout(self) -> timedelta:
        """The deadline of every wait."""
        return self.peers.timeout

    def barrier(self) -> None:
        """Return when every worker has called this."""
        self.sum(0)

    def sum(self, x: Number) -> Number:
        """The sum of `x` over all workers: a number for a number, a new tensor for a tensor of equal shape."""
        if isinstance(x, Tensor):
            total = x.detach().clone(memory_format=torch.contiguous_format)
            self._all_reduce(total, "summing over the workers")
            return total
        kind = torch.int64 if isinstance(x, int) else torch.float64
        reduced = torch.tensor(x, dtype=kind)
        self._all_reduce(reduced, "summing over the workers")
        return type(x)(reduced.item())

    def mean(self, x: float | Tensor, weight: float | Tensor = 1) -> float | Tensor:
        """The mean of `x` over all workers by weight: `sum(weight * x) / sum(weight)`, 0 where nothing weighs.

        Exact for parts of different sizes: give the number of samples (or tokens) that `x` is the mean of. A worker
        of weight zero does not count, even if its `x` is not a number.
        """
        value = x.detach() if isinstance(x, Tensor) else torch.tensor(float(x), dtype=torch.float64)
        if not (value.is_floating_point() or value.is_complex()):
            value = value.to(torch.get_default_dtype())
        share = torch.as_tensor(weight, dtype=value.dtype, device=value.device)
        if share.ndim:
            raise UsageError(f"world.mean: weight must be one number per worker, not a tensor of {tuple(share.shape)}.")
        both = torch.cat([torch.where(share == 0, 0, value * share).reshape(-1), share.reshape(1)])
        self._all_reduce(both, "averaging over the workers")
        averaged = torch.where(both[-1] == 0, 0, both[:-1] / both[-1]).reshape(value.shape)
        return averaged if isinstance(x, Tensor) else averaged.item()

    def gather(self, obj: Any) -> list[Any]:
        """Every worker's `obj`, in order of rank, on every worker. Objects travel as pickles among peers you trust."""
        if self.size == 1:
            return [obj]
        payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = payload.numel()
        self._all_reduce(lengths, "gathering objects")
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: payload.numel()] = payload
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        with waited_for():
            work = dist.all_gather(parts, padded, group=self.host_group, async_op=True)
        self.wait(work, "gathering objects")
        return [
            pickle.loads(part[:length].numpy().tobytes()) for part, length in zip(parts, lengths.tolist(), strict=True)
        ]

    def broadcast(self, obj: Any) -> Any:
        """Worker 0's `obj`, on every worker."""
        return self.gather(obj if self.is_main else None)[0]

    def wait(self, work: Waitable | None, doing: Doing) -> None:
        """Wait for an operation in host memory, with the world's deadline; WorkerLost names who is missing."""
        if work is not None:
            self.peers.wait(work, doing)

    def await_on_device(self, work: Waitable | None, doing: Doing) -> None:
        """Wait for an operation on tensors of this worker's device: on a GPU the stream waits, not the host."""
        if self.device.type == "cpu":
            self.wait(work, doing)
        elif work is not None:
            work.wait()

    def within(self, group: dist.ProcessGroup) -> "World":
        """This worker's place in `group`, one of several groups that this world is cut into."""
        ranks = dist.get_process_group_ranks(group)
        is_all = self.group is not None and ranks == list(range(self.size))
        if is_all and dist.get_backend(group) == dist.get_backend(self.group):
            return self
        members = tuple(self.peers.all[rank] for rank in ranks)
        inner = World(
            dist.get_rank(group),
            len(ranks),
            local_rank=self.local_rank,
            local_size=self.local_size,
            device=self.device,
            backend=str(dist.get_backend(group)),
            seed=self.seed,
            peers=Peers(self.peers.me, members, self.peers.store, self.timeout),
            group=group,
            host_group=backends.host_group(group),
            owns_group=False,
        )
        inner.events, inner.replicas, inner._weight = self.events, self.replicas, self._weight
        inner.on_wrap, inner.on_leave = self.on_wrap, self.on_leave
        return inner

    def welcome(self, replica: Any) -> None:
        """A model has been wrapped for this world."""
        self.replicas.add(replica)
        for see in self.on_wrap:
            see(replica)

    def leave(self) -> None:
        """End this worker's part in the world. Called at exit by itself; a second call does nothing."""
        if self._left:
            return
        self._left = True
        atexit.unregister(self.leave)
        for end in self.on_leave:
            end()
        self.peers.leave()
        _Current.world = None
        # A group's threads end with the last reference to it. One that is still busy when the interpreter ends makes
        # the process abort.
        for replica in self.replicas:
            replica.release()
        self.release()
        if self._owns_group:
            arrival.end_groups(are_broken=self.peers.broken)

    @property
    def has_left(self) -> bool:
        """Whether this worker's part in the world has ended."""
        return self._left

    def release(self) -> None:
        """Let go of the groups."""
        self.group = self.host_group = None
        self._left = True

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, device={str(self.device)!r}, backend={self.backend!r})"

    def _all_reduce(self, tensor: Tensor, doing: str) -> None:
        if self.size == 1:
            return
        on_host = tensor.device.type == "cpu"
        group = self.host_group if on_host else self.group
        with waited_for():
            work = dist.all_reduce(tensor, group=group, async_op=True)
        if on_host:
            self.wait(work, doing)
        elif work is not None:
            work.wait()


class _Slot:
    """The weight of the current batch, shared by a world and the groups it is cut into."""

    value: Weight | None = None


class _Current:
    """The one world of this process: a process is one worker, so there can be no two."""

    world: World | None = None


def current() -> World | None:
    """The world that this process has joined, if any."""
    return _Current.world


def join(
    *,
    seed: int | None = None,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: timedelta | float | None = None,
) -> World:
    """Take this process's place among the workers; alone, a world of one. Twice gives the same world.

    seed: makes initial weights the same on every worker, and dropout, augmentation and loader processes different
        but reproducible. Without it, worker 0's torch seed counts, and no generator is touched here.
    device: defaults to this worker's GPU, or the CPU where there is none.
    backend: torch.distributed's name of one; defaults to nccl on GPUs, shm for CPU workers of one host (see
        docs/shared_memory.md), and gloo elsewhere.
    timeout: the deadline of every wait, in seconds or as a timedelta; 10 minutes if not given.

    Knows torchrun, `lockstep run`, Slurm and Open MPI. Where torch.distributed is initialised already, its default
    group is used as it is. Raises LaunchError, naming variables or missing workers, if the world cannot be formed.
    """
    if _Current.world is not None:
        if seed is not None:
            seeds.seed_everything(seed)
            _Current.world.seed = seed
        return _Current.world
    deadline = _as_timedelta(timeout)
    world = _arrive(device, backend, deadline)
    if seed is not None:
        seeds.seed_everything(seed)
    world.seed = int(world.broadcast(torch.initial_seed()))
    atexit.register(world.leave)
    _Current.world = world
    if (folder := environment.watched_in(os.environ)) is not None:
        # By its name: watching stands above the world, and is its guest.
        importlib.import_module("lockstep.watching.guest").enter(world, folder)
    return world


def _arrive(device: str | torch.device | None, backend: str | None, timeout: timedelta) -> World:
    if dist.is_initialized():
        place = arrival.adopt(arrival.choose_device(device, None), timeout)
    else:
        launch = environment.read(os.environ)
        where = arrival.choose_device(device, launch.local_rank)
        place = arrival.alone(where, timeout) if launch.size == 1 else arrival.meet(launch, where, backend, timeout)
    return World(
        place.rank,
        place.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        device=place.device,
        backend=place.backend,
        seed=0,
        peers=place.peers,
        group=place.group,
        host_group=place.host_group,
        owns_group=place.owns_group,
    )


def _as_timedelta(timeout: timedelta | float | None) -> timedelta:
    if timeout is None:
        return DEFAULT_TIMEOUT
    deadline = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if deadline <= timedelta(0):
        raise UsageError(f"join(timeout={timeout!r}): a deadline must lie in the future.")
    return deadline
