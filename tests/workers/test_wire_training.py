"""DataParallel with a wire: replicas stay equal, learn as without one, send what was promised, and can be resumed."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from amount import some
from models import build, difference, part_of, weights_of
from pool import OnBackend

import lockstep
from lockstep import wire
from lockstep.wire import BucketShape, Piece

BACKENDS = some(["gloo"], ["gloo", "shm"])
WIRES = [wire.Full(), wire.Half("bf16"), wire.Int8(), wire.Sign(), wire.TopK(0.3), wire.LowRank(4)]
WIRES += [wire.After(2, wire.Int8())]


def begin(chosen, zero=0, lr=1e-3):
    net = build("gpt")
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    return lockstep.DataParallel(net, optimizer=optimizer, zero=zero, wire=chosen, bucket_cap_mb=0.01), optimizer


def go_on(world, model, optimizer, first, last):
    losses = []
    for step in range(first, last):
        x, y = part_of(type(model.module).batch(7, torch.Generator().manual_seed(step), torch.float), world)
        loss = F.cross_entropy(model(x), y)
        lockstep.backward(loss, weight=len(x))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(world.mean(loss.item(), weight=len(x)))
    return losses


def train(world, chosen, zero, steps):
    model, optimizer = begin(chosen, zero)
    losses = go_on(world, model, optimizer, 0, steps)
    with model.whole_params():
        return weights_of(model.module), losses


@pytest.fixture(scope="module")
def without_wire(started_pool):
    """Weights and losses of two workers."""
    return functools.cache(lambda: started_pool.run(2, train, None, 0, 30)[0])


SOME = zip(WIRES, [(2, 0), (3, 1), (3, 3), (2, 2), (3, 3), (2, 0), (3, 1)], strict=True)
"""Every wire, and every stage at least once."""


@pytest.mark.parametrize(
    ("chosen", "at"), some(SOME, itertools.product(WIRES, [(2, 0), (3, 1), (2, 2), (3, 3)])), ids=str
)
def test_replicas_stay_equal_and_learn(pool, without_wire, chosen, at):
    expected, plain = without_wire()
    workers, zero = at
    results = pool.run(workers, train, chosen, zero, 30)
    assert all(difference(weights, results[0][0]) == 0 for weights, _ in results)
    rel = 0.25 if isinstance(chosen, wire.Sign | wire.TopK | wire.LowRank) else 0.02
    assert results[0][1][-1] == pytest.approx(plain[-1], rel=rel), plain
    if isinstance(chosen, wire.Full):
        assert difference(results[0][0], expected) < 1e-4


def sent(world, chosen, zero=0):
    model, optimizer = begin(chosen, zero)
    go_on(world, model, optimizer, 0, 3)
    promised = 0
    for bucket in model._engine.reducer.buckets:
        if bucket.plan.slots:
            pieces = [Piece(str(s.index), s.offset, tuple(p.shape)) for s, p in zip(bucket.plan.slots, bucket.params)]
            promised += chosen.bytes_promised(BucketShape(bucket.plan.tail_offset, tuple(pieces)), world.size)
    return model.coded.num_bytes, promised


@pytest.mark.parametrize("chosen", WIRES, ids=str)
def test_it_sends_what_was_promised(pool, chosen):
    for counted, promised in pool.run(3, sent, chosen):
        assert counted == pytest.approx(promised, rel=0.02)


def test_where_gradients_are_split_nothing_is_sent_back(pool):
    for counted, promised in pool.run(3, sent, wire.Int8(), 2):
        assert counted == pytest.approx(promised / 2, rel=0.02)


def train_gathering(world, gather_wire, chosen):
    net = build("gpt")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    whole = {"optimizer": optimizer, "zero": 3, "reshard_after_forward": world.size == 2}
    model = lockstep.DataParallel(net, wire=chosen, gather_wire=gather_wire, **whole)
    losses = go_on(world, model, optimizer, 0, 30)
    with model.whole_params():
        weights = weights_of(net)
    computed = []
    net.head.register_forward_hook(lambda module, inputs, output: computed.append(module.weight.double().clone()))
    go_on(world, model, optimizer, 30, 31)
    return losses, weights, computed[0].detach().numpy()


@pytest.mark.parametrize(
    ("workers", "gather_wire", "chosen"),
    [(2, wire.Int8(), wire.Int8()), (3, wire.Int8(64), None), (2, wire.Half(), None)],
)
def test_gathered_parameters_may_be_encoded_too(started_pool, without_wire, workers, gather_wire, chosen):
    """All compute with the same rounded weights; what the optimizer has is whole."""
    results = OnBackend(started_pool, "gloo").run(workers, train_gathering, gather_wire, chosen)
    losses, weights, computed = results[0]
    assert losses[-1] == pytest.approx(without_wire()[1][-1], rel=0.03)
    for _, others, theirs in results:
        assert difference(others, weights) == 0 and (theirs == computed).all()
    lost = abs(computed - weights["head.weight"]).max() / abs(weights["head.weight"]).max()
    assert 0 < lost <= (1 / 254 if isinstance(gather_wire, wire.Int8) else 1 / 256)


def test_a_gather_wire_needs_something_to_gather():
    net = build("mlp")
    with pytest.raises(lockstep.UsageError, match="zero=3 does"):
        lockstep.DataParallel(net, gather_wire=wire.Int8())


def waiting(model):
    """What waits to be sent, by parameter: this worker's own errors and those of the sums that it owns."""
    state = model.coded.state_dict()
    totals = {name.removeprefix("error."): v.clone() for name, v in state.items() if name.startswith("error.")}
    for name, part in state.items():
        if name.startswith("owner_error."):
            begin = int(state[name.replace("owner_error.", "owner_begin.")])
            totals[name.removeprefix("owner_error.")].view(-1)[begin : begin + part.numel()] += part.view(-1)
    return totals


