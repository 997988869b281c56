"""How workers hear of each other during a save beside training: by letters in the folder of the save.

A save in the training's thread uses the world's collectives. A thread beside it must not, since workers would then
launch them in different orders. It knows the same two verbs, in this order: `reports` (every worker gives its report,
worker 0 gets all of them) and `verdict` (worker 0 says whether the save succeeded, everybody hears it).

    letters/.worker-3           the worker's report before it is written; made before anything else
    letters/worker-3.report     a worker's report; the worker removes it when it has read the verdict
    letters/worker-3.28.report  the same from one that found no room to write: the number of its error
    letters/verdict             worker 0's word; when no reports are left, worker 0 clears the folder

A letter is renamed into place, so whoever sees it sees all of it.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.keep.folder import SaveFolder
from lockstep.keep.manifest import PartReport
from lockstep.keep.tensor_file import describe, remove

PATIENCE_AT_EXIT = timedelta(seconds=30)
"""Silence after which peers count as gone once this worker's script has ended: then nothing else tells of them."""

PATIENCE_WITH_WORKER_0 = timedelta(seconds=5)
"""By how much the others wait longer for worker 0 than it does for them."""

PATIENCE_AFTER_LOSS = timedelta(seconds=2)
"""The same once a worker is known to be gone."""

HEARING = timedelta(seconds=30)
"""Worker 0 keeps the letters for so long for workers that have reported and do not seem to hear the verdict."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.1


class Letters:
    """Exchange by files in the save's own folder, in a thread beside the one that trains.

    A worker is given up when nothing in the folder has changed for `patience`: no file grew, no letter came. The
    others wait for worker 0 a little longer, so that it is the one to say who is missing.
    """

    def __init__(
        self, folder: SaveFolder, rank: int, size: int, patience: timedelta, has_lost: Callable[[], bool]
    ) -> None:
        self._folder = folder
        self._rank, self._size = rank, size
        self._patience = patience if rank == 0 else patience + PATIENCE_WITH_WORKER_0
        self._has_lost = has_lost

    def reports(self, report: PartReport) -> list[PartReport]:
        """Leave this worker's report; worker 0 waits for everybody's. Raises CheckpointError naming who is silent."""
        try:
            self._leave(report)
        except OSError as error:
            # No room even for a letter: the part makes way for the bad news.
            for name in report.files:
                remove(self._folder.parts / name)
            failure = f"worker {self._rank} {describe(error, self._folder.letters)}"
            try:
                self._leave(PartReport(self._rank, failure))
            except OSError as again:
                draft = self._folder.report_draft(self._rank)
                draft.rename(self._folder.letters / f"worker-{self._rank}.{again.errno}.report")
        if self._rank:
            return [report]
        self._wait(lambda: len(self._arrived()) == self._size, self._who_is_missing)
        return [_read(rank, letter) for rank, letter in sorted(self._arrived().items())]

    def verdict(self, failure: str) -> str:
        """Post or hear the verdict. Worker 0 returns when everybody who reported has heard it, or is silent."""
        verdict = self._folder.letters / "verdict"
        if self._rank == 0:
            # Whether or not the others hear of it, this worker knows how the save ended.
            with suppress(OSError, CheckpointError):
                self._post(self._folder.verdict_draft, verdict.name, failure)
                self._take_back()
                self._wait(lambda: not self._arrived(), lambda: "", limit=HEARING)
            return failure
        self._wait(verdict.exists, lambda: "worker 0 has not said whether the checkpoint is complete")
        heard = str(json.loads(verdict.read_text()))
        self._take_back()
        return heard

    def _leave(self, report: PartReport) -> None:
        self._post(self._folder.report_draft(self._rank), f"worker-{self._rank}.report", report.to_json())

    def _take_back(self) -> None:
        for report in self._folder.letters.glob(f"worker-{self._rank}.*"):
            remove(report)

    def _post(self, draft: Path, name: str, content: Any) -> None:
        draft.write_text(json.dumps(content))
        draft.rename(self._folder.letters / name)

    def _arrived(self) -> dict[int, Path]:
        """The reports that lie here, by rank."""
        reports = self._folder.letters.glob("worker-*.report")
        return {int(path.name.removeprefix("worker-").partition(".")[0]): path for path in reports}

    def _who_is_missing(self) -> str:
        missing = [str(rank) for rank in range(self._size) if rank not in self._arrived()]
        return f"worker {', '.join(missing)} has not reported its part"

    def _wait(self, is_so: Callable[[], bool], why: Callable[[], str], limit: timedelta | None = None) -> None:
        pause_s = SHORTEST_PAUSE_S
        signs, since = self._signs_of_life(), time.monotonic()
        while not is_so():
            if not self._folder.letters.exists():
                raise CheckpointError(
                    f"worker {self._rank}: worker 0 has ended this save ({self._folder.path} is gone) before this "
                    "worker could hear how. Look at worker 0's output, and at which checkpoints are there."
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
        for folder, _, names in os.walk(self._folder.path):
            for name in names:
                with suppress(FileNotFoundError):
                    found.append((name, Path(folder, name).stat().st_size))
        return sorted(found)


def _read(rank: int, letter: Path) -> PartReport:
    number = letter.stem.partition(".")[2]
    if number:
        return PartReport(rank, f"worker {rank} {describe(OSError(int(number), os.strerror(int(number))), letter)}")
    return PartReport.from_json(json.loads(letter.read_text()))
