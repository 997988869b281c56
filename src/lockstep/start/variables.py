"""A worker's environment: the variables that torchrun sets too, so that `join` and plain torch scripts both know them.

Pure: values in, a dictionary out. Nobody's environment is changed here.
"""

import sys
from collections.abc import Mapping

from lockstep.environment import LOOPBACK
from lockstep.errors import LaunchError


def variables(
    environ: Mapping[str, str], *, rank: int, size: int, port: int, num_threads: int | None
) -> dict[str, str]:
    """What worker `rank` of `size` gets on top of `environ`; what the user has set there about sockets stands."""
    added = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        # torch's word for "the launcher serves the store": without it worker 0 would try to listen on the same port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if num_threads is not None:
        added["OMP_NUM_THREADS"] = str(num_threads)
    # Left alone, both listen on whichever interface they find, where other machines can reach them.
    loopback = "lo" if sys.platform == "linux" else "lo0"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if not environ.get(name):
            added[name] = loopback
    return added


def refuse_nesting(environ: Mapping[str, str]) -> None:
    """Raise LaunchError if this process is a worker itself: its workers would each be worker R of another world."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK"):
        if name in environ:
            raise LaunchError(
                f"{name}={environ[name]} is set: this process is itself a worker, and workers do not start workers. "
                f"Start them once, from outside, or unset {name} if it is a leftover."
            )
