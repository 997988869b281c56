"""Who is shown the steps of a run as they are settled: the terminal, and TensorBoard if asked for."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from lockstep.watching.progress import Progress
from lockstep.watching.tensorboard import TensorBoard


@dataclass(frozen=True, slots=True)
class Viewer:
    """One of them."""

    show: Callable[[Mapping[str, Any]], None]
    """Takes a line of steps.jsonl; called in worker 0's background thread."""
    close: Callable[[], None]


def opened(*, progress: bool, tensorboard: str | PathLike[str] | None) -> list[Viewer]:
    """Those that were asked for."""
    found = []
    if progress:
        line = Progress(sys.stderr)
        found.append(Viewer(line.show, line.close))
    if tensorboard is not None:
        board = TensorBoard(str(tensorboard))
        found.append(Viewer(board.write, board.close))
    return found
