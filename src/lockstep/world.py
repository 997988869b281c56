"""The workers that train together, and this worker's place among them.

`join` is called once per process, by the user or by the first thing that needs a world; calling it again gives the
same world until `leave`. It reads the launch environment (nothing else does), meets the other workers, opens the
group and agrees on a seed. Alone, it needs no port, no network and no environment.
"""

import atexit
import contextlib
import copy
import functools
import gc
import hmac
import itertools
import json
import math
import operator
import os
import pickle
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import environment, events, faults, limits, seeds, torch_private
from lockstep.comm import gloo_ports
from lockstep.comm import group as groups
from lockstep.comm.channel import MAC_BYTES, mac
from lockstep.comm.generations import Generations
from lockstep.comm.group import Membership, waited_for
from lockstep.comm.notices import RAISED, farewell
from lockstep.comm.peers import Doing, Peers, QueuedWork, Waitable
from lockstep.errors import UsageError, WorkerLost
from lockstep.weight import Accumulation, HandOuts

DEFAULT_TIMEOUT = timedelta(minutes=10)
_DROP_S = 0.03

Number = TypeVar("Number", int, float, Tensor)


class Replica(Protocol):
    """A wrapped model, as far as a world knows it."""

    training: bool
    require_backward_grad_sync: bool
    world: "World"

    def parameters(self) -> Iterable[Tensor]:
        """The parameters of the module."""

    def release(self) -> None:
        """Let go of the groups."""


FIRST = -1
"""In place of a number: what waits for nobody, and must be done for all models before one waits."""


class PassEnds:
    """What is due when a backward pass has ended, of all models in it, in the order in which these were wrapped.

    That is the same on all workers. The order in which a pass comes to its models need not be; and each model's end
    waits for all workers.
    """

    def __init__(self) -> None:
        self._due: dict[int, list[tuple[int, weakref.ref[Callable[[], None]]]]] = {}
        """By the number of the pass; who drops the function cancels it."""
        self._numbers = itertools.count()

    def next_number(self) -> int:
        """The number of the next one who has things due; called in the same order on all workers."""
        return next(self._numbers)

    def add(self, pass_id: int, number: int, end: Callable[[], None]) -> Iterator[None]:
        """Have `end` among what is due for this pass, as long as somebody else refers to it; `FIRST` is first.

        Each step of the iterator, which is to be taken when the pass has ended, calls the next one that is due.
        """
        self._due = {each: left for each, left in self._due.items() if any(ref() is not None for _, ref in left)}
        due = self._due.setdefault(pass_id, [])
        due.append((number, weakref.ref(end)))
        return map(operator.call, _in_order(due))


def _in_order(due: list[tuple[int, "weakref.ref[Callable[[], None]]"]]) -> Iterator[Callable[[], None]]:
    while due:
        place = min(range(len(due)), key=lambda each: due[each][0])
        if (end := due.pop(place)[1]()) is not None:
            yield end


