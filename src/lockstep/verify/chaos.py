"""`lockstep verify --chaos`: does a training with `lockstep.Trainer` end in the same bits, undisturbed and under kills?

The script runs twice as under `lockstep run --elastic`, each worker with a recorder beside it, the second half of this
file. The first run says how many steps there are. Then the kills are drawn: after which step, which rank, and how far
into the next; there the worker kills itself, from a thread that knows nothing of what the training does at that moment.
The next kill waits for the replacement to be let in.

If the two end differently, the undisturbed run is made once more: a script may not even repeat its own bits.
"""

import contextlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.start import command
from lockstep.start.elastic import DEFAULT_RESTARTS, Elastic
from lockstep.verify.session import VerifiedScript

RUN = "{run}"
"""Stands in the script's arguments for a word that is another one in each run."""
_KILLS = "kills.json"
_REPLACED_WITHIN_S = 120.0
"""How long the training waits for the replacement of a killed worker before it goes on without."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One that is to happen."""

    step: int
    """It comes once so many steps have been made."""
    rank: int
    """The worker's, by then."""
    part: float
    """How far into the next step, in lengths of the last one."""


@dataclass(frozen=True, slots=True)
class ChaosRun:
    """What was recorded of one run."""

    final: dict[str, str]
    """A hash of each tensor of the model and of its optimizer at the end, by name."""
    steps: dict[int, dict[str, str]]
    """Of each parameter and buffer after each step, where workers have them whole; and of the loss."""
    kills: list[tuple[int, int, int]]
    """Step, rank and process id of each worker that was killed."""


@dataclass(frozen=True, slots=True)
class ChaosVerdict:
    """Whether the training ends in the same bits."""

    quiet: ChaosRun
    storm: ChaosRun
    again: ChaosRun | None = None
    """The undisturbed run once more, where the two differ."""

    @property
    def is_same(self) -> bool:
        """Whether all tensors have the same bits at the end."""
        return self.quiet.final == self.storm.final


def verify(script: VerifiedScript, kills: int, seed: int, announce: Callable[[str], None]) -> ChaosVerdict:
    """Run, kill, compare. Raises WorkerFailed if the script fails, UsageError if it makes no steps of a Trainer."""
    command.python_command(script.path, script.args, as_module=script.as_module)  # Refuses one that is not there.
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as folder:
        announce(f"running on {script.workers} workers, undisturbed")
        quiet = _run(script, Path(folder, "undisturbed"), [])
        drawn = draw(kills, max(quiet.steps), script.workers, seed)
        announce(f"running on {script.workers} workers, {len(drawn)} of which are killed on the way")
        storm = _run(script, Path(folder, "killed"), drawn)
        verdict = ChaosVerdict(quiet, storm)
        if verdict.is_same:
            return verdict
        announce("once more undisturbed: does the script repeat its own bits?")
        return ChaosVerdict(quiet, storm, _run(script, Path(folder, "again"), []))


