"""What one worker recorded, as plain values that can be written to files and read back. Needs no torch."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.verify.sketch import Floats, Sketch

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
class Step:
    """One call of an optimizer's step, and what led to it."""

    optimizer: int = 0
    """Which optimizer, in the order in which they made their first step."""
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
class Record:
    """What one worker did."""

    rank: int = 0
    steps: list[Step] = field(default_factory=list)
    initial: Sketches = field(default_factory=dict)
    """The parameters before their first step."""
    is_joined: bool = False
    """Whether it knew of the other workers when it made its first step."""
    is_wrapped: bool = False
    """Whether there is a lockstep.DataParallel."""
    is_split: bool = False
    """Whether its optimizer has a part of the parameters only."""
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


def save(record: Record, folder: Path) -> None:
    """Write `record` as two files of `folder`."""
    samples: list[Floats] = []
    place = 0

    def as_json(value: Any) -> Any:
        nonlocal place
        if isinstance(value, dict):
            return {key: as_json(item) for key, item in value.items()}
        if isinstance(value, list):
            return [as_json(item) for item in value]
        if not isinstance(value, Sketch):
            return value
        samples.append(value.sample)
        begin, place = place, place + len(value.sample)
        return [value.numel, value.covered, value.fingerprint, value.square, value.first, begin, place]

    shallow = {name: getattr(record, name) for name in Record.__slots__ if name != "steps"}
    steps = [{name: _plain(getattr(step, name)) for name in Step.__slots__} for step in record.steps]
    text = json.dumps(as_json({**shallow, "steps": steps}))
    np.save(folder / f"samples-{record.rank}.npy", np.concatenate(samples) if samples else np.zeros(0))
    (folder / f"record-{record.rank}.json").write_text(text)


def load(folder: Path, rank: int) -> Record | None:
    """The record of worker `rank`; None if it has written none."""
    path = folder / f"record-{rank}.json"
    if not path.exists():
        return None
    samples: Floats = np.load(folder / f"samples-{rank}.npy")

    def sketches(content: dict[str, list[Any]]) -> Sketches:
        return {
            name: Sketch(*numbers, samples[begin:end])  # type: ignore[call-arg]
            for name, (*numbers, begin, end) in content.items()
        }

    content = json.loads(path.read_text())
    steps = []
    for step in content.pop("steps"):
        step["forwards"] = [Forward(**each) for each in step["forwards"]]
        step["backwards"] = [Backward(**each) for each in step["backwards"]]
        for name in ("local", "opening", "grads", "weights", "buffers", "hidden"):
            step[name] = sketches(step[name])
        steps.append(Step(**step))
    return Record(**{**content, "initial": sketches(content["initial"]), "steps": steps})


def _plain(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], Forward | Backward):
        return [asdict(each) for each in value]
    return value
