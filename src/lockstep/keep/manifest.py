"""The table of contents of a checkpoint: `manifest.json`, written by worker 0 when all parts are on disk.

It is made to be read by people and by other tools: which file has which elements of which tensor, and the tree. Its
first field is the checksum of all lines after it. What a worker reports of its part is one such table for its file.
"""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import torch

from lockstep import __version__, files
from lockstep.errors import CheckpointError
from lockstep.keep import json_tree, tensor_file

NAME = "manifest.json"
FORMAT = "lockstep checkpoint"
VERSION = 1
MAX_BYTES = 100_000_000
"""Of a manifest that is written or read: a stranger's must not fill up memory. A tensor takes about 200 bytes."""

MAX_DIMS = 64
"""Of a tensor; torch knows no more."""

FIRST_FIELD = re.compile(rb'\{\n  "crc32": "([0-9a-f]{8})",\n')
FILE_NAME = re.compile(r"[\w.-]+\.safetensors")
"""Plain names only: a manifest from elsewhere must not make us read other folders."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in tensor_file.NAMES}


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the checkpoint."""

    num_bytes: int
    crc32: int

    def to_json(self) -> dict[str, Any]:
        """What a manifest has under the file's name."""
        return {"bytes": self.num_bytes, "crc32": f"{self.crc32:08x}"}


@dataclass(frozen=True, slots=True)
class PiecePlace:
    """Where a run of elements lies."""

    file: str
    key: str
    """Name of the one-dimensional tensor in that file."""
    begin: int
    """Number of its first element in the flattened whole."""
    numel: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What a checkpoint holds under one name, and where its elements lie, in order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    places: tuple[PiecePlace, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """What a manifest has under the tensor's name."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"shape": list(self.shape), "dtype": dtype, "pieces": [asdict(place) for place in self.places]}

    def check_cover(self, name: str) -> None:
        """Raise CheckpointError unless every element of the tensor has exactly one place."""
        end, last = 0, "the beginning"
        for place in (*self.places, PiecePlace("the end", "", self.numel, 0)):
            if place.begin != end:
                kind = "are missing" if place.begin > end else "are there twice"
                between = f"{min(end, place.begin)} to {max(end, place.begin)}"
                raise CheckpointError(
                    f"the pieces do not make the tensor {name!r} of shape {tuple(self.shape)}: elements {between} "
                    f"{kind} (between {last} and {place.file}). Every element must be in the pieces of exactly one "
                    "worker."
                )
            end, last = place.begin + place.numel, place.file


@dataclass(frozen=True, slots=True)
class PartReport:
    """What a worker tells worker 0 when its part is on disk, or cannot be."""

    rank: int
    failure: str = ""
    """Why there is no part; empty if there is one."""
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON holds it, its tables as in a manifest."""
        parts = {name: entry.to_json() for name, entry in self.files.items()}
        tensors = {name: entry.to_json() for name, entry in self.tensors.items()}
        return {"rank": self.rank, "failure": self.failure, "files": parts, "tensors": tensors}

    @staticmethod
    def from_json(plain: dict[str, Any]) -> "PartReport":
        """The report that `to_json` was given."""
        return PartReport(plain["rank"], plain["failure"], *_parse_tables(plain))


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest says."""

    step: int
    world_size: int
    """How many workers wrote it; any number can read it."""
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    tree: Any


def assemble(reports: Sequence[PartReport], step: int, plain_tree: Any) -> str:
    """The manifest's text for the parts of all workers. Raises CheckpointError naming a tensor they do not cover."""
    tensors = _joined(reports)
    for name, entry in tensors.items():
        entry.check_cover(name)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "world_size": len(reports),
        "lockstep": __version__,
        "torch": torch.__version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    fields = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    fields.append(f'  "files": {_table({name: row for report in reports for name, row in report.files.items()})}')
    fields.append(f'  "tensors": {_table(tensors)}')
    fields.append('  "tree": ' + json.dumps(plain_tree, indent=2).replace("\n", "\n  "))
    body = ",\n".join(fields) + "\n}\n"
    if len(body) > MAX_BYTES:
        raise CheckpointError(
            f"the manifest would have {len(body)} characters, and {MAX_BYTES} bytes can be read: `extra`, or the tree, "
            "is too large for a table of contents. Give large content as tensors."
        )
    return f'{{\n  "crc32": "{zlib.crc32(body.encode()):08x}",\n{body}'


def _joined(reports: Sequence[PartReport]) -> dict[str, TensorEntry]:
    """The tensors of all parts by name, their places in order."""
    found: dict[str, TensorEntry] = {}
    for report in reports:
        for name, mine in report.tensors.items():
            known = found.setdefault(name, replace(mine, places=()))
            if (known.shape, known.dtype) != (mine.shape, mine.dtype):
                raise CheckpointError(
                    f"the pieces do not make the tensor {name!r}: {' '.join(report.files)} has one of {mine.dtype} "
                    f"{list(mine.shape)}, another file one of {known.dtype} {list(known.shape)}."
                )
            places = sorted((*known.places, *mine.places), key=lambda place: place.begin)
            found[name] = replace(known, places=tuple(places))
    return found


def _table(rows: Mapping[str, FileEntry] | Mapping[str, TensorEntry]) -> str:
    """A JSON object with one line per row: short enough to look at, and to compare with diff."""
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row.to_json())}" for name, row in rows.items())
    return f"{{\n{lines}\n  }}" if rows else "{}"


