"""What a launched worker runs and sends back: a function on its way there, its result or exception on the way back.

A worker is a fresh interpreter whenever the function can be found again by import, else a fork of the launcher, for
functions that only it has, as in a notebook. It reports once, through a pipe. On the wire: 8 bytes of length, then one
letter that says what it is, then a pickle. The launcher reads whatever has arrived whenever it looks, so that a large
result never blocks it, nor the worker for long.
"""

import atexit
import contextlib
import functools
import io
import multiprocessing
import multiprocessing.spawn
import multiprocessing.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from mmap import mmap
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO, Any, TextIO

from lockstep.errors import LaunchError, WorkerFailed
from lockstep.start.supervisor import Supervisor

FunctionCall = functools.partial[Any]
"""What every worker is to run: a function with its arguments."""

_CHUNK_BYTES = 1 << 20
_LENGTH_BYTES = 8

# The path comes first: without it, a worker might not find this package.
_BEGIN = """
import mmap, os, pickle, sys
parcel_fd, outbox_fd, rank = map(int, sys.argv[1:])
parcel = mmap.mmap(parcel_fd, 0, access=mmap.ACCESS_READ)
os.close(parcel_fd)
sys.path[:] = pickle.load(parcel)
from lockstep.start.call import begin
begin(parcel, outbox_fd, rank)
"""


class ReportKind(Enum):
    """What a report says."""

    RETURNED = b"r"
    """The function returned: the pickle is its result."""
    RAISED = b"x"
    """The function raised: the pickle is a `Raised`."""
    NOT_LOADED = b"n"
    """The function could not be loaded in the worker: the pickle is a `Raised`."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception on its way to another process."""

    summary: str
    """Its type and message."""
    trace: str
    """Its traceback in the worker, with all it is chained to."""
    pickled: bytes | None
    """The exception itself, if it can be pickled."""


class Outbox:
    """The worker's end of the pipe."""

    def __init__(self, fd: int, rank: int) -> None:
        self._fd = fd
        self._rank = rank

    def returned(self, result: Any) -> None:
        """Send the function's result; one that cannot be pickled becomes a failure that says so."""
        try:
            pickled = _sendable(result)
        except Exception as error:
            failed = WorkerFailed(
                f"worker {self._rank} returned a {type(result).__qualname__} that cannot be sent to the process that "
                f"launched it: {error}. Return numbers, strings, tensors, or containers of them."
            )
            self.raised(failed.with_traceback(error.__traceback__))
        else:
            self.send(ReportKind.RETURNED, pickled)

    def raised(self, error: BaseException, kind: ReportKind = ReportKind.RAISED) -> None:
        """Send an exception, as itself where possible."""
        try:
            pickled = _sendable(error)
        except Exception:
            pickled = None
        summary = "".join(traceback.format_exception_only(error)).strip()
        self.send(kind, pickle.dumps(Raised(summary, "".join(traceback.format_exception(error)), pickled)))

    def send(self, kind: ReportKind, pickled: bytes) -> None:
        """Send what has been pickled, and let go of the pipe."""
        for part in ((len(pickled) + 1).to_bytes(_LENGTH_BYTES), kind.value, pickled):
            unsent = memoryview(part)
            while unsent:
                unsent = unsent[os.write(self._fd, unsent[:_CHUNK_BYTES]) :]
        self.close()

    def close(self) -> None:
        """Let go of the pipe."""
        os.close(self._fd)


class Inbox:
    """The launcher's end of the pipe of one worker."""

    def __init__(self, rank: int, fd: int) -> None:
        self.rank = rank
        self.fd = fd
        self.is_open = True
        """Whether more may come."""
        self.arrived_at = 0.0
        """When the report was complete, on the monotonic clock."""
        self._received = bytearray()
        os.set_blocking(fd, False)

    def receive(self) -> None:
        """Take in what has arrived, without waiting."""
        while self.is_open:
            try:
                data = os.read(self.fd, _CHUNK_BYTES)
            except BlockingIOError:
                return
            self._received += data
            if not data or self.is_complete:
                self.arrived_at = time.monotonic()
                self.close()

    def close(self) -> None:
        """Take no more."""
        if self.is_open:
            self.is_open = False
            os.close(self.fd)

    @property
    def is_complete(self) -> bool:
        """Whether the whole report has arrived."""
        length = self._received[:_LENGTH_BYTES]
        return len(length) == _LENGTH_BYTES and len(self._received) - _LENGTH_BYTES >= int.from_bytes(length)

    @property
    def kind(self) -> ReportKind | None:
        """What the report says; None while it is not complete."""
        return ReportKind(bytes(self._received[_LENGTH_BYTES : _LENGTH_BYTES + 1])) if self.is_complete else None

    def open_report(self) -> Any:
        """What was sent. For results this runs what the result's type says about unpickling, and may raise."""
        return pickle.loads(memoryview(self._received)[_LENGTH_BYTES + 1 :])


