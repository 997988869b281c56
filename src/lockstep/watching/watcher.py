"""`lockstep.watch(model)`: know where the time goes, and who is slow, while it trains.

What it starts on each worker: a recorder that hears the engine's events, a measure of gradient norms, a background
thread, probes where there are several hosts, and the look-out for hangs. On worker 0, also what writes the run folder.
Nothing of it changes a bit of the training.
"""

import contextlib
import os
import sys
import time
import warnings
import weakref
from collections.abc import Sequence
from datetime import timedelta
from os import PathLike
from pathlib import Path

from torch import Tensor

from lockstep import environment
from lockstep.comm.channel import mac
from lockstep.comm.meeting import towards_others
from lockstep.errors import UsageError
from lockstep.replica.data_parallel import DataParallel
from lockstep.terminal import LOG_EVERY_S
from lockstep.watching.background import Background, StoreMail
from lockstep.watching.collector import Collector, Summary
from lockstep.watching.efficiency import FlopCount, SpeedTracker, measured_peak
from lockstep.watching.hangs import DEADLINE as HANG_DEADLINE
from lockstep.watching.hangs import Hangs
from lockstep.watching.live import CELL_S, StatusLine, TensorBoard, Tracked, Tracker, View
from lockstep.watching.network import Probes
from lockstep.watching.noise import GradNorms
from lockstep.watching.recorder import HeardStep, Recorder
from lockstep.watching.run_writer import RunWriter
from lockstep.world import World, current


def watch(
    model: DataParallel,
    folder: str | PathLike[str] | None = None,
    *,
    peak_flops: float | None = None,
    hang_deadline: timedelta | float | None = HANG_DEADLINE,
    progress: bool = True,
    tensorboard: str | PathLike[str] | None = None,
    trackers: Sequence[Tracker] = (),
) -> "Watcher":
    """Watch the training of `model` from now on; every worker calls this, once, with the same arguments.

    folder: where worker 0 writes what it sees, for `lockstep report`; nowhere if not given. An earlier run in it is
        kept under `earlier/`.
    peak_flops: operations per second that a worker's device can do, to say how much of that the model uses; measured by
        a matrix product if not given.
    hang_deadline: after so long a wait, in seconds or as a timedelta, it is reported who is stuck; None for never.

    progress: whether worker 0 shows a line on stderr, drawn over and over in a terminal, else now and then; and at the
        end what was seen.
    tensorboard: a folder for TensorBoard, where that is installed.
    trackers: who else is given the numbers of every step and the verdicts: see `lockstep.integrations.trackers`.

    A world has one watcher: a second call, for another model or under `lockstep run --watch`, returns that one, and
    gives it these trackers too.
    """
    if not isinstance(model, DataParallel):
        raise UsageError(
            f"lockstep.watch() takes a model wrapped in lockstep.DataParallel, not a {type(model).__name__}: it "
            "listens to the wrapper. Wrap it first; with Trainer, use Trainer(..., watch=True)."
        )
    watcher = model.world.watcher
    if not isinstance(watcher, Watcher) or watcher.has_ended:
        where = _folder_of(Path(folder), model.world) if folder is not None else None
        deadline = timedelta(seconds=hang_deadline) if isinstance(hang_deadline, int | float) else hang_deadline
        views = _views(progress, tensorboard) if model.world.is_main else []
        watcher = model.world.watcher = Watcher(model, where, peak_flops, deadline, views, says_end=progress)
    watcher.see(model)
    watcher.track(trackers)
    return watcher


def watch_wrapped(world: World, folder: str) -> None:
    """Watch every model that is wrapped in `world` from now on: `lockstep run --watch`, LOCKSTEP_WATCH; for `join`."""

    def watch_model(model: DataParallel) -> None:
        if not world.is_waiting:  # A newcomer's model is wrapped once more when it is counted.
            watch(model, folder)

    world.replicas.on_wrap.append(watch_model)


