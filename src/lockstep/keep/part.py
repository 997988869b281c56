"""One worker's part of a checkpoint: its pieces in one safetensors file, and the report of it."""

import errno
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.keep import safetensors
from lockstep.keep.piece import Piece

ADVICE = {
    errno.ENOSPC: "Free some space or save elsewhere; keep_last=2 keeps only the latest two.",
    errno.EDQUOT: "Your quota is used up: free some space or save elsewhere.",
    errno.EFBIG: "The file is larger than this process may write: raise the limit (ulimit -f) or use more workers.",
    errno.EACCES: "Give this user the right to write there, or save elsewhere.",
    errno.EPERM: "Give this user the right to write there, or save elsewhere.",
    errno.EROFS: "The file system is mounted read-only: save elsewhere.",
    errno.ENOENT: "The folder must be on storage that all workers share, and stay there during the save.",
    errno.EIO: "The device reports a fault: save elsewhere and look at `dmesg`.",
}


@dataclass(frozen=True, slots=True)
class Row:
    """Where one piece lies in a worker's file."""

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name of it, such as `float32`."""
    key: str
    """Its name in the file."""
    begin: int
    numel: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker tells worker 0 when its part is on disk, or cannot be."""

    rank: int
    failure: str = ""
    """Why there is no part; empty if there is one."""
    file: str = ""
    num_bytes: int = 0
    crc32: int = 0
    rows: tuple[Row, ...] = ()

    @staticmethod
    def from_json(plain: dict[str, Any]) -> "Report":
        """The report that `dataclasses.asdict` was given, after a way through JSON."""
        rows = tuple(Row(**{**row, "shape": tuple(row["shape"])}) for row in plain["rows"])
        return Report(**{**plain, "rows": rows})


def file_name(rank: int, size: int) -> str:
    """Name of the file of worker `rank` of `size`."""
    return f"worker-{rank:05d}-of-{size:05d}.safetensors"


def rows(pieces: Sequence[Piece]) -> tuple[Row, ...]:
    """The places of `pieces` in their worker's file. Raises UsageError for what cannot be written.

    A tensor of which a worker has one piece keeps its name there; with several, their offsets are added to it.
    """
    held = Counter(piece.name for piece in pieces)
    found = []
    for piece in pieces:
        piece.check()
        safetensors.check_dtype(piece.name, piece.flat.dtype)
        key = piece.name if held[piece.name] == 1 else f"{piece.name}@{piece.begin}"
        dtype = str(piece.flat.dtype).removeprefix("torch.")
        found.append(Row(piece.name, tuple(piece.shape), dtype, key, piece.begin, piece.flat.numel()))
    repeated = [key for key, count in Counter(row.key for row in found).items() if count > 1]
    if repeated:
        raise UsageError(f"this worker has two pieces that would both be called {repeated[0]!r}: give each once.")
    return tuple(found)


def write(folder: Path, rank: int, size: int, step: int, pieces: Sequence[Piece]) -> Report:
    """Write this worker's file into `folder`. Never raises: a failure is part of the report, and leaves no file."""
    path = folder / file_name(rank, size)
    try:
        table = rows(pieces)
        tensors = {row.key: piece.flat for row, piece in zip(table, pieces, strict=True)}
        metadata = {"format": "pt", "lockstep": "part of a checkpoint: see manifest.json", "step": str(step)}
        written = safetensors.write(path, tensors, metadata)
    except Exception as error:
        # The file goes first: on a full disk it makes the room that the report needs.
        remove(path)
        return Report(rank, failure=describe(error, rank, path))
    return Report(rank, "", path.name, written.num_bytes, written.crc32, table)


def remove(path: Path) -> None:
    """Delete a file of ours if it is there and can be deleted."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def describe(error: Exception, rank: int, path: Path) -> str:
    """What went wrong when worker `rank` wrote `path`, and what to do."""
    if isinstance(error, OSError) and error.errno is not None:
        advice = ADVICE.get(error.errno, "")
        return f"worker {rank} could not write {error.filename or path}: {error.strerror}. {advice}".rstrip()
    return f"worker {rank} could not write {path}: {type(error).__name__}: {error}"
