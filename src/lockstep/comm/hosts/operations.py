"""The collectives of workers of several hosts: within a host through shared memory, between hosts once for all of it.

**A reduction** of M bytes over H hosts has three phases. The workers of a host are numbered alike on all hosts; workers
of one number are a *column*, and there are as many columns as the smallest host has workers.

    within     the workers of a host add up what they have: each gets the host's sum of its part of M
    between    the workers of a column, which have the same part, add up over the hosts: the part is cut into H pieces,
               each host adds up one of them, and sends the sum to the others
    share      the workers of a host take the sums of the parts from one another

Between hosts (H-1)/H of every part goes out twice, so 2(H-1)/H * M for all workers of a host together, however many
these are, by the connections of all of them. With two hosts, each sends the other all of its part and adds by itself:
as many bytes in one hop. Large tensors go chunk by chunk: while one travels, the next one is added up within the host.
Up to 1 KB every worker of a host gets the sums of the other hosts: a barrier costs more than such bytes.

**The order of a sum.** Plain sums are added in order of rank within a host, then in order of the hosts. Sums along a
tree of shards are added along that tree: the shards of a host are a run, so it has the sums of a few nodes, its roots
(one, where its shards are a subtree), and these are what travels between hosts. The bits are those of any other way.

**Who waits for what.** All operations of a group are carried out one at a time, in one order, on all workers; each has
barriers with the workers of this host (shm/barrier.py), and messages to and from workers of other hosts, posted in an
order that follows from the operation alone. A message that is waited for is sent by a worker that has come to the same
place; so a chain of waits ends with a worker that computes, or is gone:

    a worker dies        those of its host see it at their barrier, within 0.2 s, and those with a message under way see
                         its connection close; each of them breaks the group for its host, says why in the store, and
                         closes its own connections (`Links.close`), so that the news reaches all who wait, hop by hop
    a host loses power,  nothing closes: who waits for a message from there waits. The thread that trains waits for the
    or its link is cut   operation in slices (peers.py), and raises when a launcher has said that the host is gone, or
                         at the world's deadline, with the names of those who do not answer; the messages' own deadline
                         is the group's, which is later
    a worker is stopped  as a lost host; those of its host name it at the deadline
    one calls something  on one host: compared at the barrier, UsageError on all of it, and others see connections
    else than the rest   close. On different hosts: as with gloo, a message of another length breaks the connection

After the first error every call raises at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lockstep.comm.hosts.links import Links, Message
from lockstep.comm.hosts.places import Places
from lockstep.comm.shm.host import Host
from lockstep.comm.shm.reductions import Reduction
from lockstep.comm.shm.segment import BLOCK_BYTES, cut
from lockstep.comm.tree import ShardTree, sums_of

CHUNK_BYTES = 1 << 20
"""So much of a reduction does every worker of a column exchange at a time. Tuned by bench/hosts.py --chunks."""

LITTLE_BYTES = 1 << 10
"""Up to here a barrier costs more than bytes."""

Span = tuple[int, int]
"""First and last-but-one element."""
NONE: Span = (0, 0)


class Adding(Protocol):
    """How contributions become sums, in two steps."""

    @property
    def num_roots(self) -> Sequence[int]:
        """How many sums each host has of a span; one, where the order is that of the ranks."""

    def within(self, spans: Sequence[Span], out: Tensor) -> list[Tensor]:
        """The sums that this host has over this worker's span; `spans`: one for each worker of it.

        A single one is in `out`. All workers of the host call this.
        """

    def between(self, roots: Sequence[Tensor], out: Tensor) -> None:
        """Set `out` to the sum of what the hosts have, in their order; it may be this host's only root."""


class InOrder:
    """In the order of the ranks of a host, then of the hosts."""

    def __init__(self, places: Places, host: Host, piece: Callable[[Span], Tensor], reduce: Reduction) -> None:
        """`piece`: what this worker has over a span."""
        self._places, self._host, self._piece = places, host, piece
        self._within, self._between = reduce.among(places.num_local), reduce.among(places.num_hosts)
        self._divide = reduce.divide
        self.num_roots: Sequence[int] = [1] * places.num_hosts

    def within(self, spans: Sequence[Span], out: Tensor) -> list[Tensor]:
        """See Adding."""
        self._host.reductions.reduce_scatter(out, [self._piece(span) for span in spans], self._within)
        return [out]

    def whole_within(self, flat: Tensor) -> None:
        """Set `flat` of every worker of this host to the sum of theirs."""
        self._host.reductions.all_reduce(flat, self._within)

    def between(self, roots: Sequence[Tensor], out: Tensor) -> None:
        """See Adding."""
        if out.numel():
            self._between(roots, out, out_is=self._places.mine)
            self._divide(out)


