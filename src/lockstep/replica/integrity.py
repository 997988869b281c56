"""Replicas that should hold the same bits are compared now and then, and one that does not is named or repaired.

Compared is what several workers hold copies of, and nothing else:

    parameters        where every worker has them whole: with zero=0, and with zero=1 and 2 unless shared memory has
                      them once for all. With zero=3 they are split.
    buffers           those that DataParallel keeps equal: with every stage
    optimizer state   with zero=0; split state exists once

What is compared of a tensor is its fingerprint, which no single flipped bit leaves as it is (see fingerprint.py).

The workers exchange one digest of all fingerprints (a single small all-reduce). Only if digests differ are the
fingerprints of all tensors exchanged, and a majority is sought tensor by tensor: two workers with a fault each, in
different tensors, are both found by three.
"""

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from lockstep.data import tree
from lockstep.errors import ReplicaDiffers, UsageError
from lockstep.replica import agreement
from lockstep.replica.batch_norm import SyncBatchNorm
from lockstep.replica.data_parallel import DataParallel
from lockstep.replica.fingerprint import fingerprints, raw_bytes


class Policy(Enum):
    """What happens to a replica that differs."""

    STOP = "stop"
    """Every worker raises ReplicaDiffers."""
    REPAIR = "repair"
    """Its tensors are overwritten from a worker of the majority; without one, every worker raises ReplicaDiffers."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One worker that differs from the majority."""

    rank: int
    first: str
    """The first tensor that differs: `'head.weight'`, `'head.weight' (exp_avg)`, `'norm.running_mean' (buffer)`."""
    num_tensors: int
    """How many differ."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found; the same on every worker."""

    num_tensors: int
    """How many tensors were compared."""
    repaired: tuple[Difference, ...] = ()
    """The workers that differed and do so no more."""


@dataclass(frozen=True, slots=True)
class Print:
    """What is compared of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    value: int
    """The fingerprint of its bytes."""

    def fits(self, other: "Print | None") -> bool:
        """Whether one tensor's bytes can be written over the other's."""
        return other is not None and (self.shape, self.dtype) == (other.shape, other.dtype)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who is wrong, by majority."""

    wrong: dict[int, list[str]]
    """Worker -> the tensors in which it differs from the majority."""
    sources: dict[str, int]
    """Tensor that differs somewhere -> a worker that has it as the majority has."""
    undecided: list[str]
    """Tensors of which no majority has the same."""
    misfits: list[str]
    """Tensors that somebody lacks, or has in another shape or dtype: they cannot be overwritten."""

    @property
    def differences(self) -> tuple[Difference, ...]:
        """One per wrong worker, in order."""
        return tuple(Difference(rank, labels[0], len(labels)) for rank, labels in sorted(self.wrong.items()))