def work(load: Callable[[], FunctionCall], outbox: Outbox, rank: int) -> int:
    """Load the call, run it, send its result or exception; returns this process's exit code. In the worker."""
    sys.stdout, sys.stderr = _in_whole_lines(sys.stdout), _in_whole_lines(sys.stderr)
    try:
        call = load()
    except BaseException as error:
        outbox.raised(error, ReportKind.NOT_LOADED)
        return 1
    try:
        result = call()
    except SystemExit as left:
        if left.code:
            outbox.raised(_without_own_frame(_as_failure(left, rank)))
            return 1
        result = None
    except BaseException as error:
        outbox.raised(_without_own_frame(error))
        # As Python does with an error that ends it: so what runs at exit can tell the others how this worker ended.
        sys.last_value = error.with_traceback(None)
        return 1
    outbox.returned(result)
    return 0


def _as_failure(left: SystemExit, rank: int) -> WorkerFailed:
    """`sys.exit` as a failure: raised as itself in the launcher, it would end the user's script or notebook."""
    return WorkerFailed(f"worker {rank} called sys.exit({left.code!r}).").with_traceback(left.__traceback__)


def _without_own_frame(error: BaseException) -> BaseException:
    """`error` with a traceback that begins in the user's function."""
    return error.with_traceback(error.__traceback__.tb_next) if error.__traceback__ else error


def _in_whole_lines(stream: TextIO) -> TextIO:
    """`stream`, made to pass on whole lines: workers share the launcher's output, and pieces would end up anywhere."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(line_buffering=True)
        return stream
    return _WholeLines(stream)


class _WholeLines(io.StringIO):
    """In front of a stream that passes on each piece as it comes, as a notebook's does, in a fork of it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        super().write(text)
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        if self.tell():
            self._stream.write(self.getvalue())
            self.seek(0)
            self.truncate()
        self._stream.flush()


class NotImportable(Exception):
    """A call that no fresh interpreter could load; says why."""


