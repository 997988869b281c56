"""Gradients of matrices as products of two thin ones: PowerSGD (Vogels, Karimireddy, Jaggi 2019) with warm start."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.wire.error_feedback import ErrorFeedback, clear, drop_overflow, find, load_errors, padding_of, save_errors
from lockstep.wire.protocol import BucketShape, Parcel, Passage, Piece, Route, as_bucket, require

VALUE_BYTES = 4
MIN_SAVING = 2
"""A matrix travels whole unless its factors take at most one in so many bytes of it."""
NOTHING = 1e-12
"""A column of which less than this share is left beside the columns before it is taken for none."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """Each matrix travels as two factors of `rank` columns, found by one step of power iteration from the last ones.

    A piece of two or more dimensions counts as a matrix with as many rows as its first. Vectors, and matrices whose
    factors would take more than half of them, travel whole in fp32 along with the first factors.

    Volume: 2(N-1)/N times 4 * (rank * (rows + columns), or rows * columns where whole) bytes a matrix, in two
    all-reduces. Memory: the error, once the bucket in fp32, and the factors.
    Exactness: a single step has the part of the summed gradient that lies in `rank` directions, which follow the
    gradient from step to step; error feedback adds the rest to the next steps. What travels whole is exact but for
    the order of addition. A value that is not finite makes its matrix NaN everywhere. The bits are the same on all
    workers where the same library on the same kind of processor multiplies the factors.
    """

    rank: int = 4

    bucket_mb = 200

    def __post_init__(self) -> None:
        is_fit = isinstance(self.rank, int) and 1 <= self.rank <= 256
        require(is_fit, "LowRank", f"rank={self.rank!r}", "It is a whole number from 1 to 256, such as 4.")

    def bytes_promised(self, bucket: BucketShape | int, size: int) -> int:
        """2(N-1)/N of both messages: left factors with what travels whole, and right factors."""
        plan = _Plan(as_bucket(bucket), self.rank)
        out, back = (Route.SUM.num_bytes(VALUE_BYTES * numel, size) for numel in (plan.out_numel, plan.back_numel))
        return out + back

    def open(self, bucket: BucketShape, rank: int, size: int) -> "LowRankPassage":
        """The state of one bucket on worker `rank` of `size`."""
        return LowRankPassage(self.rank, bucket)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix of a bucket and where its factors lie in the messages."""

    piece: Piece
    rows: int
    columns: int
    rank: int

    def of(self, flat: Tensor) -> Tensor:
        """The matrix as a view of a bucket."""
        return flat[self.piece.offset : self.piece.end].view(self.rows, self.columns)


class _Plan:
    """Which pieces of a bucket are matrices to factor, sorted by their rows, and which travel whole."""

    def __init__(self, bucket: BucketShape, rank: int) -> None:
        matrices, self.whole = [], []
        for piece in bucket.pieces:
            rows = piece.shape[0] if len(piece.shape) > 1 else 0
            columns = piece.numel // rows if rows else 0
            thin = min(rank, rows, columns)
            if rows and MIN_SAVING * thin * (rows + columns) <= rows * columns:
                matrices.append(_Matrix(piece, rows, columns, thin))
            elif piece.numel:
                self.whole.append(piece)
        self.matrices = sorted(matrices, key=lambda matrix: (matrix.rows, matrix.rank))
        """Those with equally long left factors are next to each other, so that these can be treated as one batch."""
        self.left_numel = sum(matrix.rows * matrix.rank for matrix in matrices)
        self.out_numel = self.left_numel + sum(piece.numel for piece in self.whole)
        self.back_numel = sum(matrix.columns * matrix.rank for matrix in matrices)

    def lefts(self, message: Tensor) -> list[Tensor]:
        """The left factors (rows, rank) as views of the first message."""
        return _cut(message, [(matrix.rows, matrix.rank) for matrix in self.matrices])

    def left_batches(self, message: Tensor) -> list[Tensor]:
        """The same by batches (matrices, rows, rank)."""
        kinds = groupby(self.matrices, key=lambda matrix: (matrix.rows, matrix.rank))
        return _cut(message, [(len(list(batch)), *kind) for kind, batch in kinds])

    def rights(self, message: Tensor) -> list[Tensor]:
        """The right factors (columns, rank) as views of the second message."""
        return _cut(message, [(matrix.columns, matrix.rank) for matrix in self.matrices])

    def wholes(self, message: Tensor) -> list[Tensor]:
        """What travels whole, as views of the first message."""
        return _cut(message[self.left_numel :], [(piece.numel,) for piece in self.whole])


