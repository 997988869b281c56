"""Where was this process started, and which worker is it: read from the environment, as plain values.

`lockstep.join` is the only caller with the real environment. Five launchers are known; each sets its own
variables, and a set that is partial or contradicts itself is refused by name instead of being guessed around.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.errors import LaunchError, UsageError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher said about this process."""

    launcher: str
    """`alone`, `torchrun` (also `lockstep run` and anything that sets RANK), `slurm`, `openmpi` or `mpich`."""
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
    secret: bytes | None = None
    """What the workers of this run know and others do not."""
    own_store: str = ""
    """The Unix socket at which `lockstep run` or `launch` serves the store of a run with a secret."""
    member: int | None = None
    """The number that this worker keeps over the generations of an elastic run; None where the workers are fixed."""


WATCH = "LOCKSTEP_WATCH"
"""The folder in which a watched run is to be recorded, as `lockstep run --watch=FOLDER` has it; any launcher may."""


TRACEBACK = "LOCKSTEP_TRACEBACK"
"""`full` shows tracebacks whole, and as they come."""


def shows_all_frames(environ: Mapping[str, str]) -> bool:
    """Whether tracebacks are to be shown as they are."""
    return environ.get(TRACEBACK) == "full"


CELL = "LOCKSTEP_CELL"
"""Set where workers write into a notebook's cell: their progress is redrawn there, so it may come often."""


def is_in_cell(environ: Mapping[str, str]) -> bool:
    """Whether this worker writes into a notebook's cell."""
    return bool(environ.get(CELL))


SECRET = "LOCKSTEP_SECRET"
"""The run's secret. `lockstep run` and `launch` make one; under other launchers a user may give all workers one."""
OWN_STORE = "LOCKSTEP_STORE"
"""MASTER_PORT and the Unix socket that belongs to it: another launcher below this one sets another MASTER_PORT."""
MEMBER = "LOCKSTEP_MEMBER"
"""The worker's number in an elastic run, which the one that takes its place does not get again."""
_SECRET_LETTERS = 32
STDIN = "-"
"""In place of a file with the secret: the first line of stdin has it, and the launcher ends with the end of stdin."""


def secret_of(environ: Mapping[str, str]) -> bytes | None:
    """The run's secret; None where there is none."""
    text = environ.get(SECRET, "")
    if text and len(text) < _SECRET_LETTERS:
        raise LaunchError(
            f"{SECRET} has {len(text)} characters, and fewer than {_SECRET_LETTERS} can be guessed. Make one for each "
            f"run and give it to all workers: export {SECRET}=$(openssl rand -hex 16)"
        )
    return text.encode() or None


def _line_of_stdin() -> str:
    """The first line, and not a byte more: what follows is not for this reader."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line.decode().strip()


def required_secret(environ: Mapping[str, str], file: str | None) -> str:
    """The secret of a run over several hosts, from a file or the environment; LaunchError if there is none."""
    if file is not None:
        try:
            text = _line_of_stdin() if file == STDIN else Path(file).read_text().strip()
        except OSError as error:
            raise LaunchError(f"the secret cannot be read from {file}: {error}.") from error
        environ = {SECRET: text}
    secret = secret_of(environ)
    if secret is None:
        raise LaunchError(
            "a run over several hosts needs a secret that all of them know and others do not. Make one, and give it to "
            f"all hosts, in the environment or with --secret-file FILE: export {SECRET}=$(openssl rand -hex 16)"
        )
    return secret.decode()


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Where a launcher belongs in a run over several hosts."""

    meet: str
    hosts: int
    rank: int | None
    """This host's number; None where it joins a run under way."""


def hosts_of(
    environ: Mapping[str, str], hosts: str | None, rank: int | None, meet: str | None, join: str | None
) -> HostPlace | None:
    """This launcher's place, from what it was asked for and what Slurm, Kubernetes or torchrun's operators say.

    None where the run has this host alone. hosts: how many; or LEAST:MOST, where the first LEAST begin the run and the
    others join it.
    """
    if join is not None:
        if hosts is not None or rank is not None or meet is not None:
            raise UsageError(
                "--join says all about where this host belongs: leave out --hosts, --host-rank and --meet."
            )
        return HostPlace(join, 0, None)
    if hosts is None and rank is None and (slurm := _slurm_hosts(environ)) is not None:
        return slurm if meet is None else replace(slurm, meet=meet)
    hosts = hosts or environ.get("PET_NNODES") or None
    if hosts is None:
        if rank is not None or meet is not None:
            raise UsageError("--host-rank and --meet are for several hosts: say how many with --hosts.")
        return None
    least, most = _least_and_most(hosts)
    for name in ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "SLURM_NODEID"):
        rank = _optional(environ, name) if rank is None else rank
    meet = meet or environ.get("PET_RDZV_ENDPOINT") or None
    if meet is None and environ.get("PET_MASTER_ADDR") and environ.get("PET_MASTER_PORT"):
        meet = f"{environ['PET_MASTER_ADDR']}:{environ['PET_MASTER_PORT']}"
    if most == 1 and meet is None:
        return None
    if rank is None or meet is None:
        raise UsageError(
            f"--hosts {hosts}: give each host its number with --host-rank R, from 0, and all of them --meet HOST:PORT, "
            "an address of host 0 and a free port there."
        )
    if not 0 <= rank < most:
        raise UsageError(f"--host-rank {rank} of --hosts {hosts}: host ranks go from 0 to the number of hosts minus 1.")
    return HostPlace(meet, least, rank) if rank < least else HostPlace(meet, 0, None)


