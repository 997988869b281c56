"""What programs ask of DDP besides training: copies, its class and attributes, `Join`, wrappers in wrappers."""

import copy
import io
import pickle
import warnings
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim import swa_utils

import lockstep

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
TOLERANCE = {"rtol": 1e-5, "atol": 1e-7}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batch(step, rank=None, size=None):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 6, generator=generator)
    return x if rank is None else x.chunk(size)[rank]


def train(model, world, steps=3, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        model(batch(step, world.rank, world.size)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def expect_alike(world, params):
    """Workers have the same bits."""
    everybodys = world.gather([param.numpy().tobytes() for param in params])
    assert everybodys.count(everybodys[0]) == world.size


# Copies


def copies(world):
    model = lockstep.DataParallel(net())
    model.note = "kept"
    train(model, world, 1)
    saved = io.BytesIO()
    torch.save(model, saved)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
    expected = train(model, world)
    for other in (copied, pickled, loaded, copy.deepcopy(copied)):
        assert type(other) is lockstep.DataParallel and other.note == "kept"
        assert all(a.data_ptr() != b.data_ptr() for a, b in zip(other.parameters(), model.parameters(), strict=True))
        found = train(other, world)
        expect_alike(world, found)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, **TOLERANCE)


def test_a_copy_is_a_wrapped_model_of_the_same_workers(pool):
    pool.run(2, copies)


def averaged(world):
    """Worker 0 alone has a copy and evaluates it; then all have averages, of weights that were trained."""
    model = lockstep.DataParallel(net())
    if world.is_main:
        alone = copy.deepcopy(model).eval()
        with torch.no_grad():
            alone(torch.ones(2, 6))
        pickle.dumps(model)
    mean = swa_utils.AveragedModel(model)
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True)
    seen = []
    for _ in range(3):
        seen.append(train(model, world, 1))
        mean.update_parameters(model)
        ema.update_parameters(model)
    for param, *history in zip(mean.module.parameters(), *seen, strict=True):
        torch.testing.assert_close(param, torch.stack(history).mean(0), **TOLERANCE)
    swa_utils.update_bn([batch(step) for step in range(3)], mean)
    with torch.no_grad():
        assert not torch.equal(mean(batch(0)), ema(batch(0)))
    expect_alike(world, [param.detach() for param in (*mean.parameters(), *ema.parameters())])


def test_weights_are_averaged_by_copies(pool):
    pool.run(2, averaged)


def refused(world):
    given = dist.new_group([0, 1], backend="gloo")
    model = lockstep.DataParallel(net(), process_group=given)
    if model.world is not world:
        with pytest.raises(lockstep.UsageError, match=r"torch\.save\(model\.module"):
            pickle.dumps(model)
        expect_alike(world, train(copy.deepcopy(model), world))
    module = net()
    split = lockstep.DataParallel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), zero=2)
    with pytest.raises(lockstep.UsageError, match=r"copied = copy\.deepcopy\(model\.module\)"):
        copy.deepcopy(split)
    with split.whole_params():
        copied = copy.deepcopy(split.module)
    assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), module.parameters(), strict=True))


def test_what_cannot_be_copied_says_what_can(pool):
    pool.run(2, refused)


def timm_ema(world):
    from vision import import_torchvision

    import_torchvision()
    timm_utils = pytest.importorskip("timm.utils")
    model = lockstep.DataParallel(net())
    emas = [timm_utils.ModelEma(model, 0.5), timm_utils.ModelEmaV2(model, 0.5), timm_utils.ModelEmaV3(model, 0.5)]
    train(model, world, 2)
    for ema in emas:
        ema.update(model)
    weights = [timm_utils.get_state_dict(ema, timm_utils.unwrap_model)["0.weight"] for ema in emas]
    for weight in weights:
        torch.testing.assert_close(weight, (net()[0].weight + model.module[0].weight).detach() / 2, **TOLERANCE)
    with pytest.warns(UserWarning, match="--no-ddp-bb"):
        lockstep.DataParallel(net(), broadcast_buffers=True)
    model = lockstep.DataParallel(net(), broadcast_buffers=False)
    train(model, world, 1)
    mine = model.module[1].running_mean.clone()
    timm_utils.distribute_bn(model, world.size, reduce=True)
    torch.testing.assert_close(model.module[1].running_mean, world.mean(mine), **TOLERANCE)
    assert not torch.equal(model.module[1].running_mean, mine)


