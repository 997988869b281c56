"""`lockstep.watch(model)`: know where the time goes, and who is slow, while it trains.

What it starts on each worker: a recorder that hears the engine's events, a gauge of gradient norms, a background
thread, probes where there are several hosts, and the look-out for hangs. On worker 0, also what writes the run folder.
Nothing of it changes a bit of the training.
"""

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from os import PathLike
from pathlib import Path

from torch import Tensor

from lockstep.errors import UsageError
from lockstep.replica.data_parallel import DataParallel
from lockstep.watching import viewers
from lockstep.watching.background import Background
from lockstep.watching.calibration import calibrated
from lockstep.watching.clock import Clock
from lockstep.watching.collector import Collector
from lockstep.watching.contention import Contention
from lockstep.watching.description import Description
from lockstep.watching.flops import FlopCount, is_countable, peak_flops
from lockstep.watching.hangs import DEADLINE as HANG_DEADLINE
from lockstep.watching.hangs import Hangs
from lockstep.watching.mail import Mail
from lockstep.watching.noise import NormGauge
from lockstep.watching.probes import Probes, meeting_point
from lockstep.watching.recorder import Raw, Recorder
from lockstep.watching.run_writer import RunWriter
from lockstep.watching.stamps import stamps_of
from lockstep.watching.summary import Summary
from lockstep.world import World, current

LossReader = Callable[[], float | Tensor]


def watch(
    model: DataParallel,
    folder: str | PathLike[str] | None = None,
    *,
    loss: LossReader | None = None,
    peak_flops: float | None = None,
    hang_deadline: timedelta | float | None = HANG_DEADLINE,
    progress: bool = True,
    tensorboard: str | PathLike[str] | None = None,
) -> "Watcher":
    """Watch the training of `model` from now on; every worker calls this, once, with the same arguments.

    folder: where worker 0 writes what it sees, for `lockstep report`; nowhere if not given. An earlier run in it is
        kept under `earlier/`.
    loss: called at the end of every step, for the loss to be written; or call `watcher.log(loss=...)`.
    peak_flops: operations per second that a worker's device can do, to say how much of that the model uses; measured by
        a matrix product if not given.
    hang_deadline: after so long a wait, in seconds or as a timedelta, it is reported who is stuck; None for never.

    progress: whether worker 0 shows a line on stderr: drawn over and over in a terminal, else now and then.
    tensorboard: a folder for TensorBoard, where that is installed.

    A world has one watcher: a second call, for another model or under `lockstep run --watch`, returns that one.
    """
    if not isinstance(model, DataParallel):
        raise UsageError(
            f"lockstep.watch() takes a model wrapped in lockstep.DataParallel, not a {type(model).__name__}: it "
            "listens to the wrapper. Wrap it first; with Trainer, use Trainer(..., watch=True)."
        )
    watcher: Watcher | None = model.world.watcher
    if watcher is None or watcher.has_ended:
        where = _folder_of(Path(folder), model.world) if folder is not None else None
        deadline = timedelta(seconds=hang_deadline) if isinstance(hang_deadline, int | float) else hang_deadline
        shows = viewers.opened(progress=progress, tensorboard=tensorboard) if model.world.is_main else []
        watcher = model.world.watcher = Watcher(model, where, peak_flops, deadline, shows)
    watcher.see(model, loss)
    return watcher


