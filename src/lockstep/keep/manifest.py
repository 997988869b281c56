"""The table of contents of a checkpoint: `manifest.json`, written by worker 0 when all parts are on disk.

It is made to be read by people and by other tools: which file has which elements of which tensor, and the tree. Its
first field is the checksum of all lines after it.
"""

import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import torch

from lockstep import __version__
from lockstep.errors import CheckpointError
from lockstep.keep import safetensors, tree
from lockstep.keep.part import Report

NAME = "manifest.json"
FORMAT = "lockstep checkpoint"
VERSION = 1
FIRST_FIELD = re.compile(rb'\{\n  "crc32": "([0-9a-f]{8})",\n')
FILE_NAME = re.compile(r"[\w.-]+\.safetensors")
"""Plain names only: a manifest from elsewhere must not make us read other folders."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in safetensors.NAMES}


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the checkpoint."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run of elements lies."""

    file: str
    key: str
    """Name of the one-dimensional tensor in that file."""
    begin: int
    """Number of its first element in the flattened whole."""
    numel: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor and where its elements lie, in order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest says."""

    step: int
    world_size: int
    """How many workers wrote it; any number can read it."""
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    tree: Any


def assemble(reports: Sequence[Report], step: int, plain_tree: Any) -> str:
    """The manifest's text for the parts of all workers. Raises CheckpointError naming a tensor they do not cover."""
    files = {report.file: {"bytes": report.num_bytes, "crc32": f"{report.crc32:08x}"} for report in reports}
    tensors = {}
    for name, entry in _tensors(reports).items():
        check_cover(name, entry)
        tensors[name] = {
            "shape": entry.shape,
            "dtype": str(entry.dtype).removeprefix("torch."),
            "pieces": [asdict(place) for place in entry.places],
        }
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
    fields += [f'  "files": {_table(files)}', f'  "tensors": {_table(tensors)}']
    fields.append('  "tree": ' + json.dumps(plain_tree, indent=2).replace("\n", "\n  "))
    body = ",\n".join(fields) + "\n}\n"
    return f'{{\n  "crc32": "{zlib.crc32(body.encode()):08x}",\n{body}'


def check_cover(name: str, entry: TensorEntry) -> None:
    """Raise CheckpointError unless every element of the tensor has exactly one place."""
    end, last = 0, "the beginning"
    for place in (*entry.places, Place("the end", "", prod(entry.shape), 0)):
        if place.begin != end:
            kind = "are missing" if place.begin > end else "are there twice"
            between = f"{min(end, place.begin)} to {max(end, place.begin)}"
            raise CheckpointError(
                f"the pieces do not make the tensor {name!r} of shape {tuple(entry.shape)}: elements {between} {kind} "
                f"(between {last} and {place.file}). Every element must be in the pieces of exactly one worker."
            )
        end, last = place.begin + place.numel, place.file


def read(folder: Path, *, verify: bool = True) -> Manifest:
    """The manifest of the checkpoint in `folder`. Raises CheckpointError if it is missing, damaged or foreign."""
    path = folder / NAME
    try:
        content = path.read_bytes()
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
        return _parse(plain)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged or not the manifest of a Lockstep checkpoint: {type(error).__name__}: {error}"
        ) from error


def _tensors(reports: Iterable[Report]) -> dict[str, TensorEntry]:
    """The tensors of all parts by name, their pieces in order; those without elements are left out."""
    found: dict[str, TensorEntry] = {}
    for report in reports:
        for row in report.rows:
            entry = found.setdefault(row.tensor, TensorEntry(row.shape, DTYPES[row.dtype], ()))
            if (entry.shape, entry.dtype) != (row.shape, DTYPES[row.dtype]):
                raise CheckpointError(
                    f"the pieces do not make the tensor {row.tensor!r}: {report.file} has one of {row.dtype} "
                    f"{list(row.shape)}, another file one of {entry.dtype} {list(entry.shape)}."
                )
            if row.numel:
                place = Place(report.file, row.key, row.begin, row.numel)
                found[row.tensor] = TensorEntry(entry.shape, entry.dtype, (*entry.places, place))
    return {name: _in_order(entry) for name, entry in found.items()}


def _in_order(entry: TensorEntry) -> TensorEntry:
    places = sorted(entry.places, key=lambda place: place.begin)
    return TensorEntry(entry.shape, entry.dtype, tuple(places))


def _table(rows: Mapping[str, Any]) -> str:
    """A JSON object with one line per row: short enough to look at, and to compare with diff."""
    lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in rows.items())
    return f"{{\n{lines}\n  }}" if rows else "{}"


def _parse(plain: Any) -> Manifest:
    files = {name: FileEntry(_count(row["bytes"]), int(row["crc32"], 16)) for name, row in plain["files"].items()}
    for name in files:
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a checkpoint's file")
    tensors = {name: _parse_tensor(row, files) for name, row in plain["tensors"].items()}
    for name, entry in tensors.items():
        check_cover(name, entry)
    return Manifest(_count(plain["step"]), _count(plain["world_size"]), files, tensors, tree.decode(plain["tree"]))


def _parse_tensor(row: Any, files: Mapping[str, FileEntry]) -> TensorEntry:
    places = tuple(Place(p["file"], str(p["key"]), _count(p["begin"]), _count(p["numel"])) for p in row["pieces"])
    for place in places:
        if place.file not in files:
            raise ValueError(f"{place.file!r} is not in its list of files")
    return TensorEntry(tuple(_count(length) for length in row["shape"]), DTYPES[row["dtype"]], places)


def _count(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no number of anything")
    return number