class Watcher:
    """What `watch` returns; also a context manager that ends the watching."""

    def __init__(
        self,
        model: DataParallel,
        folder: Path | None,
        peak: float | None,
        hang_deadline: timedelta | None,
        views: list[View],
        *,
        says_end: bool,
    ) -> None:
        self._says_end = says_end
        world = self._world = model.world
        self.has_ended = False
        """Whether it has been closed."""
        # Models, and what belongs to them, are held weakly: the watcher lives as long as the world.
        self._norms: weakref.WeakSet[GradNorms] = weakref.WeakSet()
        self._flops = FlopCount(model.module) if world.is_main else None
        began = time.perf_counter_ns()
        self._writer = _open_writer(folder, model, began) if folder is not None else None
        self._speed = SpeedTracker(world.size, peak or measured_peak(model.module, world.device))
        self._recorder = Recorder(world.events, world.device, self._see_end)
        self._collector = Collector(world.size, began, self._speed, self._writer, views) if world.is_main else None
        self._hangs = Hangs(current() or world, model, folder, hang_deadline) if hang_deadline else None
        mail = StoreMail(world.peers, world.rank) if world.size > 1 and world.peers.store is not None else None
        probes = _open_probes(world) if mail is not None else None
        self._background = Background(self._recorder, self._collector, mail, probes)
        self._background.start()
        if self._hangs is not None:
            self._hangs.start()
        # Others may have failed and not come here: worker 0 alone waits, briefly, for what they have to say.
        world.on_leave.append(lambda: self._close(waits=world.is_main and not world.peers.has_lost()))

    # What the user calls

    def verdict(self) -> str:
        """Who holds everyone up, by how much and why, as far as the run has come; empty if nobody stands out.

        Waits for what the others have seen: a moment where all workers call this, else a second or so, and not more
        than once a second. So call it now and then, and best on all of them.
        """
        return self.summary().verdict

    def summary(self) -> Summary:
        """Where the time of the run has gone so far; waits as `verdict` does."""
        return self._background.catch_up().summary

    def log(self, *, loss: float | Tensor | None = None, lr: float | None = None, **more: float | Tensor) -> None:
        """Note numbers about the step under way, or between two steps about the one that has ended.

        `loss` and `grad_norm` are averaged over the workers that give them. A tensor on a GPU is read later, in
        the background.
        """
        given = {"loss": loss, "lr": lr, **more}
        self._recorder.note({name: _kept(value) for name, value in given.items() if value is not None})

    def track(self, trackers: Sequence[Tracker]) -> None:
        """Give these the numbers from now on."""
        if self._collector is not None and trackers:
            self._collector.views.extend(Tracked(tracker) for tracker in trackers)
            if (world := current()) is not None:
                world.leave_first_at_exit()  # They get the last numbers then, and some end by themselves at exit.

    def close(self) -> None:
        """End the watching: write and print what was seen. Called by itself when the world ends; on every worker."""
        self._close(waits=not self._world.peers.has_lost())

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What happens in between

    def see(self, model: DataParallel) -> None:
        """Watch `model` too."""
        reducer = model._engine.reducer
        if reducer is not None and reducer.observer is None:
            self._norms.add(GradNorms(model, reducer))
        if self._hangs is not None:
            self._hangs.see(model)

    def _see_end(self, step: HeardStep) -> None:
        """A step has ended. In the training thread."""
        for norms in self._norms:
            step.noted.update({name: _kept(value) for name, value in norms.take().items()})
        if self._writer is not None:
            self._writer.see_step()
        if self._flops is not None:
            samples = next((event.num_samples for event, _ in step.heard if event.num_samples), 0.0)
            self._speed.flops_per_sample, self._flops = self._flops.per_sample(samples), None

    def _close(self, *, waits: bool) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        self._recorder.close()
        for norms in self._norms:
            norms.close()
        self._background.close(waits=waits)
        if self._hangs is not None:
            self._hangs.close()
        if self._collector is not None:
            with contextlib.suppress(OSError):  # A full disk must not keep the world from ending.
                self._collector.close()
            if self._says_end and self.summary().steps:
                for line in str(self.summary()).splitlines():
                    print(f"lockstep: {line}", file=sys.stderr)


def _open_writer(folder: Path, model: DataParallel, began_ns: int) -> RunWriter | None:
    """What writes the run folder, on worker 0; returns when an earlier run has been put aside. On every worker."""
    world = model.world
    writer, failure = None, ""
    try:
        writer = RunWriter(folder, model, began_ns) if world.is_main else None
    except OSError as error:
        failure = (
            f"the watch folder '{folder}' cannot be written ({error.strerror}: '{error.filename or folder}'). Give one "
            "in which this user may write: --watch=FOLDER, or lockstep.watch(model, folder=...)."
        )
    failure = world.gather_json(failure)[0]
    if failure:
        raise UsageError(failure)
    return writer


def _views(progress: bool, tensorboard: str | PathLike[str] | None) -> list[View]:
    log_every_s = CELL_S if environment.is_in_cell(os.environ) else LOG_EVERY_S
    views: list[View] = [StatusLine(sys.stderr, log_every_s=log_every_s)] if progress else []
    if tensorboard is not None:
        try:
            views.append(Tracked(TensorBoard(tensorboard)))
        except ImportError:
            warnings.warn(
                "tensorboard is not installed, so the run's numbers do not go there: pip install tensorboard. "
                "`lockstep report` shows them too.",
                stacklevel=3,
            )
    return views


def _folder_of(folder: Path, world: World) -> Path:
    """`folder`; one in it for each group, where a model is trained by several groups of workers side by side."""
    whole = current()
    if whole is None or whole.size == world.size:
        return folder
    return folder / f"workers-{world.peers.all[0].rank}-{world.peers.all[-1].rank}"


def _kept(value: float | Tensor) -> float | Tensor:
    """What the background thread may read: a number; of a GPU, where reading it now would wait, a tensor of its own."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return float(value) if value.is_cpu else value.clone()


def _open_probes(world: World) -> Probes | None:
    """Where workers are on several hosts and can find one another; on every worker."""
    if world.peers.are_on_one_host:
        return None
    probes, address = None, towards_others(world.peers.me, world.peers.all)
    if address:
        names = "\n".join(peer.format() for peer in world.peers.all)
        key = mac(world.peers.secret or b"", b"probes", names.encode())
        with contextlib.suppress(OSError):  # Not a network to be probed: who is slow by it cannot be said then.
            probes = Probes(world.rank, address, key)
    addresses = world.gather_json(probes and probes.address)
    if probes is not None:
        probes.start([each and tuple(each) for each in addresses])
    return probes