def saved_by_one(world):
    model = lockstep.DataParallel(torch.nn.Linear(3, 2))
    average = copy.deepcopy(model)
    saved = average.state_dict() if world.rank == 0 else {}
    if saved:
        average.load_state_dict(saved)
    average.zero_grad()
    with pytest.raises(lockstep.UsageError, match="wrapped already"):
        lockstep.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).mean(), shards=2)
    return sorted(saved), average.coded


def test_one_worker_may_save_a_copy_alone_and_a_trainer_wraps_by_itself(pool):
    names = ["module.bias", "module.weight"]
    assert pool.run(2, saved_by_one) == [(names, None), ([], None)]


@pytest.mark.skipif(not (find_spec("timm") and find_spec("torchvision")), reason="needs timm")
def test_timms_averages_and_statistics(pool):
    pool.run(2, timm_ema)


# What programs read


def attributes(world):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = lockstep.DataParallel(net(), broadcast_buffers=True, find_unused_parameters=True, bucket_cap_mb=2)
    assert any(issubclass(each.category, FutureWarning) and "broadcast_buffers" in str(each.message) for each in caught)
    assert isinstance(model, DistributedDataParallel)
    assert model.process_group is world.group and model.device == torch.device("cpu")
    assert (model.device_ids, model.output_device, model.dim) == (None, None, 0)
    assert model.broadcast_buffers and model.find_unused_parameters and not model.static_graph
    assert model.bucket_bytes_cap == 2 << 20 and model.parameters_to_ignore == set()
    data = model._get_ddp_logging_data()
    assert data["world_size"] == world.size and data["module_name"] == "Sequential"
    model._set_ddp_runtime_logging_sample_rate(4)
    told = []
    for step in range(16):
        model(batch(step, world.rank, world.size)).square().mean().backward()
        told.append(model._get_ddp_logging_data())
    assert [data["iteration"] for data in told] == [*range(11), 10, 12, 12, 12, 12]
    data = told[-1]
    times = [data[f"{phase}_time"] for phase in ("forward_compute", "backward_compute", "backward_comm")]
    assert all(0 < each < 10**10 for each in times) and data["avg_forward_compute_time"] > 0
    assert 0 <= data["backward_compute_comm_overlap_time"] <= min(times[1:])
    assert data["forward_compute_time_start"] + times[0] == data["backward_compute_time_start"]
    assert data["prev_iteration_grad_ready_order_indices"].count(",") == 5
    module = net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["3.bias"])
    ignoring = lockstep.DataParallel(module)
    assert ignoring.parameters_to_ignore == {"3.bias"}
    ignoring(torch.ones(2, 6) * world.rank).sum().backward()
    ignoring(batch(0, world.rank, world.size)).square().mean().backward()
    biases, weights = (world.gather(each.grad.tolist()) for each in (module[3].bias, module[3].weight))
    assert biases[0] != biases[1] and weights[0] == weights[1]


def test_attributes_and_warnings(pool):
    pool.run(2, attributes)