class AlongTree:
    """Along a tree of shards, whose runs go by host."""

    def __init__(self, places: Places, host: Host, tree: ShardTree) -> None:
        self._host = host
        ends = [tree.runs[ranks[-1]][1] for ranks in places.ranks]
        counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        self._hosts = ShardTree(tree.shards, places.num_hosts, counts)
        self.num_roots: Sequence[int] = [len(roots) for roots in self._hosts.roots]
        self._steps = []
        """For each root of this host: worker and lane of what it is added from, and in which order."""
        for root in self._hosts.roots[places.mine]:
            leaves, lanes = [], []
            for local, rank in enumerate(places.ranks[places.mine]):
                for number, leaf in enumerate(tree.roots[rank]):
                    if root[0] <= leaf[0] and leaf[1] <= root[1]:
                        leaves.append(leaf)
                        lanes.append((local, tree.lane(rank, number)))
            self._steps.append((lanes, sums_of(root, leaves)))
        self._lanes: Tensor = torch.empty(0)

    def of(self, lanes: Tensor) -> "AlongTree":
        """For this matrix of lanes from now on."""
        self._lanes = lanes
        return self

    def within(self, spans: Sequence[Span], out: Tensor) -> list[Tensor]:
        """See Adding."""
        outs = [out] if len(self._steps) == 1 else [torch.empty_like(out) for _ in self._steps]
        for (contributions, sums), each in zip(self._steps, outs, strict=True):
            self._host.reductions.add_along(self._lanes, contributions, sums, spans, each)
        return outs

    def between(self, roots: Sequence[Tensor], out: Tensor) -> None:
        """See Adding."""
        step = BLOCK_BYTES // out.itemsize
        for at in range(0, out.numel(), step):
            self._hosts.sums([root[at : at + step] for root in roots], out[at : at + step])