class Replicas:
    """The wrapped models of this worker, each as long as it lives."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Replica] = weakref.WeakSet()
        self._numbers = itertools.count()
        self.pass_ends = PassEnds()
        self.on_wrap: list[Callable[[Any], None]] = []
        """Called with every model that is wrapped from now on."""

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._all)

    def next_number(self) -> int:
        """The number of the next model: how many have been wrapped before it."""
        return next(self._numbers)

    def forget(self, replica: Replica) -> None:
        """A model is wrapped anew, and its groups are gone."""
        self._all.discard(replica)

    def add(self, replica: Replica) -> None:
        """A model has been wrapped."""
        self._all.add(replica)
        for see in self.on_wrap:
            see(replica)


class World(Membership):
    """The workers that train together now. Made by `join`; also a context manager that leaves at its end."""

    def __init__(self, place: Membership) -> None:
        super().__init__(**vars(place))
        self._seed: int | None = None
        self.is_seeded = False
        """Whether the script gave `join` a seed: then models and loaders draw each worker's own numbers."""
        self.own_groups = groups.OwnGroups()
        """Groups of these workers, or of some, that carry one thing each."""
        self._parts: dict[tuple[int, ...], World] = {}
        """Worlds of some of these workers, by their ranks; see `among`."""
        self.events = events.Events()
        self.replicas = Replicas()
        self.hand_outs = HandOuts(self.size)
        """The batches that sharded loaders have handed out on this worker."""
        self.watcher: object | None = None
        """What watches this worker: see `lockstep.watch`."""
        self.accumulation = Accumulation()
        """The weights that `lockstep.backward` was given for micro-batches that wait for their update."""
        self.generations: Generations | None = None
        """This worker's part in the agreement of an elastic run on who trains; None where the workers are fixed."""
        self.on_leave: list[Callable[[], None]] = []
        """Called when this worker's part in the world ends, while it can still talk to the others."""
        self.has_left = False
        """Whether this worker's part in the world has ended."""

    @property
    def is_main(self) -> bool:
        """Whether this is worker 0, the one that prints and writes; no newcomer is that until it is counted."""
        return self.rank == 0 and not self.is_waiting

    @property
    def is_waiting(self) -> bool:
        """Whether this worker was started beside a run under way and is not counted yet: a world of its own so far."""
        return self.generations is not None and self.generations.is_waiting

    @property
    def seed(self) -> int:
        """The seed that all workers agreed on: `join`'s, else worker 0's torch seed when a model was first wrapped or a
        loader sharded. Before that, torch's seed on this worker as it is now."""
        return torch.initial_seed() if self._seed is None else self._seed

    def agree_on_seed(self) -> int:
        """The seed, agreed on now if it has not been; every worker calls this, whenever something needs the seed.

        So late, since scripts call `torch.manual_seed` after `join` too.
        """
        if self._seed is None:
            self._seed = int(self.gather_json(torch.initial_seed())[0])
        return self._seed

    def own_stream(
        self, *path: int | str, torch_only: bool = False, device: torch.device | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """The numbers that this worker draws inside `with`: its own where the script gave `join` a seed.

        Nothing is switched without a seed, as torch's DDP does, nor on one worker, which draws what the plain script
        draws. The arguments are those of `seeds.Generators`.
        """
        if not self.is_seeded or self.size == 1:
            return contextlib.nullcontext()
        seed = seeds.derive(self.seed, "worker", self.rank, *path)
        return seeds.Generators(seed, torch_only=torch_only, device=device)

    @property
    def timeout(self) -> timedelta:
        """The deadline of every wait."""
        return self.peers.timeout

    def barrier(self) -> None:
        """Return when every worker has called this."""
        self._all_reduce(torch.zeros((), dtype=torch.int64), "waiting for all workers")

    def sum(self, x: Number) -> Number:
        """The sum of `x` over all workers: a number for a number, a new tensor for a tensor of equal shape.

        While the batch that this worker has from a sharded loader is a stand-in, its `x` is not added. So call it for
        what was computed from one batch in the loop, and for what was added up over batches after it.
        """
        if self.hand_outs.is_standing_in:
            _warn_of_stand_in()
            x = torch.zeros_like(x) if isinstance(x, Tensor) else type(x)(0)
        elif self.hand_outs.may_stand_in:
            _warn_of_stand_in_read_ahead()
        return self.all_reduce(x)

    def all_reduce(self, x: Number) -> Number:
        """The sum of `x` over all workers, whatever their batches are: for numbers that do not come from a batch."""
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
        of weight zero does not count, even if its `x` is not a number, and neither does one whose batch is a stand-in.
        """
        if self.hand_outs.is_standing_in:
            weight = 0
        elif self.hand_outs.may_stand_in:
            _warn_of_stand_in_read_ahead()
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
        """Every worker's `obj`, in order of rank, on every worker.

        Objects travel as pickles. In a run with a secret (see docs/launching.md) nothing is unpickled that a worker of
        this run has not sent; in one without, over gloo, whoever gets into the run can have code executed.
        """
        if self.size == 1:
            return [obj]
        return [pickle.loads(part) for part in self._exchange(pickle.dumps(obj))]

    def broadcast(self, obj: Any) -> Any:
        """Worker 0's `obj`, on every worker. As `gather`, it travels as a pickle."""
        if self.size == 1:
            return obj
        return pickle.loads(self._exchange(pickle.dumps(obj) if self.is_main else b"")[0])

    def gather_json(self, obj: Any) -> list[Any]:
        """As `gather`, for what JSON can say: nothing is unpickled, whoever sent it. A tuple comes back as a list."""
        return [obj] if self.size == 1 else [json.loads(part) for part in self._exchange(json.dumps(obj).encode())]

    def gather_tensors(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Every worker's tensors, on the host, in order of rank; numbers, types and shapes may differ.

        They travel as their bytes and a line that says what these are: nothing is unpickled, whoever sent it.
        """
        if self.size == 1:
            return [[tensor.detach().cpu() for tensor in tensors]]
        return [_unpacked(part) for part in self._exchange(_packed(tensors))]

    def meet(self, call: str) -> None:
        """Return when every worker has made this call; UsageError on all of them if they have made different ones."""
        if self.size == 1:
            return
        doing = f"in {call}, which every worker must call and not one alone"
        calls = [str(json.loads(part)) for part in self._exchange(json.dumps(call).encode(), doing)]
        if len(set(calls)) > 1:
            raise UsageError(
                f"worker {self.rank}: {', '.join(f'worker {rank} is in {each}' for rank, each in enumerate(calls))}. "
                "Each of these needs all workers: make the same calls on every worker, in the same order."
            )

    def _exchange(self, content: bytes, doing: str = "gathering objects") -> list[bytes]:
        """Every worker's bytes, by rank; in a run with a secret, each is known to be of the worker it comes from."""
        secret, sealed = self.peers.secret, content
        if secret is not None:
            sealed += self._mac(secret, self.rank, content)
        parts = self._gather_bytes(sealed, doing)
        if secret is None:
            return parts
        for rank, part in enumerate(parts):
            if not hmac.compare_digest(part[-MAC_BYTES:], self._mac(secret, rank, part[:-MAC_BYTES])):
                raise WorkerLost(
                    f"worker {self.rank}: what came in place of worker {rank}'s part was not sent by a worker of this "
                    "run, and was not looked into. Another process has got between the workers' connections.",
                    (rank,),
                )
        return [part[:-MAC_BYTES] for part in parts]

    def _mac(self, secret: bytes, rank: int, content: bytes) -> bytes:
        """What shows that `content` is of the worker with this rank of this very world."""
        members = "\n".join(peer.format() for peer in self.peers.all)
        return mac(secret, b"exchange", members.encode(), str(rank).encode(), content)

    def _gather_bytes(self, content: bytes, doing: str) -> list[bytes]:
        payload = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0).byte()
        lengths = [int(length) for length in self._gather_alike(torch.tensor([payload.numel()]), doing)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: payload.numel()] = payload
        parts = self._gather_alike(padded, doing)
        return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def _gather_alike(self, mine: torch.Tensor, doing: str) -> list[torch.Tensor]:
        """Every worker's tensor, by rank; all are of one shape."""
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with waited_for():
            work = dist.all_gather(parts, mine, group=self.host_group, async_op=True)
        self.wait(work, doing)
        return parts

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

    def await_device(self, doing: Doing) -> None:
        """Return when this worker's GPU has done all that was queued, messages of others included; on a CPU at once.

        For elastic runs, where nothing may follow a message that never comes: when a broken group is ended, its GPU
        goes on with what was queued behind the message, on half a sum.
        """
        if self.device.type == "cuda":
            self.wait(QueuedWork(self.device), doing)

    def within(self, workers: "dist.ProcessGroup | dist.DeviceMesh") -> "World":
        """This worker's place among those of a group, or of the dimensions of a mesh that data is parallel over.

        With model parallelism it is this that counts batches and loaders: `world.within(mesh["dp"])`. Its rank, size,
        sums and means are those of the workers with this one's part of the model. All workers of the whole mesh call
        this.
        """
        if isinstance(workers, dist.ProcessGroup):
            return self._in_group(workers)
        if workers.get_coordinate() is None:
            raise UsageError(f"worker {self.rank} is not in {workers}: give it a mesh that has a place for it.")
        if torch_private.root_of(workers).size() == self.size:
            # All parts of a model must draw and shuffle alike, and only here are they sure to be all together.
            self.agree_on_seed()
        return self.among(sorted(workers.mesh.flatten().tolist()), workers.get_group() if workers.ndim == 1 else None)

    def among(self, ranks: Sequence[int], group: dist.ProcessGroup | None = None) -> "World":
        """This worker's place among those with these ranks, all of which call this; they have `group`, if any yet."""
        if self.group is None or list(ranks) == list(range(self.size)):
            return self
        if tuple(ranks) not in self._parts:
            if group is None:
                options: dict[str, Any] = {"timeout": self.timeout + groups.MARGIN, "use_local_synchronization": True}
                with gloo_ports.closed_afterwards(may_open_nccls=self.device.type == "cuda"):
                    opened = dist.new_group(list(ranks), **options)
                assert isinstance(opened, dist.ProcessGroup)
                group = opened
            self._parts[tuple(ranks)] = self._in_group(group)
        return self._parts[tuple(ranks)]

    def _in_group(self, group: dist.ProcessGroup) -> "World":
        ranks = dist.get_process_group_ranks(group)
        is_all = self.group is not None and ranks == list(range(self.size))
        if is_all and dist.get_backend(group) == dist.get_backend(self.group):
            return self
        members = tuple(self.peers.all[rank] for rank in ranks)
        place = Membership(
            dist.get_rank(group),
            len(ranks),
            self.local_rank,
            self.local_size,
            self.device,
            str(dist.get_backend(group)),
            Peers(self.peers.me, members, self.peers.store, self.timeout, self.peers.secret, self.peers.servers),
            group,
            groups.host_group(group, self.timeout),
            owns_group=False,
        )
        inner = copy.copy(self)  # It shares the replicas, the batches, the listeners: all but the place.
        vars(inner).update(vars(place))
        inner.watcher = None
        return inner

    def move(self, open_place: Callable[[Generations], Membership]) -> None:
        """End this world as it is, and take the place that `open_place` gives among others: for elastic training.

        Who holds this world then sees the new rank and size. Wrapped models stay behind, and are wrapped anew.
        """
        assert self.generations is not None
        self.peers.retire()
        for end in self.on_leave:  # What watches this world; it is opened anew with the model that is wrapped next.
            end()
        self.on_leave.clear()
        self.group = self.host_group = None
        self.own_groups.clear()
        self._parts.clear()
        groups.end_groups(are_broken=True)
        vars(self).update(vars(open_place(self.generations)))
        self.hand_outs = HandOuts(self.size)
        self.peers.listen()
        self.leave_first_at_exit()  # The groups just opened must not be closed before this has ended.

    def leave_first_at_exit(self) -> None:
        """When the interpreter ends, leave before what has been opened so far is closed: last registered, first run."""
        atexit.unregister(self.leave)
        atexit.register(self.leave)

    def leave(self) -> None:
        """End this worker's part in the world. Called at exit by itself; a second call does nothing."""
        if self.has_left:
            return
        self.has_left = True
        atexit.unregister(self.leave)
        for end in self.on_leave:
            end()
        self.peers.leave()
        _Current.world = None
        if self.peers.broken or farewell().startswith(RAISED):
            groups.outlive()
        elif self.generations is not None:
            groups.skip_cpp_destructors()  # Groups of earlier generations may still wait for who is gone.
        # A group's threads end with the last reference to it. One that is still busy when the interpreter ends makes
        # the process abort.
        for replica in self.replicas:
            replica.release()
        self.release()
        if self.owns_group:
            groups.end_groups(are_broken=self.peers.broken)
        if self.size > 1 and self.backend != "shm":
            # A thread of gloo that has just ended an operation drops its tensors, for which it wants the interpreter's
            # lock: where the interpreter is gone by then, the process aborts (seen once in 40 workers over a network).
            time.sleep(_DROP_S)

    def release(self) -> None:
        """Let go of the groups."""
        self.group = self.host_group = None
        self.own_groups.clear()
        for part in self._parts.values():
            part.group = part.host_group = None
            part.has_left = True
        self._parts.clear()
        self.has_left = True

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, device={str(self.device)!r}, backend={self.backend!r})"

    def _start_from(self, seed: int) -> None:
        """The script gave this seed: the same generators on every worker."""
        seeds.seed_everything(seed)
        self._seed = torch.initial_seed()
        self.is_seeded = True

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


