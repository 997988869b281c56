"""All-reduce over send and receive alone, in two ways whose traffic is counted: naive and ring.

With N workers and a tensor of M bytes:

           steps     a worker sends       all send together   messages of a worker
    naive  1         (N-1) * M            N(N-1) * M          N-1
    ring   2(N-1)    2(N-1)/N * M         2(N-1) * M          2(N-1)

They show what a collective is made of, and what it is worth to have a better one: `lockstep bench comm` compares
both to the backend's own all_reduce. Training does not use them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one worker sent in one all-reduce, counted where it was handed over to be sent."""

    num_bytes: int
    """Bytes of all messages."""
    num_messages: int
    """How many messages; a chunk without elements is none."""
    num_steps: int
    """Rounds of sending and receiving, each begun when the one before was over on this worker."""


def naive_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Traffic:
    """Sum `tensor` over the workers of `group`, in place: everyone sends its whole tensor to everyone.

    Every worker of the group calls this with a tensor of the same shape and dtype. All add in the order of the ranks,
    so the sum has the same bits everywhere. Takes N-1 times the tensor in memory.
    """
    post = _Post(group)
    flat = _flatten(tensor)
    parts = {rank: torch.empty_like(flat) for rank in range(post.size) if rank != post.rank}
    post.exchange(dict.fromkeys(parts, flat), parts)
    parts[post.rank] = flat
    total = parts[0]
    for rank in range(1, post.size):
        total.add_(parts[rank])
    _write_back(total, tensor)
    return post.traffic()


def ring_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Traffic:
    """Sum `tensor` over the workers of `group`, in place: chunks travel around a ring, twice.

    Every worker of the group calls this with a tensor of the same shape and dtype. Phases: reduce-scatter, after which
    worker r holds the sum of chunk r+1; all-gather, which hands these sums around. A chunk's sum is finished by one
    worker and copied by the others, so it has the same bits everywhere. Takes 1/N of the tensor in memory.
    """
    post = _Post(group)
    flat = _flatten(tensor)
    chunks = flat.tensor_split(post.size)
    arrived = torch.empty_like(chunks[0])  # None is larger.
    for step in range(post.size - 1):
        leaving, entering = _chunk(chunks, post.rank - step), _chunk(chunks, post.rank - step - 1)
        partial_sum = arrived[: entering.numel()]
        post.exchange({post.right: leaving}, {post.left: partial_sum})
        entering.add_(partial_sum)
    for step in range(post.size - 1):
        leaving, entering = _chunk(chunks, post.rank + 1 - step), _chunk(chunks, post.rank - step)
        post.exchange({post.right: leaving}, {post.left: entering})
    _write_back(flat, tensor)
    return post.traffic()


class _Post:
    """Sends and receives within a group, and counts what it sends."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise UsageError(
                f"worker {dist.get_rank()} is not in the group that it reduces over. Call this on its workers only."
            )
        self.left, self.right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self._num_bytes = self._num_messages = self._num_steps = 0

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """One step: send to and receive from the workers named, all at once; return when all of it is done."""
        operations = [self._sending(tensor, rank) for rank, tensor in sends.items() if tensor.numel()]
        operations += [self._receiving(tensor, rank) for rank, tensor in receives.items() if tensor.numel()]
        self._num_steps += 1
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def traffic(self) -> Traffic:
        """What was sent so far."""
        return Traffic(self._num_bytes, self._num_messages, self._num_steps)

    def _sending(self, tensor: Tensor, rank: int) -> dist.P2POp:
        raw = _as_bytes(tensor)
        self._num_bytes += raw.numel()
        self._num_messages += 1
        return dist.P2POp(dist.isend, raw, group=self._group, group_peer=rank)

    def _receiving(self, tensor: Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(dist.irecv, _as_bytes(tensor), group=self._group, group_peer=rank)


def _chunk(chunks: tuple[Tensor, ...], number: int) -> Tensor:
    """The chunk of that number, counted around the ring."""
    return chunks[number % len(chunks)]


def _as_bytes(flat: Tensor) -> Tensor:
    """The same memory as bytes: there is no backend that cannot send these, whatever dtypes it knows."""
    return flat.view(torch.uint8)


def _flatten(tensor: Tensor) -> Tensor:
    """The elements in a row: the tensor's own memory if they lie so, else a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not view(-1), which leaves a lone element the stride it had, and that cannot be viewed as bytes.
    return plain.as_strided((plain.numel(),), (1,))


def _write_back(flat: Tensor, tensor: Tensor) -> None:
    """Set `tensor` to the elements in `flat`; nothing happens if they are its own memory."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