def stopped_and_resumed(world, chosen, zero, folder):
    whole, optimizer = begin(chosen, zero)
    go_on(world, whole, optimizer, 0, 8)
    stopped, optimizer = begin(chosen, zero)
    go_on(world, stopped, optimizer, 0, 4)
    lockstep.save(folder, stopped, optimizer, step=4)
    resumed, optimizer = begin(chosen, zero)
    lockstep.load(folder, resumed, optimizer)
    before, after = waiting(stopped), waiting(resumed)
    assert before.keys() == after.keys() and any(value.abs().max() > 0 for value in before.values())
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-7)
    go_on(world, resumed, optimizer, 4, 8)
    return difference(weights_of(resumed.module), weights_of(whole.module))


WITH_ERRORS = [wire.Int8(), wire.TopK(0.1), wire.Sign(), wire.LowRank(4)]


@pytest.mark.parametrize(
    ("chosen", "zero"),
    some(zip(WITH_ERRORS, [0, 1, 1, 0], strict=True), itertools.product(WITH_ERRORS, [0, 1])),
    ids=str,
)
def test_errors_are_in_the_checkpoint(pool, tmp_path, chosen, zero):
    """The resumed one lays its buckets out anew after its first step, so chunks are cut elsewhere than in the other."""
    results = pool.run(2, stopped_and_resumed, chosen, zero, str(tmp_path))
    if isinstance(chosen, wire.LowRank):  # Which knows matrices, and not chunks.
        assert max(results) <= 1e-6


def saved_with_errors(world, chosen, folder):
    model, optimizer = begin(chosen)
    go_on(world, model, optimizer, 0, 4)
    lockstep.save(folder, model, optimizer, step=4)
    return {name: world.sum(value).numpy() for name, value in waiting(model).items()}


def loaded_with_errors(world, chosen, folder):
    model, optimizer = begin(chosen)
    lockstep.load(folder, model, optimizer)
    totals = {name: world.sum(value).numpy() for name, value in waiting(model).items()}
    go_on(world, model, optimizer, 4, 6)
    return totals