class _Current:
    """The one world of this process: a process is one worker, so there can be no two."""

    world: World | None = None
    has_warned = False
    """Of a stand-in that was not counted."""
    has_warned_of_ahead = False
    """Of one that may have been counted."""


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

    seed: makes initial weights, and all that the script itself draws, the same on every worker; what wrapped models
        draw in their forward pass (dropout) and sharded loaders for their samples (augmentation) different,
        reproducibly. Without it no generator is touched, here or later, and samples are shuffled by worker 0's torch
        seed, as it is when a model is first wrapped or a loader sharded.
    device: defaults to this worker's GPU, or the CPU where there is none.
    backend: torch.distributed's name of one; defaults to nccl on GPUs, shm for CPU workers of one host (see
        docs/shared_memory.md), hosts for those of several hosts (see docs/hosts.md), and gloo elsewhere.
    timeout: the deadline of every wait, in seconds or as a timedelta; 10 minutes if not given.

    Knows torchrun, `lockstep run`, Slurm and Open MPI. Where torch.distributed is initialised already, its default
    group is used as it is. Raises LaunchError, naming variables or missing workers, if the world cannot be formed.
    """
    given = None if seed is None else seeds.checked(seed)
    deadline = _as_timedelta(timeout)
    if _Current.world is not None:
        if given is not None:
            _Current.world._start_from(given)
        return _Current.world
    _freeze_in_children()
    groups.let_go()
    world = _arrive(device, backend, deadline)
    given_by_all = world.gather_json(given)
    if any(each != given for each in given_by_all):
        world.leave()
        raise UsageError(
            f"join(seed=...) was given different seeds by the workers: {given_by_all}. Give all workers the same, so "
            "that their models begin alike; dropout and augmentation draw each worker's own numbers anyway."
        )
    if given is not None:
        world._start_from(given)
    atexit.register(world.leave)
    world.peers.listen()
    _Current.world = world
    for see in events.ON_JOIN:
        see(world)
    return world


@functools.cache
def _freeze_in_children() -> None:
    """Have what exists here never be collected as garbage in processes that are forked from this one, for good.

    A group that was left may be garbage in a cycle. Collected in a forked process (a loader's, say), gloo's ends
    threads that are not there, and that process dies of a segmentation fault. Nothing is frozen in this process:
    thawed again, it would go unseen by the collector's counts, and memory would grow with every loop over a loader.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def _arrive(device: str | torch.device | None, backend: str | None, timeout: timedelta) -> World:
    if dist.is_initialized():
        return World(groups.adopt(groups.choose_device(device, None), timeout))
    launch = environment.read(os.environ)
    limits.require_file_handles(16 + launch.size, f"worker {launch.rank}")  # A connection to each other, for gloo.
    where = groups.choose_device(device, launch.local_rank)
    if launch.member is not None:
        return _arrive_among_generations(launch, where, backend, timeout)
    return World(groups.alone(where, timeout) if launch.size == 1 else groups.meet(launch, where, backend, timeout))


def _arrive_among_generations(
    launch: environment.Launch, device: torch.device, backend: str | None, timeout: timedelta
) -> World:
    """In an elastic run: the world of its first workers; a newcomer is alone until its trainer lets it in."""
    faults.at("join")
    generations = groups.arrive(launch, backend, timeout)
    first = generations.arrive(timeout)
    if first is None:
        place = groups.alone(device, timeout)
    else:
        place = groups.enter(generations, first, device, timeout, {"calls": 0, "call": "join"})
    world = World(place)
    world.generations = generations
    return world


def _warn_of_stand_in() -> None:
    if not _Current.has_warned:
        _Current.has_warned = True
        warnings.warn(
            "world.sum() left out this worker's number, since its batch is a stand-in: the sample is another worker's. "
            "What was added up over several batches is to be summed after the loop, which a stand-in does not touch.",
            stacklevel=3,
        )


def _warn_of_stand_in_read_ahead() -> None:
    if not _Current.has_warned_of_ahead:
        _Current.has_warned_of_ahead = True
        warnings.warn(
            "world.sum() or world.mean() counted this worker's number, and its model saw a stand-in last, another "
            "worker's sample, which was read ahead of the loop. A number of that batch must not count: keep "
            "loader.num_samples with each batch that is read ahead, and count so many samples of it. What was added up "
            "so is right.",
            stacklevel=3,
        )


def _as_timedelta(timeout: timedelta | float | None) -> timedelta:
    if timeout is None:
        return DEFAULT_TIMEOUT
    try:
        deadline = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except (TypeError, ValueError, OverflowError):  # Of another type, not a number, and infinite or too long.
        raise UsageError(f"join(timeout={timeout!r}): a deadline is a number of seconds, or a timedelta.") from None
    if deadline <= timedelta(0):
        raise UsageError(f"join(timeout={timeout!r}): a deadline must lie in the future.")
    return deadline


def _packed(tensors: Sequence[Tensor]) -> bytes:
    """Types and shapes as a line of JSON, then the bytes of each."""
    on_host = [tensor.detach().cpu().contiguous() for tensor in tensors]
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in on_host]
    raws = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in on_host]
    return b"".join([json.dumps(kinds).encode(), b"\n", *raws])


def _unpacked(content: bytes) -> list[Tensor]:
    line, _, rest = content.partition(b"\n")
    tensors, raw = [], torch.frombuffer(bytearray(rest), dtype=torch.uint8) if rest else torch.empty(0).byte()
    for name, shape in json.loads(line):
        dtype = getattr(torch, name)
        own, raw = raw.tensor_split([math.prod(shape) * dtype.itemsize])
        tensors.append(own.clone().view(dtype).reshape(shape))  # A copy, since other types begin at multiples.
    return tensors
