"""Who does not know the run's secret cannot join, read, write or hold it up, and nothing of theirs is unpickled."""

import contextlib
import io
import json
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import DEADLINE_S, Forked, fork_context, wait_until

import lockstep
from lockstep import world as worlds
from lockstep.cli.main import main
from lockstep.comm import store_server
from lockstep.comm.channel import Session, Stranger, prove
from lockstep.comm.peers import Peer
from lockstep.comm.store import SecretStore
from lockstep.comm.store_server import StoreServer
from lockstep.train.integrity import ReplicaComparison

pytestmark = pytest.mark.timeout(60)
NOBODY = 65534

SCRIPT = """
import json, os, pathlib, time, torch, lockstep
rank = int(os.environ["RANK"])
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCKSTEP_STORE")
if rank == 0:
    pathlib.Path("told.tmp").write_text(json.dumps({name: os.environ.get(name, "") for name in names}))
    pathlib.Path("told.tmp").rename("told")
while rank == 1 and not pathlib.Path("attacked").exists():
    time.sleep(0.01)
world = lockstep.join(seed=0, timeout=30)
model = lockstep.DataParallel(torch.nn.Linear(2, 1))
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
print(sorted(world.gather({"pid": rank}), key=str), world.backend)
"""


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def attack(told, pwned):
    """Be rank 1 before the real one is, by all that another user can see; returns how far it came."""
    "x".encode("idna")  # Loaded while its file can be read.
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    for name, value in told.items():
        os.environ[name] = value
    os.environ.update(RANK="1", GLOO_SOCKET_IFNAME="lo")
    os.environ.pop("LOCKSTEP_SECRET", None)
    got = []
    name = told["LOCKSTEP_STORE"].partition(" ")[2]
    kept = []
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b"lockstep1" + bytes(32)):
        channel = socket.socket(socket.AF_UNIX)
        channel.settimeout(5)
        try:
            channel.connect("\0" + name)
            channel.sendall(words)
            if channel.recv(1):
                got.append(f"an answer to {words[:9]}")
        except OSError:
            pass
        kept.append(channel)
    me = Peer.me
    Peer.me = classmethod(
        lambda cls, *args: cls(*(["elsewhere/1/1" if x == me(0).host else x for x in _fields(me(*args))]))
    )
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ.pop("LOCKSTEP_STORE")
    try:
        world = worlds.join(seed=0, timeout=4)
        got.append("a place in the world")
        world.gather(Evil(pwned))
    except Exception:
        traceback.print_exc(file=sys.stdout)
    return json.dumps(got)


