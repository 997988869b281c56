"""`lockstep.integrations.ray` on a real cluster of several raylets, one of which is removed in mid-run."""

import hashlib
import os
import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep

ray = pytest.importorskip("ray", reason="needs ray")
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs ray[default]")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif("FULL" not in os.environ, reason="needs FULL=1: a Ray cluster takes 20 s to start"),
]
EPOCHS = 4


@pytest.fixture(scope="module")
def cluster():
    """A head without room, and two nodes with room for two workers each."""
    environ = {name: os.environ.get(name, "") for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    os.environ["RAY_DISABLE_IMPORT_WARNING"] = "1"
    made = cluster_utils.Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False},
    )
    made.nodes_with_room = [
        made.add_node(num_cpus=2, resources={"slot": 1}, object_store_memory=80 << 20) for _ in range(2)
    ]
    here = str(Path(__file__).parent)
    environ["PYTHONPATH"] = f"{here}:{environ['PYTHONPATH']}"
    ray.init(made.address, runtime_env={"env_vars": environ}, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def spare_node(cluster):
    """A node that is removed in the test."""
    node = cluster.add_node(num_cpus=2, resources={"slot": 1}, object_store_memory=80 << 20)
    cluster.wait_for_nodes()
    yield node
    if node in cluster.worker_nodes:
        cluster.remove_node(node)


def train(folder, pause_s):
    world = lockstep.join(timeout=60)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    made = torch.Generator().manual_seed(1)
    samples = torch.randn(400, 16, generator=made), torch.randint(0, 4, (400,), generator=made)
    trainer = lockstep.Trainer(net, torch.optim.AdamW(net.parameters()), loss, shards=12, clip=1.0, seed=3)
    for batch in trainer.batches(torch.utils.data.TensorDataset(*samples), batch_size=40, epochs=EPOCHS):
        out = trainer.step(batch)
        if folder is not None:
            Path(folder, f"step{out.step}").touch()
        time.sleep(pause_s)
    digest = hashlib.sha256()
    for _, tensor in sorted(trainer.state_dict()["tensors"].items()):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest(), world.size


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def place():
    world = lockstep.join(timeout=60)
    node = ray.get_runtime_context().get_node_id()
    return world.rank, world.size, world.local_rank, node, world.sum(1.0), os.environ["OMP_NUM_THREADS"]


@pytest.fixture(scope="module")
def undisturbed():
    return lockstep.launch(train, 1, (None, 0.0), timeout=120)[0][0]


def test_ranks_go_by_node(cluster):
    from lockstep.integrations.ray import launch

    results = launch(place, 4, timeout=120)
    assert [result[:2] for result in results] == [(rank, 4) for rank in range(4)]
    assert {result[4] for result in results} == {4.0}
    nodes = [result[3] for result in results]
    assert nodes == sorted(nodes, key=nodes.index) and len(set(nodes)) >= 2
    assert [result[2] for result in results] == [nodes[:rank].count(nodes[rank]) for rank in range(4)]


def fails(rank):
    if lockstep.join(timeout=60).rank == rank:
        raise ValueError("bad sample")
    time.sleep(100)


def test_errors_of_workers_and_of_requests(cluster):
    from lockstep.integrations.ray import launch

    with pytest.raises(ValueError, match="bad sample"):
        launch(fails, 2, (1,), timeout=120)
    with pytest.raises(lockstep.LaunchError, match=r"no room for 3 workers with {'GPU': 1} each within 1 s.*CPU 5"):
        launch(place, 3, resources_per_worker={"GPU": 1}, placed_within=1)


def test_the_same_bits_as_one_worker(cluster, undisturbed):
    from lockstep.integrations.ray import launch

    assert launch(train, 3, (None, 0.0), timeout=120) == [(undisturbed, 3)] * 3


@pytest.mark.parametrize("elastic", [True, False])
def test_a_node_is_removed(cluster, spare_node, tmp_path, undisturbed, elastic):
    from threading import Thread

    from lockstep.integrations.ray import launch

    outcome = []

    def run():
        try:
            one_a_node = {"CPU": 1, "slot": 1}
            outcome.append(launch(train, 3, (str(tmp_path), 0.15), resources_per_worker=one_a_node, elastic=elastic))
        except BaseException as error:
            outcome.append(error)

    thread = Thread(target=run)
    thread.start()
    until = time.monotonic() + 240
    while not (tmp_path / "step5").exists():
        assert time.monotonic() < until and thread.is_alive(), outcome
        time.sleep(0.05)
    cluster.remove_node(spare_node, allow_graceful=False)
    thread.join(200)
    assert outcome
    if elastic:
        assert not isinstance(outcome[0], BaseException), outcome[0]
        assert {hashed for hashed, _ in outcome[0]} == {undisturbed}
        assert len(outcome[0]) == 2, "one went with its node, and nowhere was room for another"
    else:
        assert isinstance(outcome[0], lockstep.WorkerLost), outcome[0]
        assert re.search(r"Ray has lost 1 of 3 workers, with their actors or the nodes", str(outcome[0]))
        assert outcome[0].ranks


def train_for_ray(config):
    import ray.train

    world = lockstep.join(timeout=60)
    assert not os.environ.get("LOCKSTEP_STORE") and len(os.environ["LOCKSTEP_SECRET"]) >= 32
    assert (world.rank, world.size) == (ray.train.get_context().get_world_rank(), 2)
    assert world.backend == "shm"
    assert train(None, 0.0) == (config["hash"], 2)
    Path(config["folder"], f"rank{world.rank}").touch()


def test_one_argument_of_rays_trainer(cluster, undisturbed, tmp_path):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from lockstep.integrations.ray import LockstepConfig

    trainer = TorchTrainer(
        train_for_ray,
        train_loop_config={"hash": undisturbed, "folder": str(tmp_path)},
        torch_config=LockstepConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    assert trainer.fit().error is None
    assert {path.name for path in tmp_path.glob("rank*")} == {"rank0", "rank1"}
