"""The workers of one launch: where they meet, and when they are ended. `lockstep run` and `launch` share it."""

import contextlib
import multiprocessing.connection
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from lockstep.comm.channel import SECRET_BYTES
from lockstep.comm.store_server import LATEST, StoreServer
from lockstep.environment import LOOPBACK
from lockstep.errors import LaunchError
from lockstep.start import host
from lockstep.start.failure import to_peers
from lockstep.start.hosts import Launchers
from lockstep.start.process import Warden, Worker

NOTICE = timedelta(seconds=5)
"""How long the others may go on when one has failed. Workers that wait for it look after their peers every second,
and end by themselves with an error that names it: worth waiting for. `comm.peers` takes 4 s at most."""
GRACE = timedelta(seconds=5)
"""How long a worker that was asked to end has until it is killed."""
_LOOK_S = 0.05
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BACKLOG = 2048
_RAISED = "raised"
"""How a worker's farewell begins that leaves because of an error: `comm.notices.RAISED`, which would import torch."""


@contextlib.contextmanager
def collected_signals() -> Iterator[list[int]]:
    """Within the block, what would have ended this process is added to the list instead. For the main thread.

    Signals are not raised as exceptions where they arrive: measured, one that arrives while torch is being imported can
    get lost there. A signal that whoever started us has set to be ignored (nohup, a shell's background job) stays
    ignored. SIGPIPE is not taken: it comes for any pipe, a dead warden's too. Whether the output is read is the relay's
    to say.
    """
    received: list[int] = []
    taken = [
        each for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN
    ]
    before = {signum: signal.signal(signum, lambda signum, _frame: received.append(signum)) for signum in taken}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def resizing_signals() -> Iterator[list[int]]:
    """Within the block, SIGUSR1 adds 1 to the list, for one worker more, and SIGUSR2 -1; for the main thread."""
    changes: list[int] = []
    by_signal: dict[int, int] = {signal.SIGUSR1: 1, signal.SIGUSR2: -1}
    before = {each: signal.signal(each, lambda signum, _: changes.append(by_signal[signum])) for each in by_signal}
    try:
        yield changes
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class Rendezvous:
    """The stores in which the workers of one launch meet, served by the launcher.

    Workers that `join` use a store of ours over a Unix socket, for those who know the run's secret (see
    `comm.store_server`), or over loopback where the system has no abstract Unix sockets. Scripts that call
    torch.distributed themselves ask for torch's TCPStore at MASTER_PORT. It can keep nobody out, so it is there only
    once somebody connects to it, and nothing of Lockstep's goes through it.

    Both sockets listen before any worker starts, so no port can be lost to another program and no worker can come too
    early: their connections wait until `attend` has a store ready. It starts a thread; forks come before, or while that
    is `resting`.
    """

    def __init__(self, launchers: Launchers | None = None, address: str = LOOPBACK) -> None:
        """Begin to listen, at `address`, which workers elsewhere may reach.

        launchers: of the run's hosts, where it has several. Then the first of them serves the stores.
        """
        self.secret: str = secrets.token_hex(SECRET_BYTES) if launchers is None else launchers.options.secret
        """What workers are told, by their environment, and nobody else is."""
        self._launchers = launchers
        self._server: StoreServer | None = None
        self._torch_store: object = None
        self._told: set[int] = set()
        """Ranks of the workers whose end has been told."""
        self.address = address
        """Where torch's own store is, with `port`."""
        self.interface = ""
        """The interface that leads to the workers of other hosts; empty where there are none."""
        self.port = 0
        """Where torch's own store is, for scripts that ask for it."""
        self._listener: socket.socket | None = None
        self._torch_listener: socket.socket | None = None
        if launchers is not None:
            self._torch_listener = launchers.torch_listener
            self.address, self.port = launchers.torch_place
            self.own_store, self.interface = launchers.own_store, launchers.interface
            return
        try:
            self._torch_listener = socket.create_server((address, 0), backlog=_BACKLOG)
            self.port = self._torch_listener.getsockname()[1]
            self._listener, self.own_store = _listen(address)
        except OSError as error:
            raise LaunchError(
                f"no port could be opened on {address}, where the workers are to meet: {error}. Is loopback up?"
            ) from error

    @property
    def server(self) -> StoreServer:
        """Our own store, which is served from now on; of a run on one host."""
        if self._server is None:
            assert self._listener is not None
            self._server = StoreServer(self._listener, self.secret.encode())
        return self._server

    def resting(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which a fork is safe from what our store does beside."""
        return contextlib.nullcontext() if self._server is None else self._server.resting()

    def attend(self, workers: Sequence[Worker]) -> None:
        """Set up the stores that are needed by now, and tell in ours how workers have ended; called again and again."""
        if self._launchers is None:
            self.server  # noqa: B018 (served from now on)
        listener = self._torch_listener
        if self._torch_store is None and listener is not None and multiprocessing.connection.wait([listener], 0):
            self._torch_store = self._serve_torch(listener)
        for worker in workers:
            if worker.code is not None and worker.rank not in self._told:
                self._told.add(worker.rank)
                self._tell_end(worker)

    @property
    def has_met(self) -> bool:
        """Whether workers have come to a store: by `join`, or by torch.distributed itself."""
        return self._torch_store is not None or self._world is not None

    def have_all_raised(self, size: int) -> bool:
        """Whether every worker has left the world because of an error, as each says in the store."""
        world = self._world
        if world is None:
            return False
        farewells = [self._get(f"lockstep/{world}/left/{rank}") for rank in range(size)]
        return all(text is not None and text.startswith(_RAISED) for text in farewells)

    def close(self) -> None:
        """End the stores and free the sockets. A forked worker calls this for its copies of the sockets."""
        self._torch_store = None
        if self._torch_listener is not None:
            self._torch_listener.close()
        if self._server is not None:
            self._server.close()
        if self._listener is not None:
            self._listener.close()

    @property
    def _world(self) -> str | None:
        """The world that was formed last, by its name in the store."""
        return self._get(LATEST)

    def tell_lost(self, rank: int, how: str) -> None:
        """Worker `rank` is gone with its host: tell the others, who may wait for it."""
        if (world := self._world) is not None:
            self._set(f"lockstep/{world}/ended/{rank}", how)
            self._set(f"lockstep/{world}/failed", str(rank))

    def _get(self, key: str) -> str | None:
        if self._launchers is not None:
            return self._launchers.keys.ask(key)
        return None if self._server is None else self._server.get(key)

    def _set(self, key: str, value: str) -> None:
        (self.server if self._launchers is None else self._launchers.keys).set(key, value)

    def _serve_torch(self, listener: socket.socket) -> object:
        from torch.distributed import TCPStore  # 1.5 s, while the workers are busy with the same.

        return TCPStore(
            self.address, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def _tell_end(self, worker: Worker) -> None:
        """How a worker's process has ended, as its parent alone knows, for peers that miss it: see `comm.notices`."""
        world = self._world
        if world is not None and worker.code is not None and not worker.was_told_to_end:
            self._set(f"lockstep/{world}/ended/{worker.rank}", to_peers(worker.code))


def _listen(address: str) -> tuple[socket.socket, str]:
    """A socket for our own store, and what workers call it: on one host a name in no file system, else a port."""
    if sys.platform != "linux" or address != LOOPBACK:
        listener = socket.create_server((address, 0), backlog=_BACKLOG)
        return listener, f"{address}:{listener.getsockname()[1]}"
    name = f"lockstep-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen(_BACKLOG)
    return listener, name


class Supervisor:
    """Starts workers, and sees to it that all of them end.

    Phases: execute, or add, each worker; watch; end, if something came up; kill, always.
    """

    def __init__(
        self,
        size: int,
        num_threads: int | None,
        rendezvous: Rendezvous,
        warden: Warden,
        is_urgent: Callable[[], bool] = lambda: False,
        first_rank: int = 0,
        local_size: int | None = None,
    ) -> None:
        """Supervise the workers of this host, none of which has been started.

        size: how many there are, on all hosts.
        first_rank, local_size: the first one's number, and how many are on this host; all of them, if None.
        num_threads: compute threads of each worker; None if the user's own setting stands.
        is_urgent: tells that workers which were asked to end are to be killed without further ado.
        """
        self.workers: list[Worker] = []
        self.rendezvous = rendezvous
        self.warden = warden
        self.size = size
        """How many workers there are, on all hosts."""
        self._first_rank = first_rank
        self._local_size = size if local_size is None else local_size
        self._num_threads = num_threads
        self._is_urgent = is_urgent

    def variables(self, local_rank: int, member: int | None = None) -> dict[str, str]:
        """What a worker gets on top of this process's environment; in an elastic run `local_rank` is its slot."""
        rank = self._first_rank + local_rank
        return host.variables(
            os.environ,
            rank=rank,
            size=max(self.size, rank + 1),
            local_rank=local_rank,
            local_size=self._local_size,
            address=self.rendezvous.address,
            port=self.rendezvous.port,
            interface=self.rendezvous.interface,
            num_threads=self._num_threads,
            secret=self.rendezvous.secret,
            own_store=self.rendezvous.own_store,
            member=member,
        )

    def execute(
        self, command: Sequence[str], environ: Mapping[str, str], rank: int | None = None, **files: Any
    ) -> subprocess.Popen[bytes]:
        """Start `command` as the next worker, on the warden's list and in a session of its own.

        rank: its number, where it is not that of the next one.
        files: what subprocess.Popen is told about them; `pass_fds` are passed on besides the warden's list.
        """
        pass_fds = (self.warden.list_fd, *files.pop("pass_fds", ()))
        try:
            process = subprocess.Popen(
                self.warden.entering(command),
                env={**environ, **self.warden.mark},
                pass_fds=pass_fds,
                start_new_session=True,
                **files,
            )
        except OSError as error:
            raise LaunchError(f"{command[0]} could not be started: {error}.") from error
        self.add(process.pid, process.poll, rank)
        return process

    def add(self, pid: int, poll: Callable[[], int | None], rank: int | None = None) -> None:
        """Take charge of a process that was started as the next worker; `poll` gives its exit code once it has one."""
        number = self._first_rank + len(self.workers) if rank is None else rank
        self.workers.append(Worker(number, pid, poll, self.warden))

    def watch(self, attend: Callable[[float], bool], is_over: Callable[[], bool], notice: timedelta = NOTICE) -> bool:
        """Return True when all workers have ended: by themselves, or ended from here soon after it is over.

        attend: called between looks, for so many seconds at most, to do whatever else the launcher has to do. Once it
            returns False, so does this, and the workers are as they are.
        is_over: tells that workers have no more reason to go on, as when one has failed.
        notice: how long they may still take then.
        """
        give_up = float("inf")
        while self._running():
            self.rendezvous.attend(self.workers)
            if not attend(_LOOK_S):
                return False
            if give_up == float("inf") and is_over():
                give_up = time.monotonic() + notice.total_seconds()
            if time.monotonic() > give_up:
                self.end(signal.SIGTERM)
                break  # One that hangs inside the kernel may still be there.
        return True

    def end(self, signum: int) -> None:
        """Ask all workers to end by a signal, and kill those that have not when the grace time is over."""
        self._tell(signum, until=self._is_urgent)
        self.kill()

    def kill(self) -> None:
        """Leave no worker running. Only one that hangs inside the system's kernel is not waited for."""
        self._tell(signal.SIGKILL, until=lambda: False)

    def _tell(self, signum: int, until: Callable[[], bool]) -> None:
        """Send a signal, and wait for the workers to end, for the grace time at most."""
        for worker in self.workers:
            worker.tell(signum)
        give_up = time.monotonic() + GRACE.total_seconds()
        while self._running() and time.monotonic() < give_up and not until():
            time.sleep(_LOOK_S / 5)

    def _running(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.has_ended()]