class Scaled(nn.Module):
    """What DDP is to ignore is computed with as it is, also where the rest is computed with in half."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.linear, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.0009765))
        self.register_buffer("shift", torch.tensor(0.1))
        self.register_buffer("halved", torch.tensor(0.1))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["scale", "shift"])

    def forward(self, x):
        found = [each.dtype for each in (x, self.linear.weight, self.halved, self.scale, self.shift)]
        assert found == [torch.bfloat16] * 3 + [torch.float] * 2
        return self.linear(x).float() * self.scale + self.shift


def ignored_in_half(world):
    half = _MixedPrecision(*[torch.bfloat16] * 3)
    model = lockstep.DataParallel(Scaled(), mixed_precision=half)
    model(batch(0, world.rank, world.size)).square().mean().backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.float}


def test_mixed_precision_leaves_alone_what_is_ignored(pool):
    pool.run(2, ignored_in_half)


def sends_on_request(world):
    """As Accelerate, Lightning and torch's pipelines do: passes under no_sync, and the last backward pass sends."""
    model = lockstep.DataParallel(net())
    x = batch(0, world.rank, world.size)
    with model.no_sync():
        first, second = model(x).square().mean(), model(2 * x).square().mean()
    with model.no_sync():
        first.backward()
    model.require_backward_grad_sync = True
    model.reducer.prepare_for_backward([])
    second.backward()
    grads = [param.grad.clone() for param in model.parameters()]
    expect_alike(world, grads)
    plain = net()
    for part in batch(0).chunk(world.size):
        ((plain(part).square().mean() + plain(2 * part).square().mean()) / world.size).backward()
    for found, param in zip(grads, plain.parameters(), strict=True):
        torch.testing.assert_close(found, param.grad, **TOLERANCE)
    model.zero_grad()
    with model.no_sync():  # As a loop does that has a pipeline run, and sends by itself.
        loss = model(x).square().mean()
        model.reducer.prepare_for_backward([])
        loss.backward()
    own = world.gather([param.grad.tolist() for param in model.parameters()])
    assert own[0] != own[1]
    model.sync_gradients()
    expect_alike(world, [param.grad for param in model.parameters()])


def test_a_backward_pass_sends_on_request(pool):
    pool.run(2, sends_on_request)


def in_backward(world, attached):
    """Optimizers are attached before or after the forward pass of the first or the second step."""
    at_step, _ = attached
    model = lockstep.DataParallel(net())
    train(model, world, at_step)
    for step in range(at_step, 4):
        if (step, "before") == attached:
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        x = batch(step, world.rank, world.size)
        model(x)  # With no backward pass over it.
        loss = model(x).square().mean()
        if (step, "after") == attached:
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        loss.backward()
        assert all(param.grad is None for param in model.parameters())
    for found, wanted in zip(model.parameters(), train(lockstep.DataParallel(net()), world, 4), strict=True):
        torch.testing.assert_close(found.detach(), wanted, **TOLERANCE)


@pytest.mark.parametrize("attached", [(0, "before"), (0, "after"), (1, "before"), (1, "after")])
def test_optimizers_that_step_in_the_backward_pass_get_averages(pool, attached):
    pool.run(2, in_backward, attached)


def in_backward_where_split(world):
    module = net()
    model = lockstep.DataParallel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), zero=1)
    model(batch(0, world.rank, world.size)).square().mean().backward()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    for _ in range(2):
        loss = model(batch(0, world.rank, world.size)).square().mean()
        with pytest.raises(lockstep.UsageError, match="train nothing"):
            loss.backward()


def test_optimizers_in_the_backward_pass_of_what_is_split_are_refused(pool):
    pool.run(2, in_backward_where_split)


# Parameters that are used only later


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.trunk, self.branch = nn.Linear(6, 600), nn.Linear(600, 300)

    def forward(self, x, branches):
        return self.branch(self.trunk(x)) if branches else self.trunk(x)


def expect_means(world, module, passes):
    """Gradients are those of the mean over the workers, each of which made these passes: (input, branches)."""
    found = [param.grad for param in module.parameters()]
    plain = Branches()
    for worker in world.gather([(x, branches) for x, branches in passes]):
        for x, branches in worker:
            (plain(x, branches).square().mean() / world.size).backward()
    for mine, param in zip(found, plain.parameters(), strict=True):
        assert (mine is None) == (param.grad is None)
        if mine is not None:
            torch.testing.assert_close(mine, param.grad, **TOLERANCE)
    module.zero_grad()


def sent(model):
    """Numbers of the parameters that have a bucket."""
    buckets = model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
    return set(map(int, buckets.replace(",", "").split()))


def used_later(world, is_frozen):
    """The branch is used by one worker in step 2, and by all in step 3, where it is under no_sync; or frozen first."""
    module = Branches()
    module.branch.requires_grad_(not is_frozen)
    model = lockstep.DataParallel(module, skip_all_reduce_unused_params=True)
    own = [batch(step, world.rank, world.size) for step in range(5)]
    for step, branches in enumerate((False, False, world.is_main and not is_frozen, None, False)):
        module.branch.requires_grad_(step >= 3 or not is_frozen)
        passes = [(own[step], bool(branches))]
        if branches is None:
            passes = [(own[0], True), (own[step], False)]
            with model.no_sync():
                model(*passes[0]).square().mean().backward()
        model(*passes[-1]).square().mean().backward()
        if step == 1:
            assert sent(model) == {0, 1}
        expect_means(world, module, passes)
    assert sent(model) == {0, 1, 2, 3}


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_is_used_later_is_averaged_as_well(pool, is_frozen):
    pool.run(2, used_later, is_frozen)


