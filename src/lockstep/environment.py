"""Where was this process started, and which worker is it: read from the environment, as plain values.

`lockstep.join` is the only caller with the real environment. Four launchers are known; each sets its own
variables, and a set that is partial or contradicts itself is refused by name instead of being guessed around.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import LaunchError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher said about this process."""

    launcher: str
    """`alone`, `torchrun` (also `lockstep run` and anything that sets RANK), `slurm` or `openmpi`."""
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    """Number among the workers of this host, where the launcher says so."""
    local_size: int | None = None
    address: str = LOOPBACK
    """Where the workers meet."""
    port: int = 0
    store_is_up: bool = False
    """True where the launcher itself serves the meeting point, so that no worker has to."""


WATCH = "LOCKSTEP_WATCH"
"""The folder in which a watched run is to be recorded, as `lockstep run --watch=FOLDER` has it; any launcher may."""


def watched_in(environ: Mapping[str, str]) -> str | None:
    """The folder of a run that is to be watched; None where nobody asked for it."""
    return environ.get(WATCH) or None


def read(environ: Mapping[str, str]) -> Launch:
    """The launch that `environ` describes; raises LaunchError, naming variables, where it does not add up."""
    if "RANK" in environ:
        launch = _torchrun(environ)
    elif "SLURM_PROCID" in environ:
        launch = _slurm(environ)
    elif "OMPI_COMM_WORLD_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ:
        launch = _openmpi(environ)
    elif "WORLD_SIZE" in environ and environ["WORLD_SIZE"] != "1":
        raise LaunchError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set but RANK is not, so this process cannot know which worker "
            "it is. Start it with `lockstep run` or torchrun, or unset WORLD_SIZE to run alone."
        )
    else:
        return Launch("alone")
    _check(launch, environ)
    return launch


def _torchrun(environ: Mapping[str, str]) -> Launch:
    size = _number(environ, "WORLD_SIZE", needed_by="RANK")
    meeting: dict[str, object] = {}
    if size > 1:
        meeting = {
            "address": _text(environ, "MASTER_ADDR", needed_by="RANK"),
            "port": _number(environ, "MASTER_PORT", needed_by="RANK"),
        }
    return Launch(
        "torchrun",
        rank=_number(environ, "RANK"),
        size=size,
        local_rank=_optional(environ, "LOCAL_RANK"),
        local_size=_optional(environ, "LOCAL_WORLD_SIZE"),
        store_is_up=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        **meeting,  # type: ignore[arg-type]
    )


def _slurm(environ: Mapping[str, str]) -> Launch:
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    size = _number(environ, size_name, needed_by="SLURM_PROCID")
    address = environ.get("MASTER_ADDR") or (first_host(nodes) if nodes else LOOPBACK)
    if not nodes and size > 1 and environ.get("SLURM_NNODES", "1") != "1" and "MASTER_ADDR" not in environ:
        raise LaunchError(
            "SLURM_NNODES says there are several hosts, but neither SLURM_JOB_NODELIST nor MASTER_ADDR says where "
            "to meet. Start the workers with srun, or export MASTER_ADDR."
        )
    return Launch(
        "slurm",
        rank=_number(environ, "SLURM_PROCID"),
        size=size,
        local_rank=_optional(environ, "SLURM_LOCALID"),
        address=address,
        port=_optional(environ, "MASTER_PORT") or _port_from(_optional(environ, "SLURM_JOB_ID") or 0),
    )


def _openmpi(environ: Mapping[str, str]) -> Launch:
    size = _number(environ, "OMPI_COMM_WORLD_SIZE", needed_by="OMPI_COMM_WORLD_RANK")
    local_size = _optional(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    address = environ.get("MASTER_ADDR")
    if address is None and local_size is not None and local_size < size:
        raise LaunchError(
            f"Open MPI started {size} workers, {local_size} of them on this host, and MASTER_ADDR does not say where "
            "they meet. Give it the first host: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..."
        )
    # Every process of one mpirun shares this identifier; it stands in for a port that nobody was asked for.
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "0"
    return Launch(
        "openmpi",
        rank=_number(environ, "OMPI_COMM_WORLD_RANK", needed_by="OMPI_COMM_WORLD_SIZE"),
        size=size,
        local_rank=_optional(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=local_size,
        address=address or LOOPBACK,
        port=_optional(environ, "MASTER_PORT") or _port_from(sum(int(x) for x in re.findall(r"\d+", job))),
    )


def _check(launch: Launch, environ: Mapping[str, str]) -> None:
    if launch.size < 1:
        raise LaunchError(f"the number of workers is {launch.size} ({launch.launcher}); it must be at least 1.")
    if not 0 <= launch.rank < launch.size:
        raise LaunchError(
            f"this process is worker {launch.rank} of {launch.size} according to {_names(launch)}; "
            f"ranks go from 0 to {launch.size - 1}. Start all workers with the same launcher."
        )
    if launch.local_rank is not None and launch.local_size is not None and launch.local_rank >= launch.local_size:
        raise LaunchError(
            f"LOCAL_RANK={launch.local_rank} does not fit LOCAL_WORLD_SIZE={launch.local_size}: "
            "it must be smaller. Start all workers with the same launcher."
        )
    if launch.local_size is not None and launch.local_size > launch.size:
        raise LaunchError(
            f"LOCAL_WORLD_SIZE={launch.local_size} is more than WORLD_SIZE={launch.size}: "
            "a host cannot hold more workers than there are. Start all workers with the same launcher."
        )
    said = environ.get("WORLD_SIZE")
    if said is not None and launch.launcher != "torchrun" and said != str(launch.size):
        raise LaunchError(
            f"WORLD_SIZE={said} contradicts {_names(launch)}, which say {launch.size} workers. Unset WORLD_SIZE."
        )


def _names(launch: Launch) -> str:
    return {
        "torchrun": "RANK and WORLD_SIZE",
        "slurm": "SLURM_PROCID and SLURM_NTASKS",
        "openmpi": "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE",
    }[launch.launcher]


def _text(environ: Mapping[str, str], name: str, needed_by: str) -> str:
    value = environ.get(name)
    if not value:
        raise LaunchError(
            f"{needed_by} is set but {name} is not. Start the workers with `lockstep run` or torchrun, "
            f"which set both, or unset {needed_by} to run alone."
        )
    return value


def _number(environ: Mapping[str, str], name: str, needed_by: str | None = None) -> int:
    value = _text(environ, name, needed_by or name)
    try:
        return int(value)
    except ValueError:
        raise LaunchError(f"{name}={value!r} is not a whole number.") from None


def _optional(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) if environ.get(name) else None


def _port_from(job: int) -> int:
    """A port below the range that systems hand out by themselves, the same for every worker of a job."""
    return 15000 + job % 15000


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[03-05,9],login` gives `gpu03`."""
    head = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes.strip())
    if head is None:
        raise LaunchError(f"SLURM_JOB_NODELIST={nodes!r} cannot be read. Export MASTER_ADDR instead.")
    prefix, index, suffix = head.groups()
    return f"{prefix}{index or ''}{suffix or ''}"
