"""A number that stands for all bits of a tensor.

A fingerprint is one 64-bit number made of its raw bytes in row-major order: bits count, not values, so
0.0 differs from -0.0 and a NaN equals itself. The bytes are read as 64-bit words in rows of `COLUMNS`, the last one
filled up with zeros, and the rows are added up modulo 2**64. Then the sum of each column is scrambled in a way of its
own, and the scrambled sums are added up.

That cannot miss a flipped bit. It changes its word by plus or minus 2**k with k < 64, so the sum of its column changes.
Scrambling can be undone (odd numbers have an inverse modulo 2**64, and `x ^ x >> 32` done twice gives x back), so
different sums stay different; and no other column has changed. Of several wrong bits those are missed that cancel in
every column, and of the rest about one case in 2**64: without scrambling, any two flips of a word's highest bit would
cancel. `COLUMNS` is no power of two, so that a memory page in the wrong place stands in other columns.
"""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lockstep.torch_private import has_triton

COLUMNS = 208
"""Words in a row: 13 * 16. On a CPU, sums over rows of a multiple of 16 words take 1.0 to 1.3 of the time that it takes
to add up the same memory as floats, those of 251 words 1.3 to 1.9; only every 13th page falls on the same columns."""
WORD_BYTES = 8
ROW_BYTES = COLUMNS * WORD_BYTES
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size, what tensors are copied as: copying a bool as itself would make every byte 0 or 1."""
TABLE_ROWS = 256
"""Tensors whose column sums are kept at a time, so that many small tensors need no second model's memory."""
SMALL_BYTES = 64 << 10
"""Tensors up to this size are copied behind one another and added up together."""
STRETCH_BYTES = 256 * ROW_BYTES
"""What one program of the kernel adds up, before it adds to the sums in memory."""
SLAB_ROWS = 10_000
"""Rows added up at a time, 17 MB: torch's sum over rows on a GPU takes 1.5 times the memory that it reads."""


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """One number per tensor, different if any one bit of it is; on a GPU the host waits once, for all of them."""
    found = torch.zeros(len(tensors), dtype=torch.int64)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        numbers = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        factors = _odd_numbers(2).to(device)
        sums_of = _sums_by_kernel if device.type == "cuda" and has_triton() else _column_sums
        parts = [
            _scrambled(sums_of([tensors[number] for number in numbers[begin : begin + TABLE_ROWS]], device), factors)
            for begin in range(0, len(numbers), TABLE_ROWS)
        ]
        found[numbers] = torch.cat(parts).cpu()
    return found.tolist()


def raw_bytes(tensor: Tensor) -> Tensor:
    """The bytes of `tensor` in row-major order: a view of it where they lie so, else a copy."""
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@torch.no_grad()
def _column_sums(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sums of the columns of some tensors of one device, there; as torch adds them.

    Small ones go together: calls cost more than bytes.
    """
    pieces: list[Tensor] = []
    numbers: list[int] = []
    zeros = torch.zeros(ROW_BYTES, dtype=torch.uint8, device=device)
    for number, tensor in enumerate(tensors):
        for piece in _pieces(tensor):
            num_rows = -(-piece.numel() // ROW_BYTES)
            pieces += (piece, zeros[: num_rows * ROW_BYTES - piece.numel()])  # Each is filled up to whole rows.
            numbers += [number] * num_rows
    rows = torch.cat(pieces).view(torch.int64).view(len(numbers), COLUMNS)
    sums = torch.zeros(len(tensors), COLUMNS, dtype=torch.int64, device=device)
    return sums.index_add_(0, torch.tensor(numbers, dtype=torch.int64, device=device), rows)


@torch.no_grad()
def _sums_by_kernel(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The same by one kernel, which reads everything where it lies; tensors that do not lie in a row are copied."""
    from lockstep.replica import fingerprint_kernel  # Needs Triton.

    lying = [
        tensor if tensor.is_contiguous() and tensor.data_ptr() % WORD_BYTES == 0 else tensor.contiguous().clone()
        for tensor in map(Tensor.detach, tensors)
    ]
    lengths = np.array([tensor.numel() * tensor.element_size() for tensor in lying])
    counts = -(-lengths // STRETCH_BYTES)
    begins = (np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)) * STRETCH_BYTES
    table = np.stack(
        [
            np.repeat(np.array([tensor.data_ptr() for tensor in lying]), counts) + begins,
            np.minimum(STRETCH_BYTES, np.repeat(lengths, counts) - begins),
            np.repeat(np.arange(len(lying)), counts),
        ]
    )
    sums = torch.zeros(len(lying), COLUMNS, dtype=torch.int64, device=device)
    if counts.any():
        addresses, sizes, numbers = torch.from_numpy(table.astype(np.int64)).to(device)
        with torch.cuda.device(device):
            fingerprint_kernel.column_sums[(len(addresses),)](
                addresses, sizes, numbers, sums, COLUMNS=COLUMNS, WIDTH=256, ROWS=8
            )
    return sums


def _scrambled(sums: Tensor, factors: Tensor) -> Tensor:
    """The fingerprints of tensors whose columns have these sums."""
    once = sums * factors[0]
    return ((once ^ ((once >> 32) & 0xFFFFFFFF)) * factors[1]).sum(1)  # Masked, since the shift would repeat the sign.


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Bytes of the same column sums as `tensor`: of a small one as they are, else of the sums of slabs and the rest."""
    size, begin = tensor.element_size(), tensor.storage_offset()
    tensor = tensor.view(INTEGERS.get(size, tensor.dtype))
    if tensor.numel() * size <= SMALL_BYTES:
        yield raw_bytes(tensor)
        return
    if not tensor.is_contiguous() or begin * size % WORD_BYTES:
        tensor, begin = tensor.clone(memory_format=torch.contiguous_format), 0
    width = ROW_BYTES // size
    num_rows, num_left = divmod(tensor.numel(), width)
    for first in range(0, num_rows, SLAB_ROWS):
        shape = min(SLAB_ROWS, num_rows - first), width
        yield tensor.as_strided(shape, (width, 1), begin + first * width).view(torch.int64).sum(0).view(torch.uint8)
    if num_left:
        yield tensor.as_strided((num_left,), (1,), begin + num_rows * width).view(torch.uint8)


def _odd_numbers(num_rows: int) -> Tensor:
    """`num_rows` for every column, the same on every worker and with every version of every library."""
    drawn = np.frombuffer(hashlib.shake_128(b"lockstep").digest(num_rows * COLUMNS * WORD_BYTES), dtype="<i8")
    return torch.from_numpy(drawn.astype(np.int64) | 1).view(num_rows, COLUMNS)