def _cut(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of these shapes, one behind the other."""
    views, begin = [], 0
    for shape in shapes:
        end = begin + torch.Size(shape).numel()
        views.append(flat[begin:end].view(shape))
        begin = end
    return views


class LowRankPassage(Passage):
    """One bucket in two all-reduces, with the error of its matrices and the right factors to begin the next step from.

    encode    left factor = matrix @ right factor of the last step
    combine   make the columns of the summed left factors orthonormal; right factor = matrix.T @ left factor
    decode    left factor @ summed right factor.T
    """

    def __init__(self, rank: int, bucket: BucketShape) -> None:
        self._bucket = bucket
        self._plan = plan = _Plan(bucket, rank)
        self._error = ErrorFeedback(bucket, 0, bucket.numel)
        self._padding = padding_of(bucket, 0, bucket.numel)
        self._matrices = [matrix.of(self._error.values) for matrix in plan.matrices]
        self._whole = [self._error.values[piece.offset : piece.end] for piece in plan.whole]
        self._fresh = [_random(matrix, bucket.device) for matrix in plan.matrices]
        """Right factors to begin from where there are none: the same on every worker."""
        self._warm = [fresh.clone() for fresh in self._fresh]
        self._out: Tensor | None = None

    def encode(self, flat: Tensor) -> Parcel:
        """Multiply the matrices by the last right factors."""
        self._error.add(flat)
        message = torch.empty(self._plan.out_numel, device=self._bucket.device)
        for matrix, right, left in zip(self._matrices, self._warm, self._plan.lefts(message), strict=True):
            torch.mm(matrix, right, out=left)
        if self._whole:
            torch._foreach_copy_(self._plan.wholes(message), self._whole)
            torch._foreach_zero_(self._whole)
        return Parcel(message, Route.SUM)

    def combine(self, arrived: Tensor) -> Parcel:
        """Multiply the matrices by the common left factors, and keep of them what these leave."""
        self._out = arrived
        for batch in self._plan.left_batches(arrived):
            batch.copy_(orthonormal(batch))
        message = torch.empty(self._plan.back_numel, device=self._bucket.device)
        lefts, rights = self._plan.lefts(arrived), self._plan.rights(message)
        for matrix, left, right in zip(self._matrices, lefts, rights, strict=True):
            torch.mm(matrix.t(), left, out=right)
            matrix.addmm_(left, right.t(), alpha=-1.0)
        drop_overflow(self._error.values, message)
        self._error.settle()
        return Parcel(message, Route.SUM)

    def decode(self, arrived: Tensor, flat: Tensor) -> None:
        """Multiply the factors, and begin the next step from the right ones."""
        assert self._out is not None, "decode comes after combine"
        lefts, rights = self._plan.lefts(self._out), self._plan.rights(arrived)
        for matrix, left, right in zip(self._plan.matrices, lefts, rights, strict=True):
            if flat.dtype == torch.float32:
                torch.mm(left, right.t(), out=matrix.of(flat))
            else:
                matrix.of(flat).copy_(torch.mm(left, right.t()))
        for piece, whole in zip(self._plan.whole, self._plan.wholes(self._out), strict=True):
            flat[piece.offset : piece.end].copy_(whole)
        clear(flat, self._padding)
        for warm, right, fresh in zip(self._warm, rights, self._fresh, strict=True):
            warm.copy_(_next_start(right, fresh))
        self._out = None

    def state_dict(self) -> dict[str, Tensor]:
        """The error and the right factors, by the names of pieces."""
        state = save_errors(self._error, None)
        for matrix, warm in zip(self._plan.matrices, self._warm, strict=True):
            state[f"right.{matrix.piece.name}"] = warm.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved error and saved factors."""
        for matrix, warm in zip(self._plan.matrices, self._warm, strict=True):
            saved = find(state, f"right.{matrix.piece.name}")
            if saved.shape != warm.shape:
                raise UsageError(
                    f"the saved factor of '{matrix.piece.name}' has shape {tuple(saved.shape)}, and this wire's has "
                    f"{tuple(warm.shape)}. Use the rank that it was saved with, or start without it."
                )
            warm.copy_(saved)
        load_errors(state, self._bucket, self._error, ErrorFeedback(self._bucket, self._bucket.numel, 0))

    def rescale(self, factor: float) -> None:
        """Multiply the error; the factors to begin from have no size."""
        self._error.rescale(factor)


def orthonormal(batch: Tensor) -> Tensor:
    """The columns of each matrix, made orthonormal from the first to the last; one with nothing of its own is zero.

    In fp64, in which squares neither overflow nor vanish and nearly parallel columns come out at right angles. A column
    that is not finite spoils its matrix.
    """
    wide = batch.double()
    before = torch.linalg.vector_norm(wide, dim=1)
    for place in range(wide.shape[2]):
        column, rest = wide[:, :, place], wide[:, :, place + 1 :]
        length = torch.linalg.vector_norm(column, dim=1, keepdim=True)
        is_none = length <= NOTHING * before[:, place, None]
        column.copy_(torch.where(is_none, 0.0, column / length))
        rest.sub_(column.unsqueeze(2) * (column.unsqueeze(1) @ rest))
    return wide.float()


def _next_start(right: Tensor, fresh: Tensor) -> Tensor:
    """The right factor with columns of length one; the fresh column where there is none, or no finite one."""
    length = torch.linalg.vector_norm(right, dim=0, keepdim=True, dtype=torch.float64)
    is_usable = (length > 0.0) & torch.isfinite(length)
    return torch.where(is_usable, right / length, fresh)


def _random(matrix: _Matrix, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(matrix.piece.name.encode()))
    return orthonormal(torch.randn(1, matrix.columns, matrix.rank, generator=generator))[0].to(device)
