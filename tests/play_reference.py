"""The playground's training in Python: float32, in the same order of operations, added by the engine's own tree.

What stands in play/assets as float32.js, network.js and training.js, without batch norm, compression and faults.
"""

import hashlib
import math

import numpy as np
import torch

from lockstep.comm.tree import ShardTree, halves, run

F = np.float32
SHARDS, SAMPLES = 16, 512


class RandomStream:
    def __init__(self, seed):
        self.state = ((seed + 1) * 0x9E3779B1) & 0xFFFFFFFF or 1
        for _ in range(8):
            self.next()

    def next(self):
        x = self.state
        x ^= (x << 13) & 0xFFFFFFFF
        x ^= x >> 17
        x ^= (x << 5) & 0xFFFFFFFF
        self.state = x
        return x

    def uniform(self):
        return self.next() / 4294967296

    def normal(self):
        total = -6.0
        for _ in range(12):
            total += self.uniform()
        return total

    def permutation(self, count):
        order = list(range(count))
        for k in range(count - 1, 0, -1):
            other = math.floor(self.uniform() * (k + 1))
            order[k], order[other] = order[other], order[k]
        return order


def exponential(x):
    x = np.clip(np.asarray(x, dtype=np.float64), -120, 120)
    k = np.floor(x * 1.4426950408889634 + 0.5)
    r = x - k * 0.6931471805599453
    total = np.ones_like(r)
    for n in range(14, 0, -1):
        total = 1 + (r / n) * total
    return np.ldexp(total, k.astype(np.int64))


def logarithm(y):
    s = (y - 1) / (y + 1)
    total = 0.0
    for n in range(35, 0, -2):
        total = total * (s * s) + 1 / n
    return 2 * s * total


def tanh32(x):
    e = exponential(-2 * np.abs(np.float64(x)))
    t = (1 - e) / (1 + e)
    return np.where(np.asarray(x) < 0, -t, t).astype(F)


def cosine_of_turns(turns):
    x = (turns - math.floor(turns + 0.5)) * 6.283185307179586
    total = 1.0
    for n in range(26, 1, -2):
        total = 1 - (x * x / (n * (n - 1))) * total
    return total


def spirals(seed):
    random = RandomStream(1000 + seed)
    x, y = np.zeros((SAMPLES, 2), F), np.zeros(SAMPLES, F)
    for k in range(SAMPLES):
        along = 0.12 + 0.88 * random.uniform()
        turns = along * 0.95 + (k % 2) / 2
        x[k, 0] = along * cosine_of_turns(turns) + 0.035 * random.normal()
        x[k, 1] = along * cosine_of_turns(turns - 0.25) + 0.035 * random.normal()
        y[k] = k % 2
    return x, y


def global_batch(seed, batch, number):
    epoch, place = divmod(number, math.ceil(SAMPLES / batch))
    return RandomStream(7919 * (seed + 1) + epoch).permutation(SAMPLES)[place * batch : (place + 1) * batch]


def initial_weights(seed, width):
    random = RandomStream(seed)
    tensors = []
    for rows, columns in ((width, 2), (width, 0), (width, width), (width, 0), (1, width), (1, 0)):
        bound = math.sqrt(3 / (columns or 1))
        values = [(2 * random.uniform() - 1) * bound if columns else 0.0 for _ in range(rows * (columns or 1))]
        tensors.append(np.array(values, F).reshape((rows, columns) if columns else (rows,)))
    return tensors


def gradients(tensors, x, y, scale):
    """The gradients of a part, and the sum of its losses."""
    w1, b1, w2, b2, w3, b3 = tensors
    grads = [np.zeros_like(each) for each in tensors]
    loss, width = F(0), len(b1)
    for s in range(len(x)):
        a1 = tanh32((b1 + w1[:, 0] * x[s, 0]) + w1[:, 1] * x[s, 1])
        h = b2.copy()
        for i in range(width):
            h = h + w2[:, i] * a1[i]
        a2 = tanh32(h)
        logit = b3[0]
        for j in range(width):
            logit = F(logit + F(w3[0, j] * a2[j]))
        z, e = float(logit), float(exponential(-abs(float(logit))))
        loss = F(loss + F(max(z, 0.0) - z * float(y[s]) + logarithm(1 + e)))
        sigmoid = F(e / (1 + e) if z < 0 else 1 / (1 + e))
        d = F(F(sigmoid - y[s]) * scale)
        d2 = (d * w3[0]) * (F(1) - a2 * a2)
        d1 = np.zeros(width, F)
        for j in range(width):
            d1 = d1 + d2[j] * w2[j]
        d1 = d1 * (F(1) - a1 * a1)
        for grad, change in zip(
            grads, (d1[:, None] * x[s], d1, d2[:, None] * a1, d2, (d * a2)[None], [d]), strict=True
        ):
            grad += np.asarray(change, F)
    return np.concatenate([grad.ravel() for grad in grads]), loss


def add_along_tree(leaves, workers):
    """Add shards' gradients as so many workers do: each within its run, then the roots by the engine's `Sums`."""
    tree = ShardTree(SHARDS, workers)

    def within(node):
        if node[1] - node[0] == 1:
            return torch.from_numpy(leaves[node[0]])
        return torch.add(*(within(half) for half in halves(node)))

    roots = [within(root) for roots in tree.roots for root in roots]
    out = torch.empty_like(roots[0])
    tree.sums(roots, out)
    return out.numpy()


def add_around_ring(contributions):
    """As comm/ring.py: chunk c starts at worker c, and each next worker adds its own."""
    size = len(contributions)
    chunks = [np.array_split(each, size) for each in contributions]
    total = []
    for c in range(size):
        partial = chunks[c][c]
        for step in range(1, size):
            partial = chunks[(c + step) % size][c] + partial
        total.append(partial)
    return np.concatenate(total)


def train(*, workers, batch, width, rate, reduction, steps, seed=0):
    """The losses, and the SHA-256 of the weights after the last step."""
    x, y = spirals(seed)
    tensors = initial_weights(seed, width)
    flat = np.concatenate([each.ravel() for each in tensors])
    momentum, losses = np.zeros_like(flat), []
    for number in range(steps):
        order = np.array(global_batch(seed, batch, number))
        parts = SHARDS if reduction == "tree" else workers
        scale = F(1 / len(order))
        ends = np.cumsum([each.size for each in tensors])[:-1]
        views = [part.reshape(each.shape) for part, each in zip(np.split(flat, ends), tensors, strict=True)]
        found = []
        for part in range(parts):
            mine = order[slice(*run(len(order), parts, part))]
            found.append(gradients(views, x[mine], y[mine], scale))
        losses.append(sum(float(loss) for _, loss in found) / len(order))
        grads = [grad for grad, _ in found]
        total = add_along_tree(grads, workers) if reduction == "tree" else add_around_ring(grads)
        momentum = F(0.9) * momentum + total
        flat = flat - F(rate) * momentum
    return losses, hashlib.sha256(flat.tobytes()).hexdigest()