def read(folder: Path, *, verify: bool = True) -> Manifest:
    """The manifest of the checkpoint in `folder`. Raises CheckpointError if it is missing, damaged or foreign."""
    path = folder / NAME
    try:
        content = files.read_bounded(path, MAX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. {folder} is no whole checkpoint.") from error
    first = FIRST_FIELD.match(content)
    if verify and first is not None and zlib.crc32(content[first.end() :]) != int(first[1], 16):
        raise CheckpointError(
            f"{path} is damaged: its text does not have the checksum in its first field. If it was edited on purpose, "
            "open it with verify=False."
        )
    try:
        plain = json.loads(content.decode())
        if first is None or plain["format"] != FORMAT:
            raise ValueError("it does not say that it is one")
        if plain["version"] > VERSION:
            raise CheckpointError(f"{path} has format version {plain['version']}, and this Lockstep knows {VERSION}.")
        parts, tensors = _parse_tables(plain)
        _check_tables(parts, tensors)
        return Manifest(
            _count(plain["step"]), _count(plain["world_size"]), parts, tensors, json_tree.decode(plain["tree"])
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged or not the manifest of a Lockstep checkpoint: {type(error).__name__}: {error}"
        ) from error


def _parse_tables(plain: Any) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
    parts = {name: FileEntry(_count(row["bytes"]), int(row["crc32"], 16)) for name, row in plain["files"].items()}
    return parts, {name: _parse_tensor(row) for name, row in plain["tensors"].items()}


def _parse_tensor(row: Any) -> TensorEntry:
    if len(row["shape"]) > MAX_DIMS:
        raise ValueError(f"a tensor has {len(row['shape'])} dimensions")
    places = (PiecePlace(p["file"], str(p["key"]), _count(p["begin"]), _count(p["numel"])) for p in row["pieces"])
    return TensorEntry(tuple(_count(length) for length in row["shape"]), DTYPES[row["dtype"]], tuple(places))


def _check_tables(parts: Mapping[str, FileEntry], tensors: Mapping[str, TensorEntry]) -> None:
    """Raise unless files and tensors belong together, and no file is larger than what is said to be in it.

    A larger one would be read for its checksum, however large.
    """
    for name in parts:
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a checkpoint's file")
    room = dict.fromkeys(parts, tensor_file.MAX_HEADER_BYTES + 8)
    for name, entry in tensors.items():
        entry.check_cover(name)
        for place in entry.places:
            if place.file not in parts:
                raise ValueError(f"{place.file!r} is not in its list of files")
            room[place.file] += place.numel * entry.dtype.itemsize
    for name, part in parts.items():
        if part.num_bytes > room[name]:
            raise ValueError(f"{name!r} has {part.num_bytes} bytes, and its tensors and header at most {room[name]}")


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(f"{number!r} is no number of anything")
    return number
