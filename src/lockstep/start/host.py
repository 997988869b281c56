"""What this machine offers to workers, and the environment each of them gets.

Nothing here imports torch: that takes longer than starting workers.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lockstep import limits
from lockstep.environment import LOOPBACK, MEMBER, OWN_STORE, SECRET, is_operators_rank, workers_of
from lockstep.errors import LaunchError, UsageError


def num_workers(asked: int | None) -> int:
    """The number of workers asked for; if none was, one per GPU, or per core where there is no GPU."""
    if asked is None:
        return workers_of(os.environ) or gpus_here(os.environ) or num_cores()
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise UsageError(f"{asked!r} workers cannot be started: give a whole number, 1 or more.")
    return asked


def require_file_handles(size: int) -> None:
    """Raise LaunchError if this process may not open as many files as launching `size` workers takes.

    Measured: 14 and 3 per worker (its output, its connection to the store), which torch's store, if it cannot have
    them, tries to open again and again without end.
    """
    limits.require_file_handles(20 + 4 * size, f"the process that launches {size} workers")


def num_threads(asked: int | None, workers: int, environ: Mapping[str, str]) -> int | None:
    """Compute threads per worker, such that all workers together fill the cores; None if the user's setting stands."""
    if asked is not None:
        if asked < 1:
            raise UsageError(f"{asked} threads per worker: give 1 or more.")
        return asked
    return None if environ.get("OMP_NUM_THREADS") else max(1, num_cores() // workers)


def num_cores() -> int:
    """The cores that this process may use: its affinity, or what its container is allowed if that is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota = cores_in_quota(Path("/sys/fs/cgroup/cpu.max").read_text())
    except OSError:
        quota = None
    return allowed if quota is None else max(1, min(allowed, quota))


def cores_in_quota(cpu_max: str) -> int | None:
    """Whole cores in a cgroup's `cpu.max`, None if it sets no limit: `150000 100000` is one core and a half."""
    match = re.match(r"(\d+) (\d+)", cpu_max)
    return int(match[1]) // int(match[2]) if match else None


def gpus_here(environ: Mapping[str, str]) -> int:
    """The GPUs of this host that `environ` leaves visible."""
    return num_gpus(environ, (path.name for path in Path("/dev").glob("nvidia*")))


def num_gpus(environ: Mapping[str, str], devices: Iterable[str]) -> int:
    """The GPUs among `devices` (names in /dev) that CUDA_VISIBLE_DEVICES leaves visible."""
    present = sum(re.fullmatch(r"nvidia\d+", name) is not None for name in devices)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    # As CUDA reads it: names and numbers up to the first that is none. Parts of one GPU (MIG) count each.
    valid = re.match(r"(?:\s*(?:\d+|(?:GPU|MIG)-[^,\s]+)\s*(?:,|$))*", visible)
    assert valid is not None
    return len([name for name in valid[0].split(",") if name.strip()])


def variables(
    environ: Mapping[str, str],
    *,
    rank: int,
    size: int,
    port: int,
    num_threads: int | None,
    secret: str,
    own_store: str,
    member: int | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    address: str = LOOPBACK,
    interface: str = "",
) -> dict[str, str]:
    """What worker `rank` of `size` gets on top of `environ`: what torchrun sets too, so that plain torch scripts run.

    What the user has set in `environ` about sockets stands. `interface` leads to other hosts, where there are any.
    """
    added = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank if local_rank is None else local_rank),
        "LOCAL_WORLD_SIZE": str(size if local_size is None else local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        # torch's word for "the launcher serves the store": without it worker 0 would try to listen on the same port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # Never on a command line, which every user of the machine can read; an environment only its owner can.
        SECRET: secret,
    }
    if own_store:
        added[OWN_STORE] = f"{port} {own_store}"
    if cores := _cores_of(int(added["LOCAL_RANK"]), int(added["LOCAL_WORLD_SIZE"]), environ):
        added[CORES] = ",".join(map(str, sorted(cores)))
    if member is not None:
        added[MEMBER] = str(member)
    if num_threads is not None:
        added["OMP_NUM_THREADS"] = str(num_threads)
    # Left alone, both listen on whichever interface they find, where other machines can reach them.
    if not interface and address == LOOPBACK:
        interface = "lo" if sys.platform == "linux" else "lo0"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if interface and not environ.get(name):
            added[name] = interface
    return added