@pytest.mark.parametrize("chosen", [wire.TopK(0.1), wire.LowRank(4)], ids=str)
def test_what_waits_is_shared_by_another_number_of_workers(pool, tmp_path, chosen):
    before = pool.run(3, saved_with_errors, chosen, str(tmp_path))[0]
    after = pool.run(2, loaded_with_errors, chosen, str(tmp_path))[0]
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(torch.from_numpy(after[name]), torch.from_numpy(value), rtol=1e-4, atol=1e-6)


def overflows(world, chosen):
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 8)
    model = lockstep.DataParallel(net, wire=chosen)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    skipped = []
    for step in range(4):
        x = torch.full((2, 64), torch.inf if step == 1 and world.rank == 1 else 1.0)
        before = net.weight.detach().clone()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(torch.equal(before, net.weight))
    return skipped, scaler.get_scale(), net.weight.isfinite().all().item()


@pytest.mark.parametrize("chosen", WIRES, ids=str)
def test_an_overflow_on_one_worker_skips_the_step_on_all_once(pool, chosen):
    for skipped, scale, is_finite in pool.run(2, overflows, chosen):
        assert skipped == [False, True, False, False] and scale == 4.0 and is_finite


def misused(world):
    net = torch.nn.Linear(4, 4)
    texts = []
    with pytest.raises(lockstep.UsageError) as caught:
        lockstep.DataParallel(net, wire="bf16")
    texts.append(str(caught.value))
    with pytest.raises(lockstep.UsageError) as caught:
        lockstep.DataParallel(net, wire=wire.Half()).register_comm_hook(None, lambda state, bucket: bucket.buffer())
    return [*texts, str(caught.value)]


def test_misuse_is_told(pool):
    for texts in pool.run(2, misused):
        words = ("lockstep.wire.Half", "does not go with wire")
        assert all(word in text for word, text in zip(words, texts, strict=True)), texts


def chosen_by_itself(world, auto, zero):
    model, optimizer = begin(auto, zero)
    early = model.wire_report()
    losses = go_on(world, model, optimizer, 0, 30)
    with model.whole_params():
        return early, model.wire_report(), model.coded.choice, weights_of(model.module), losses[-1]


AUTOS = ["auto", wire.Auto(candidates=(wire.Full(), wire.Int8(), wire.Sign()), trial_steps=1)]


@pytest.mark.parametrize(
    ("auto", "zero"), some(zip(AUTOS, [0, 3], strict=True), itertools.product(AUTOS, [0, 3])), ids=str
)
def test_auto_chooses_once_and_alike_on_all_workers(pool, without_wire, auto, zero):
    plain = without_wire()[1][-1]
    results = pool.run(2, chosen_by_itself, auto, zero)
    for early, report, choice, weights, loss in results:
        assert "measuring" in early and report == str(choice) and 'wire="auto" chose' in report
        assert choice == results[0][2] and choice.tried[0][0] == wire.Full()
        assert difference(weights, results[0][3]) == 0
        assert loss == pytest.approx(plain, rel=0.2)


def switched(world):
    """Nothing that waits is lost from wire to wire: in the end all has arrived."""
    torch.manual_seed(world.rank)
    net = torch.nn.Linear(16, 16, bias=False)
    model = lockstep.DataParallel(net, wire=wire.Full())
    expected, arrived = torch.zeros(16, 16), torch.zeros(16, 16)
    for step, chosen in enumerate(
        [wire.Full(), wire.TopK(0.1), wire.Full(), wire.Int8(), wire.LowRank(1), wire.Full()]
    ):
        if step:
            model.coded._wire = chosen
            model._engine.reducer._placement.reduction.adopt(model._engine.reducer.buckets)
        grad = torch.randn(16, 16)
        (model(torch.eye(16)).t() * grad).sum().backward()
        expected += world.mean(grad)
        arrived += net.weight.grad
        net.weight.grad = None
    return (arrived - expected).abs().max().item()


def test_no_error_is_lost_between_wires(pool):
    assert max(pool.run(2, switched)) < 1e-5
