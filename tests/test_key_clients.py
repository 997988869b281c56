"""The keys of a run, whoever keeps them: a launcher's store and an etcd cluster answer alike."""

import contextlib
import json
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.comm.channel import Stranger
from lockstep.comm.etcd import Deposed, EtcdClient, endpoints
from lockstep.comm.key_client import KeyClient, open_client
from lockstep.comm.store import launchers_store
from lockstep.comm.store_server import Op, StoreServer
from lockstep.elastic.coordinator import Coordinator
from lockstep.errors import LaunchError
from lockstep.start.run_keys import RunKeys

pytestmark = pytest.mark.timeout(60)
needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of one member."""
    folder: Path = tmp_path_factory.mktemp("etcd")
    client, peer = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
    command = ["etcd", "--data-dir", str(folder), "--listen-client-urls", client, "--advertise-client-urls", client]
    command += [
        "--listen-peer-urls",
        peer,
        "--initial-advertise-peer-urls",
        peer,
        "--initial-cluster",
        f"default={peer}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield client.replace("http", "etcd")
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["store", pytest.param("etcd", marks=needs_etcd)])
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, bytes]]:
    """Where the keys are, and the secret."""
    secret = secrets.token_hex(16).encode()
    if request.param == "etcd":
        yield request.getfixturevalue("etcd"), secret
        return
    with contextlib.closing(StoreServer(socket.create_server(("127.0.0.1", 0)), secret)) as server:
        yield f"127.0.0.1:{server._listener.getsockname()[1]}", secret


@pytest.fixture
def client(place: tuple[str, bytes]) -> KeyClient:
    return open_client(*place, 20.0)


def ask(client: KeyClient, operation: Op, *operands: str) -> list[bytes]:
    return client.call(operation, *operands, timeout_s=10.0)


def test_all_operations(client: KeyClient) -> None:
    assert ask(client, Op.SET, "a", "1", "b/x", "2") == []
    assert ask(client, Op.GET, "a", "b/x") == [b"1", b"2"]
    assert (ask(client, Op.CHECK, "a", "b/x"), ask(client, Op.CHECK, "a", "c")) == ([b"1"], [b""])
    assert ask(client, Op.WAIT, "a") == []
    assert [ask(client, Op.ADD, "n", number) for number in ("3", "-1")] == [[b"3"], [b"2"]]
    assert ask(client, Op.COMPARE_SET, "c", "", "first") == [b"first"]
    assert ask(client, Op.COMPARE_SET, "c", "", "second") == [b"first"]
    assert ask(client, Op.COMPARE_SET, "c", "first", "second") == [b"second"]
    assert ask(client, Op.COMPARE_SET, "nothing", "expected", "x") == [b"expected"]
    ask(client, Op.APPEND, "p", "x")
    ask(client, Op.APPEND, "p", "y")
    assert ask(client, Op.GET, "p") == [b"xy"]
    assert [ask(client, Op.DELETE, "p") for _ in range(2)] == [[b"1"], [b""]]
    found = ask(client, Op.LIST, "b/", "n")
    assert dict(zip(found[::2], found[1::2], strict=True)) == {b"b/x": b"2", b"n": b"2"}
    before = int(ask(client, Op.COUNT)[0])
    ask(client, Op.FORGET, "b/")
    assert ask(client, Op.LIST, "b/") == []
    assert int(ask(client, Op.COUNT)[0]) in (before - 1, before)  # etcd keeps a mark of what was forgotten.


def test_a_wait_ends_with_the_key_or_the_time_or_when_it_is_forgotten(client: KeyClient) -> None:
    with pytest.raises(TimeoutError):
        client.call(Op.GET, "late", timeout_s=0.3)
    threading.Timer(0.2, lambda: ask(client, Op.SET, "late", "here")).start()
    assert ask(client, Op.GET, "late") == [b"here"]
    threading.Timer(0.3, lambda: ask(client, Op.FORGET, "gone/")).start()
    begun = time.monotonic()
    with pytest.raises(ConnectionError):
        ask(client, Op.GET, "late", "gone/key")
    assert time.monotonic() - begun < 5


def test_sums_of_many_at_once(place: tuple[str, bytes], client: KeyClient) -> None:
    threads = [threading.Thread(target=lambda: [ask(client, Op.ADD, "sum", "1") for _ in range(10)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ask(client, Op.GET, "sum") == [b"80"]


def test_torch_uses_it_as_a_store(place: tuple[str, bytes]) -> None:
    store = dist.PrefixStore("deep", launchers_store(place[0], place[1], timedelta(seconds=10)))
    store.set("key", "value")
    assert (store.get("key"), store.add("n", 2), store.check(["key", "none"])) == (b"value", 2, False)
    with pytest.raises(dist.DistStoreError, match="wait timeout after 200ms"):
        store.wait(["none"], timedelta(milliseconds=200))


def test_what_is_no_cluster() -> None:
    assert endpoints("etcd://a:1,[::1]:2/x") == ["a:1", "[::1]:2"]
    for wrong in ("etcd://", "etcd://a", "etcd://a:2379,b"):
        with pytest.raises(LaunchError, match="give the members of an etcd cluster"):
            endpoints(wrong)


@needs_etcd
def test_a_value_of_a_stranger_is_refused(etcd: str) -> None:
    secret = secrets.token_hex(16).encode()
    ours, theirs = EtcdClient(etcd, secret, 20.0), EtcdClient(etcd, b"x" * 32, 20.0)
    ask(ours, Op.SET, "key", "value", "other", "value")
    assert ask(theirs, Op.CHECK, "key") == [b""]
    theirs._run = ours._run
    ask(theirs, Op.SET, "key", "value")
    with pytest.raises(Stranger, match="was not put there by a process of this run"):
        ask(ours, Op.GET, "key")
    moved = ours._ask("kv/range", {"key": ours._name("other")}, time.monotonic() + 5)["kvs"][0]["value"]
    ours._ask("kv/put", {"key": ours._name("key"), "value": moved}, time.monotonic() + 5)
    with pytest.raises(Stranger):
        ask(ours, Op.GET, "key")
    assert ask(ours, Op.LIST, "") == [b"other", b"value"]


@needs_etcd
def test_who_decides(etcd: str) -> None:
    secret = secrets.token_hex(16).encode()
    one, other = EtcdClient(etcd, secret, 20.0), EtcdClient(etcd, secret, 20.0)
    until = time.monotonic() + 20
    first, second = one.grant_lease(until), other.grant_lease(until)
    revision = one.claim("leader", "0", first, until)
    assert revision
    assert one.claim("leader", "0", first, until) == revision
    assert other.claim("leader", "1", second, until) == 0
    assert one.keep_lease(first, until)
    one.guard = ("leader", revision)
    ask(one, Op.SET, "decision", "mine")
    one.revoke_lease(first, until)
    assert not one.keep_lease(first, until)
    assert other.claim("leader", "1", second, until) > revision
    with pytest.raises(Deposed):
        ask(one, Op.SET, "decision", "late")
    with pytest.raises(Deposed):
        ask(one, Op.FORGET, "d")
    assert ask(other, Op.GET, "decision") == [b"mine"]


@needs_etcd
def test_what_an_earlier_run_has_left_goes_once(etcd: str) -> None:
    client = EtcdClient(etcd, secrets.token_hex(16).encode(), 20.0)
    until = time.monotonic() + 20
    ask(client, Op.SET, "a", "1", "epoch", "old", "z", "2")
    assert client.wipe("epoch", "new", "old", until)
    assert ask(client, Op.LIST, "") == [b"epoch", b"new"]
    ask(client, Op.SET, "a", "1")
    assert not client.wipe("epoch", "newer", "old", until)
    assert ask(client, Op.GET, "a", "epoch") == [b"1", b"new"]


def test_another_coordinator_goes_on_from_the_keys(client: KeyClient) -> None:
    keys = RunKeys(client, ["elastic/"])

    def worker(key: str, value: str) -> None:
        ask(client, Op.SET, f"elastic/{key}", value)

    def coordinator() -> Coordinator:
        keys.refresh()
        made = Coordinator(keys, 2, most=3)
        made.resume()
        return made

    for member in (0, 1):
        worker(f"card/{member}", "card")
    first = coordinator()
    first.attend({0: True, 1: True})
    assert (first.number, first.members) == (1, (0, 1))
    worker("source", "0")
    worker("card/2", "card")
    worker("ready/2/0", "1")
    second = coordinator()
    assert (second.number, second.members) == (1, (0, 1))
    second.attend({0: True, 2: True})
    assert ask(client, Op.CHECK, "elastic/call/1") == [b"1"]
    worker("report/1/0", json.dumps({"calls": 3, "call": "step"}))
    third = coordinator()
    third.attend({0: True, 2: True})
    assert (third.number, third.members) == (2, (0, 2))
    assert json.loads(ask(client, Op.GET, "elastic/admit/2/0")[0]) == {"generation": 2}
    ask(client, Op.DELETE, "elastic/admit/2/0")  # As if the third had died just before it.
    coordinator()
    assert json.loads(ask(client, Op.GET, "elastic/admit/2/0")[0]) == {"generation": 2}
    worker("report/2/2", json.dumps({"calls": 5, "call": "step", "leaves": True}))
    worker("report/2/0", json.dumps({"calls": 5, "call": "step"}))
    keys.refresh()
    third.attend({0: True, 2: True})
    assert (third.number, third.members) == (3, (0,))
    keys.refresh()
    third.attend({0: True, 2: True})  # Its process is there for a moment still, and is no newcomer.
    assert ask(client, Op.CHECK, "elastic/call/3") == [b""]
    third.stop("enough")
    assert coordinator().stopped == "enough"
