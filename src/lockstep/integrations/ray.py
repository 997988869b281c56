"""Workers on a Ray cluster: `launch` runs a function on actors, `LockstepConfig` is for ray.train's TorchTrainer.

`launch` is `lockstep.launch` with actors in place of processes: who is replaced, when the run is over and what is
raised are decided by the same code, in the process that calls it. That process serves the store in which the workers
meet, and its secret goes to them by Ray. Each worker is one actor in a bundle of one placement group, so that all start
or none; ranks go by node. A node that is removed takes its actors with it: in an elastic run the others go on, and
replacements wait in Ray's queue for room. All actors end with the call, and with the process that calls.
"""

import contextlib
import functools
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lockstep import world as worlds
from lockstep.errors import LaunchError, WorkerLost
from lockstep.start import host
from lockstep.start.call import FunctionCall, Outbox, ReportKind, work
from lockstep.start.elastic import Elastic
from lockstep.start.function import checked_call, deadline_after, limits_of, run_call
from lockstep.start.hosts import say
from lockstep.start.process import Worker
from lockstep.start.supervisor import Supervisor

if TYPE_CHECKING:
    from lockstep.integrations.ray_train import LockstepConfig as LockstepConfig

Result = TypeVar("Result")
_PLACED_WITHIN = timedelta(minutes=2)


def launch(
    fn: Callable[..., Result],
    workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    resources_per_worker: Mapping[str, float] | None = None,
    elastic: bool | Elastic = False,
    timeout: timedelta | float | None = None,
    placed_within: timedelta | float = _PLACED_WITHIN,
) -> list[Result]:
    """Run `fn(*args, **kwargs)` on `workers` workers of the Ray cluster; returns their results, by rank.

    resources_per_worker: as Ray counts them, `{"CPU": 4, "GPU": 1}`; one CPU if not given.
    elastic: True, or `lockstep.Elastic(...)`, for training with `lockstep.Trainer` that outlives its workers.
    timeout: seconds, or a timedelta, after which workers that have not returned are ended and WorkerLost is raised.
    placed_within: how long Ray may take to find room for all workers, before LaunchError is raised.

    Called where `ray.init` has been. Inside `fn`, `lockstep.join()` gives the world of these workers. All else is as in
    `lockstep.launch`: the first failure is raised as itself, WorkerLost where an actor or its node is gone.
    """
    host.refuse_nesting(os.environ)
    if not ray.is_initialized():
        raise LaunchError("this process is in no Ray cluster: call ray.init() first, or ray.init(address='auto').")
    size = host.num_workers(workers)
    host.require_file_handles(size)
    limits, deadline = limits_of(elastic, size), deadline_after(timeout)
    within_s = placed_within.total_seconds() if isinstance(placed_within, timedelta) else placed_within
    bundle = {"CPU": 1.0} if resources_per_worker is None else dict(resources_per_worker)
    count = size + (limits.spares if limits is not None else 0)
    starter = _ActorStarter(checked_call(fn, args, kwargs), bundle, count, within_s)
    outcome = run_call(starter, size, None, deadline, limits, ray.util.get_node_ip_address())
    if isinstance(outcome, WorkerLost) and starter.lost:
        reasons = "\n".join(f"worker {rank}: {reason}" for rank, reason in sorted(starter.lost.items()))
        raise WorkerLost(
            f"Ray has lost {len(starter.lost)} of {size} workers, with their actors or the nodes those were on. The "
            "others were ended. With elastic=True, and lockstep.Trainer, the others go on. Ray says:\n" + reasons,
            tuple(sorted(starter.lost)),
        ) from None
    if isinstance(outcome, BaseException):
        raise outcome from None
    return outcome


