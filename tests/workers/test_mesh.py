"""Data parallelism over some dimensions of a mesh, tensor and pipeline parallelism over the others."""

import contextlib
import itertools
import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from amount import some
from torch import nn

import lockstep

ROOT = Path(__file__).parents[2]

STEPS = 20
SIZES = [8, 7, 8, 5]
"""Of the global batches: some do not divide."""


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """As much of a transformer as tensor parallelism cuts in different ways."""

    def __init__(self, width=8, vocabulary=16, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(depth=2):
    torch.manual_seed(3)
    return Net(depth=depth)


def plan_of(kind):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    if kind == "tensor":  # Norms and the embedding are plain tensors, the same on all.
        return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    return {  # As torchtitan's: activations between are cut over the sequence.
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def parallel(net, mesh, kind):
    from torch.distributed.tensor.parallel import parallelize_module

    return parallelize_module(net, mesh["tp"], plan_of(kind))


def optimizer_of(net, foreach=None):
    decayed = [param for param in net.parameters() if param.dim() > 1]
    others = [param for param in net.parameters() if param.dim() == 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-2, foreach=foreach)


def global_batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(16, (SIZES[step % len(SIZES)], 13), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def full_weights(model, net):
    with model.whole_params():
        return {n: getattr(p, "full_tensor", lambda p=p: p)().clone() for n, p in net.named_parameters()}


@pytest.fixture(scope="module")
def reference():
    """The same training by one worker, in plain torch."""
    net = build()
    optimizer = optimizer_of(net)
    norms = []
    for step in range(STEPS):
        loss_of(net, *global_batch(step)).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in net.named_parameters()}, norms


def go_on(model, optimizer, steps):
    norms = []
    for step in steps:
        x, y = global_batch(step)
        part = slice(*(len(x) * (model.world.rank + end) // model.world.size for end in (0, 1)))
        lockstep.backward(loss_of(model, x[part], y[part]), weight=len(x[part]))
        norms.append(model.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


MESHES = {
    "dp x tp": ((2, 2), ("dp", "tp"), "dp"),
    "replicate x split x tp": ((2, 2, 2), ("replicate", "split", "tp"), ("replicate", "split")),
    "replicate x split": ((2, 2), ("replicate", "split"), ("replicate", "split")),
    "tp": ((1, 2), ("dp", "tp"), "dp"),
    "replicate alone": ((3, 1), ("replicate", "split"), ("replicate", "split")),
    "split alone": ((1, 3), ("replicate", "split"), ("replicate", "split")),
}


def train(world, shape, names, data, zero, kind, foreach=None):
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    net = build()
    if "tp" in names:
        parallel(net, mesh, kind)
    params = list(net.parameters())
    optimizer = optimizer_of(net, foreach)
    model = lockstep.DataParallel(net, device_mesh=mesh[data], optimizer=optimizer, zero=zero, bucket_cap_mb=0.001)
    norms = go_on(model, optimizer, range(STEPS))
    assert all(now is before for now, before in zip(net.parameters(), params, strict=True))
    return full_weights(model, net), norms


def assert_same(results, reference):
    expected, expected_norms = reference
    for weights, norms in results:
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        for name, value in expected.items():
            assert (weights[name] - value).abs().max() <= 1e-5 * max(1, value.abs().max()), name


@pytest.mark.parametrize(
    ("shape", "kind", "zero", "backend"),
    some(
        [
            *(("dp x tp", "sequence", zero, "shm") for zero in range(4)),
            ("dp x tp", "tensor", 3, "gloo"),
            ("replicate x split x tp", "sequence", 2, "shm"),
            ("tp", "sequence", 1, "shm"),
        ],
        itertools.product(MESHES, ["tensor", "sequence"], range(4), ["shm", "gloo"]),
    ),
)
def test_as_one_worker(started_pool, reference, shape, kind, zero, backend):
    sizes, names, data = MESHES[shape]
    workers = torch.Size(sizes).numel()
    results = started_pool.run(workers, train, sizes, names, data, zero, kind, backend=backend)
    assert_same(results, reference)


def begin(shape, names, data, zero, kind="sequence"):
    net = build()
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names) if shape else None
    if "tp" in names:
        parallel(net, mesh, kind)
    optimizer = optimizer_of(net)
    options = {"device_mesh": mesh[data]} if shape else {}
    return net, optimizer, lockstep.DataParallel(net, optimizer=optimizer, zero=zero, bucket_cap_mb=0.001, **options)


def train_and_save(world, shape, names, data, zero, folder):
    _, optimizer, model = begin(shape, names, data, zero)
    norms = go_on(model, optimizer, range(10))
    lockstep.save(folder, model, optimizer, step=10)
    return norms


def load_and_go_on(world, shape, names, data, zero, folder):
    net, optimizer, model = begin(shape, names, data, zero)
    with torch.no_grad():
        for param in net.parameters():
            if zero == 0:
                param.zero_()
    assert lockstep.load(folder, model, optimizer).step == 10
    norms = go_on(model, optimizer, range(10, STEPS))
    return full_weights(model, net), norms


SAVED = [
    ((2, 2), ("dp", "tp"), "dp"),
    ((1, 4), ("dp", "tp"), "dp"),
    ((2, 2, 2), ("replicate", "split", "tp"), ("replicate", "split")),
    ((2, 2), ("replicate", "split"), ("replicate", "split")),
    ((), (), ""),
    ((1, 3), ("dp", "tp"), "dp"),
]


@pytest.mark.parametrize(
    ("number", "zero", "backend"),
    some([(0, 0, "shm"), (5, 3, "shm")], itertools.product(range(len(SAVED)), (0, 3), ("shm", "gloo"))),
)
def test_a_checkpoint_loads_on_another_mesh(started_pool, reference, tmp_path, number, zero, backend):
    def run(function, layout, zero):
        workers = torch.Size(layout[0]).numel() if layout[0] else 2
        return started_pool.run(workers, function, *layout, zero, str(tmp_path), backend=backend)

    before = run(train_and_save, SAVED[number], zero)[0]
    results = run(load_and_go_on, SAVED[(number + 1) % len(SAVED)], 3 - zero)
    assert_same([(weights, before + norms) for weights, norms in results], reference)


class Stage(nn.Module):
    """Some of the layers of a Net, under the names that they have there."""

    def __init__(self, net, first, last):
        super().__init__()
        depth = len(net.blocks)
        self.embed = net.embed if first == 0 else nn.Identity()
        self.blocks = nn.ModuleDict({str(number): net.blocks[number] for number in range(first, last)})
        self.norm, self.head = (net.norm, net.head) if last == depth else (nn.Identity(), nn.Identity())

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x))


def train_pipeline(world, zero, schedule_name, tensor_parallel):
    from torch.distributed import pipelining

    shape, names = ((2, 2, 2), ("pp", "dp", "tp")) if tensor_parallel else ((2, 2), ("pp", "dp"))
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    net, stage = build(), mesh["pp"].get_local_rank()
    part = Stage(net, stage, stage + 1)
    if tensor_parallel:
        parallel(part, mesh, "tensor")
    optimizer = optimizer_of(part)
    model = lockstep.DataParallel(part, device_mesh=mesh["dp"], optimizer=optimizer, zero=zero, bucket_cap_mb=0.001)
    data = torch.utils.data.TensorDataset(*(torch.cat(both) for both in zip(*map(global_batch, range(0, 40, 4)))))
    loader = lockstep.shard(torch.utils.data.DataLoader(data, batch_size=8), device_mesh=mesh["dp"])
    place = pipelining.PipelineStage(model, stage, 2, world.device, group=mesh["pp"].get_group())
    schedule = getattr(pipelining, schedule_name)(
        place, 2, loss_fn=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())
    )
    norms = []
    for x, y in loader:
        with model.no_sync():
            schedule.step(*(() if stage else (x,)), **({"target": y.contiguous()} if stage else {}))
        model.sync_gradients()
        norms.append(model.clip_grad_norm_(0.5, stages=mesh["pp"]).item())
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model, part), norms


