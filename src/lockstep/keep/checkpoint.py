"""Reading a checkpoint: any elements of any tensor, whoever wrote them, on any number of workers.

`export` writes one as a single file for other tools.
"""

import os
import secrets
import stat
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep import files
from lockstep.errors import CheckpointError, UsageError
from lockstep.keep import folder as folders
from lockstep.keep import manifest, tensor_file
from lockstep.keep.manifest import PiecePlace, TensorEntry
from lockstep.keep.tensor_file import TensorFile


class Checkpoint:
    """An open checkpoint; also a context manager that closes it. Made by `open_checkpoint`.

    Files are opened, and their checksums verified, when something in them is first asked for. Raises CheckpointError
    naming the file that is missing or damaged. Not for several threads at once.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path = path
        if path.is_symlink() and (folders.STEP.fullmatch(path.name) or folders.REPLACED.fullmatch(path.name)):
            raise CheckpointError(
                f"{path} is a link, which may lead anywhere, and no folder of a checkpoint. Give the folder that it "
                "leads to by a path of its own, or copy it here."
            )
        content = manifest.read(path, verify=verify)
        self.step = content.step
        """The step whose state this is."""
        self.tree: Any = content.tree
        """What was saved beside tensors."""
        self.world_size = content.world_size
        """How many workers wrote it."""
        self.tensors = content.tensors
        """Shape, dtype and number of elements of every tensor, by name."""
        self._written = content.files
        self._verify = verify
        self._files: dict[str, TensorFile] = {}
        self._check_sizes()

    def read(self, name: str, begin: int, end: int, out: Tensor | None = None) -> Tensor:
        """Elements `begin` to `end` of the flattened tensor `name`, from whatever files hold them.

        out: a one-dimensional tensor of this length and dtype to read into, on any device; a new one if not given.
        """
        entry = self._entry(name)
        if not 0 <= begin <= end <= entry.numel:
            raise UsageError(
                f"{name!r} has {entry.numel} elements in {self.path}; elements {begin} to {end} do not exist."
            )
        if out is not None and (out.dtype != entry.dtype or out.shape != (end - begin,)):
            raise UsageError(
                f"read({name!r}, {begin}, {end}) needs out= of {entry.dtype} and shape ({end - begin},), not "
                f"{out.dtype} {tuple(out.shape)}."
            )
        direct = out is not None and out.device.type == "cpu" and out.is_contiguous()
        flat = out.detach() if out is not None and direct else torch.empty(end - begin, dtype=entry.dtype)
        self._fill(flat, name, begin, end)
        if out is None or direct:
            return flat if out is None else out
        out.detach().copy_(flat)
        return out

    def read_whole(self, name: str) -> Tensor:
        """The tensor `name` in its shape."""
        entry = self._entry(name)
        return self.read(name, 0, entry.numel).reshape(entry.shape)

    def verify(self) -> None:
        """Read every file and compare checksums now, also those that nothing has been asked of yet."""
        for name in self._written:
            self._check(name, self._files.get(name) or self._open(name))

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, step={self.step}, tensors={len(self.tensors)})"

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.tensors:
            raise UsageError(f"{self.path} has no tensor {name!r}; it has {_some(self.tensors)}.")
        return self.tensors[name]

    def _fill(self, flat: Tensor, name: str, begin: int, end: int) -> None:
        places = self.tensors[name].places
        first = bisect_right(places, begin, key=lambda place: place.begin) - 1
        for place in places[max(0, first) :]:
            start, stop = max(begin, place.begin), min(end, place.begin + place.numel)
            if start >= stop:
                break
            file = self._file_of(place, self.tensors[name].dtype)
            file.read(place.key, start - place.begin, stop - place.begin, out=flat[start - begin : stop - begin])

    def _file_of(self, place: PiecePlace, dtype: torch.dtype) -> TensorFile:
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

    def _open(self, name: str) -> TensorFile:
        file = self._files[name] = TensorFile(self.path / name)
        return file

    def _check(self, name: str, file: TensorFile) -> None:
        found, written = file.crc32(), self._written[name].crc32
        if found != written:
            self._files.pop(name).close()
            raise CheckpointError(
                f"{file.path} is damaged: its checksum is {found:08x} and was {written:08x} when it was written. Use "
                "an earlier checkpoint (fall_back=True), or a copy of this file."
            )

    def _check_sizes(self) -> None:
        for name, entry in self._written.items():
            path = self.path / name
            try:
                held = path.lstat()
                if not stat.S_ISREG(held.st_mode):
                    raise files.not_regular(path)
            except OSError as error:
                raise CheckpointError(
                    f"{path} is part of the checkpoint and cannot be read: {error.strerror}."
                ) from error
            if held.st_size != entry.num_bytes:
                raise CheckpointError(
                    f"{path} is damaged: it has {held.st_size} bytes and was written with {entry.num_bytes}."
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
        f"{root} has no checkpoint: there is no folder named like {folders.name_of(0)} in it. Give the folder that was "
        "saved to, or start anew."
    )


def has_checkpoint(folder: str | PathLike[str]) -> bool:
    """Whether there is one for `open_checkpoint`, be it damaged. Raises CheckpointError if that cannot be told."""
    try:
        return any(path.exists() for path in _candidates(Path(folder)))
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return False
        raise


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
        if folders.STEP.fullmatch(root.name):
            return [former] if former.exists() and not root.exists() else [root]
        if (root / manifest.NAME).exists():
            return [root]
        return list(folders.checkpoints(root).values())
    except OSError as error:
        raise CheckpointError(f"{root} cannot be opened as a folder of checkpoints: {error.strerror}.") from error


def _some(names: Mapping[str, object]) -> str:
    first = ", ".join(repr(name) for name in list(names)[:5])
    return f"{first} and {len(names) - 5} more" if len(names) > 5 else first or "none at all"


def export(checkpoint: Checkpoint, path: str | PathLike[str], prefix: str = "") -> Path:
    """Write the tensors whose names start with `prefix`, without it, whole and in their shapes, to the file `path`.

    Called by one worker. The file appears when it is complete, in place of a former one; at no time is more than a
    part of one tensor in memory. Raises CheckpointError if the checkpoint is damaged or the file cannot be written.
    """
    target = Path(path)
    names = {name.removeprefix(prefix): name for name in checkpoint.tensors if name.startswith(prefix)}
    if not names or "" in names:
        raise UsageError(f"{checkpoint.path} has no tensors with names that start with {prefix!r} and go on.")
    entries = {short: checkpoint.tensors[name] for short, name in names.items()}
    specs = {short: tensor_file.Spec(entry.dtype, entry.shape) for short, entry in entries.items()}

    def parts(short: str) -> Iterator[Tensor]:
        length = tensor_file.STAGING_BYTES // specs[short].dtype.itemsize
        for begin in range(0, specs[short].numel, length):
            yield checkpoint.read(names[short], begin, min(begin + length, specs[short].numel))

    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        tensor_file.write(draft, specs, parts, {"format": "pt"})
        os.replace(draft, target)  # noqa: PTH105
        folders.sync(target.parent)
    except OSError as error:
        raise CheckpointError(tensor_file.describe(error, target)) from error
    finally:
        tensor_file.remove(draft)
    return target
