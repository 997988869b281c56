"""What an encoding loses is added to the next gradient, so that nothing is lost for good.

The error lives in fp32, one value for each of the bucket: that is what a lossy wire costs in memory. In each exchange
the gradient is added to it, the sum is encoded, and what the encoding did not carry stays. So the sum of all that was
decoded differs from the sum of all that was put in by the present error alone, however many steps there were.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.wire.protocol import BucketShape, Piece


class ErrorFeedback:
    """The error of one bucket, or of the part of it that one worker owns.

    `begin` is the place of the first value in the bucket; `numel` may reach beyond the bucket's end (padding).
    """

    def __init__(self, bucket: BucketShape, begin: int, numel: int, share: float = 1.0) -> None:
        self._bucket = bucket
        self._begin = begin
        self._numel = max(0, min(bucket.numel - begin, numel))
        self._share = share
        """How much of the error is added to the next gradient."""
        self.values = torch.zeros(numel, dtype=torch.float32, device=bucket.device)
        """Between exchanges the error; after `add` what is to be encoded, out of which the encoder takes its part."""
        self._padding = padding_of(bucket, begin, numel)

    def add(self, flat: Tensor) -> Tensor:
        """Add the gradients of the bucket; returns what is to be encoded: the error's own memory."""
        self.fade()
        self.values[: self._numel].add_(flat[self._begin : self._begin + self._numel])
        return self.values

    def fade(self) -> None:
        """Forget what is not to be added."""
        if self._share != 1.0:
            self.values.mul_(self._share)

    def settle(self) -> None:
        """The encoder has left in `values` what it lost: keep none of it where there is no parameter."""
        clear(self.values, self._padding)

    def rescale(self, factor: float) -> None:
        """Multiply the error."""
        self.values.mul_(factor)

    def parts(self) -> dict[str, tuple[int, Tensor]]:
        """For each piece that lies here: where in the piece its part begins, and a copy of the part."""
        found = {}
        for piece in self._bucket.pieces:
            begin, end = self._span(piece)
            if begin < end:
                found[piece.name] = (begin - piece.offset, self.values[begin - self._begin : end - self._begin].clone())
        return found

    def _span(self, piece: Piece) -> tuple[int, int]:
        return max(piece.offset, self._begin), min(piece.end, self._begin + self._numel)

    def take_from(self, whole: Tensor) -> None:
        """Move the values that lie here out of those of a whole bucket."""
        theirs = whole[self._begin : self._begin + self._numel]
        self.values.zero_()
        self.values[: self._numel].copy_(theirs)
        theirs.zero_()
        self.settle()


def clear(flat: Tensor, padding: Tensor | None) -> None:
    """Set the values at these places to zero."""
    if padding is not None:
        flat.index_fill_(0, padding, 0)


def padding_of(bucket: BucketShape, begin: int, numel: int) -> Tensor | None:
    """The places of so many values from `begin` on that belong to no piece, or None if there are none."""
    gaps = [*bucket.gaps(), (bucket.numel, begin + numel)]
    inside = [(max(first, begin) - begin, min(last, begin + numel) - begin) for first, last in gaps]
    ranges = [torch.arange(first, last) for first, last in inside if first < last]
    return torch.cat(ranges).to(bucket.device) if ranges else None


def drop_overflow(values: Tensor, witness: Tensor) -> None:
    """Set what is not finite in `values` to zero: an overflow is passed on in this step and forgotten in the next.

    `witness` is small, and not finite wherever `values` could be; in host memory it saves looking at all of them.
    """
    if witness.is_cuda or not bool(torch.isfinite(witness).all()):
        values.nan_to_num_(0.0, 0.0, 0.0)


def save_errors(own: ErrorFeedback, owned: ErrorFeedback | None) -> dict[str, Tensor]:
    """The errors of a bucket by the names of its pieces: `error.NAME`, and `owner_error.NAME` with where it begins."""
    state = {f"error.{name}": part for name, (_, part) in own.parts().items()}
    if owned is not None:
        for name, (begin, part) in owned.parts().items():
            state[f"owner_error.{name}"] = part
            state[f"owner_begin.{name}"] = torch.tensor(begin)
    return state


def load_errors(state: Mapping[str, Tensor], bucket: BucketShape, own: ErrorFeedback, owned: ErrorFeedback) -> None:
    """Set errors from what `save_errors` gave.

    The bucket may be cut in another way than it was. An owner's error at a place that this worker no longer owns
    becomes part of its own error: both wait to be added to the same sum.
    """
    errors, owner_errors = (torch.zeros(bucket.numel, device=bucket.device) for _ in range(2))
    for piece in bucket.pieces:
        _fill(errors, piece, 0, piece.numel, find(state, f"error.{piece.name}"))
        part = state.get(f"owner_error.{piece.name}")
        if part is not None:
            begin = int(find(state, f"owner_begin.{piece.name}"))
            _fill(owner_errors, piece, begin, begin + part.numel(), part)
    owned.take_from(owner_errors)
    own.take_from(errors.add_(owner_errors))


def all_errors(state: Mapping[str, Tensor], bucket: BucketShape) -> ErrorFeedback | None:
    """All that waits in a saved state for the pieces of a bucket, as one error; None if nothing does."""
    names = {f"{kind}.{piece.name}" for piece in bucket.pieces for kind in ("error", "owner_error")}
    if not any(name in state for name in names):
        return None
    zeros = {f"error.{piece.name}": torch.zeros(piece.numel, device=bucket.device) for piece in bucket.pieces}
    error = ErrorFeedback(bucket, 0, bucket.numel)
    load_errors(zeros | dict(state), bucket, error, ErrorFeedback(bucket, bucket.numel, 0))
    return error


def shared_out(states: Iterable[Mapping[str, Tensor]], size: int) -> dict[str, Tensor]:
    """One of `size` equal shares of all that waits on any worker, given what each of another number remembered.

    It is the sum of all errors that counts, whoever holds them. What else a wire remembers is alike on all.
    """
    found: dict[str, Tensor] = {}
    for state in states:
        for name, value in state.items():
            if name.startswith("error."):
                found[name] = found[name] + value / size if name in found else value / size
            elif not name.startswith("owner_"):
                found.setdefault(name, value)
        for name in [name for name in state if name.startswith("owner_error.")]:
            piece = name.removeprefix("owner_error.")
            part, begin = state[name].view(-1), int(state[f"owner_begin.{piece}"])
            found[f"error.{piece}"].view(-1)[begin : begin + part.numel()] += part / size
    return found


def _fill(whole: Tensor, piece: Piece, begin: int, end: int, part: Tensor) -> None:
    if not 0 <= begin <= end <= piece.numel or part.numel() != end - begin:
        raise UsageError(
            f"the saved error of '{piece.name}' has {part.numel()} values for {begin} to {end} of {piece.numel}. "
            "It was saved for another model: load the one that belongs to this model, or none."
        )
    whole[piece.offset + begin : piece.offset + end].copy_(part.reshape(-1))


def find(state: Mapping[str, Tensor], key: str) -> Tensor:
    """One tensor of a saved state."""
    if key not in state:
        raise UsageError(
            f"the saved state of the wire has no '{key}'. It was saved with another wire or for another model: use "
            "the same, or start without it."
        )
    return state[key]
