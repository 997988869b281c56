"""Ports of gloo take no connection once a group stands; those of anybody else do."""

import os
import socket

import pytest
import torch.distributed as dist
from processes import FromServer

from lockstep.comm.gloo_ports import _listening, closed_afterwards


def takes_connections(port):
    with socket.socket() as stranger:
        stranger.settimeout(0.3)
        try:
            stranger.connect(("127.0.0.1", port))
        except TimeoutError:
            return False
    return True


def open_a_group(lazily):
    """Prints whether gloo's port takes connections, and whether one does that was opened meanwhile."""
    os.environ |= {"TORCH_GLOO_LAZY_INIT": "1"} if lazily else {}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    before = _listening()
    with closed_afterwards():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        another = socket.create_server(("127.0.0.1", 0))
    (fd,) = _listening().keys() - before.keys()
    with socket.socket(fileno=os.dup(fd)) as listener:
        port = listener.getsockname()[1]
    print(takes_connections(port), takes_connections(another.getsockname()[1]))
    return 0


@pytest.mark.parametrize(("lazily", "said"), [(False, "False True"), (True, "True True")])
def test_only_gloos_ports_close_and_only_once_nothing_needs_them(tmp_path, lazily, said):
    """Where gloo connects at the first operation it needs them still."""
    ended = FromServer(tmp_path, open_a_group, lazily).wait()
    assert (ended.code, ended.out.strip()) == (0, said), ended.err[-2000:]