class FreshStarter:
    """Starts workers that are fresh interpreters: they load the call from a file without a name, which ends with them.

    multiprocessing's "spawn" would do nearly this; it is not used because a worker's environment must be in place
    before its interpreter starts (OpenMP and Gloo read it once, and unpickling the function may import torch), and it
    could only be put there by changing this process's own. What it knows about finding the main script again is used.

    What was defined in a notebook or at a prompt is in no script. It is sent by value, where cloudpickle is installed.
    """

    def __init__(self, call: FunctionCall) -> None:
        path = [entry or str(Path.cwd()) for entry in sys.path]
        preparation: dict[str, Any] = {"sys_path": path, "sys_argv": sys.argv, "dir": str(Path.cwd())}
        try:
            pickled = _pickled(call)
            # Only if needed is the script run again, as far as its functions: the others need no `__main__` guard.
            if b"__main__" in pickled:
                preparation |= _main_script()
        except NotImportable as reason:
            pickled = _by_value(call, reason)
        self._parcel = _nameless_file()
        for part in (pickle.dumps(path), pickle.dumps(preparation), pickled):
            self._parcel.write(part)
        self._parcel.flush()

    def start(
        self,
        rank: int,
        outbox_fd: int,
        supervisor: Supervisor,
        variables: Mapping[str, str],
        output: Mapping[str, int] | None = None,
    ) -> None:
        """Start worker `rank`, which reports to `outbox_fd`, with these variables in its environment.

        output: where `stdout` and `stderr` go, if not where this process's do.
        """
        parcel_fd = self._parcel.fileno()
        supervisor.execute(
            [sys.executable, "-c", _BEGIN, str(parcel_fd), str(outbox_fd), str(rank)],
            {**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            pass_fds=(parcel_fd, outbox_fd),
            **(output or {}),
        )

    def close(self) -> None:
        """Let go of the file; workers that have started hold it themselves."""
        self._parcel.close()


def _pickled(call: FunctionCall) -> bytes:
    try:
        return pickle.dumps(call, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise NotImportable(f"it cannot be pickled ({error})") from error


def _by_value(call: FunctionCall, reason: NotImportable) -> bytes:
    """The call with what it refers to of a main program without a file; raises `reason` where there is a file."""
    main = sys.modules["__main__"]
    is_file = getattr(main, "__file__", None) is not None or getattr(main, "__spec__", None) is not None
    if is_file or multiprocessing.parent_process() is not None:  # What multiprocessing has started is no notebook.
        raise reason
    try:
        import cloudpickle
    except ImportError:
        raise NotImportable(
            f"{reason}; with `pip install cloudpickle`, what a notebook defines can be sent to fresh interpreters"
        ) from reason
    try:
        pickled: bytes = cloudpickle.dumps(call)
    except Exception as error:
        raise NotImportable(f"{reason}, nor can it be sent by value ({error})") from error
    return pickled


def _sendable(what: Any) -> bytes:
    """A pickle of a result or an exception, by value where its class came here so."""
    try:
        return pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
    except Exception:
        by_value = sys.modules.get("cloudpickle")
        if by_value is None:
            raise
        pickled: bytes = by_value.dumps(what)
        return pickled


def _nameless_file() -> IO[bytes]:
    """A file for this process and its children: in memory, as a temporary folder may be full or read-only."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("lockstep-call"), "w+b")
    return tempfile.TemporaryFile()


def is_loading() -> bool:
    """Whether this process is a worker, of any launcher, that is still busy with importing the main script."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def begin(parcel: mmap, outbox_fd: int, rank: int) -> None:
    """Be a worker. Called by the command line above, and nowhere else."""
    os.set_inheritable(outbox_fd, False)
    preparation = pickle.load(parcel)

    def load() -> FunctionCall:
        # multiprocessing's own mark for this phase, so that its starting of processes is refused here too.
        process = multiprocessing.current_process()
        process._inheriting = True  # type: ignore[attr-defined]
        try:
            multiprocessing.spawn.prepare(preparation)
            call = pickle.load(parcel)
        finally:
            del process._inheriting  # type: ignore[attr-defined]
        assert isinstance(call, functools.partial)
        return call

    sys.exit(work(load, Outbox(outbox_fd, rank), rank))


def _main_script() -> dict[str, str]:
    """How multiprocessing.spawn finds this process's main module again; raises NotImportable if it cannot."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and not spec.name.endswith("__main__"):
        return {"init_main_from_name": spec.name}
    file = getattr(main, "__file__", None)
    if spec is None and file is not None and Path(file).is_file():
        return {"init_main_from_path": str(Path(file).resolve())}
    raise NotImportable("it refers to things defined interactively, or in a main program that cannot be imported")


class ForkStarter:
    """Starts workers that are forks of this process, and have the call in memory already.

    A fork has the memory of its parent but none of its threads. What follows from that is dealt with here: compute
    threads (one per worker: measured, a pool of several that the parent has used hangs in the fork), CUDA (cannot be
    used at all once the parent has), and a world that the parent has joined (the fork would take it for its own).
    """

    def __init__(self, call: FunctionCall, threads: int | None, reason: str) -> None:
        """`reason` says why fresh interpreters will not do; LaunchError if forks will not do either."""
        obstacle = _obstacle(threads)
        if obstacle:
            name = getattr(call.func, "__qualname__", call.func)
            raise LaunchError(
                f"{name} cannot run in fresh interpreters, since {reason}; and it cannot run in forks of this process, "
                f"since {obstacle}. Change that, or put the function into a module (a .py file) and import it."
            )
        self._call = call
        self._processes: list[ForkProcess] = []

    def start(
        self,
        rank: int,
        outbox_fd: int,
        supervisor: Supervisor,
        variables: Mapping[str, str],
        output: Mapping[str, int] | None = None,
    ) -> None:
        """Start worker `rank`, which reports to `outbox_fd`, with these variables in its environment.

        A fork writes to this process's own streams, as objects: `output` is not for it.
        """
        # Not os.fork: multiprocessing also tells itself, and thereby data loaders, that this is another process.
        process = ForkProcess(
            target=_begin_fork,
            args=(self._call, rank, outbox_fd, supervisor, variables),
            name=f"lockstep worker {rank}",
        )
        try:
            with supervisor.rendezvous.resting():
                process.start()
        except OSError as error:
            raise LaunchError(f"worker {rank} could not be forked: {error}.") from error
        self._processes.append(process)
        assert process.pid is not None
        supervisor.add(process.pid, lambda: process.exitcode)

    def close(self) -> None:
        """Let go of the processes, which have all ended."""
        for process in self._processes:
            with contextlib.suppress(ValueError):  # Not even SIGKILL has ended it.
                process.close()


def _obstacle(threads: int | None) -> str | None:
    if threads is not None and threads > 1:
        return f"a fork can have one compute thread, and threads={threads} was asked for"
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if torch.cuda.is_initialized():
        return "CUDA is in use here already, and no fork can use it then"
    world = sys.modules.get("lockstep.world")
    if torch.distributed.is_initialized() or (world is not None and world.current() is not None):
        return "this process is in a world (`lockstep.join().leave()` ends that), and a fork would take it for its own"
    return None


def _begin_fork(
    call: FunctionCall, rank: int, outbox_fd: int, supervisor: Supervisor, variables: Mapping[str, str]
) -> None:
    """Be a worker: the first thing that runs in the fork."""
    os.setsid()
    supervisor.warden.enter()
    supervisor.rendezvous.close()
    os.environ.update(variables)
    _forget_parent()
    code = work(lambda: _with_one_thread(call), Outbox(outbox_fd, rank), rank)
    atexit._run_exitfuncs()  # multiprocessing skips them; what the function registered (`world.leave`) is to run.
    sys.exit(code)


def _forget_parent() -> None:
    """Drop what the parent has set up to happen on signals and at its end; it is not to happen here."""
    signal.set_wakeup_fd(-1)  # A notebook's event loop would be woken by our signals.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    vars(sys).pop("last_value", None)  # A notebook's last error is none of the worker's.
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def _with_one_thread(call: FunctionCall) -> FunctionCall:
    import torch

    torch.set_num_threads(1)
    return call