class Integrity:
    """Compares the replicas of `model`, and the state of its `optimizer`, over the workers every `every` steps.

    Made on every worker after the model was wrapped. `check_if_due(step)` is called by every worker after the update of
    each step; it costs one reading of what is compared, every `every` steps. `every=None` or 0 switches it off.

    optimizer: None leaves its state out, as is right for one whose state workers do not hold alike (torch's
        ZeroRedundancyOptimizer, or any after `model.join()` with workers that ended early).
    policy: `Policy.STOP` or "stop", `Policy.REPAIR` or "repair".

    Buffers are worker 0's after every backward pass, with zero=1 and 2 parameters their owners' after every update: a
    fault in another worker's copy that is older is gone, and one in theirs is everybody's. Numbers that an optimizer
    keeps outside of tensors are not compared.
    """

    def __init__(
        self,
        model: DataParallel,
        optimizer: torch.optim.Optimizer | None,
        *,
        every: int | None = 50,
        policy: Policy | str = Policy.STOP,
    ) -> None:
        if not isinstance(model, DataParallel):
            raise UsageError(f"Integrity compares the replicas of a DataParallel model, got {type(model).__name__}.")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}.")
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 0):
            raise UsageError(f"Integrity(every={every!r}): a number of steps is needed; None or 0 switches it off.")
        self._model, self._optimizer = model, optimizer
        self._world = model.world
        self._every = every or 0
        self._policy = _as_policy(policy)

    def check_if_due(self, step: int) -> None:
        """Check if `step` is a multiple of `every`; called after the update of each step, by every worker."""
        if self._every and step % self._every == 0:
            self.check(step)

    def check(self, step: int | None = None) -> Checked:
        """Compare now, whatever `every` is; returns what was compared and repaired, raises ReplicaDiffers to stop.

        Called by every worker, between an update and the next forward pass. `step` is for the message alone. Alone, or
        where nothing is held twice, nothing is done. A repair is also a warning on worker 0.
        """
        held = self._held() if self._world.size > 1 else {}
        if not held:
            return Checked(0)
        prints = _prints(held)
        if self._all_have(prints):
            return Checked(len(held))
        everyone = self._world.gather(prints)
        verdict = judge(everyone)
        if self._policy is Policy.STOP or verdict.undecided or verdict.misfits:
            raise self._error(verdict, everyone, step)
        self._repair(held, verdict)
        if not self._all_have(_prints(held)):
            raise ReplicaDiffers(
                f"{self._found(verdict, everyone, step)} Overwritten from the majority, it differs again: its memory "
                "does not keep what is written to it. Take that machine out of the run.",
                tuple(verdict.wrong),
            )
        if self._world.is_main:
            warnings.warn(f"{self._found(verdict, everyone, step)} Repaired from the majority.", stacklevel=2)
        return Checked(len(held), verdict.differences)

    def _held(self) -> dict[str, Tensor]:
        """What this worker holds a copy of, by the words that name it in messages; in the same order everywhere."""
        zero = self._model._zero
        params = dict(_params(self._model)) if zero is None or zero.keeps_whole_params else {}
        held: dict[str, Tensor] = {repr(name): param for name, param in params.items()}
        held |= {f"{name!r} (buffer)": buffer for name, buffer in _equal_buffers(self._model)}
        if zero is None and self._optimizer is not None:
            for name, param in params.items():
                state: Mapping[str, Any] = self._optimizer.state.get(param, {})
                held |= {f"{name!r} ({key})": tensor for key, tensor in _state_tensors(state)}
        return held

    def _all_have(self, prints: Mapping[str, Print]) -> bool:
        """Whether every worker has `prints`: one small all-reduce of digests, each in the place of its worker."""
        digest = hashlib.blake2b(repr(list(prints.items())).encode(), digest_size=16).digest()
        digests = torch.zeros(self._world.size, 2, dtype=torch.int64)
        digests[self._world.rank] = torch.frombuffer(bytearray(digest), dtype=torch.int64)
        digests = self._world.sum(digests)
        return bool((digests == digests[0]).all())

    @torch.no_grad()
    def _repair(self, held: Mapping[str, Tensor], verdict: Verdict) -> None:
        """Overwrite what differs, byte by byte; all workers send and receive, the right ones what they have."""
        places = sorted({(source, held[label].device.type) for label, source in verdict.sources.items()})
        for source, kind in places:
            group = self._world.host_group if kind == "cpu" else self._world.group
            assert group is not None
            tensors = [held[k] for k, s in verdict.sources.items() if s == source and held[k].device.type == kind]
            raws = [raw_bytes(tensor) for tensor in tensors]
            agreement.broadcast(raws, self._world, source, group)
            for tensor, raw in zip(tensors, raws, strict=True):
                if raw.data_ptr() != tensor.data_ptr():  # Its bytes did not lie in a row, so `raw` is a copy.
                    tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))

    def _error(self, verdict: Verdict, everyone: Sequence[Mapping[str, Print]], step: int | None) -> ReplicaDiffers:
        found = self._found(verdict, everyone, step)
        back = "Go back to a checkpoint from before it"
        if verdict.undecided:
            ranks = tuple(range(self._world.size))
            which = "With two workers" if self._world.size == 2 else "Without a majority"
            return ReplicaDiffers(
                f"{found} {which} it cannot be told which is right. {back}; with three or more workers the one that "
                "differs can be named.",
                ranks,
            )
        if verdict.misfits:
            advice = (
                f"{verdict.misfits[0]} is not there on every worker in one shape and dtype: build or load the same on "
                "all of them, or give Integrity optimizer=None if its state is meant to differ."
            )
        else:
            advice = (
                f"Its memory or its arithmetic went wrong, and its gradients are in every update since. {back}, and "
                "take that machine out if it happens again; policy='repair' would overwrite it from the majority."
            )
        return ReplicaDiffers(f"{found} {advice}", tuple(sorted(verdict.wrong)))

    def _found(self, verdict: Verdict, everyone: Sequence[Mapping[str, Print]], step: int | None) -> str:
        """What differs where, in one sentence or more."""
        when = "" if step is None else f" after step {step}"
        size, total = self._world.size, len(everyone[0])
        texts = [
            f"{self._world.peers.all[one.rank]} differs from the majority of {size} workers{when}: first in "
            f"{one.first}, in {one.num_tensors} of {total} tensors."
            for one in verdict.differences
        ]
        if verdict.undecided:
            label = verdict.undecided[0]
            camps: dict[Print | None, list[int]] = {}
            for rank, prints in enumerate(everyone):
                camps.setdefault(prints.get(label), []).append(rank)
            sides = " and ".join(_workers(ranks) for ranks in camps.values())
            texts.append(
                f"the replicas of {sides} differ{when}: first in {label}, in {len(verdict.undecided)} of {total} "
                "tensors."
            )
        return " ".join(texts)


