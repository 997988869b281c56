"""What is recorded of a training, in numbers that need no torch: of a tensor a sketch, of a worker its steps.

A model may have more parameters than a disk has room for their gradients in every step, so what is kept of a tensor is
a fingerprint of all its bits, its norm, and a sample of its elements: enough to tell whether two are equal to the bit,
and how far apart they are. Pieces of one tensor, as ZeRO's workers have them, add up to the sketch of the whole.
"""

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SAMPLE = 4096
"""How many elements are kept; all of them of a tensor that has no more."""

Floats = NDArray[np.float64]
Bits = NDArray[np.uint64]
Mask = NDArray[np.bool_]

_CHUNK = 1 << 15
"""Elements that are worked on at a time, such that they stay in the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """What is kept of one tensor, or of a piece of one."""

    numel: int
    """How many elements the whole tensor has."""
    covered: int
    """How many of them this sketch was made from."""
    fingerprint: int
    """The sum, modulo 2^64, of a number that is made of each element's place and bits."""
    square: float
    """The sum of the squares."""
    first: int
    """Which of the sampled elements `sample` begins with."""
    sample: Floats
    """The sampled elements."""

    @property
    def is_whole(self) -> bool:
        """Whether it stands for the whole tensor."""
        return self.covered == self.numel

    @property
    def norm(self) -> float:
        """The tensor's norm."""
        return math.sqrt(self.square)


def positions(numel: int) -> NDArray[np.int64]:
    """Which elements of a tensor are sampled: evenly spread, and all of a small one."""
    if numel <= SAMPLE:
        return np.arange(numel)
    return (np.arange(SAMPLE) * numel) // SAMPLE


