"""A safetensors file: named tensors in a format that every tool can read and that cannot run code.

    8 bytes   length of the header, little-endian
    header    JSON: {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
    data      the tensors' bytes, little-endian, in row-major order, without holes

Headers are read, and held against the file, by the `safetensors` library. Data passes here, chunk by chunk: the library
writes only what lies in host memory as a whole, and to read a part it maps the file, which ends the process if the file
is cut or its disk fails meanwhile (docs/decisions.md).
"""

import errno
import itertools
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lockstep import files
from lockstep.errors import CheckpointError, UsageError

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""The format's names of dtypes whose elements are whole bytes."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
"""The library refuses longer headers, so as not to be filled up by a hostile file."""

STAGING_BYTES = 16 << 20
"""A tensor on a device passes through host memory in steps of this size."""

CHUNK_BYTES = 1 << 20
"""Checksum and write take turns on chunks that stay in the processor's cache in between."""

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
class Spec:
    """What a header says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0
    """Where its bytes begin in the file; not used in writing."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """What its elements take."""
        return self.numel * self.dtype.itemsize


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise UsageError if the format has no name for `dtype`."""
    if dtype not in NAMES:
        advice = "Give torch.view_as_real of it" if dtype.is_complex else "Convert it, or give a view as torch.uint8"
        raise UsageError(f"{name!r} is {dtype}, which safetensors files cannot hold. {advice}.")


def write(
    path: Path, specs: Mapping[str, Spec], read: Callable[[str], Iterable[Tensor]], metadata: Mapping[str, str]
) -> tuple[int, int]:
    """Write a new file and wait until it is on disk; returns its number of bytes and its CRC-32.

    Tensors are fetched when their turn comes, and no second copy of them is made: `read(name)` gives the parts of one,
    on any device. Raises OSError if the file cannot be written, and leaves what there is of it to the caller.
    """
    # Large elements first, so that every tensor is aligned to its element size for readers that map the file.
    order = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
    specs = {name: specs[name] for name in order}
    header = memoryview(_header(specs, metadata))
    crc32, num_bytes = 0, 0
    with path.open("xb", buffering=0) as file:
        for chunk in itertools.chain([header], _chunks(specs, read)):
            crc32 = zlib.crc32(chunk, crc32)
            num_bytes += len(chunk)
            while chunk:
                chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return num_bytes, crc32


def _chunks(specs: Mapping[str, Spec], read: Callable[[str], Iterable[Tensor]]) -> Iterator[memoryview]:
    for name, spec in specs.items():
        left = spec.num_bytes
        for tensor in read(name):
            flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
            assert flat.dtype == spec.dtype
            for staged in flat.split(STAGING_BYTES // flat.dtype.itemsize) if flat.numel() else ():
                memory = _bytes_of(staged.cpu().contiguous())
                left -= len(memory)
                yield from (memory[at : at + CHUNK_BYTES] for at in range(0, len(memory), CHUNK_BYTES))
        assert not left, f"{name}: {left} bytes are missing"


def _header(specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> bytes:
    assert sys.byteorder == "little", "safetensors files are little-endian"
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
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


class TensorFile:
    """A file opened for reading: its header is read and checked at once, its tensors when asked for.

    Raises CheckpointError naming the file if it is missing, truncated or not of this format. The file stays open,
    and so readable even if its name is deleted, until `close`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = files.open_regular(path, buffering=0)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}.") from error
        try:
            self.num_bytes = os.fstat(self._file.fileno()).st_size
            self.tensors: dict[str, Spec] = self._read_header()
            """What the file holds, by name."""
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> dict[str, Spec]:
        from safetensors import SafetensorError, safe_open  # Only needed where checkpoints are read.

        try:
            # By the open file, not by its name, which may be a link by now; by reads, not by a map of the file.
            opened = safe_open(f"/proc/self/fd/{self._file.fileno()}", "pt", backend="pread")
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            specs = {name: Spec(DTYPES[each.get_dtype()], tuple(each.get_shape())) for name, each in slices.items()}
        except SafetensorError as error:
            raise self._damage(f"it is no whole safetensors file ({error})") from error
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}.") from error
        except KeyError as error:
            raise self._damage(f"its elements of {error} are no whole bytes") from error
        # The library has seen to it that the tensors lie one behind the other, up to the end of the file.
        offset = self.num_bytes - sum(spec.num_bytes for spec in specs.values())
        tensors = {}
        for name, spec in specs.items():
            tensors[name] = Spec(spec.dtype, spec.shape, offset)
            offset += spec.num_bytes
        return tensors

    def read(self, name: str, begin: int, end: int, out: Tensor) -> None:
        """Set `out` (contiguous, on the CPU) to elements `begin` to `end` of the flattened tensor `name`."""
        spec = self.tensors[name]
        assert 0 <= begin <= end <= spec.numel and out.numel() == end - begin
        assert out.dtype == spec.dtype and out.is_contiguous()
        self._fill(_bytes_of(out), spec.offset + begin * spec.dtype.itemsize)

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

    def _fill(self, buffer: memoryview, begin: int) -> None:
        while buffer:
            try:
                count = os.preadv(self._file.fileno(), [buffer], begin)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read at byte {begin}: {error.strerror}.") from error
            if not count:
                raise self._damage(f"it ends at byte {begin}, {len(buffer)} bytes too early")
            buffer, begin = buffer[count:], begin + count

    def _damage(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or of another kind: {what}.")


def _bytes_of(flat: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    memory: Any = flat.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(memory) if flat.numel() else memoryview(b"")


def remove(path: Path) -> None:
    """Delete a file of ours if it is there and can be deleted."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def describe(error: Exception, path: Path) -> str:
    """What went wrong when `path` was written, and what to do: "could not write ..."."""
    if isinstance(error, OSError) and error.errno is not None:
        advice = ADVICE.get(error.errno, "")
        return f"could not write {error.filename or path}: {error.strerror}. {advice}".rstrip()
    return f"could not write {path}: {type(error).__name__}: {error}"