class _ActorStarter:
    """Starts workers that are actors, one a bundle of a placement group."""

    def __init__(self, call: FunctionCall, bundle: dict[str, float], count: int, within_s: float) -> None:
        self._pickled = ray.cloudpickle.dumps(call)
        self._bundle = bundle
        self.lost: dict[int, str] = {}
        """What Ray says of actors that have gone, by the worker's number."""
        self._group = placement_group([bundle] * count, strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=within_s)
        except GetTimeoutError:
            self.close()
            raise LaunchError(
                f"Ray has found no room for {count} workers with {bundle} each within {within_s:.0f} s. All nodes "
                f"together have {_totals(ray.cluster_resources())}; free are {_totals(ray.available_resources())}."
            ) from None
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        self._order = sorted(nodes, key=lambda index: (list(nodes.values()).index(nodes[index]), index))
        """The bundle of each slot: ranks go by node."""
        self._nodes = [nodes[index] for index in self._order]

    def start(
        self,
        rank: int,
        outbox_fd: int,
        supervisor: Supervisor,
        variables: Mapping[str, str],
        output: Mapping[str, int] | None = None,
    ) -> None:
        """Start worker `rank`, which reports to `outbox_fd`, with these variables in its environment.

        What it prints goes where Ray has it go.
        """
        if not ray.is_initialized():  # It would connect again, by itself.
            raise LaunchError("ray.shutdown() was called while workers were to be started.")
        slot = int(variables["RANK"])
        on_node = [other for other, node in enumerate(self._nodes) if node == self._nodes[slot]]
        place = {"LOCAL_RANK": str(on_node.index(slot)), "LOCAL_WORLD_SIZE": str(len(on_node))}
        if self._bundle.get("GPU"):  # Ray shows each actor its own GPUs alone, which count from 0.
            place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        custom = {name: count for name, count in self._bundle.items() if name not in ("CPU", "GPU", "memory")}
        actor = (
            ray.remote(_Actor)
            .options(
                num_cpus=self._bundle.get("CPU", 0),
                num_gpus=self._bundle.get("GPU", 0),
                memory=self._bundle.get("memory"),
                resources=custom,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, self._order[slot]),
            )
            .remote()
        )
        pid = actor.pid.remote()
        report = actor.run.remote(rank, {**variables, **place}, self._pickled)
        worker = _ActorWorker(rank, actor, supervisor)
        supervisor.workers.append(worker)
        outbox = Outbox(os.dup(outbox_fd), rank)
        threading.Thread(
            target=self._await, args=(worker, pid, report, outbox), name="lockstep-ray", daemon=True
        ).start()

    def close(self) -> None:
        """Give back the room."""
        if ray.is_initialized():
            remove_placement_group(self._group)

    def _await(self, worker: "_ActorWorker", pid: Any, report: Any, outbox: Outbox) -> None:
        """Pass on what the actor reports, in a thread; then it has ended."""
        code = -int(signal.SIGKILL)
        try:
            worker.pid = ray.get(pid)
            code, kind, pickled = ray.get(report)
            with contextlib.suppress(OSError):  # The launcher has given up.
                outbox.send(ReportKind(kind), pickled)
        except RayError as error:
            if not worker.was_told_to_end:
                self.lost[worker.rank] = _why(error)
                say(f"worker {worker.rank} is lost. Ray says: {self.lost[worker.rank]}")
        finally:
            with contextlib.suppress(OSError):
                outbox.close()
            worker.end(code)


class _ActorWorker(Worker):
    """One actor, as the launcher sees it."""

    def __init__(self, rank: int, actor: Any, supervisor: Supervisor) -> None:
        super().__init__(rank, 0, lambda: None, supervisor.warden)
        self._actor = actor
        self._ended_fd, self._end_fd = os.pipe()

    def end(self, code: int) -> None:
        """It has ended so."""
        self._kill()
        self.ended_at, self.code = time.monotonic(), code
        os.close(self._end_fd)

    def has_ended(self) -> bool:
        """Whether it has."""
        return self.code is not None

    def end_fd(self) -> int:
        """Can be read once it has ended."""
        return os.dup(self._ended_fd)

    def ask_to_leave(self) -> None:
        """Nobody asks: a run on Ray is not resized."""
        self.tell(signal.SIGTERM)

    def tell(self, signum: int) -> None:
        """End it: Ray knows no signals."""
        if self.code is None:
            self.told_at = time.monotonic() if self.told_at is None else self.told_at
            self._kill()

    def _kill(self) -> None:
        if ray.is_initialized():
            with contextlib.suppress(RayError):
                ray.kill(self._actor)

    def __del__(self) -> None:
        os.close(self._ended_fd)


class _Report(Outbox):
    """Keeps what is reported until the actor returns it."""

    def __init__(self, rank: int) -> None:
        super().__init__(-1, rank)
        self.kind, self.pickled = ReportKind.RETURNED, b""

    def send(self, kind: ReportKind, pickled: bytes) -> None:
        """Keep it."""
        self.kind, self.pickled = kind, pickled


class _Actor:
    """The worker: a process of its own."""

    def pid(self) -> int:
        """The number of its process, on its node."""
        return os.getpid()

    def run(self, rank: int, variables: dict[str, str], pickled: bytes) -> tuple[int, bytes, bytes]:
        """Run the call; returns the exit code that a process would have, and the report."""
        os.environ.update(variables)
        report = _Report(rank)
        code = work(functools.partial(pickle.loads, pickled), report, rank)
        if (world := worlds.current()) is not None:
            world.leave()
        sys.stdout.flush()
        sys.stderr.flush()
        return code, report.kind.value, report.pickled


def _totals(resources: Mapping[str, float]) -> str:
    shown = {name: count for name, count in sorted(resources.items()) if ":" not in name and "_group_" not in name}
    return ", ".join(f"{name} {count:g}" for name, count in shown.items() if "memory" not in name) or "nothing"


def _why(error: RayError) -> str:
    """Why an actor is gone, in one line."""
    text = str(error) if isinstance(error, RayActorError) else repr(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "dead" in line or "died" in line or "killed" in line), lines[0])


def __getattr__(name: str) -> Any:
    """`LockstepConfig`, which wants what ray[train] installs: imported when it is asked for."""
    if name == "LockstepConfig":
        from lockstep.integrations.ray_train import LockstepConfig

        return LockstepConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
