"""The groups through which workers talk: choose a backend, open a group, use it, end it.

A worker gets its place alone, by meeting the others (see meeting.py), or from a torch.distributed that is up already.

**The end of a worker that has failed** is bounded, whatever its groups do. gloo's destructor waits for every operation
that was started, so with a peer that never comes it takes as long as the operation's own deadline. It therefore never
runs in such a worker: `outlive` keeps a reference to each group. Threads of gloo may then still be at an
operation when the process ends, and would crash on what C++ has destroyed by then. So the process skips that phase
alone, see `skip_cpp_destructors`; what users rely on comes before it, in Python's own order: threads that are no
daemons are waited for (asynchronous saves, which know that a worker is lost), then `atexit` handlers run, all of them,
then the streams are flushed; the exit code stays what it was.

A process that goes on after a broken world joins another one: then `let_go` destroys what was kept, in a thread. It
must not stay: a gloo thread with a message for an operation that is gone asks the kernel for room over and over, which
takes a core (seen with gloo of torch 2.13).
"""

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep import environment, torch_private
from lockstep.comm import gloo_ports, meeting, shm
from lockstep.comm.flat_group import FlatGroup, Spans
from lockstep.comm.generations import Generation, Generations
from lockstep.comm.peers import Peer, Peers
from lockstep.comm.shm.group import ShmGroup
from lockstep.comm.shm.queue import waited_for as waited_for
from lockstep.comm.store import launchers_store
from lockstep.environment import LOOPBACK, Launch
from lockstep.errors import LaunchError

MARGIN = timedelta(seconds=10)
"""By how much a backend's own deadline is later than the world's: whoever waits by `Peers.wait` speaks first, and names
who is missing. A backend knows no names, and closes the connections of those who are still being asked."""

FORMING = timedelta(seconds=15)
"""How long the groups of a generation may wait for a member of it that has died meanwhile."""

_LATER = dist.AllreduceOptions()
_LATER.asyncOp = True


@dataclass(eq=False)
class Membership:
    """A worker's place among the others, and what it needs to talk to them."""

    rank: int
    """This worker's number, from 0."""
    size: int
    """How many workers there are."""
    local_rank: int
    """This worker's number among those of its host."""
    local_size: int
    """How many workers this host has."""
    device: torch.device
    """Where this worker computes."""
    backend: str
    """What carries tensors of `device`: nccl, gloo, shm, or hosts."""
    peers: Peers
    group: dist.ProcessGroup | None
    """The torch process group for tensors on `device`; None in a world of one that has none."""
    host_group: dist.ProcessGroup | None
    """The same for tensors in host memory; waits on it have a deadline and name who is missing."""
    owns_group: bool
    """Whether torch.distributed was initialised here, and is to be ended with the world."""


# --- Opening ---


def alone(device: torch.device, timeout: timedelta) -> Membership:
    """A world of one. It opens a group if it can, for scripts that call torch.distributed themselves."""
    name = choose_backend(device, ())  # Any will do; gloo is always there.
    group: dist.ProcessGroup | None = None
    try:
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        group = dist.group.WORLD
    except RuntimeError:
        pass  # No network interface at all, not even loopback: nothing here needs the group.
    return _single(device, _plain(name), group, timeout, owns_group=group is not None)


def meet(launch: Launch, device: torch.device, backend: str | None, timeout: timedelta) -> Membership:
    """Meet the other workers where the launcher said, and open the group."""
    whole, where = meeting.open_store(launch, timeout)
    me = Peer.me(launch.rank, meeting.address_towards(whole))
    store, peers = meeting.Roster(whole, me, launch.size, timeout, where).agree()
    _refuse_outsiders(launch, peers)
    me = peers[launch.rank]
    meeting.choose_interface(me, peers)
    name = backend or choose_backend(device, peers)
    shm.register()
    try:
        with gloo_ports.closed_afterwards():
            dist.init_process_group(
                name,
                store=dist.PrefixStore("group", store),
                rank=launch.rank,
                world_size=launch.size,
                timeout=timeout + MARGIN,
            )
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"worker {launch.rank}: backend {name!r} could not be opened: {error}. {meeting.addresses(peers)}"
        ) from error
    return _in_default_group(device, Peers(me, peers, store, timeout, launch.secret), launch)