def judge(everyone: Sequence[Mapping[str, Print]]) -> Verdict:
    """Who is wrong where workers, in order of rank, hold tensors of these fingerprints; pure, the same everywhere."""
    verdict = Verdict({}, {}, [], [])
    for label in dict.fromkeys(label for prints in everyone for label in prints):
        row = [prints.get(label) for prints in everyone]
        right, count = Counter(row).most_common(1)[0]
        if count == len(row):
            continue
        if not all(one is not None and one.fits(row[0]) for one in row):
            verdict.misfits.append(label)
        if 2 * count <= len(row):
            verdict.undecided.append(label)
            continue
        verdict.sources[label] = row.index(right)
        for rank, one in enumerate(row):
            if one != right:
                verdict.wrong.setdefault(rank, []).append(label)
    return verdict


def _prints(held: Mapping[str, Tensor]) -> dict[str, Print]:
    values = fingerprints(list(held.values()))
    return {
        label: Print(tuple(tensor.shape), str(tensor.dtype), value)
        for (label, tensor), value in zip(held.items(), values, strict=True)
    }


def _params(model: DataParallel) -> Iterator[tuple[str, Tensor]]:
    assert model._reducer is not None
    yield from zip(model._reducer._names, model._reducer._params, strict=True)


def _equal_buffers(model: DataParallel) -> Iterator[tuple[str, Tensor]]:
    """The buffers that are equal between steps, by full name: sent from worker 0, or computed alike everywhere."""
    assert model._reducer is not None
    sent = {(id(owner), name) for owner, name in model._reducer._buffers._owners}
    for prefix, owner in model.module.named_modules():
        for name, buffer in owner._buffers.items():
            is_computed = isinstance(owner, SyncBatchNorm) and owner.process_group is None
            if buffer is not None and ((id(owner), name) in sent or is_computed):
                yield f"{prefix}.{name}" if prefix else name, buffer


def _state_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an optimizer's state of one parameter; sparse ones as the two that they are made of."""
    for key in sorted(state, key=str):
        leaves = [leaf for leaf in tree.leaves(state[key]) if isinstance(leaf, Tensor)]
        for number, leaf in enumerate(leaves):
            name = str(key) if len(leaves) == 1 else f"{key}.{number}"
            if leaf.layout is torch.sparse_coo:
                yield f"{name}, indices", leaf._indices()
                yield f"{name}, values", leaf._values()
            elif leaf.layout is torch.strided:
                yield name, leaf


def _workers(ranks: Sequence[int]) -> str:
    return f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(map(str, ranks))}"


def _as_policy(policy: object) -> Policy:
    try:
        return Policy(policy)
    except ValueError:
        known = " and ".join(repr(one.value) for one in Policy)
        raise UsageError(f"Integrity(policy={policy!r}): the policies are {known}.") from None