@pytest.mark.parametrize(
    ("zero", "schedule", "tensor_parallel"),
    some(
        [(0, "Schedule1F1B", False), (3, "ScheduleGPipe", False)],
        itertools.product(range(4), ["Schedule1F1B", "ScheduleGPipe"], [False, True]),
    ),
)
def test_stages_of_a_pipeline(pool, zero, schedule, tensor_parallel):
    net = build()
    optimizer = optimizer_of(net)
    norms = []
    for step in range(0, 40, 4):
        loss_of(net, *global_batch(step)).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(net.named_parameters())
    for weights, got_norms in pool.run(8 if tensor_parallel else 4, train_pipeline, zero, schedule, tensor_parallel):
        assert got_norms == pytest.approx(norms, rel=1e-5)
        for name, value in weights.items():
            assert (value - expected[name]).abs().max() <= 1e-5, name


def sized(world, data, kind="sequence", **options):
    """A net over a mesh of 2 x 2, and its optimizer."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = parallel(build(), mesh, kind)
    optimizer = options.pop("optimizer", torch.optim.AdamW)(net.parameters(), lr=1e-2)
    if data is not None:
        options["device_mesh"] = mesh[data]
    return net, optimizer, mesh, options


def refused(call, *args, **options):
    with pytest.raises(lockstep.UsageError) as caught:
        call(*args, **options)
    return str(caught.value)


def wrong_uses(world):
    said = {}
    net, optimizer, mesh, _ = sized(world, "dp")
    said["no mesh"] = refused(lockstep.DataParallel, net)
    said["over tp"] = refused(lockstep.DataParallel, net, device_mesh=mesh["tp"])
    said["trainer"] = refused(lockstep.Trainer, net, optimizer, loss_of, shards=4, world=world.within(mesh["dp"]))
    wire = lockstep.wire.Int8()
    said["wire"] = refused(lockstep.DataParallel, net, device_mesh=mesh["dp"], wire=wire)
    adafactor = torch.optim.Adafactor(net.parameters())
    said["adafactor"] = refused(lockstep.DataParallel, net, device_mesh=mesh["dp"], optimizer=adafactor, zero=2)
    with torch.device("meta"):
        unmade = parallel(Net(), mesh, "sequence")
    said["meta"] = refused(lockstep.DataParallel, unmade, device_mesh=mesh["dp"])
    whole = nn.Sequential(lockstep.SyncBatchNorm(4))
    said["statistics"] = refused(lockstep.DataParallel, whole, device_mesh=mesh["dp"])
    three = dist.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    said["three"] = refused(lockstep.DataParallel, build(), device_mesh=three)

    model = lockstep.DataParallel(net, device_mesh=mesh["dp"])
    data = torch.utils.data.TensorDataset(*global_batch(0))
    for x, y in lockstep.shard(torch.utils.data.DataLoader(data, batch_size=4)):
        said["loader"] = refused(loss_of, model, x, y)
    return said


def test_what_cannot_be_right_is_refused(pool):
    wanted = {
        "no mesh": "device_mesh=mesh['dp']",
        "over tp": "device_mesh=mesh['dp']",
        "trainer": "DataParallel(net, device_mesh=mesh['dp'])",
        "wire": "lockstep.wire.Half",
        "adafactor": "zero=0",
        "meta": "net.to_empty(device=...)",
        "statistics": "convert(net, mesh['dp'].get_group())",
        "three": "mesh['replicate', 'split']",
        "loader": "lockstep.shard(loader, device_mesh=mesh['dp'])",
    }
    for said in pool.run(4, wrong_uses):
        assert said.keys() == wanted.keys()
        for case, line in wanted.items():
            assert line in said[case], case


def forgets_a_norm(world, zero):
    """Norms of a sequence-parallel model that are no part of the plan: each worker sees its part of the sequence."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    parallelize_module(block, mesh["tp"], {"0": RowwiseParallel(output_layouts=Shard(0))})
    net = nn.Sequential(nn.Linear(4, 4), block)
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = lockstep.DataParallel(net, device_mesh=mesh["dp"], optimizer=optimizer, zero=zero)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(world.rank // 2))
    return refused(lambda: model(x).square().sum().backward())


@pytest.mark.parametrize("zero", [0, 2])
def test_copies_with_other_gradients_are_found(pool, zero):
    for said in pool.run(4, forgets_a_norm, zero):
        assert "'1.1.weight' is a plain tensor" in said and "SequenceParallel()" in said


def torchs_clipping(world):
    net, _, _, options = sized(world, "dp")
    model = lockstep.DataParallel(net, **options)
    x, y = global_batch(0)
    half = slice(4 * model.world.rank, 4 * model.world.rank + 4)
    loss_of(model, x[half], y[half]).backward()
    placements = [(p.placements, p.grad.placements) for p in net.parameters()]
    theirs = nn.utils.clip_grad_norm_(net.parameters(), 1e9).full_tensor().item()
    largest = model.clip_grad_norm_(1e9, float("inf")).item()
    return theirs, model.clip_grad_norm_(1e9).item(), largest, all(one == other for one, other in placements)


def test_torchs_clipping(pool):
    net = build()
    loss_of(net, *global_batch(0)).backward()
    expected = nn.utils.clip_grad_norm_(net.parameters(), 1e9).item()
    largest = nn.utils.clip_grad_norm_(net.parameters(), 1e9, float("inf")).item()
    for theirs, ours, ours_largest, are_placed in pool.run(4, torchs_clipping):
        assert are_placed
        assert theirs == pytest.approx(expected, rel=1e-5)
        assert ours == pytest.approx(expected, rel=1e-5)
        assert ours_largest == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "zero"), some([("tensor", 1)], [("sequence", 0), ("tensor", 1), ("tensor", 2), ("sequence", 3)])
)
def test_foreach(pool, reference, kind, zero):
    assert_same(pool.run(4, train, *MESHES["dp x tp"], zero, kind, True), reference)