def arrive(launch: Launch, backend: str | None, timeout: timedelta) -> Generations:
    """Become a worker of an elastic run, of no generation yet."""
    assert launch.member is not None
    whole, _ = meeting.open_store(launch, timeout)
    me = Peer.me(launch.rank, meeting.address_towards(whole))
    return Generations(whole, launch.member, me, backend, launch.secret)


def enter(
    generations: Generations,
    generation: Generation,
    device: torch.device,
    timeout: timedelta,
    facts: dict[str, Any],
) -> Membership:
    """This worker's place in `generation`, its groups opened; in a later one if a member has died meanwhile.

    Waits at the store are broken off then; those for a connection end after FORMING. `facts`: see `Generations.leave`.
    """
    while True:
        try:
            return _open(generations, generation, device, timeout)
        except (RuntimeError, ValueError) as error:
            end_groups(are_broken=True)
            facts = {**facts, "why": f"{type(error).__name__}: {error}"}
        generations.leave(facts)
        generation = generations.following()


def _open(generations: Generations, generation: Generation, device: torch.device, timeout: timedelta) -> Membership:
    store = generations.enter(generation)
    rank, size = generations.rank, len(generation.members)
    me = generation.peers[rank]
    name = generations.backend or choose_backend(device, generation.peers)
    meeting.choose_interface(me, generation.peers)
    shm.register()
    # Else NCCL ends the process of whoever has lost a peer. Recovery ends its groups, and opens others.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    with gloo_ports.closed_afterwards():
        dist.init_process_group(
            name, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=min(FORMING, timeout)
        )
    group = dist.group.WORLD
    assert group is not None
    if isinstance(group, FlatGroup):
        group.set_timeout(timeout + MARGIN)
    else:
        torch_private.set_timeout(group, timeout + MARGIN)
    peers = Peers(me, generation.peers, store if size > 1 else None, timeout, generations.secret)
    return _in_default_group(device, peers, None, owns_group=True)


def adopt(device: torch.device, timeout: timedelta) -> Membership:
    """Take torch's default group as it is."""
    if dist.get_world_size() == 1:
        return _single(device, _plain(str(dist.get_backend())), dist.group.WORLD, timeout, owns_group=False)
    secret, own_store = environment.secret_of(os.environ), environment.own_store(os.environ)
    if secret is not None and own_store:  # torch's own keeps nobody out.
        whole: dist.Store = launchers_store(own_store, secret, timeout)
    else:
        whole = torch_private.default_store()
    me = Peer.me(dist.get_rank(), meeting.address_towards(whole))
    roster = meeting.Roster(whole, me, dist.get_world_size(), timeout, "the store of torch's default group")
    store, peers = roster.agree()
    return _in_default_group(device, Peers(me, peers, store, timeout, secret), None)


def choose_device(asked: str | torch.device | None, local_rank: int | None) -> torch.device:
    """The device asked for, else this worker's GPU, else the CPU; a GPU becomes the current one."""
    device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cuda":
        return device
    if device.index is None:
        device = torch.device("cuda", _gpu(local_rank))
    torch.cuda.set_device(device)
    return device


def choose_backend(device: torch.device, peers: Sequence[Peer]) -> str:
    """The backend for tensors on `device`, in torch.distributed's words; host memory always has one too."""
    if device.type == "cuda":
        return "cpu:gloo,cuda:nccl"
    num_hosts = len({peer.host for peer in peers})
    if num_hosts == len(peers) or not shm.is_supported():  # One worker a host: all links are alike.
        return "gloo"
    return shm.NAME if num_hosts == 1 else shm.HOSTS


