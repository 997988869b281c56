"""Reading a checkpoint: any elements of any tensor, whoever wrote them, on any number of workers."""

import warnings
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import CheckpointError, UsageError
from lockstep.keep import manifest, shelf
from lockstep.keep.manifest import Place
from lockstep.keep.safetensors import SafetensorsFile


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a checkpoint holds under one name."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class Checkpoint:
    """An open checkpoint; also a context manager that closes it. Made by `open_checkpoint`.

    Files are opened, and their checksums verified, when something in them is first asked for. Raises CheckpointError
    naming the file that is missing or damaged. Not for several threads at once.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path = path
        self._manifest = manifest.read(path, verify=verify)
        self._verify = verify
        self._files: dict[str, SafetensorsFile] = {}
        self._check_sizes()
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(entry.shape, entry.dtype) for name, entry in self._manifest.tensors.items()
        }
        """Shape and dtype of every tensor, by name."""

    @property
    def step(self) -> int:
        """The step whose state this is."""
        return self._manifest.step

    @property
    def tree(self) -> Any:
        """What was saved beside tensors."""
        return self._manifest.tree

    @property
    def world_size(self) -> int:
        """How many workers wrote it."""
        return self._manifest.world_size

    def read(self, name: str, begin: int, end: int, out: Tensor | None = None) -> Tensor:
        """Elements `begin` to `end` of the flattened tensor `name`, from whatever files hold them.

        out: a one-dimensional tensor of this length and dtype to read into, on any device; a new one if not given.
        """
        info = self._info(name)
        if not 0 <= begin <= end <= info.numel:
            raise UsageError(
                f"{name!r} has {info.numel} elements in {self.path}; elements {begin} to {end} do not exist."
            )
        if out is not None and (out.dtype != info.dtype or out.shape != (end - begin,)):
            raise UsageError(
                f"read({name!r}, {begin}, {end}) needs out= of {info.dtype} and shape ({end - begin},), not "
                f"{out.dtype} {tuple(out.shape)}."
            )
        direct = out is not None and out.device.type == "cpu" and out.is_contiguous()
        flat = out.detach() if out is not None and direct else torch.empty(end - begin, dtype=info.dtype)
        self._fill(flat, name, begin, end)
        if out is None or direct:
            return flat if out is None else out
        out.detach().copy_(flat)
        return out

    def read_whole(self, name: str) -> Tensor:
        """The tensor `name` in its shape."""
        info = self._info(name)
        return self.read(name, 0, info.numel).reshape(info.shape)

    def verify(self) -> None:
        """Read every file and compare checksums now, also those that nothing has been asked of yet."""
        for name in self._manifest.files:
            self._check(name, self._files.get(name) or self._open(name))

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, step={self.step}, tensors={len(self.tensors)})"

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise UsageError(f"{self.path} has no tensor {name!r}; it has {_some(self.tensors)}.")
        return self.tensors[name]

    def _fill(self, flat: Tensor, name: str, begin: int, end: int) -> None:
        places = self._manifest.tensors[name].places
        first = bisect_right(places, begin, key=lambda place: place.begin) - 1
        for place in places[max(0, first) :]:
            start, stop = max(begin, place.begin), min(end, place.begin + place.numel)
            if start >= stop:
                break
            file = self._file_of(place, self.tensors[name].dtype)
            file.read(place.key, start - place.begin, stop - place.begin, out=flat[start - begin : stop - begin])

    def _file_of(self, place: Place, dtype: torch.dtype) -> SafetensorsFile:
        file = self._files.get(place.file)
        if file is None:
            file = self._open(place.file)
            if self._verify:
                self._check(place.file, file)
        spec = file.tensors.get(place.key)
        if spec is None or spec.dtype != dtype or spec.numel != place.numel:
            raise CheckpointError(
                f"{file.path} does not hold what {manifest.NAME} says: {place.numel} elements of {dtype} under the "
                f"name {place.key!r}. One of the two belongs to another checkpoint."
            )
        return file

    def _open(self, name: str) -> SafetensorsFile:
        file = self._files[name] = SafetensorsFile(self.path / name)
        return file

    def _check(self, name: str, file: SafetensorsFile) -> None:
        found, written = file.crc32(), self._manifest.files[name].crc32
        if found != written:
            self._files.pop(name).close()
            raise CheckpointError(
                f"{file.path} is damaged: its checksum is {found:08x} and was {written:08x} when it was written. Use "
                "an earlier checkpoint (fall_back=True), or a copy of this file."
            )

    def _check_sizes(self) -> None:
        for name, entry in self._manifest.files.items():
            path = self.path / name
            try:
                found = path.stat().st_size
            except OSError as error:
                raise CheckpointError(
                    f"{path} is part of the checkpoint and cannot be read: {error.strerror}."
                ) from error
            if found != entry.num_bytes:
                raise CheckpointError(
                    f"{path} is damaged: it has {found} bytes and was written with {entry.num_bytes}."
                )


def open_checkpoint(folder: str | PathLike[str], *, fall_back: bool = False, verify: bool = True) -> Checkpoint:
    """The checkpoint of the latest step in `folder`, or `folder` itself if it is a checkpoint.

    verify: compare the checksum of every file that is read, once. Sizes are compared always, at once.
    fall_back: if the latest is damaged, warn and take the one before. All checksums are then verified at once, since
        later it would be too late; with several workers, let one choose and the others open its `path`.

    Raises CheckpointError if there is none, or if it is damaged: the message names the file.
    """
    root = Path(folder)
    candidates = _candidates(root)
    for index, path in enumerate(candidates):
        try:
            return _opened(path, verify, at_once=fall_back)
        except CheckpointError as error:
            if not fall_back or index + 1 == len(candidates):
                raise
            warnings.warn(f"{error} Falling back to {candidates[index + 1].name}.", stacklevel=2)
    raise CheckpointError(
        f"{root} has no checkpoint: there is no folder named like {shelf.name_of(0)} in it. Give the folder that was "
        "saved to, or start anew."
    )


def _opened(path: Path, verify: bool, at_once: bool) -> Checkpoint:
    checkpoint = Checkpoint(path, verify=verify)
    try:
        if verify and at_once:
            checkpoint.verify()
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _candidates(root: Path) -> list[Path]:
    """What `root` offers, the latest first: itself if it is a checkpoint, else those in it."""
    former = root.parent / f".replaced-{root.name}"
    try:
        if shelf.STEP.fullmatch(root.name):
            return [former] if former.exists() and not root.exists() else [root]
        if (root / manifest.NAME).exists():
            return [root]
        return [one.path for one in shelf.standing(root)]
    except OSError as error:
        raise CheckpointError(f"{root} cannot be opened as a folder of checkpoints: {error.strerror}.") from error


def _some(names: Mapping[str, object]) -> str:
    first = ", ".join(repr(name) for name in list(names)[:5])
    return f"{first} and {len(names) - 5} more" if len(names) > 5 else first or "none at all"
