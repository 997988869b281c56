"""Closes the ports on which gloo has listened for the workers of a group, once the group stands.

gloo knows no secret. It keeps every connection that comes to such a port, also after the other side has closed it, and
ends the process when no file handle is left for the next one (seen with gloo of torch 2.13: `accept: Too many open
files`). It needs the port no more when all workers of the group are connected, but keeps it open until the group ends,
and would not survive that it was closed. So the kernel is told to drop what comes there, by a filter of one
instruction. On Linux; elsewhere, and where a container forbids it, ports stay as gloo has them.
"""

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
"""The classic BPF instruction `ret #0`: keep no byte of it."""


@contextlib.contextmanager
def closed_afterwards(*, may_open_nccls: bool = False) -> Iterator[None]:
    """Within it this thread opens a group; the TCP ports that were opened meanwhile take no connection after it.

    may_open_nccls: ports of NCCL may be among them, which it needs later; then they are left as they are. It opens them
        with its first operation, but where the default group was given a device, with the group.
    """
    connects_later = os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0")
    if may_open_nccls or connects_later:
        yield
        return
    before = _listening()
    yield
    for fd, _ in _listening().items() - before.items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as listener:
            program = ctypes.create_string_buffer(_DROP, len(_DROP))
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def _listening() -> dict[int, str]:
    """The file handles of this process that are listening TCP sockets, and which sockets they are.

    Those alone that a program which this process starts would inherit: gloo's are so, and Python's and gRPC's, which
    another thread may open at the same time, are not.
    """
    found = {}
    with contextlib.suppress(OSError):
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                name = str(path.readlink())
                if name.startswith("socket:") and os.get_inheritable(int(path.name)):
                    with socket.socket(fileno=os.dup(int(path.name))) as one:
                        is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
                        if is_tcp and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            found[int(path.name)] = name
    return found