# --- Which cores are near: NUMA ---

BIND = "LOCKSTEP_BIND"
"""`none` lets workers run on any core."""
CORES = "LOCKSTEP_CORES"
"""The cores that a worker may use, which it takes before it does anything else: see `process`."""


def _cores_of(local_rank: int, local_size: int, environ: Mapping[str, str]) -> frozenset[int] | None:
    if environ.get(BIND) == "none" or not hasattr(os, "sched_getaffinity"):
        return None
    nodes = numa_nodes(Path("/"), frozenset(os.sched_getaffinity(0)))
    return near_cores(local_rank, local_size, nodes, gpu_nodes(Path("/"), environ))


def near_cores(
    local_rank: int, local_size: int, nodes: Mapping[int, frozenset[int]], of_gpus: Sequence[int]
) -> frozenset[int] | None:
    """The cores for a worker: those near its GPU, else its share of the NUMA nodes; None where it may use any.

    Memory follows: the system takes it from the node of the core that touches it first.
    """
    if len(nodes) < 2:
        return None
    if of_gpus:
        return nodes.get(of_gpus[local_rank]) if local_rank < len(of_gpus) else None
    order, place = sorted(nodes), local_rank % local_size
    first, last = place * len(order) // local_size, (place + 1) * len(order) // local_size
    return frozenset().union(*(nodes[node] for node in order[first : max(last, first + 1)]))


def numa_nodes(root: Path, allowed: frozenset[int]) -> dict[int, frozenset[int]]:
    """The allowed cores of each NUMA node that has some."""
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        spans = re.findall(r"(\d+)(?:-(\d+))?", (folder / "cpulist").read_text())
        cores = frozenset(core for first, last in spans for core in range(int(first), int(last or first) + 1))
        if cores & allowed:
            nodes[int(folder.name.removeprefix("node"))] = cores & allowed
    return nodes


def gpu_nodes(root: Path, environ: Mapping[str, str]) -> list[int]:
    """The NUMA node of each visible GPU, -1 where it is not known; of NVIDIA's, which CUDA numbers by bus."""
    places = sorted(path.name.lower() for path in (root / "proc/driver/nvidia/gpus").glob("*"))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [str(number) for number in range(len(places))] if visible is None else visible.split(",")
    found = []
    for name in map(str.strip, chosen if places else []):
        is_known = name.isdigit() and int(name) < len(places)
        file = root / "sys/bus/pci/devices" / (places[int(name)] if is_known else "-") / "numa_node"
        found.append(int(file.read_text()) if file.exists() else -1)
    return found


def chosen_devices(asked: str, environ: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES for `--devices 0,2`, which counts among those that are visible already."""
    names = [name.strip() for name in asked.split(",")]
    visible = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not all(names) or len(set(names)) < len(names):
        raise UsageError(f"--devices {asked}: give the numbers of GPUs, each once, as 0,2.")
    if not visible or not all(name.isdigit() for name in names):
        return ",".join(names)
    if any(int(name) >= len(visible) for name in names):
        raise UsageError(
            f"--devices {asked}: CUDA_VISIBLE_DEVICES={','.join(visible)} leaves {len(visible)}, counted from 0."
        )
    return ",".join(visible[int(name)] for name in names)


def refuse_nesting(environ: Mapping[str, str]) -> None:
    """Raise LaunchError if this process is a worker itself: its workers would each be worker R of another world."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if name in environ and not (name == "RANK" and is_operators_rank(environ)):
            raise LaunchError(
                f"{name}={environ[name]} is set: this process is itself a worker, and workers do not start workers. "
                f"Start them once, from outside, or unset {name} if it is a leftover."
            )
