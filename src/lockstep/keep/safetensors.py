"""The safetensors format: named tensors in a file that every tool can read and that cannot run code.

    8 bytes   length of the header, little-endian
    header    JSON: {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
    data      the tensors' bytes, little-endian, in row-major order, without holes

Files are written in one pass, chunk by chunk, with the checksum computed on the way; they are read by range.
"""

import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lockstep.errors import CheckpointError, UsageError

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""The format's names, as its reference implementation 0.8 knows them."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
"""The reference implementation refuses longer headers, so as not to be filled up by a hostile file."""

STAGING_BYTES = 16 << 20
"""A tensor on a device passes through host memory in steps of this size."""

CHUNK_BYTES = 1 << 20
"""Checksum and write take turns on chunks that stay in the processor's cache in between."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a header says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0
    """Where its bytes begin, counted from the end of the header."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """What its elements take."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Written:
    """A file that has been written and has reached the disk."""

    num_bytes: int
    crc32: int
    """Of the whole file, header included."""


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Written:
    """Write `tensors` to a new file and wait until it is on disk. No second copy of them is made.

    Raises OSError if the file cannot be written, and leaves what there is of it to the caller.
    """
    specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return write_streamed(path, specs, lambda name: (tensors[name],), metadata)


def write_streamed(
    path: Path,
    specs: Mapping[str, Spec],
    read: Callable[[str], Iterable[Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """As `write`, with tensors that are fetched when their turn comes: `read(name)` gives the parts of one."""
    # Large elements first, so that every tensor is aligned to its element size for readers that map the file.
    order = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
    header = _header({name: specs[name] for name in order}, metadata or {})
    crc32, num_bytes = 0, 0
    with path.open("xb", buffering=0) as file:
        for chunk in _chunks(header, specs, order, read):
            crc32 = zlib.crc32(chunk, crc32)
            num_bytes += len(chunk)
            while chunk:
                chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return Written(num_bytes, crc32)


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise UsageError if the format has no name for `dtype`."""
    if dtype not in NAMES:
        advice = "Give torch.view_as_real of it" if dtype.is_complex else "Convert it, or give a view as torch.uint8"
        raise UsageError(f"{name!r} is {dtype}, which safetensors files cannot hold. {advice}.")


class SafetensorsFile:
    """A file opened for reading: its header is read and checked at once, its tensors when asked for.

    Raises CheckpointError naming the file if it is missing, truncated or not of this format. The file stays open,
    and so readable even if its name is deleted, until `close`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str]
        """The header's notes."""
        self.tensors: dict[str, Spec]
        try:
            self._file: BinaryIO = path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}.") from error
        try:
            self.num_bytes = os.fstat(self._file.fileno()).st_size
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def read(self, name: str, begin: int = 0, end: int | None = None, out: Tensor | None = None) -> Tensor:
        """Elements `begin` to `end` of the flattened tensor `name`, in `out` (contiguous, on the CPU) if given."""
        spec = self.tensors[name]
        end = spec.numel if end is None else end
        if not 0 <= begin <= end <= spec.numel:
            raise UsageError(f"{name!r} in {self.path} has {spec.numel} elements, not {begin} to {end}.")
        flat = torch.empty(end - begin, dtype=spec.dtype) if out is None else out
        assert flat.dtype == spec.dtype and flat.numel() == end - begin and flat.is_contiguous()
        self._fill(as_bytes(flat), self._data_begin + spec.offset + begin * spec.dtype.itemsize)
        return flat

    def read_whole(self, name: str) -> Tensor:
        """The tensor `name` in its shape."""
        return self.read(name).reshape(self.tensors[name].shape)

    def crc32(self) -> int:
        """The checksum of the file as it is now: reads all of it."""
        crc32, buffer = 0, memoryview(bytearray(CHUNK_BYTES))
        for begin in range(0, self.num_bytes, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, self.num_bytes - begin)]
            self._fill(chunk, begin)
            crc32 = zlib.crc32(chunk, crc32)
        return crc32

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self, buffer: memoryview, begin: int) -> None:
        while buffer:
            try:
                count = os.preadv(self._file.fileno(), [buffer], begin)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read at byte {begin}: {error.strerror}.") from error
            if not count:
                raise self._damage(f"it ends at byte {begin}, {len(buffer)} bytes too early")
            buffer, begin = buffer[count:], begin + count

    def _read_header(self) -> None:
        if self.num_bytes < 8:
            raise self._damage(f"it has {self.num_bytes} bytes, fewer than any safetensors file")
        start = bytearray(8)
        self._fill(memoryview(start), 0)
        length = int.from_bytes(start, "little")
        if length > min(self.num_bytes - 8, MAX_HEADER_BYTES):
            raise self._damage(f"its header would take {length} bytes of {self.num_bytes}")
        text = bytearray(length)
        self._fill(memoryview(text), 8)
        self._data_begin = 8 + length
        try:
            self.metadata, self.tensors = _parse(text, self.num_bytes - self._data_begin)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._damage(f"its header is not that of a safetensors file ({error})") from error

    def _damage(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or of another kind: {what}.")


def as_bytes(flat: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    memory: Any = flat.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(memory) if flat.numel() else memoryview(b"")


def _header(specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> bytes:
    assert sys.byteorder == "little", "safetensors files are little-endian"
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, spec in specs.items():
        check_dtype(name, spec.dtype)
        end = offset + spec.num_bytes
        entries[name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UsageError(f"{len(specs)} tensors make a header of {len(text)} bytes; readers accept {MAX_HEADER_BYTES}.")
    return len(text).to_bytes(8, "little") + text


def _chunks(
    header: bytes, specs: Mapping[str, Spec], order: Iterable[str], read: Callable[[str], Iterable[Tensor]]
) -> Iterator[memoryview]:
    yield memoryview(header)
    for name in order:
        left = specs[name].num_bytes
        for tensor in read(name):
            flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
            assert flat.dtype == specs[name].dtype
            for staged in flat.split(STAGING_BYTES // flat.dtype.itemsize) if flat.numel() else ():
                memory = as_bytes(staged.cpu().contiguous())
                left -= len(memory)
                yield from (memory[at : at + CHUNK_BYTES] for at in range(0, len(memory), CHUNK_BYTES))
        assert not left, f"{name}: {left} bytes are missing"


def _parse(text: bytearray, data_bytes: int) -> tuple[dict[str, str], dict[str, Spec]]:
    """Metadata and tensors of a header; ValueError and its like if it contradicts itself or the size of the file."""
    header = json.loads(text.decode(), object_pairs_hook=_without_repeats)
    metadata = header.pop("__metadata__", {})
    if not all(isinstance(word, str) for pair in metadata.items() for word in pair):
        raise ValueError("its metadata are not text")
    tensors = {name: _spec(name, entry) for name, entry in header.items()}
    end = 0
    for name, spec in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if spec.offset != end:
            raise ValueError(f"the bytes of {name!r} begin at {spec.offset}, not at {end}")
        end += spec.num_bytes
    if end != data_bytes:
        raise ValueError(f"the file has {data_bytes} bytes of data and should have {end}")
    return metadata, tensors


def _spec(name: str, entry: dict[str, Any]) -> Spec:
    begin, end = entry["data_offsets"]
    spec = Spec(DTYPES[entry["dtype"]], tuple(entry["shape"]), begin)
    if not all(type(number) is int and number >= 0 for number in (begin, end, *spec.shape)):
        raise ValueError(f"{name!r} has numbers that are no sizes")
    if end - begin != spec.num_bytes:
        raise ValueError(f"{name!r} has {end - begin} bytes and should have {spec.num_bytes}")
    return spec


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found
