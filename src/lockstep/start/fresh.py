"""Workers that are fresh interpreters: what `launch` uses whenever the function can be found again by import.

multiprocessing's "spawn" would do nearly this; it is not used because a worker's environment must be in place before
its interpreter starts (OpenMP and Gloo read it once, and unpickling the function may import torch), and it could only
be put there by changing this process's own. What it knows about finding the main script again is used.
"""

import multiprocessing
import multiprocessing.spawn
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from mmap import mmap
from pathlib import Path
from typing import Any

from lockstep.start.call import Call, work
from lockstep.start.meeting import Meeting
from lockstep.start.report import Outbox
from lockstep.start.warden import Warden
from lockstep.start.worker import Worker, execute

# The path comes first: without it, a worker might not find this package.
_BEGIN = """
import mmap, os, pickle, sys
parcel_fd, outbox_fd, rank = map(int, sys.argv[1:])
parcel = mmap.mmap(parcel_fd, 0, access=mmap.ACCESS_READ)
os.close(parcel_fd)
sys.path[:] = pickle.load(parcel)
from lockstep.start.fresh import begin
begin(parcel, outbox_fd, rank)
"""


class NotImportable(Exception):
    """A call that no fresh interpreter could load; says why."""


class Fresh:
    """Starts workers that load the call from a file which has no name and ends with the last that holds it."""

    def __init__(self, call: Call) -> None:
        try:
            pickled = pickle.dumps(call, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise NotImportable(f"it cannot be pickled ({error})") from error
        path = [entry or str(Path.cwd()) for entry in sys.path]
        preparation: dict[str, Any] = {"sys_path": path, "sys_argv": sys.argv, "dir": str(Path.cwd())}
        # Only if needed is the script run again, as far as its functions: the others need no `__main__` guard.
        if b"__main__" in pickled:
            preparation |= _main_script()
        self._parcel = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as this object)
        for part in (pickle.dumps(path), pickle.dumps(preparation), pickled):
            self._parcel.write(part)
        self._parcel.flush()

    def start(
        self, rank: int, variables: Mapping[str, str], outbox_fd: int, meeting: Meeting, warden: Warden
    ) -> Worker:
        """Start worker `rank`, which reports to `outbox_fd`."""
        parcel_fd = self._parcel.fileno()
        command = [sys.executable, "-c", _BEGIN, str(parcel_fd), str(outbox_fd), str(rank)]
        process = execute(
            command,
            {**os.environ, **variables},
            warden,
            stdin=subprocess.DEVNULL,
            pass_fds=(parcel_fd, outbox_fd),
        )
        return Worker(rank, process.pid, process.poll, warden)

    def close(self) -> None:
        """Let go of the file; workers that have started hold it themselves."""
        self._parcel.close()


def is_loading() -> bool:
    """Whether this process is a worker, of any launcher, that is still busy with importing the main script."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def begin(parcel: mmap, outbox_fd: int, rank: int) -> None:
    """Be a worker. Called by the command line above, and nowhere else."""
    os.set_inheritable(outbox_fd, False)
    preparation = pickle.load(parcel)

    def load() -> Call:
        # multiprocessing's own mark for this phase, so that its starting of processes is refused here too.
        process = multiprocessing.current_process()
        process._inheriting = True  # type: ignore[attr-defined]
        try:
            multiprocessing.spawn.prepare(preparation)
            call = pickle.load(parcel)
        finally:
            del process._inheriting  # type: ignore[attr-defined]
        assert isinstance(call, Call)
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
