"""By which interface this host reaches another one. Needs no torch: launchers ask, and workers do."""

import contextlib
import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
"""Linux's number for "the address of an interface"."""


def route_to(host: str) -> str:
    """The address of the interface by which this host reaches `host`; nothing is sent. Empty if there is no route."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""


def is_loopback(address: str) -> bool:
    """Whether an address is of loopback, or none."""
    return not address or address.startswith("127.") or address == "::1"


def interface_of(address: str) -> str:
    """The name of the interface that has `address`; empty if it cannot be told."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        wanted = socket.inet_aton(address)
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # An interface without an address.
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if answer[20:24] == wanted:
                    return name
    return ""
