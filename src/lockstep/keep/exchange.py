"""How workers hear of each other during a save: by collectives, or by letters in the folder of the save.

Both know two verbs, in this order: `reports` (every worker gives its report, worker 0 gets all of them) and `verdict`
(worker 0 says whether the save succeeded, everybody hears it). Collectives are for the thread that trains. A thread
beside it must not use them, since workers would then launch them in different orders; it writes letters:

    letters/worker-3.done, worker-3.failed   a worker's report; the worker removes it when it has read the verdict
    letters/verdict                          worker 0's word; when no reports are left, worker 0 clears the folder

A letter is renamed into place, so whoever sees it sees all of it.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import CheckpointError
from lockstep.keep import part, shelf
from lockstep.keep.part import Report

PATIENCE_AT_EXIT = timedelta(seconds=30)
"""Silence after which peers count as gone once this worker's script has ended: then nothing else tells of them."""

PATIENCE_AFTER_LOSS = timedelta(seconds=2)
"""The same once a worker is known to be gone."""

HEARING = timedelta(seconds=30)
"""Worker 0 keeps the letters for so long for workers that have reported and do not seem to hear the verdict."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.1


class Workers(Protocol):
    """What a save needs of a `World`."""

    @property
    def rank(self) -> int:
        """This worker's number."""

    @property
    def size(self) -> int:
        """How many workers there are."""

    def gather(self, obj: Any) -> list[Any]:
        """Every worker's `obj`, in order of rank, on every worker."""


class Exchange(Protocol):
    """The two verbs."""

    def reports(self, report: Report) -> list[Report]:
        """All workers' reports in order of rank, on worker 0; elsewhere what this worker happens to know."""

    def verdict(self, failure: str) -> str:
        """Worker 0's `failure`, on every worker; empty if the checkpoint stands."""


class Collectives:
    """Exchange by the world's own messages, in the thread that trains."""

    def __init__(self, world: Workers) -> None:
        self._world = world

    def reports(self, report: Report) -> list[Report]:
        """Every worker's report, on every worker."""
        return self._world.gather(report)

    def verdict(self, failure: str) -> str:
        """Worker 0's `failure`, on every worker."""
        return str(self._world.gather(failure)[0])


class Letters:
    """Exchange by files in the save's own folder, in a thread beside the one that trains.

    A worker is given up when nothing in the folder has changed for `patience`: no file grew, no letter came. The
    others wait for worker 0 twice as long, so that it is the one to say who is missing.
    """

    def __init__(
        self,
        workplace: Path,
        rank: int,
        size: int,
        patience: timedelta,
        has_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self._workplace = workplace
        self._letters = shelf.letters_of(workplace)
        self._rank = rank
        self._size = size
        self._patience = patience if rank == 0 else 2 * patience
        self._has_lost = has_lost

    def reports(self, report: Report) -> list[Report]:
        """Leave this worker's report; worker 0 waits for everybody's. Raises CheckpointError naming who is silent."""
        try:
            self._leave(report)
        except OSError as error:
            # No room even for a letter: the part makes way for the bad news.
            part.remove(shelf.parts_of(self._workplace) / part.file_name(self._rank, self._size))
            self._leave(Report(self._rank, failure=part.describe(error, self._rank, self._letters)))
        if self._rank:
            return [report]
        self._wait(lambda: len(self._arrived()) == self._size, self._who_is_missing)
        letters = self._arrived()
        return [Report.from_json(json.loads(letters[rank].read_text())) for rank in range(self._size)]

    def verdict(self, failure: str) -> str:
        """Post or hear the verdict. Worker 0 returns when everybody who reported has heard it, or is silent."""
        verdict = self._letters / "verdict"
        if self._rank == 0:
            # Whether or not the others hear of it, this worker knows how the save ended.
            with suppress(OSError, CheckpointError):
                self._post("verdict", failure)
                self._take_back()
                self._wait(lambda: not self._arrived(), lambda: "", limit=HEARING)
            return failure
        self._wait(verdict.exists, lambda: "worker 0 has not said whether the checkpoint is complete")
        heard = str(json.loads(verdict.read_text()))
        self._take_back()
        return heard

    def _leave(self, report: Report) -> None:
        self._post(f"worker-{self._rank}.{'failed' if report.failure else 'done'}", asdict(report))

    def _take_back(self) -> None:
        part.remove(self._letters / f"worker-{self._rank}.done")
        part.remove(self._letters / f"worker-{self._rank}.failed")

    def _post(self, name: str, content: Any) -> None:
        draft = self._letters / f".{name}"
        draft.write_text(json.dumps(content))
        draft.rename(self._letters / name)

    def _arrived(self) -> dict[int, Path]:
        """The reports that lie here, by rank."""
        reports = (path for path in self._letters.iterdir() if path.suffix in (".done", ".failed"))
        return {int(path.stem.removeprefix("worker-")): path for path in reports if not path.name.startswith(".")}

    def _who_is_missing(self) -> str:
        missing = [str(rank) for rank in range(self._size) if rank not in self._arrived()]
        return f"worker {', '.join(missing)} has not reported its part"

    def _wait(self, is_so: Callable[[], bool], why: Callable[[], str], limit: timedelta | None = None) -> None:
        pause_s = SHORTEST_PAUSE_S
        signs, since = self._signs_of_life(), time.monotonic()
        while not is_so():
            if not self._letters.exists():
                raise CheckpointError(
                    f"worker {self._rank}: worker 0 has ended this save ({self._workplace} is gone) before this worker "
                    "could hear how. Look at worker 0's output, and at which checkpoints are there."
                )
            if (now := self._signs_of_life()) != signs:
                signs, since = now, time.monotonic()
            patience = min(limit or self._patience, self._patience)
            if not threading.main_thread().is_alive():
                patience = min(patience, PATIENCE_AT_EXIT)
            if self._has_lost():
                patience = min(patience, PATIENCE_AFTER_LOSS)
            if time.monotonic() - since > patience.total_seconds():
                raise CheckpointError(
                    f"no checkpoint: {why()}, and nothing has happened for {patience}. It may have ended, or its disk "
                    "may hang: see its output. Earlier checkpoints are as they were."
                )
            time.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 1.5)

    def _signs_of_life(self) -> list[tuple[str, int]]:
        """Names and sizes of all files of the save."""
        found = []
        for folder, _, names in os.walk(self._workplace):
            for name in names:
                try:
                    found.append((name, os.stat(os.path.join(folder, name)).st_size))  # noqa: PTH116, PTH118
                except FileNotFoundError:
                    continue
        return sorted(found)
