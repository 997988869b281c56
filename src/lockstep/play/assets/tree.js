// The order of a sum: the binary tree over the shards of a global batch, as in src/lockstep/comm/tree.py.
//
// A node is [first, last-but-one shard]. Its left half is the largest power of two that leaves something for the right.

/** The shards of worker `rank`: runs differ by at most one, the longer ones come first. */
export function runOf(shards, workers, rank) {
  const least = Math.floor(shards / workers);
  const more = shards % workers;
  const begin = rank * least + Math.min(rank, more);
  return [begin, begin + least + (rank < more ? 1 : 0)];
}

export function halves([begin, end]) {
  const middle = begin + (1 << (31 - Math.clz32(end - begin - 1)));
  return [[begin, middle], [middle, end]];
}

/** The largest nodes under `node` that lie within the run `mine`: what a worker adds up by itself, and sends. */
export function rootsWithin(node, mine) {
  if (node[1] <= mine[0] || mine[1] <= node[0]) return [];
  if (mine[0] <= node[0] && node[1] <= mine[1]) return [node];
  return halves(node).flatMap((half) => rootsWithin(half, mine));
}

/** The sum over a node, where `leaf(node)` gives what is already added up (or undefined) and `add(a, b)` adds two. */
export function sumAlong(node, leaf, add) {
  const found = leaf(node);
  if (found !== undefined) return found;
  const [left, right] = halves(node);
  return add(sumAlong(left, leaf, add), sumAlong(right, leaf, add));
}