def sketch(values: NDArray[np.generic], bits: NDArray[np.generic], *, offset: int = 0, numel: int = -1) -> Sketch:
    """The sketch of a flat piece that begins at element `offset` of a tensor of `numel` elements.

    values: as numbers. bits: the same elements as integers of their size.
    """
    total = len(values) if numel < 0 else numel
    places = positions(total)
    first, end = np.searchsorted(places, [offset, offset + len(values)])
    fingerprint, square = 0, 0.0
    for begin in range(0, len(values), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        square += float(np.square(values[part], dtype=np.float64).sum())
        at = np.arange(offset + begin, offset + min(begin + _CHUNK, len(values)), dtype=np.uint64)
        fingerprint += int(_mixed(bits[part].astype(np.uint64), at).sum(dtype=np.uint64))
    sample = values[places[first:end] - offset].astype(np.float64)
    return Sketch(total, len(values), fingerprint % 2**64, square, int(first), sample)


def joined(pieces: Sequence[Sketch]) -> Sketch:
    """The sketch of what `pieces` of one tensor make together."""
    if len(pieces) == 1:
        return pieces[0]
    numel = pieces[0].numel
    sample = np.zeros(min(numel, SAMPLE))
    for piece in pieces:
        sample[piece.first : piece.first + len(piece.sample)] = piece.sample
    fingerprint = sum(piece.fingerprint for piece in pieces) % 2**64
    covered, square = sum(piece.covered for piece in pieces), sum(piece.square for piece in pieces)
    return Sketch(numel, covered, fingerprint, square, 0, sample)


def same_bits(one: Sketch, other: Sketch) -> bool:
    """Whether two tensors are equal to the bit."""
    return (one.numel, one.covered, one.fingerprint) == (other.numel, other.covered, other.fingerprint)


def distance(one: Sketch, other: Sketch, among: Mask | None = None) -> float:
    """The norm of the difference of two tensors, as far as the samples tell; infinite if they cannot be compared.

    among: which of the sampled elements count; all if not given.
    """
    if same_bits(one, other):
        return 0.0
    if one.numel != other.numel or len(one.sample) != len(other.sample):
        return math.inf
    mine, theirs = (one.sample, other.sample) if among is None else (one.sample[among], other.sample[among])
    finite = np.isfinite(mine) & np.isfinite(theirs)
    alike = finite | (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
    if not alike.all():
        return math.inf
    spread = float(np.linalg.norm(mine[finite] - theirs[finite])) * math.sqrt(one.numel / max(1, len(one.sample)))
    norms = abs(one.norm - other.norm) if among is None else 0.0
    return max(spread, norms) if math.isfinite(norms) else spread


def _mixed(bits: Bits, places: Bits) -> Bits:
    """A number for each element that has nothing to do with that of other bits or of another place (splitmix64)."""
    mixed = _scrambled(places * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1))
    return _scrambled(mixed ^ _scrambled(bits + np.uint64(0x632BE59BD9B4E019)))


def _scrambled(x: Bits) -> Bits:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


Sketches = dict[str, Sketch]


@dataclass(slots=True)
class Forward:
    """One forward pass of a model that is going to be trained."""

    samples: list[str]
    """A digest of each sample that it saw."""
    random_state: str
    """A digest of the random generator's state when it began."""
    bypassed: bool = False
    """Whether the module was called by itself, past its wrapper."""


@dataclass(slots=True)
class Backward:
    """One backward pass."""

    loss: float | None
    """What it began from; None if that was not one number."""
    weight: float
    """What this worker's gradients weigh in it."""
    total: float | None
    """The sum of the weights over all workers, where that is known beforehand; None where the user gave the weight."""
    syncs: bool
    """Whether gradients are reduced in it."""


@dataclass(slots=True)
class RecordedStep:
    """One call of an optimizer's step, and what led to it."""

    forwards: list[Forward] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """The learning rates of its groups."""
    settings: list[str] = field(default_factory=list)
    """The other numbers in its groups, as text."""
    drops: bool = False
    """Whether dropout would have been in use."""
    draws: bool = False
    """Whether random numbers were drawn between a forward pass and its backward pass."""
    clips_early: bool = False
    """Whether gradients were clipped before they were reduced."""
    clips_nothing: bool = False
    """Whether clipping was asked for, after a backward pass, of parameters of which none has a gradient."""
    local: Sketches = field(default_factory=dict)
    """This worker's own gradients, before the reduction; of all passes of the step together."""
    opening: Sketches = field(default_factory=dict)
    """The same after the first of several passes."""
    grads: Sketches = field(default_factory=dict)
    """The gradients that the optimizer was given."""
    weights: Sketches = field(default_factory=dict)
    """The parameters after the step."""
    buffers: Sketches = field(default_factory=dict)
    """The models' buffers after the step."""
    hidden: Sketches = field(default_factory=dict)
    """Numbers and tensors that modules keep without having registered them."""


@dataclass(slots=True)
class WorkerRecord:
    """What one worker did."""

    rank: int = 0
    steps: list[RecordedStep] = field(default_factory=list)
    initial: Sketches = field(default_factory=dict)
    """The parameters before their first step."""
    is_joined: bool = False
    """Whether it knew of the other workers when it made its first step."""
    is_wrapped: bool = False
    """Whether there is a lockstep.DataParallel."""
    is_split: bool = False
    """Whether its model is split, so that its optimizer has a part of the parameters only."""
    is_sharded: bool = False
    """Whether batches are cut into shards, as by lockstep.Trainer: losses are then each shard's share of the whole."""
    is_seeded: bool = False
    """Whether the script seeded torch's generator before it wrapped its model."""
    is_compiled: bool = False
    """Whether the script asked for torch.compile."""
    epsilon: float = 2.0**-23
    """The rounding error of the narrowest numbers that were computed with."""
    batch_norms: list[str] = field(default_factory=list)
    """Batch norms in training that do not look beyond their worker."""
    is_coupled: bool = False
    """Whether a SyncBatchNorm lets each worker's gradients depend on all workers' samples."""
    hooked: list[str] = field(default_factory=list)
    """Parameters with a hook of the user's that may change their gradients."""
    foreign: list[str] = field(default_factory=list)
    """Parameters that an optimizer updates and that are in no wrapped model."""

    def see_epsilon(self, epsilon: float) -> None:
        """Numbers with this rounding error are computed with."""
        self.epsilon = max(self.epsilon, epsilon)

    def save(self, folder: Path) -> None:
        """Write it into `folder`, which nobody else can write to."""
        (folder / f"record-{self.rank}.pickle").write_bytes(pickle.dumps(self))


def load(folder: Path) -> list[WorkerRecord]:
    """The records that workers have written there, by rank."""
    found: list[WorkerRecord] = [pickle.loads(path.read_bytes()) for path in folder.glob("record-*.pickle")]
    return sorted(found, key=lambda record: record.rank)
