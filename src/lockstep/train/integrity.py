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
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data import tree
from lockstep.errors import ReplicaDiffers, UsageError
from lockstep.replica import agreement
from lockstep.replica.batch_norm import SyncBatchNorm
from lockstep.replica.data_parallel import DataParallel
from lockstep.replica.fingerprint import fingerprints, raw_bytes
from lockstep.world import World


@dataclass(frozen=True, slots=True)
class TensorPrint:
    """What is compared of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    value: int
    """The fingerprint of its bytes."""


@dataclass(frozen=True, slots=True)
class MajorityVote:
    """Who is wrong, by majority."""

    wrong: dict[int, list[str]]
    """Worker -> the tensors in which it differs from the majority."""
    sources: dict[str, int]
    """Tensor that differs somewhere -> a worker that has it as the majority has."""
    undecided: list[str]
    """Tensors of which no majority has the same."""
    misfits: list[str]
    """Tensors that somebody lacks, or has in another shape or dtype: they cannot be overwritten."""


class Integrity:
    """Compares the replicas of `model`, and the state of its `optimizer`, over the workers every `every` steps.

    Made on every worker after the model was wrapped. `check_if_due(step)` is called by every worker after the update of
    each step; it costs one reading of what is compared, every `every` steps. `every=None` or 0 switches it off.

    optimizer: None leaves its state out.
    policy: as of ReplicaComparison.

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
        policy: str = "stop",
    ) -> None:
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 0):
            raise UsageError(f"Integrity(every={every!r}): a number of steps is needed; None or 0 switches it off.")
        self._model, self._optimizer = model, optimizer
        self._every = every or 0
        self._comparison = ReplicaComparison(model.world, policy)

    def check_if_due(self, step: int) -> None:
        """Check if `step` is a multiple of `every`; called after the update of each step, by every worker."""
        if self._every and step % self._every == 0:
            self.check(step)

    def check(self, step: int | None = None) -> Mapping[int, Sequence[str]]:
        """Compare now, whatever `every` is; called by every worker, between an update and the next forward pass.

        Returns and raises as ReplicaComparison.check; `step` is for the message alone.
        """
        return self._comparison.check(self.held() if self._model.world.size > 1 else {}, step)

    def held(self) -> dict[str, Tensor]:
        """What this worker holds a copy of, by the words that name it in messages; in the same order everywhere."""
        split, reducer = self._model._engine.split, self._model._engine.reducer
        assert reducer is not None
        named = zip(reducer.shared.names, reducer.shared.params, strict=True)
        params = dict(named) if split is None or split.keeps_whole_params else {}
        held: dict[str, Tensor] = {repr(name): param for name, param in params.items()}
        buffers = _equal_buffers(self._model.module, reducer.shared.buffers.owners)
        held |= {f"{name!r} (buffer)": buffer for name, buffer in buffers}
        if split is None and self._optimizer is not None:
            for name, param in params.items():
                state: Mapping[str, Any] = self._optimizer.state.get(param, {})
                held |= {f"{name!r} ({key})": tensor for key, tensor in _state_tensors(state)}
        return held