class HostsOperations:
    """The collectives of one group, on flat tensors. One thread at a time; all workers in the same order."""

    def __init__(self, places: Places, host: Host, links: Links) -> None:
        self._places, self._host, self._links = places, host, links
        self.chunk_bytes = CHUNK_BYTES

    # Reductions

    def barrier(self) -> None:
        """Return when every worker has called this."""
        self._host.reductions.barrier()
        if self._places.local == 0:
            others = self._places.column.values()
            here = torch.zeros(1, dtype=torch.uint8)
            self._links.exchange([(rank, here) for rank in others], [(rank, here.clone()) for rank in others])
        self._host.reductions.barrier()

    def all_reduce(self, flat: Tensor, reduce: Reduction) -> None:
        """Replace every worker's `flat` by the reduction of all."""
        adding = InOrder(self._places, self._host, lambda span: flat[slice(*span)], reduce)
        if flat.nbytes <= LITTLE_BYTES:
            self._add_little(adding, flat)
        else:
            self.add_all(adding, flat)

    def _add_little(self, adding: InOrder, flat: Tensor) -> None:
        """The same for what costs more to cut than to send: every worker hears of all hosts, and adds by itself."""
        places = self._places
        adding.whole_within(flat)
        sums = [flat if host == places.mine else torch.empty_like(flat) for host in range(places.num_hosts)]
        receives = [(places.partner(host), sums[host]) for host in places.away]
        self._links.exchange([(rank, flat) for rank in places.partners], receives)
        adding.between(sums, flat)

    def reduce(self, flat: Tensor, root: int, reduce: Reduction) -> None:
        """Replace `flat` on `root` by the reduction of all, which all others have as well, and drop."""
        total = flat.clone()
        self.all_reduce(total, reduce)
        if self._places.rank == root:
            flat.copy_(total)

    def reduce_scatter(self, out: Tensor, pieces: Sequence[Tensor], reduce: Reduction) -> None:
        """Set `out` to the reduction of what every worker has as piece number `rank`; pieces may differ in size."""
        cuts, end = [], 0
        for piece in pieces:
            cuts.append((end, end + piece.numel()))
            end += piece.numel()
        by_span = {span: piece for span, piece in zip(cuts, pieces, strict=True) if piece.numel()}
        none = out[:0]
        adding = InOrder(self._places, self._host, lambda span: by_span.get(span, none), reduce)
        self.add_parts(adding, cuts, out)

    def add_all(self, adding: Adding, total: Tensor) -> None:
        """Set every worker's `total` to the sum over all of it, chunk by chunk."""
        step = self._places.num_columns * max(1, self.chunk_bytes // total.itemsize)
        _overlap(
            self._add_chunk(adding, total, begin, min(begin + step, total.numel()))
            for begin in range(0, total.numel(), step)
        )

    def _add_chunk(self, adding: Adding, total: Tensor, begin: int, end: int) -> Iterator[None]:
        """The phases of one chunk; at each `yield` messages are under way."""
        places, columns = self._places, self._places.num_columns
        parts = [cut(end - begin, columns, column, total.itemsize) for column in range(columns)]
        spans = [(begin + first, begin + last) for first, last in parts] + [NONE] * (places.num_local - columns)
        own = total[slice(*spans[places.local])]
        roots = adding.within(spans, own)
        if places.column:
            yield from self._add_between(adding, roots, own)
        else:
            yield from [None] * (1 if self._is_swap(adding) else 2)  # As many as there: all go in step.
        self._host.copies.all_gather([total[slice(*span)] for span in spans], own)

    def _add_between(self, adding: Adding, roots: Sequence[Tensor], total: Tensor) -> Iterator[None]:
        """Set `total` to the sum over the hosts of what each has as `roots`."""
        places, hosts = self._places, self._places.num_hosts
        is_swap, numel = self._is_swap(adding), total.numel()
        pieces = [(0, numel) if is_swap else cut(numel, hosts, host, total.itemsize) for host in range(hosts)]
        own = total[slice(*pieces[places.mine])]
        arrived = {h: [torch.empty_like(own) for _ in range(adding.num_roots[h])] for h in places.column}
        sends = [(rank, root[slice(*pieces[h])]) for h, rank in places.column.items() for root in roots]
        posted = self._links.post(sends, [(rank, root) for h, rank in places.column.items() for root in arrived[h]])
        yield
        self._links.wait(posted)
        arrived[places.mine] = [root[slice(*pieces[places.mine])] for root in roots]
        adding.between([root for h in range(hosts) for root in arrived[h]], own)
        if not is_swap:
            posted = self._links.post(
                [(rank, own) for rank in places.column.values()],
                [(rank, total[slice(*pieces[h])]) for h, rank in places.column.items()],
            )
            yield
            self._links.wait(posted)

    def _is_swap(self, adding: Adding) -> bool:
        """Whether each of two hosts sends the other all that it has, and adds by itself."""
        return self._places.num_hosts == 2 and max(adding.num_roots) == 1

    def add_parts(self, adding: Adding, cuts: Sequence[Span], out: Tensor) -> None:
        """Set `out` to the sum over this worker's part of `cuts`."""
        places, posted = self._places, []
        arrived: dict[int, list[Tensor]] = {}
        for host in places.away:
            arrived[host] = [torch.empty_like(out) for _ in range(adding.num_roots[host])]
            posted += self._links.post([], [(places.partner(host), root) for root in arrived[host]])
        for ranks in places.away.values():
            for row in self._rows(ranks):
                spans = [NONE if rank is None else cuts[rank] for rank in row]
                begin, end = spans[places.local]
                roots = adding.within(spans, out.new_empty(end - begin))
                rank = row[places.local]
                posted += self._links.post([] if rank is None else [(rank, root) for root in roots], [])
        arrived[places.mine] = adding.within([cuts[rank] for rank in places.ranks[places.mine]], out)
        self._links.wait(posted)
        adding.between([root for host in range(places.num_hosts) for root in arrived[host]], out)

    def _rows(self, ranks: Sequence[int]) -> Iterable[list[int | None]]:
        """The workers of another host, so many at a time as this host has; None where there are no more."""
        size = self._places.num_local
        for begin in range(0, len(ranks), size):
            row: list[int | None] = [*ranks[begin : begin + size]]
            yield row + [None] * (size - len(row))

    # Copies

    def broadcast(self, flat: Tensor, root: int) -> None:
        """Replace every worker's `flat` by that of `root`: its host gives each other one a part, and these share."""
        places, columns, hosts = self._places, self._places.num_columns, self._places.num_hosts
        source = next(host for host, ranks in enumerate(places.ranks) if root in ranks)
        if places.mine == source:
            self._host.copies.broadcast(flat, places.ranks[source].index(root))
        parts = [cut(flat.numel(), columns, column, flat.itemsize) for column in range(columns)]
        parts += [NONE] * (places.num_local - columns)
        own = flat[slice(*parts[places.local])]
        pieces = [own[slice(*cut(own.numel(), hosts, host, own.itemsize))] for host in range(hosts)]
        column = places.column
        if places.mine == source:
            self._links.exchange([(rank, pieces[h]) for h, rank in column.items()], [])
            self._links.exchange([(rank, pieces[source]) for rank in column.values()], [])
        else:
            if column:
                self._links.exchange([], [(column[source], pieces[places.mine])])
            others = {h: rank for h, rank in column.items() if h != source}
            sends = [(rank, pieces[places.mine]) for rank in others.values()]
            self._links.exchange(sends, [(rank, pieces[h]) for h, rank in column.items()])
            self._host.copies.all_gather([flat[slice(*part)] for part in parts], own)

    def all_gather(self, outs: Sequence[Tensor], flat: Tensor) -> None:
        """Set `outs[r]` to what worker r has as `flat`, for all r."""
        places = self._places
        own = outs[places.rank]
        if own.data_ptr() != flat.data_ptr():
            own.copy_(flat)
        posted = self._links.post(
            [(places.partner(host), flat) for host in places.away], [(rank, outs[rank]) for rank in places.partners]
        )
        self._host.copies.all_gather([outs[rank] for rank in places.ranks[places.mine]], own)
        self._links.wait(posted)
        for ranks in places.away.values():
            for row in self._rows(ranks):
                arrived = [own[:0] if rank is None else outs[rank] for rank in row]
                self._host.copies.all_gather(arrived, arrived[places.local])

    def share(self, flats: Sequence[tuple[Tensor, Sequence[Span]]]) -> None:
        """Bring the hosts' copies of `flats` up to date, of which each host has one for all of its workers.

        Every worker has changed its own of the spans, and must not read others before this is over.
        """
        places = self._places
        sends: list[Message] = []
        receives: list[Message] = []
        for flat, spans in flats:
            sends += [(places.partner(host), flat[slice(*spans[places.rank])]) for host in places.away]
            receives += [(rank, flat[slice(*spans[rank])]) for rank in places.partners]
        self._links.exchange(sends, receives)
        self._host.reductions.barrier()

    # What a host cannot do for its workers: every byte is for one worker alone.

    def gather(self, outs: Sequence[Tensor], flat: Tensor, root: int) -> None:
        """Set `outs[r]` on `root` to what worker r has as `flat`."""
        if self._places.rank != root:
            self._links.exchange([(root, flat)], [])
            return
        outs[root].copy_(flat)
        self._links.exchange([], [(rank, out) for rank, out in enumerate(outs) if rank != root])

    def scatter(self, out: Tensor, pieces: Sequence[Tensor], root: int) -> None:
        """Set `out` on worker r to piece r of `root`."""
        if self._places.rank != root:
            self._links.exchange([], [(root, out)])
            return
        out.copy_(pieces[root])
        self._links.exchange([(rank, piece) for rank, piece in enumerate(pieces) if rank != root], [])

    def all_to_all(self, outs: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
        """Set `outs[s]` to what worker s has as piece number `rank`; pieces may differ in size."""
        here = self._places.ranks[self._places.mine]
        away = [rank for ranks in self._places.away.values() for rank in ranks]
        posted = self._links.post([(rank, pieces[rank]) for rank in away], [(rank, outs[rank]) for rank in away])
        self._host.copies.all_to_all([outs[rank] for rank in here], [pieces[rank] for rank in here])
        self._links.wait(posted)


def _overlap(rows: Iterable[Iterator[None]]) -> None:
    """Go through all `rows`, each of which stops where it waits for a message: one more is begun before others go on.

    The same on all workers, whatever comes when.
    """
    under_way: list[Iterator[None]] = []
    for row in rows:
        under_way = _advanced([row, *under_way])
    while under_way:
        under_way = _advanced(under_way)


def _advanced(rows: Sequence[Iterator[None]]) -> list[Iterator[None]]:
    """Take each of `rows` to its next stop; returns those that are not at their end."""
    return [row for row in rows if next(row, _END) is None]


_END = object()