def attack_and_tell(told, folder, answers):
    """The target of the attacker's process."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            print("got", attack(told, folder / "pwned"))
        except BaseException:
            traceback.print_exc(file=sys.stdout)
    answers.send(out.getvalue())


def _fields(peer):
    return [getattr(peer, name) for name in peer.__slots__]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_cannot_join(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    tmp_path.chmod(0o755)
    run = Forked(lambda: main(["run", "-n", "2", "script.py"]), tmp_path)
    try:
        wait_until((tmp_path / "told").exists, "worker 0 to start")
        told = json.loads((tmp_path / "told").read_text())

        # A fork of the server, not of this process, which may have joined a world and have threads.
        answers, there = fork_context().Pipe(duplex=False)
        attacker = fork_context().Process(target=attack_and_tell, args=(told, tmp_path, there))
        attacker.start()
        there.close()
        assert answers.poll(DEADLINE_S), "the attacker is still at it"
        attacked = answers.recv()
        attacker.join(DEADLINE_S)
    finally:
        (tmp_path / "attacked").touch()
        ended = run.wait()
    assert not (tmp_path / "pwned").exists()
    assert "got []" in attacked and "LaunchError" in attacked, attacked
    assert ended.code == 0, ended
    assert ended.out.count("[{'pid': 0}, {'pid': 1}] shm") == 2


@pytest.fixture
def served():
    """A store over TCP, where the kernel does not say who connects; address and secret."""
    listener, secret = socket.create_server(("127.0.0.1", 0)), secrets.token_bytes(16)
    server = StoreServer(listener, secret)
    yield server, listener.getsockname(), secret
    server.close()


def test_strangers_hold_nobody_up(served, monkeypatch):
    server, address, secret = served
    monkeypatch.setattr(store_server, "MAX_UNPROVED", 16)
    first = SecretStore(address, secret, timedelta(seconds=20))
    first.set("key", "value")
    waited_for = []
    waiting = threading.Thread(target=lambda: waited_for.append(first.get("later")))
    waiting.start()
    silent = [socket.create_connection(address) for _ in range(64)]
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b"lockstep1" + bytes(32) + bytes(32)):
        garbage = socket.create_connection(address)
        garbage.sendall(words)
        garbage.settimeout(10)
        while garbage.recv(1 << 10):  # A challenge at most; then it is closed.
            pass
        garbage.close()
    begun = time.monotonic()
    second = dist.PrefixStore("", SecretStore(address, secret, timedelta(seconds=20)))  # Comes last, and gets in.
    assert second.underlying_store.get("key") == b"value"
    assert time.monotonic() - begun < store_server.HANDSHAKE_S
    first.set("later", "x")
    waiting.join(10)
    assert waited_for == [b"x"]
    assert len(server._unproved) <= 16
    for channel in silent:
        channel.close()


def test_both_sides_prove_themselves(served):
    _, address, secret = served
    wrong = bytes(16)
    with pytest.raises(OSError, match="does not know the secret"):
        SecretStore(address, wrong, timedelta(seconds=0.2))
    ours, theirs = socket.socketpair()  # A server that took the port, with a client that knows the secret.
    server = Session(wrong, b"store", is_server=True)

    def pretend():
        list(server.feed(theirs.recv(1 << 10)))
        theirs.sendall(server.outgoing)
        heard.append(theirs.recv(1 << 10))

    heard = []
    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(Stranger):
        prove(ours, secret, b"store", is_server=False, timeout_s=10)
    ours.close()
    thread.join(10)
    theirs.close()
    assert heard == [b""]  # The client has told it nothing.


def test_a_changed_message_ends_the_connection():
    one, other = (Session(b"s" * 16, b"p", is_server=side) for side in (False, True))
    for _ in range(3):
        for here, there in ((one, other), (other, one)):
            said, here.outgoing = here.outgoing, b""
            assert list(there.feed(said)) == []
    sealed = one.seal(b"first"), one.seal(b"second")
    assert list(other.feed(sealed[0][:3])) == [] and list(other.feed(sealed[0][3:])) == [b"first"]
    with pytest.raises(Stranger):
        list(other.feed(sealed[0]))  # Again.
    for bad in (one.seal(b"third"), one.seal(b"fourth")[:-1] + b"x", b"\xff" * 40):
        with pytest.raises(Stranger):
            list(other.feed(bad))


def gathers_with_another_secret(world, path):
    world.peers.secret = b"0" * 32 if world.rank == 0 else b"1" * 32
    world.gather(Evil(path) if world.rank == 1 else None)


def test_an_object_of_a_stranger_is_not_unpickled(pool, tmp_path):
    outcomes = pool.run(2, gathers_with_another_secret, tmp_path / "pwned", expect_failure=True, backend="gloo")
    assert not outcomes[0][0] and "was not sent by a worker of this run" in outcomes[0][1]
    assert not (tmp_path / "pwned").exists()


def trains_and_saves(world, folder):
    """What Lockstep exchanges by itself, under everything that exchanges more than sums of gradients."""
    with mock.patch.object(worlds.pickle, "loads", side_effect=AssertionError("unpickled")):
        for zero in (0, 3):
            net = torch.nn.Linear(3, 2)
            trainer = lockstep.Trainer(net, torch.optim.Adam(net.parameters()), loss_of, shards=3, zero=zero)
            trainer.step((torch.ones(6, 3), torch.zeros(6, 2)))
            trainer.evaluate([(torch.ones(3), torch.zeros(2))] * 4, loss_of, batch_size=4)
            trainer.save(folder / str(zero))
            trainer.load(folder / str(zero))
            trainer.load_state_dict(trainer.state_dict())
        net = torch.nn.Linear(3, 2)
        for strategy in (lockstep.LocalSGD(2), lockstep.Async()):
            trainer = lockstep.Trainer(net, torch.optim.Adam(net.parameters()), loss_of, shards=3, strategy=strategy)
            for batch in trainer.batches([(torch.ones(3), torch.zeros(2))] * 8, batch_size=4):
                trainer.step(batch)
            trainer.state_dict()
        check = ReplicaComparison(world, "repair")
        differing = torch.zeros(3, 2) + (world.rank == 2)
        check.check({"it": differing}, 1)
        return differing.sum().item()


def loss_of(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def test_lockstep_itself_unpickles_nothing(started_pool, tmp_path):
    assert started_pool.run(3, trains_and_saves, tmp_path, backend="gloo") == [0, 0, 0]


def gathers_tensors(world):
    tensors = [torch.full((world.rank, 2), 1.5, dtype=torch.bfloat16), torch.tensor(world.rank), torch.tensor([True])]
    tensors += [torch.arange(6.0).view(2, 3).t(), torch.tensor(1 + 2j)]
    return world.gather_tensors(tensors if world.rank else [])


def test_tensors_travel_with_type_and_shape(pool):
    for of_0, of_1 in pool.run(2, gathers_tensors):
        assert of_0 == []
        expected = [torch.full((1, 2), 1.5, dtype=torch.bfloat16), torch.tensor(1), torch.tensor([True])]
        expected += [torch.arange(6.0).view(2, 3).t(), torch.tensor(1 + 2j)]
        for one, other in zip(of_1, expected, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
