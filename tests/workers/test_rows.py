"""Embeddings of which only touched rows travel: the same bits as with the whole table in a bucket, whatever is done."""

import copy
import hashlib
import pickle

import pytest
import torch
from amount import some
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.replica import embedding_rows as rows_module

STEPS, CHANGES_AT, NUM_ROWS = 5, 3, 5000

AS_ROWS = [
    "plain", "accumulated", "refilled", "unused", "unused_everywhere", "weighted", "checkpointed", "gradient_asked_for",
    "twice", "hooked", "zeroed_in_place", "used_up",
]  # fmt: skip
"""Ways to train in which the table travels as rows to the end."""
WHOLE = [
    "regularised", "functional", "many", "hooked_in_place", "hooked_after", "replaced_after", "changed_between",
    "changed_unseen", "never_zeroed", "patched", "left_over", "frozen_on_one",
]  # fmt: skip
"""Ways in which it turns out to be more than the rows: from step 3 on, or from the beginning."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, 64, padding_idx=7)
        self.small = nn.Embedding(10, 64)
        self.head = nn.Linear(64, 3)
        self.uses_table = True
        self.is_functional = self.is_checkpointed = self.is_called_twice = False

    def forward(self, tokens):
        x = self.small(tokens % 10)
        if self.uses_table:
            x = x + self._looked_up(tokens)
        return self.head(x).square().mean()

    def _looked_up(self, tokens):
        if self.is_functional:
            return nn.functional.embedding(tokens, self.table.weight)
        if self.is_checkpointed:
            return checkpoint(self.table, tokens, use_reentrant=False)
        if self.is_called_twice:
            return self.table(tokens) + self.table(tokens + 1)
        return self.table(tokens)


def num_tables(model):
    """How many tables travel as rows."""
    reducer = model._engine.reducer
    return len(reducer.active) if isinstance(reducer, rows_module.RowsReducer) else 0


def train(world, way, least_bytes, zero=0):
    """Train in one way; returns a hash of the weights and how many tables travelled as rows after each step."""
    before, rows_module.LEAST_BYTES = rows_module.LEAST_BYTES, least_bytes
    try:
        return _train(world, way, zero)
    finally:
        rows_module.LEAST_BYTES = before


def replace_twice(param):
    """The second may lie where the gradient was before the first."""
    param.grad = param.grad * 2
    param.grad = param.grad + 0.01


def use_up(param):
    """An update within the backward pass, after which there is no gradient left."""
    with torch.no_grad():
        param -= 0.01 * param.grad
    param.grad = None


def add_unseen(grad):
    """Change it by a way that no version tells of."""
    grad.data.add_(0.01)


def _train(world, way, zero):
    torch.manual_seed(1)
    net = Net()
    if way == "replaced_after":
        net.table.weight.register_post_accumulate_grad_hook(replace_twice)
    elif way == "used_up":
        net.table.weight.register_post_accumulate_grad_hook(use_up)
    elif way == "patched":
        net.table.forward = lambda tokens: nn.functional.embedding((tokens + 17) % NUM_ROWS, net.table.weight)
    elif way == "frozen_on_one":
        net.table.weight.requires_grad_(world.rank == 0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    split = {"optimizer": optimizer, "zero": zero} if zero else {}
    model = lockstep.DataParallel(net, bucket_cap_mb=0.1, **split)
    generator = torch.Generator().manual_seed(world.rank)
    weight, num_active = net.table.weight, []
    if way == "hooked":
        weight.register_hook(lambda grad: grad * 2)
    elif way == "hooked_in_place":
        weight.register_hook(lambda grad: add_unseen(grad))
    elif way == "hooked_after":
        weight.register_post_accumulate_grad_hook(lambda param: add_unseen(param.grad))
    for step in range(STEPS):
        is_changed = step >= CHANGES_AT
        is_left_over = way == "left_over" and is_changed and world.rank == 1
        if way != "never_zeroed" and not is_left_over:
            optimizer.zero_grad(set_to_none=way != "zeroed_in_place")
        net.uses_table = not is_left_over and not (
            (way == "unused" and is_changed and world.rank == 1) or (way == "unused_everywhere" and step == CHANGES_AT)
        )
        net.is_functional = way == "functional" and is_changed and world.rank == 0
        net.is_checkpointed = way == "checkpointed"
        net.is_called_twice = way == "twice" and is_changed
        tokens = torch.randint(NUM_ROWS - 1, (3000 if way == "many" and is_changed else 40,), generator=generator)
        if way in ("accumulated", "refilled", "changed_between", "changed_unseen"):
            with model.no_sync():
                model(tokens).backward()
            if way == "refilled":
                tokens.copy_(torch.randint(NUM_ROWS - 1, tokens.shape, generator=generator))
            if way == "changed_between" and is_changed:
                weight.grad.add_(0.01)
            if way == "changed_unseen" and is_changed:
                add_unseen(weight.grad)
        loss = model(tokens.flip(0)[: 3000 if way == "many" else 20])
        if way == "regularised" and is_changed:
            loss = loss + 1e-3 * weight.square().sum()
        if way == "gradient_asked_for":
            torch.autograd.grad(loss, weight, retain_graph=True)
        if way == "weighted":
            lockstep.backward(loss, weight=world.rank + 1)
        else:
            loss.backward()
        num_active.append(num_tables(model))
        assert weight.grad is None or weight.grad.layout is torch.strided
        optimizer.step()
    weights = b"".join(param.detach().numpy().tobytes() for param in net.parameters())
    return hashlib.sha256(weights).hexdigest(), num_active


@pytest.mark.parametrize("way", [*AS_ROWS, *WHOLE])
def test_rows_give_the_same_bits_as_the_whole_table(started_pool, way):
    for workers in some([3], [2, 3]):
        as_rows = started_pool.run(workers, train, way, 1 << 20)
        whole = started_pool.run(workers, train, way, 1 << 40)
        assert [weights for weights, _ in as_rows] == [weights for weights, _ in whole]
        assert way == "used_up" or len({weights for weights, _ in whole}) == 1  # There each worker updates by itself.
        assert all(num_active == [0] * STEPS for _, num_active in whole)
        expected = [1] * STEPS if way in AS_ROWS else as_rows[0][1]
        assert all(num_active == expected for _, num_active in as_rows)
        assert way in AS_ROWS or expected[-1] == 0


SPLIT = [way for way in (*AS_ROWS, *WHOLE) if way not in ("used_up", "frozen_on_one")]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("way", some(["plain", "unused", "weighted", "hooked_in_place", "never_zeroed"], SPLIT))
def test_rows_of_split_gradients(started_pool, way, zero):
    for workers in some([3], [2, 3]):
        as_rows = started_pool.run(workers, train, way, 1 << 20, zero)
        whole = started_pool.run(workers, train, way, 1 << 40, zero)
        assert [weights for weights, _ in as_rows] == [weights for weights, _ in whole]
        assert len({weights for weights, _ in whole}) == 1
        assert all(num_active == as_rows[0][1] for _, num_active in as_rows)
        stays = way in (*AS_ROWS, "never_zeroed", "left_over")  # The parameter has no gradient then.
        assert as_rows[0][1] == [1] * STEPS if stays else as_rows[0][1][-1] == 0


def fail(grad):
    raise ArithmeticError("no gradient here")


def fails_once(world, least_bytes, zero):
    """The third step is void, and its gradients are not left over for the fourth."""
    before, rows_module.LEAST_BYTES = rows_module.LEAST_BYTES, least_bytes
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model = lockstep.DataParallel(net, optimizer=optimizer if zero else None, zero=zero)
    rows_module.LEAST_BYTES = before
    generator = torch.Generator().manual_seed(world.rank)
    for step in range(5):
        loss = model(torch.randint(NUM_ROWS, (30,), generator=generator))
        if step == 2:
            hook = net.small.weight.register_hook(fail) if world.rank == 1 else None
            with pytest.raises(ArithmeticError if world.rank == 1 else lockstep.StepVoid):
                loss.backward()
            if hook is not None:
                hook.remove()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return hashlib.sha256(b"".join(param.detach().numpy().tobytes() for param in net.parameters())).hexdigest()


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_void_step_leaves_nothing(started_pool, zero):
    as_rows, whole = (started_pool.run(2, fails_once, least_bytes, zero) for least_bytes in (1 << 20, 1 << 40))
    assert len({*as_rows, *whole}) == 1


def joined(world, least_bytes):
    """Worker 1 has fewer batches."""
    before, rows_module.LEAST_BYTES = rows_module.LEAST_BYTES, least_bytes
    torch.manual_seed(1)
    net = Net()
    model = lockstep.DataParallel(net)
    rows_module.LEAST_BYTES = before
    generator = torch.Generator().manual_seed(world.rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with model.join():
        for _ in range(3 if world.rank else 6):
            optimizer.zero_grad()
            model(torch.randint(NUM_ROWS, (30,), generator=generator)).backward()
            optimizer.step()
    weights = world.broadcast([param.detach().numpy().tobytes() for param in net.parameters()])
    return hashlib.sha256(b"".join(weights)).hexdigest()


def test_workers_that_have_no_batch_left(started_pool):
    as_rows, whole = (started_pool.run(2, joined, least_bytes) for least_bytes in (1 << 20, 1 << 40))
    assert len({*as_rows, *whole}) == 1


class Squares:
    """A gauge: the squared norms of what was sent, and of the sums."""

    def __init__(self):
        self.own = self.sums = 0.0

    def see_own(self, step, bucket):
        self.own += bucket.flat_grads.square().sum().item()

    def is_due(self, step):
        return True

    def see_rows(self, own, sums):
        self.own += sum(values.square().sum().item() for values in own)
        self.sums += sum(values.square().sum().item() for values in sums)

    def see_sums(self, step, buckets):
        self.sums += sum(bucket.flat_grads.square().sum().item() for bucket in buckets)


def measured(world):
    torch.manual_seed(1)
    net = Net()
    model = lockstep.DataParallel(net)
    model._engine.reducer.observer = gauge = Squares()
    found = []
    for _ in range(3):  # The first with the table in a bucket.
        net.zero_grad()
        gauge.own = gauge.sums = 0.0
        model(torch.arange(40) * (world.rank + 1)).backward()
        found.append((gauge.own, gauge.sums, sum(p.grad.square().sum().item() for p in net.parameters())))
    return found


def test_rows_are_measured_too(started_pool):
    for found in started_pool.run(2, measured):
        for own, sums, squares in found:
            assert sums == pytest.approx(squares, rel=1e-5)
            assert own == pytest.approx(found[0][0], rel=1e-5)


def train_wide(world):
    """What is sent for a table of 50 MB of which 40 rows were touched."""
    net = nn.Sequential(nn.Embedding(200_000, 64), nn.Linear(64, 1))
    model = lockstep.DataParallel(net)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(3):
        net.zero_grad()
        model(torch.randint(200_000, (40,), generator=generator)).sum().backward()
    return sum(bucket.num_bytes for bucket in model._engine.reducer.buckets), net[0].weight.grad.count_nonzero().item()


def test_the_table_is_in_no_bucket(started_pool):
    for num_bytes, num_values in started_pool.run(2, train_wide):
        assert num_bytes < 10_000
        assert 64 < num_values <= 80 * 64


def hooked_later(world, at):
    """A communication hook sees the table, which had travelled as rows or was about to."""
    net = nn.Sequential(nn.Embedding(NUM_ROWS, 64), nn.Linear(64, 1))
    model = lockstep.DataParallel(net)
    seen = []
    for step in range(4):
        net.zero_grad()
        if step == at:
            model.register_comm_hook(None, lambda state, bucket: see(bucket))

        def see(bucket):
            seen.append(bucket.buffer().numel())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model(torch.arange(9)).sum().backward()
    return seen


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_hook_sees_everything(started_pool, at):
    for seen in started_pool.run(2, hooked_later, at):
        assert sum(seen) >= (4 - at) * NUM_ROWS * 64


def strange(world):
    """Uses of a large table that have no ordinary gradient: nothing is believed, and nothing fails."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Embedding(NUM_ROWS, 64, sparse=True), nn.Linear(64, 1))
    model = lockstep.DataParallel(net)
    for _ in range(3):
        net.zero_grad()
        model(torch.arange(9) + world.rank).sum().backward()
    found = [net[0].weight.grad.is_sparse]
    net = nn.Sequential(nn.Embedding(NUM_ROWS, 64), nn.Linear(64, 1))
    model = lockstep.DataParallel(net)
    params = dict(net.named_parameters())
    for _ in range(3):
        net.zero_grad()
        grads = torch.func.grad(lambda params: torch.func.functional_call(net, params, (torch.arange(9),)).sum())(
            params
        )
        model(torch.arange(9)).sum().backward()
        found.append(torch.allclose(net[0].weight.grad, grads["0.weight"]))
    return found, num_tables(model)


def test_sparse_gradients_and_functions_of_gradients(started_pool):
    assert started_pool.run(2, strange) == [([True] * 4, 1)] * 2


def copied(world):
    """A wrapped module can be copied, pickled and compiled; what comes out is not heard of."""
    net = nn.Sequential(nn.Embedding(NUM_ROWS, 64), nn.Linear(64, 1))
    model = lockstep.DataParallel(net)
    for step in range(2):
        net.zero_grad()
        model(torch.arange(9) + step).sum().backward()
    other, loaded = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    for each in (other, loaded):
        each(torch.arange(5)).sum().backward()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    outputs = compiled(torch.arange(5))
    return torch.equal(outputs, loaded(torch.arange(5))), num_tables(model)


def test_copies_are_nobodys(started_pool):
    assert started_pool.run(2, copied) == [(True, 1), (True, 1)]
