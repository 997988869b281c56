"""The tree over the shards: cuts cover it, and sums along it do not depend on the cut."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.tree import ShardTree, halves, run
from lockstep.replica.reduction import Partials

cuts = st.integers(1, 40).flatmap(lambda shards: st.tuples(st.just(shards), st.integers(1, shards)))


def along_the_tree(values, node=None):
    begin, end = node or (0, len(values))
    if end - begin == 1:
        return values[begin]
    left, right = halves((begin, end))
    return along_the_tree(values, left) + along_the_tree(values, right)


def drawn(shards, numel=7):
    return list(torch.randn(shards, numel, generator=torch.Generator().manual_seed(shards)).exp())


@given(cuts)
def test_runs_and_roots_cover_all_shards_in_order(cut):
    shards, workers = cut
    tree = ShardTree(shards, workers)
    assert [shard for mine in tree.runs for shard in range(*mine)] == list(range(shards))
    assert max(map(len, map(range, *zip(*tree.runs, strict=True)))) - shards // workers <= 1
    roots = [root for roots in tree.roots for root in roots]
    assert [shard for root in roots for shard in range(*root)] == list(range(shards))
    for mine, roots in zip(tree.runs, tree.roots, strict=True):
        assert all(mine[0] <= begin < end <= mine[1] for begin, end in roots)
        assert len(roots) <= max(1, 2 * shards.bit_length())


@given(cuts)
def test_every_cut_gives_the_same_bits(cut):
    shards, workers = cut
    values = drawn(shards)
    expected = along_the_tree(values)
    tree = ShardTree(shards, workers)
    sent = []
    for rank, mine in enumerate(tree.runs):
        partials = Partials(tree, rank)
        for shard in range(*mine):
            partials.add(shard, {0: values[shard].clone()})
        assert len(partials.roots) == len(tree.roots[rank])
        sent += [root[0] for root in partials.roots]
    out = torch.empty(7)
    tree.sums(sent, out)
    assert torch.equal(out, expected)
    tree.sums(sent, sent[-1])  # In place.
    assert torch.equal(sent[-1], expected)


@given(st.integers(1, 16))
def test_one_root_each_where_workers_have_equal_powers_of_two(workers):
    tree = ShardTree(4 * workers, workers)
    assert tree.lanes == 1 and all(len(roots) == 1 for roots in tree.roots)


def test_a_parameter_that_some_shards_do_not_use():
    """Counts as zero, bit for bit: a negative zero does not stay one."""
    tree = ShardTree(4, 1)
    partials = Partials(tree, 0)
    negative = torch.tensor([-0.0, 1.0])
    for shard, grads in enumerate([{0: negative}, {}, {1: torch.ones(2)}, {}]):
        partials.add(shard, grads)
    (root,) = partials.roots
    assert sorted(root) == [0, 1] and not root[0].signbit().any()


def test_runs():
    assert [run(8, 3, rank) for rank in range(3)] == [(0, 3), (3, 6), (6, 8)]
    assert ShardTree(8, 3).roots == [[(0, 2), (2, 3)], [(3, 4), (4, 6)], [(6, 8)]]
    assert [halves((0, n))[0] for n in (2, 3, 4, 5, 6, 8, 9)] == [
        (0, 1), (0, 2), (0, 2), (0, 4), (0, 4), (0, 4), (0, 8)]  # fmt: skip