def draw(count: int, num_steps: int, workers: int, seed: int) -> list[Kill]:
    """At most `count` kills in a training of `num_steps` steps, with a step between any two and some after the last."""
    chance = random.Random(seed)
    places = range(1, max(1, num_steps - 2) // 2)
    chosen = sorted(chance.sample(places, min(count, len(places))))
    return [Kill(2 * place, chance.randrange(workers), chance.uniform(0.0, 1.2)) for place in chosen]


def _run(script: VerifiedScript, folder: Path, kills: list[Kill]) -> ChaosRun:
    folder.mkdir()
    (folder / _KILLS).write_text(json.dumps([asdict(kill) for kill in kills]))
    elastic = Elastic(max_restarts=len(kills) + DEFAULT_RESTARTS)
    args = [word.replace(RUN, folder.name) for word in script.args]
    script.run(script.workers, folder, 0, args, "--chaos", elastic=elastic)
    found = _read(folder)
    if not found.steps or not found.final:
        raise UsageError(
            f"{script.path} did not come to its end with a step of a lockstep.Trainer. Only that can go on without "
            "a worker. Give the script the arguments with which it trains."
        )
    if min(found.steps) > 1:
        raise UsageError(
            f"the run {folder.name!r} began after step {min(found.steps) - 1}: it has loaded a checkpoint, that of "
            f"the run before it perhaps. Write {RUN} into the script's arguments where each run is to have a folder "
            f"of its own: --out /tmp/try-{RUN}"
        )
    return found


def _read(folder: Path) -> ChaosRun:
    steps: dict[int, dict[str, str]] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / "steps.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # Its writer was killed.
                step, hashes = json.loads(line)
                steps.setdefault(int(step), hashes)
    kills = [tuple(json.loads(path.read_text())) for path in sorted(folder.glob("killed-*"))]
    final = folder / "final.json"
    return ChaosRun(json.loads(final.read_text()) if final.exists() else {}, steps, kills)


# In the workers


class Recorder:
    """Beside the training of one worker: notes what it comes to, and kills it where that is its turn."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kills = [Kill(**each) for each in json.loads((folder / _KILLS).read_text())]
        self.trainers: list[Any] = []
        self._most = 0
        """The most workers that there have been."""
        self._step_s = 0.0
        self._has_ended = False

    def install(self) -> None:
        """From now on, every trainer is recorded."""
        from lockstep.train.trainer import Trainer

        recorder, make, step = self, Trainer.__init__, Trainer.step

        def recorded_init(trainer: Trainer, *args: Any, **options: Any) -> None:
            make(trainer, *args, **options)
            if not recorder.trainers:
                trainer.world.on_leave.append(lambda: recorder.end(trainer.world))
            recorder.trainers.append(trainer)

        def recorded_step(trainer: Trainer, batch: Any) -> Any:
            recorder.before_step(trainer)
            begun = time.monotonic()
            result = step(trainer, batch)
            recorder._step_s = time.monotonic() - begun
            recorder.after_step(trainer, result)
            return result

        Trainer.__init__ = recorded_init  # type: ignore[method-assign, assignment]
        Trainer.step = recorded_step  # type: ignore[method-assign, assignment]

    def before_step(self, trainer: Any) -> None:
        """Wait until a killed worker has been replaced; then see whether it is this one's turn."""
        world = trainer.world
        give_up = time.monotonic() + _REPLACED_WITHIN_S
        while world.size < self._most and not world.generations.is_called and time.monotonic() < give_up:
            time.sleep(0.01)
        self._most = max(self._most, world.size)
        number = len(list(self.folder.glob("killed-*")))
        if world.size < self._most or number >= len(self.kills):
            return
        kill = self.kills[number]
        if trainer.steps >= kill.step and world.rank == kill.rank:
            moment = threading.Timer(kill.part * self._step_s, self._kill, (number, trainer, kill))
            moment.daemon = True
            moment.start()

    def _kill(self, number: int, trainer: Any, kill: Kill) -> None:
        note = self.folder / f"killed-{number:03}"
        with contextlib.suppress(FileExistsError), note.open("x") as file:
            file.write(json.dumps([trainer.steps + 1, kill.rank, os.getpid()]))
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, trainer: Any, result: Any) -> None:
        """Note what the step came to."""
        if not trainer.world.is_main or trainer is not self.trainers[0]:
            return
        hashes = {"the loss": float(result.loss).hex()}
        if not any(param.is_meta or not param.numel() for param in trainer.module.parameters()):
            hashes |= hashes_of(dict([*trainer.module.named_parameters(), *trainer.module.named_buffers()]))
        with (self.folder / "steps.jsonl").open("ab", buffering=0) as file:  # Whole: no other worker's comes between.
            file.write(json.dumps([result.step, hashes]).encode() + b"\n")

    def save(self, _folder: Path) -> None:
        """The script has ended well: not at exit, where a worker that loses another can open no group."""
        if self.trainers:
            self.end(self.trainers[0].world)

    def end(self, world: Any) -> None:
        """The script is over: note the tensors of every trainer. All workers that are there come to this."""
        from lockstep.comm.notices import RAISED, farewell

        if self._has_ended or world.is_waiting or farewell().startswith(RAISED):
            return
        self._has_ended = True
        final: dict[str, str] = {}
        for number, trainer in enumerate(self.trainers):
            mark = f"trainer {number}: " if number else ""
            final |= {mark + name: each for name, each in hashes_of(trainer.state_dict()["tensors"]).items()}
        if world.rank == 0:
            part = self.folder / "final.json.part"
            part.write_text(json.dumps(final))
            part.rename(self.folder / "final.json")


def hashes_of(tensors: Mapping[str, Any]) -> dict[str, str]:
    """What stands for all bits of each tensor, its shape and its dtype."""
    from lockstep.replica.fingerprint import fingerprints

    numbers = zip(tensors.items(), fingerprints(list(tensors.values())), strict=True)
    return {name: f"{number:x} {tuple(tensor.shape)} {tensor.dtype}" for (name, tensor), number in numbers}