def new_group(group: dist.ProcessGroup, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Another group of the workers of `group`, every one of which must call this; `timeout` is the world's."""
    with gloo_ports.closed_afterwards(may_open_nccls="nccl" in backend):
        opened = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timeout + MARGIN,
            backend=backend,
            use_local_synchronization=dist.get_world_size() > 1,
        )
    assert isinstance(opened, dist.ProcessGroup)
    return opened


def host_group(group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """A group of the same workers that carries host memory: `group` itself where it can."""
    config = dist.get_backend_config(group)
    if any(name in config for name in ("gloo", shm.NAME, shm.HOSTS)):
        return group
    return new_group(group, "gloo", timeout)


def _single(
    device: torch.device, backend: str, group: dist.ProcessGroup | None, timeout: timedelta, *, owns_group: bool
) -> Membership:
    me = Peer.me(0, LOOPBACK)
    return Membership(0, 1, 0, 1, device, backend, Peers(me, (me,), None, timeout), group, group, owns_group)


def _in_default_group(
    device: torch.device, peers: Peers, launch: Launch | None, *, owns_group: bool = False
) -> Membership:
    """This worker's place in torch's default group."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    on_host = [peer.rank for peer in peers.all if peer.host == peers.me.host]
    local_rank, local_size = (launch.local_rank, launch.local_size) if launch else (None, None)
    return Membership(
        rank,
        size,
        on_host.index(rank) if local_rank is None else local_rank,
        len(on_host) if local_size is None else local_size,
        device,
        _plain(str(dist.get_backend_config(group) if device.type == "cuda" else dist.get_backend(group))),
        peers,
        group,
        host_group(group, peers.timeout),
        owns_group=owns_group or launch is not None,
    )


def _refuse_outsiders(launch: Launch, peers: tuple[Peer, ...]) -> None:
    """Raise if a worker says that it is elsewhere where the launcher says that all are here.

    Over shared memory the kernel vouches for the user of every worker; whoever claims another host is not asked.
    """
    elsewhere = [peer for peer in peers if peer.host != peers[launch.rank].host]
    if elsewhere and launch.local_size == launch.size:
        raise LaunchError(
            f"worker {launch.rank}: {', '.join(map(str, elsewhere))} runs on another host or in another container, but "
            f"LOCAL_WORLD_SIZE={launch.local_size} says that all workers are on this one. Unset it if it is wrong; "
            "otherwise a process that does not belong here has joined."
        )


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


# --- Using: what the rooms above call, whatever the backend. To wait, `World.wait` or `World.await_on_device`. ---


def shares_memory(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether the workers of `group` see one another's tensors on `device` where they lie."""
    return isinstance(group, ShmGroup) and device.type == "cpu"


def shares_params(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether the workers of a host have memory of `group` in common, for what is split over all: see `share`."""
    return isinstance(group, FlatGroup) and device.type == "cpu"


def share(group: dist.ProcessGroup, flats: Sequence[tuple[torch.Tensor, Spans]]) -> Any:
    """Start making all workers see what each has changed in memory of a group that `shares_params`; see FlatGroup."""
    assert isinstance(group, FlatGroup)
    return group.share(flats)


def writes_for(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The ranks whose spans of such memory this worker writes; see FlatGroup."""
    assert isinstance(group, FlatGroup)
    return group.writes_for


def moves_parts(group: dist.ProcessGroup) -> bool:
    """Whether the backend has a reduce-scatter and an all-gather of its own.

    gloo makes the one from an all-reduce of a copy and the other by way of a copy: there it is better to all-reduce in
    place, and to broadcast the parts.
    """
    return dist.get_backend(group) != "gloo"


def all_reduce(flat: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start replacing `flat` by the sum of every worker's; returns what to wait for."""
    if isinstance(group, FlatGroup) and flat.is_cpu:
        return group.allreduce([flat], _LATER)  # What torch does around it takes as long as a small message.
    return dist.all_reduce(flat, group=group, async_op=True)


def reduce_scatter(out: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start setting `out` to this worker's part of the sum of every worker's `whole`; returns what to wait for."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # The old name until 2.12.
    return scatter(out, whole, group=group, async_op=True)


def all_gather(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start setting `whole` to every worker's `own`, one behind the other; returns what to wait for."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, own, group=group, async_op=True)


class OwnGroups:
    """Groups that the workers of one world open for one owner each, such as the gradients of a wrapped model.

    Of its own, so that what users send in mid-backward, or another model, can never be taken for a bucket. An owner
    that is gone leaves its group to a later one. It is not closed: torch names a group, and so the place where its
    workers meet, by the groups that there are, and these differ while workers drop their owners at different times.
    So when one is needed, the workers agree on one that is free on all of them.
    """

    def __init__(self) -> None:
        self._opened: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
        """Groups by the ranks in them; in the same order on all of these."""
        self._free: dict[tuple[int, ...], set[int]] = {}
        """Numbers, among those, of groups whose owner is gone here."""

    def take(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta,
        gather: Callable[[list[int]], list[list[int]]],
    ) -> dist.ProcessGroup:
        """One of the workers of `group`, for tensors on `device`; every one of them calls this, and `gather` tells all.

        On CUDA `group` itself: a second NCCL communicator would cost memory on every device, and its streams keep the
        order in which operations were issued.
        """
        if device.type == "cuda":
            return group
        ranks = tuple(dist.get_process_group_ranks(group))
        opened, free = self._opened.setdefault(ranks, []), self._free.setdefault(ranks, set())
        shared = set.intersection(*map(set, gather(sorted(free))))
        if not shared:
            opened.append(new_group(group, dist.get_backend(group), timeout))
            return opened[-1]
        free.remove(min(shared))
        return opened[min(shared)]

    def free_after(self, owner: object, group: dist.ProcessGroup) -> None:
        """Let others take `group`, if it came from `take`, when `owner` is gone."""
        for ranks, opened in self._opened.items():
            if group in opened:
                weakref.finalize(owner, self._free[ranks].add, opened.index(group)).atexit = False

    def clear(self) -> None:
        """Let go of all of them."""
        self._opened.clear()
        self._free.clear()


# --- Ending ---


def end_groups(*, are_broken: bool) -> None:
    """End torch.distributed; without the goodbye that a dead peer would never answer, where there is one."""
    if dist.is_initialized() and not are_broken:
        dist.destroy_process_group()
        return
    with contextlib.suppress(RuntimeError):  # What cannot even be aborted goes with the process.
        if dist.is_initialized():
            torch_private.abort_groups()
    if are_broken:
        torch_private.forget_groups()


def outlive() -> None:
    """Let no group of this process be destroyed while it ends: see the top. Those in shared memory wait for nobody."""
    if not dist.is_initialized():
        return
    for group in torch_private.group_names():
        if not isinstance(group, ShmGroup):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # Also the end of this module must not destroy it.
            _outlived.append(group)
    skip_cpp_destructors()


_outlived: list[dist.ProcessGroup] = []
"""Groups of broken worlds that this process has left."""


def let_go() -> None:
    """This process joins another world: destroy the groups that `outlive` has kept, each as soon as its waits are over.

    In a thread: the destructor waits without the interpreter's lock, for as long as the broken world's deadline.
    """
    kept = _outlived.copy()
    _outlived.clear()
    if kept:
        threading.Thread(target=_destroy, args=(kept,), name="lockstep-let-go", daemon=True).start()


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    while groups:
        group = groups.pop()
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
        del group  # The last reference: this waits.


def skip_cpp_destructors() -> None:
    """Let this process's `exit` flush C's own streams and be over, before C++ destroys what threads still use.

    What is given to `on_exit` last is called first, with the exit code. Where a C library has no such function, a
    thread that wakes up in the last milliseconds may crash the process.
    """
    libc = ctypes.CDLL(None)
    on_exit = getattr(libc, "on_exit", None)
    if on_exit is not None:
        on_exit(libc._exit, None)
        on_exit(libc.fcloseall, None)