class ReplicaComparison:
    """Compares tensors that workers should hold alike, and names or repairs the worker whose own differ."""

    def __init__(self, world: World, policy: str) -> None:
        """`policy`: "stop" raises ReplicaDiffers on every worker; "repair" overwrites a replica that differs by one of
        the majority, and raises where there is none."""
        if policy not in ("stop", "repair"):
            raise UsageError(f"Integrity(policy={policy!r}): the policies are 'stop' and 'repair'.")
        self._world, self._repairs = world, policy == "repair"

    def check(self, held: Mapping[str, Tensor], step: int | None) -> Mapping[int, Sequence[str]]:
        """Compare `held`, tensors by the words that name them in messages; called by every worker.

        Returns what was repaired: by worker its tensors, as `'head.weight' (exp_avg)`; worker 0 warns of it. Alone, or
        where nothing is held twice, nothing is done.
        """
        if self._world.size == 1 or not held:
            return {}
        prints = _prints(held)
        if self._all_have(prints):
            return {}
        plain = [[label, each.shape, each.dtype, each.value] for label, each in prints.items()]
        everyone = [
            {label: TensorPrint(tuple(shape), dtype, value) for label, shape, dtype, value in theirs}
            for theirs in self._world.gather_json(plain)
        ]
        vote = judge(everyone)
        if not self._repairs or vote.undecided or vote.misfits:
            raise self._error(vote, everyone, step)
        self._repair(held, vote)
        if not self._all_have(_prints(held)):
            raise ReplicaDiffers(
                f"{self._found(vote, everyone, step)} Overwritten from the majority, it differs again: its memory "
                "does not keep what is written to it. Take that machine out of the run.",
                tuple(vote.wrong),
            )
        if self._world.is_main:
            warnings.warn(f"{self._found(vote, everyone, step)} Repaired from the majority.", stacklevel=3)
        return vote.wrong

    def _all_have(self, prints: Mapping[str, TensorPrint]) -> bool:
        """Whether every worker has `prints`: one small all-reduce of digests, each in the place of its worker."""
        digest = hashlib.blake2b(repr(list(prints.items())).encode(), digest_size=16).digest()
        digests = torch.zeros(self._world.size, 2, dtype=torch.int64)
        digests[self._world.rank] = torch.frombuffer(bytearray(digest), dtype=torch.int64)
        digests = self._world.all_reduce(digests)
        return bool((digests == digests[0]).all())

    @torch.no_grad()
    def _repair(self, held: Mapping[str, Tensor], vote: MajorityVote) -> None:
        """Overwrite what differs, byte by byte; all workers send and receive, the right ones what they have."""
        places = sorted({(source, held[label].device.type) for label, source in vote.sources.items()})
        for source, kind in places:
            group = self._world.host_group if kind == "cpu" else self._world.group
            assert group is not None
            tensors = [held[k] for k, s in vote.sources.items() if s == source and held[k].device.type == kind]
            raws = [raw_bytes(tensor) for tensor in tensors]
            agreement.broadcast(raws, self._world, source, group)
            for tensor, raw in zip(tensors, raws, strict=True):
                if raw.data_ptr() != tensor.data_ptr():  # Its bytes did not lie in a row, so `raw` is a copy.
                    tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))

    def _error(
        self, vote: MajorityVote, everyone: Sequence[Mapping[str, TensorPrint]], step: int | None
    ) -> ReplicaDiffers:
        found = self._found(vote, everyone, step)
        back = "Go back to a checkpoint from before it"
        if vote.undecided:
            ranks = tuple(range(self._world.size))
            which = "With two workers" if self._world.size == 2 else "Without a majority"
            return ReplicaDiffers(
                f"{found} {which} it cannot be told which is right. {back}; with three or more workers the one that "
                "differs can be named.",
                ranks,
            )
        if vote.misfits:
            advice = (
                f"{vote.misfits[0]} is not there on every worker in one shape and dtype: build or load the same on "
                "all of them, or give Integrity optimizer=None if its state is meant to differ."
            )
        else:
            advice = (
                f"Its memory or its arithmetic went wrong, and its gradients are in every update since. {back}, and "
                "take that machine out if it happens again; policy='repair' would overwrite it from the majority."
            )
        return ReplicaDiffers(f"{found} {advice}", tuple(sorted(vote.wrong)))

    def _found(self, vote: MajorityVote, everyone: Sequence[Mapping[str, TensorPrint]], step: int | None) -> str:
        """What differs where, in one sentence or more."""
        when = "" if step is None else f" after step {step}"
        size, total = self._world.size, len(everyone[0])
        texts = [
            f"{self._world.peers.all[rank]} differs from the majority of {size} workers{when}: first in {labels[0]}, "
            f"in {len(labels)} of {total} tensors."
            for rank, labels in sorted(vote.wrong.items())
        ]
        if vote.undecided:
            label = vote.undecided[0]
            camps: dict[TensorPrint | None, list[int]] = {}
            for rank, prints in enumerate(everyone):
                camps.setdefault(prints.get(label), []).append(rank)
            sides = " and ".join(
                f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in camps.values()
            )
            texts.append(
                f"the replicas of {sides} differ{when}: first in {label}, in {len(vote.undecided)} of {total} tensors."
            )
        return " ".join(texts)


def judge(everyone: Sequence[Mapping[str, TensorPrint]]) -> MajorityVote:
    """Who is wrong where workers, in order of rank, hold tensors of these fingerprints; pure, the same everywhere."""
    vote = MajorityVote({}, {}, [], [])
    for label in dict.fromkeys(label for prints in everyone for label in prints):
        row = [prints.get(label) for prints in everyone]
        right, count = Counter(row).most_common(1)[0]
        if count == len(row):
            continue
        if len({one and (one.shape, one.dtype) for one in row}) > 1:
            vote.misfits.append(label)
        if 2 * count <= len(row):
            vote.undecided.append(label)
            continue
        vote.sources[label] = row.index(right)
        for rank, one in enumerate(row):
            if one != right:
                vote.wrong.setdefault(rank, []).append(label)
    return vote


def _prints(held: Mapping[str, Tensor]) -> dict[str, TensorPrint]:
    values = fingerprints(list(held.values()))
    return {
        label: TensorPrint(tuple(tensor.shape), str(tensor.dtype), value)
        for (label, tensor), value in zip(held.items(), values, strict=True)
    }


def _equal_buffers(module: nn.Module, kept: Sequence[tuple[nn.Module, str]]) -> Iterator[tuple[str, Tensor]]:
    """The buffers that are equal between steps, by full name: `kept` so, or computed alike everywhere."""
    sent = {(id(owner), name) for owner, name in kept}
    for prefix, owner in module.named_modules():
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