def _least_and_most(hosts: str) -> tuple[int, int]:
    """`4` and `2:4` as two numbers."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", hosts)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(f"--hosts {hosts}: how many hosts there are, as 4, or from 2 to 4 as 2:4.")
    return least, most


def workers_of(environ: Mapping[str, str]) -> int | None:
    """How many workers a host is to have, as torchrun's operators say it; None where they leave it to the host."""
    said = environ.get("PET_NPROC_PER_NODE", "")
    return int(said) if said.isdigit() else None


def is_operators_rank(environ: Mapping[str, str]) -> bool:
    """Whether RANK is the number of a pod, as Kubeflow's PyTorchJob sets it, and not that of a worker."""
    return ("PET_NNODES" in environ or "PET_RDZV_ENDPOINT" in environ) and "LOCAL_RANK" not in environ


def _slurm_hosts(environ: Mapping[str, str]) -> HostPlace | None:
    """The place of `srun lockstep run`: one launcher a host."""
    hosts = _optional(environ, "SLURM_STEP_NUM_NODES") or 1
    if hosts == 1 or "SLURM_PROCID" not in environ:
        return None
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", needed_by="SLURM_PROCID")
    if tasks != hosts:
        raise LaunchError(
            f"srun has started {tasks} tasks on {hosts} hosts, and `lockstep run` is to be started once on each: "
            "srun --ntasks-per-node=1 lockstep run -n WORKERS ... Or let srun start the workers: srun python train.py"
        )
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    port = _optional(environ, "MASTER_PORT") or port_from(_optional(environ, "SLURM_JOB_ID") or 0)
    return HostPlace(
        f"{environ.get('MASTER_ADDR') or first_host(nodes)}:{port}", hosts, _number(environ, "SLURM_NODEID")
    )


def own_store(environ: Mapping[str, str]) -> str:
    """The Unix socket of the launcher's store; empty where there is none."""
    port, _, name = environ.get(OWN_STORE, "").partition(" ")
    return name if port and port == environ.get("MASTER_PORT") else ""


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
    elif "PMI_RANK" in environ:
        launch = _mpich(environ)
    elif "WORLD_SIZE" in environ and environ["WORLD_SIZE"] != "1":
        raise LaunchError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} is set but RANK is not, so this process cannot know which worker "
            "it is. Start it with `lockstep run` or torchrun, or unset WORLD_SIZE to run alone."
        )
    else:
        return Launch("alone")
    _check(launch, environ)
    secret, store = secret_of(environ), own_store(environ)
    return replace(launch, secret=secret, own_store=store, member=_optional(environ, MEMBER) if store else None)


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
        port=_optional(environ, "MASTER_PORT") or port_from(_optional(environ, "SLURM_JOB_ID") or 0),
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
        port=_optional(environ, "MASTER_PORT") or port_from(sum(int(x) for x in re.findall(r"\d+", job))),
    )


def _mpich(environ: Mapping[str, str]) -> Launch:
    """MPICH and what is made of it (Intel MPI, MVAPICH): its process manager is called Hydra."""
    size = _number(environ, "PMI_SIZE", needed_by="PMI_RANK")
    local_size = _optional(environ, "MPI_LOCALNRANKS")
    address = environ.get("MASTER_ADDR")
    if address is None and local_size is not None and local_size < size:
        raise LaunchError(
            f"MPICH started {size} workers, {local_size} of them on this host, and MASTER_ADDR does not say where "
            "they meet. Give it the first host: mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 ..."
        )
    return Launch(
        "mpich",
        rank=_number(environ, "PMI_RANK"),
        size=size,
        local_rank=_optional(environ, "MPI_LOCALRANKID"),
        local_size=local_size,
        address=address or LOOPBACK,
        # Hydra tells its processes no number of the job. Those of one host have its proxy as their parent.
        port=_optional(environ, "MASTER_PORT") or port_from(os.getppid()),
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
        "mpich": "PMI_RANK and PMI_SIZE",
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


def port_from(job: int) -> int:
    """A port below the range that systems hand out by themselves, the same for every worker of a job."""
    return 15000 + job % 15000


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[03-05,9],login` gives `gpu03`."""
    head = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes.strip())
    if head is None:
        raise LaunchError(f"SLURM_JOB_NODELIST={nodes!r} cannot be read. Export MASTER_ADDR instead.")
    prefix, index, suffix = head.groups()
    return f"{prefix}{index or ''}{suffix or ''}"