# Join


def joined(world, divides_by_all):
    """Two models and torch's ZeroRedundancyOptimizer: worker 0 makes two steps, worker 1 four."""
    generator, critic = (lockstep.DataParallel(nn.Linear(4, 4).double()) for _ in range(2))
    start = copy.deepcopy([generator.module, critic.module])
    optimizers = [
        ZeroRedundancyOptimizer(generator.parameters(), torch.optim.SGD, lr=0.1),
        torch.optim.SGD(critic.parameters(), lr=0.1),
    ]
    with Join([generator, optimizers[0], critic], divide_by_initial_world_size=divides_by_all):
        for step in range(2 + 2 * world.rank):
            x = torch.full((2, 4), 1.0 + step + world.rank, dtype=torch.double)
            for model, optimizer in zip((generator, critic), optimizers, strict=True):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    expect_alike(world, [param.detach() for param in (*generator.parameters(), *critic.parameters())])
    for found, plain in zip((generator, critic), start, strict=True):
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(4):
            ranks = [rank for rank in range(world.size) if step < 2 + 2 * rank]
            for rank in ranks:
                x = torch.full((2, 4), 1.0 + step + rank, dtype=torch.double)
                (plain(x).square().mean() / (world.size if divides_by_all else len(ranks))).backward()
            optimizer.step()
            optimizer.zero_grad()
        for mine, wanted in zip(found.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("divides_by_all", [True, False])
def test_torchs_join_over_models_and_an_optimizer(pool, divides_by_all):
    pool.run(2, joined, divides_by_all)


# Wrappers in wrappers, and side by side


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = lockstep.DataParallel(nn.Linear(6, 8))
        self.second = nn.Linear(8, 3)

    def forward(self, x):
        return self.second(self.first(x).relu())


def nested(world):
    whole = lockstep.DataParallel(Halves())
    found = train(whole, world)
    expect_alike(world, found)
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    wanted = train(plain, type("One", (), {"rank": 0, "size": 1}))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, **TOLERANCE)
    module = net()
    inner = lockstep.DataParallel(module)
    around, beside = lockstep.DataParallel(inner), lockstep.DataParallel(module)
    for model in (around, beside, inner):
        expect_alike(world, train(model, world, 2))


def test_wrappers_nested_and_side_by_side(pool):
    pool.run(2, nested)


def alone_in_evaluation(world):
    norm = lockstep.SyncBatchNorm(6, track_running_stats=False)
    if world.is_main:
        x = torch.randn(5, 6)
        torch.testing.assert_close(norm.eval()(x), nn.BatchNorm1d(6, track_running_stats=False).eval()(x))


def test_a_worker_evaluates_alone_without_running_statistics(pool):
    pool.run(2, alone_in_evaluation)


# Loaders with a state


def stateful(world):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    data = torch.utils.data.TensorDataset(torch.arange(23.0))
    loader = lockstep.shard(loaders.StatefulDataLoader(data, batch_size=4, shuffle=True))
    batches, state = [], None
    for number, (x,) in enumerate(loader):
        batches.append(x.tolist())
        if number == 2:
            state = loader.state_dict()
    assert (
        sorted(value for part in world.gather(batches) for each in part for value in each) == data.tensors[0].tolist()
    )
    again = lockstep.shard(loaders.StatefulDataLoader(data, batch_size=4, shuffle=True))
    again.load_state_dict(state)
    assert [x.tolist() for (x,) in again] == batches[3:]
    given = loaders.StatefulDataLoader(data, batch_size=4)
    given.load_state_dict(given.state_dict())
    with pytest.raises(lockstep.UsageError, match="given a state before it was sharded"):
        lockstep.shard(given)


@pytest.mark.skipif(not find_spec("torchdata"), reason="needs torchdata")
def test_a_stateful_loader_is_sharded_and_resumed(pool):
    pool.run(2, stateful)