class Watcher:
    """What `watch` returns; also a context manager that ends the watching."""

    def __init__(
        self,
        model: DataParallel,
        folder: Path | None,
        peak: float | None,
        hang_deadline: timedelta | None,
        shows: list[viewers.Viewer],
    ) -> None:
        world = self._world = model.world
        self._loss: LossReader | None = None
        self._gauges: list[NormGauge] = []
        self._flops: float | None = None
        self._counting: FlopCount | None = None
        self._module = model.module
        self.has_ended = False
        """Whether it has been closed."""
        self.is_calibrated = False
        self._description = Description(model)
        stamps = stamps_of(world.device)
        began, clock = time.perf_counter_ns(), Clock.mine()
        self._writer = RunWriter(folder, began) if folder is not None and world.is_main else None
        if folder is not None and world.size > 1:
            world.barrier()  # An earlier run has been put aside before anybody writes to the folder.
        self._shows = shows
        self._collector = self._open_collector(clock, began) if world.is_main else None
        peak = peak or _measured_peak(model)
        if self._collector is not None:
            self._collector.speed.peak_flops = peak
        self._contention = Contention() if world.device.type == "cpu" else None
        self._recorder = Recorder(world.events, stamps, self._see_end, self._contention)
        has_mail = world.size > 1 and world.peers.store is not None
        mail = Mail(world.peers, world.rank) if has_mail else None
        self._hangs = Hangs(current() or world, model, folder, hang_deadline) if hang_deadline else None
        self._background = Background(
            self._recorder, stamps, mail, self._collector, _open_probes(world, mail), self._each_second
        )
        self._background.start()
        if self._hangs is not None:
            self._hangs.start()
        world.on_leave.append(self._close_with_world)

    def _open_collector(self, clock: Clock, began: int) -> Collector:
        return Collector(self._world.size, clock, began, self._writer, [view.show for view in self._shows])

    # What the user calls

    def verdict(self) -> str:
        """Who holds everyone up, by how much and why; empty if nobody stands out. The same on every worker, soon."""
        return self._background.summary.verdict

    def summary(self) -> Summary:
        """Where the time of the run has gone so far."""
        return self._background.summary

    def log(self, *, loss: float | Tensor | None = None, lr: float | None = None, **more: float | Tensor) -> None:
        """Note numbers about the step under way, or between two steps about the one that has ended.

        `loss` and `grad_norm` are averaged over the workers that give them. A tensor is read later, in the background.
        """
        given = {"loss": loss, "lr": lr, **more}
        self._recorder.note({name: _kept(value) for name, value in given.items() if value is not None})

    def calibrate(self, run_passes: Callable[[], None]) -> None:
        """Learn how long the passes of a step take without communication, by running them; before the first step."""
        self.is_calibrated = True
        seconds = calibrated(run_passes, self._world.device)
        self._recorder.forget()
        if self._collector is not None and seconds is not None:
            self._collector.speed.passes_ns = seconds * 1e9

    def close(self) -> None:
        """End the watching: write and print what was seen. Called by itself when the world ends; on every worker."""
        self._close(waits=not self._world.peers.has_lost())

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What happens in between

    def see(self, model: DataParallel, loss: LossReader | None) -> None:
        """Watch `model` too."""
        self._loss = loss or self._loss
        if model.reducer is not None and model.reducer.gauge is None:
            self._gauges.append(NormGauge(model, model.reducer))

    def _see_end(self, raw: Raw) -> None:
        """A step has ended. In the training thread."""
        for gauge in self._gauges:
            if gauge.noted:
                raw.noted.update({name: _kept(value) for name, value in gauge.noted.items()})
                gauge.noted = {}
        if self._loss is not None:
            raw.noted["loss"] = _kept(self._loss())
        self._description.see_step()
        if self._collector is not None and raw.step <= 2:
            self._count_operations(raw)

    def _count_operations(self, raw: Raw) -> None:
        """After the first step, count those of the second, whose first pass says how many samples they were for."""
        if raw.step == 1 and is_countable(self._module):
            self._counting = FlopCount(self._module, self._see_flops)
        elif raw.step == 2 and self._collector is not None:
            samples = next((event.num_samples for event, _ in raw.heard if event.num_samples), 0.0)
            if self._flops and samples:
                self._collector.speed.flops_per_sample = self._flops / samples
            if self._counting is not None:
                self._counting.close()

    def _see_flops(self, flops: float) -> None:
        self._flops = flops

    def _each_second(self) -> None:
        """In the background thread."""
        if self._contention is not None:
            self._contention.look()
        if self._writer is not None and self._collector is not None:
            described = self._description.to_json(self._collector.speed.single_step_ns)
            if described is not None:
                self._writer.write_run(described)

    def _close_with_world(self) -> None:
        # Others may have failed and not come here: worker 0 alone waits, briefly, for what they have to say.
        self._close(waits=self._world.is_main and not self._world.peers.has_lost())

    def _close(self, *, waits: bool) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        self._recorder.close()
        for gauge in self._gauges:
            gauge.close()
        self._background.close(waits=waits)
        if self._hangs is not None:
            self._hangs.close()
        if self._collector is not None:
            with contextlib.suppress(OSError):  # A full disk must not keep the world from ending.
                self._end_run()

    def _end_run(self) -> None:
        if self._writer is not None and self._collector is not None:
            described = self._description.to_json(self._collector.speed.single_step_ns, is_last=True)
            if described is not None:
                self._writer.write_run(described)
            self._writer.close()
        for view in self._shows:
            view.close()
        if self.summary().steps:
            for line in str(self.summary()).splitlines():
                print(f"lockstep: {line}", file=sys.stderr)


def _folder_of(folder: Path, world: World) -> Path:
    """`folder`; one in it for each group, where a model is trained by several groups of workers side by side."""
    whole = current()
    if whole is None or whole.size == world.size:
        return folder
    return folder / f"workers-{world.peers.all[0].rank}-{world.peers.all[-1].rank}"


def _kept(value: float | Tensor) -> float | Tensor:
    return value.detach() if isinstance(value, Tensor) else value


def _measured_peak(model: DataParallel) -> float | None:
    param = next((param for param in model.module.parameters() if param.is_floating_point()), None)
    return peak_flops(model.world.device, param.dtype) if param is not None else None


def _open_probes(world: World, mail: Mail | None) -> Probes | None:
    """Where workers are on several hosts and can find one another."""
    reached = meeting_point(world.peers.store)
    if mail is None or reached is None or world.peers.are_on_one_host:
        return None
    names = "\n".join(peer.format() for peer in world.peers.all)
    token = int.from_bytes(hashlib.sha256(names.encode()).digest()[:8], "big")
    try:
        probes = Probes(world.rank, world.size, reached, token, mail.address)
    except OSError:
        return None  # Not a network to be probed; who is slow by it cannot be said then.
    mail.announce(probes.address)
    probes.start()
    return probes