def torchtitans_order(world, zero, kind, compiles):
    """Tensor parallel, activation checkpointing, compile, then us."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = parallel(build(), mesh, kind)
    for number, block in enumerate(net.blocks):
        net.blocks[number] = checkpoint_wrapper(block, preserve_rng_state=False)
        if compiles:
            net.blocks[number].compile(backend="aot_eager")
    optimizer = optimizer_of(net)
    model = lockstep.DataParallel(net, device_mesh=mesh["dp"], optimizer=optimizer, zero=zero, bucket_cap_mb=0.001)
    norms = go_on(model, optimizer, range(STEPS))
    weights = full_weights(model, net)
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in weights.items()}, norms


@pytest.mark.parametrize(
    ("zero", "kind", "compiles"),
    some([(3, "sequence", False)], [(z, *way) for z in range(4) for way in (("sequence", False), ("tensor", True))]),
)
def test_in_torchtitans_order(pool, reference, zero, kind, compiles):
    assert_same(pool.run(4, torchtitans_order, zero, kind, compiles, timeout=60), reference)


def run_block(world, text, folder):
    os.chdir(folder)
    try:
        exec(compile(text, "docs/mesh.md", "exec"), {})
    finally:
        os.chdir(ROOT)


@pytest.mark.parametrize("number", range(4))
def test_programs_of_the_docs(pool, tmp_path, number):
    texts = (ROOT / "docs" / "mesh.md").read_text().split("```python\n")[1:]
    assert len(texts) == 4
    pool.run(4, run_block, texts[number].partition("\n```")[0], str(tmp_path))


def train_interleaved(world, zero, kind):
    """Two stages on each worker: the layers go round."""
    from torch.distributed import pipelining

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    net, place = build(4), mesh["pp"].get_local_rank()
    numbers = [place, place + 2]
    models, optimizers, stages = [], [], []
    for number in numbers:
        part = Stage(net, number, number + 1)
        optimizers.append(optimizer_of(part))
        options = {"optimizer": optimizers[-1], "zero": zero, "bucket_cap_mb": 0.001}
        models.append(lockstep.DataParallel(part, device_mesh=mesh["dp"], **options))
        stages.append(pipelining.PipelineStage(models[-1], number, 4, world.device, group=mesh["pp"].get_group()))
    schedule = getattr(pipelining, kind)(stages, 2, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
    norms, said = [], []
    for step in range(0, 20, 4):
        x, y = (each[4 * models[0].world.rank :][:4].contiguous() for each in global_batch(step))
        with models[0].no_sync(), models[1].no_sync():
            schedule.step(*(() if place else (x,)), **({"target": y} if place else {}))
        for model in models:
            model.sync_gradients(weight=y.numel())
        said += [refused(models[0].clip_grad_norm_, 0.5), refused(models[0].clip_grad_norm_, 0.5, stages=mesh["pp"])]
        norms.append(models[0].clip_grad_norm_(0.5, stages=mesh["pp"], also=models[1:]).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all("stages=mesh['pp']" in text for text in said)
    return full_weights(models[0], models[0].module) | full_weights(models[1], models[1].module), norms


@pytest.mark.parametrize(
    ("zero", "kind"),
    some(
        [(2, "ScheduleInterleaved1F1B")],
        itertools.product(range(4), ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"]),
    ),
)
def test_interleaved_stages(pool, zero, kind):
    net = build(4)
    optimizer = optimizer_of(net)
    norms = []
    for step in range(0, 20, 4):
        loss_of(net, *global_batch(step)).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(net.named_parameters())
    for weights, got_norms in pool.run(4, train_interleaved, zero, kind):
        assert got_norms == pytest.approx(norms, rel=1e-5)
        for name, value in weights.items():
            assert (value - expected[name]).abs().max() <= 1e-5, name


def accumulated(world, shape, names, data, zero):
    net, optimizer, model = begin(shape, names, data, zero)
    norms = []
    for step in range(STEPS):
        x, y = global_batch(step)
        size, place = len(x), model.world.rank
        mine = range(size * place // model.world.size, size * (place + 1) // model.world.size)
        for micro in (mine[:1], mine[1:]):  # Of different sizes: each counts by its own.
            with contextlib.nullcontext() if micro.stop == mine.stop else model.no_sync():
                loss = loss_of(model, x[micro.start : micro.stop], y[micro.start : micro.stop])
                lockstep.backward(loss / 2, weight=len(micro))
        norms.append(model.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model, net), norms


@pytest.mark.parametrize(("shape", "zero"), some([("dp x tp", 2)], itertools.product(("dp x tp", "tp"), range(4))))
def test_accumulation(pool, reference, shape, zero):
    sizes, names, data = MESHES[shape]
    assert_same(pool.run(torch.Size(sizes).numel(), accumulated, sizes, names, data, zero), reference)


def kept_state(world, zero, precision):
    """What goes out by state_dict and comes in again; dropout that all copies of an activation share."""
    mesh = dist.init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("dp", "tp"))
    net = parallel(build(), mesh, "tensor")
    for block in net.blocks:
        block.norm = nn.Sequential(block.norm, nn.Dropout(0.3))
    optimizer = optimizer_of(net)
    options = {"precision": lockstep.Precision(params=torch.bfloat16)} if precision else {}
    model = lockstep.DataParallel(net, device_mesh=mesh["dp"], optimizer=optimizer, zero=zero, **options)
    go_on(model, optimizer, range(4))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = full_weights(model, net)
    go_on(model, optimizer, range(4, 6))
    model.load_state_dict(state)
    after = full_weights(model, net)
    return all(torch.equal(after[name], value) for name, value in before.items()), before


@pytest.mark.parametrize(
    ("workers", "zero", "precision"),
    some([(4, 3, True)], [(w, z, p) for w in (2, 4) for z in range(4) for p in (False, True) if z or not p]),
)
def test_state_dropout_and_precision(pool, workers, zero, precision):
    results = pool.run(workers, kept_state, zero, precision)
    for came_back, weights in results:
        assert came_back
        assert all(torch.equal(value, results[0][1][name]) for name, value in weights.items())


def ends_early(world):
    net, _, model = begin((2, 2), ("dp", "tp"), "dp", 0)
    with model.join(divide_by_initial_world_size=False):
        for step in range(3 + model.world.rank):
            loss_of(model, *global_batch(step)).backward()
            with torch.no_grad():
                for param in net.parameters():
                    param -= 0.1 * param.grad
                    param.grad = None
    return full_weights(model, net)


def test_workers_with_fewer_batches(pool):
    results = pool.run(4, ends_early)
    for weights in results:
        assert all(torch.equal(value, results[0][name]) for name, value in weights.items())


class Routed(nn.Module):
    """Runs the blocks that it is told to run."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.experts = nn.ModuleList(Block(8) for _ in range(4))

    def forward(self, x, path):
        for number in path:
            x = self.experts[number](x)
        return x * self.scale


def routed(world, zero):
    """Workers run different blocks, in different orders."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "split"))
    torch.manual_seed(3)
    net = Routed().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = lockstep.DataParallel(net, device_mesh=mesh["replicate", "split"], optimizer=optimizer, zero=zero)
    for step in range(8):
        dice = random.Random(10 * step + world.rank)
        for is_last in (False, True):
            with contextlib.nullcontext() if is_last else model.no_sync():
                path = [dice.randrange(4) for _ in range(dice.randrange(5))]
                x = torch.randn(3, 8, generator=torch.Generator().manual_seed(dice.randrange(99)), dtype=torch.double)
                model(x, path).square().mean().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model, net)


@pytest.mark.parametrize(("zero", "backend"), some([(3, "gloo")], itertools.product((2, 3), ("shm", "gloo"))))
def test_different_blocks_in_replicas(started_pool, zero, backend):
    expected = started_pool.run(4, routed, 0, backend=backend)[0]
    for weights in started_pool.run(4, routed, zero, backend=backend):
        for name, value in expected.items():
            assert torch.allclose(weights[name], value, rtol=1e-10, atol=1e-12), name
