"""`lockstep run`: start workers on this host, or on several, relay their output, report the first failure."""

import argparse
import os
import shlex
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import environment, terminal
from lockstep.errors import UsageError
from lockstep.start.supervisor import NOTICE
from lockstep.terminal import Style

if TYPE_CHECKING:
    from lockstep.start.command import RunOutcome
    from lockstep.start.elastic import Elastic
    from lockstep.start.hosts import HostOptions

_DESCRIPTION = """\
Run a script, or with -m a module, as N workers of this host, or of each of several.

Their output is relayed line by line, each line with the worker's number; a single worker has the terminal to itself.
If a worker fails, the others get a few seconds to notice, then are ended; what the first to fail said last is printed
once, at the very end, without the frames of this package (LOCKSTEP_TRACEBACK=full shows all of them, and as they come),
and its exit code becomes that of this command (128 plus the signal if it was killed). However this command ends, no
worker is left behind, nor what a worker has started.
"""


_ELASTIC = """\
With lockstep.Trainer a lost worker costs no step, and the result keeps its bits: the others do the step in flight again
and go on, and a replacement joins them. Other scripts start again, all workers, from the checkpoint that they load.
`lockstep resize` changes how many there are, as do SIGUSR1 (one more) and SIGUSR2 (one less) to this process. See
docs/elastic.md.
"""


_HOSTS = """\
With --hosts a,b,c or a --hostfile this command starts itself on each host over ssh, in the same folder. Else run it on
every host, with the same --meet, --hosts and secret, and a --host-rank of its own. The secret keeps everybody else out;
it comes from LOCKSTEP_SECRET or a file, and one is made by: openssl rand -hex 16
-n is the number of workers on this host; hosts may differ. Under Slurm (srun lockstep run) hosts, rank and place are
known, in a Kubernetes Job the rank. torchrun's --nnodes, --node-rank, --rdzv-endpoint and --nproc-per-node mean the
same. See docs/hosts.md.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command."""
    parser = subparsers.add_parser("run", help="start workers and run a script on each", description=_DESCRIPTION)
    parser.add_argument(
        "-n",
        "--workers",
        "--nproc-per-node",
        "--nproc_per_node",
        type=_count,
        metavar="N",
        help="number of workers (default: one per GPU, or per core without)",
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument(
        "--threads",
        type=int,
        metavar="T",
        help="compute threads per worker (default: OMP_NUM_THREADS if set, else cores divided by workers)",
    )
    parser.add_argument(
        "--watch",
        action="store_const",
        const="run",
        help="record where the time goes and who is slow, in the folder `run`, or FOLDER with --watch=FOLDER",
    )
    _allow_value(parser, "--watch", "--watch-in")
    parser.add_argument("--devices", metavar="0,2", help="use these GPUs only")
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="a variable for the workers")
    parser.add_argument(
        "--bind",
        choices=("numa", "none"),
        default="numa",
        help="keep each worker on the cores of its GPU's NUMA node, or its share of the nodes (default), or not",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and start nothing")
    parser.add_argument("--no-prefix", action="store_true", help="relay lines without the worker's number")
    parser.add_argument("--only", type=_ranks, metavar="0,1", help="show the output of these workers only")
    parser.add_argument(
        "-q", "--quiet", dest="only", action="store_const", const=(), help="show no worker's output but the first error"
    )
    parser.add_argument("--log-dir", metavar="DIR", help="keep the output of worker R in DIR/worker-R.log")
    parser.add_argument(
        "--notice",
        type=_seconds,
        default=NOTICE.total_seconds(),
        metavar="SECONDS",
        help="how long the other workers may go on when one has failed (default: %(default)g)",
    )
    elastic = parser.add_argument_group("workers that come and go", _ELASTIC)
    elastic.add_argument("--elastic", action="store_true", help="a worker that ends does not end the run")
    elastic.add_argument("--min", type=int, default=1, metavar="N", help="train with no fewer workers: wait for others")
    elastic.add_argument("--max", type=int, metavar="N", help="let no more workers in (default: as many as -n says)")
    elastic.add_argument(
        "--max-restarts", type=int, metavar="R", help="replace so many workers that end badly (default: 16)"
    )
    elastic.add_argument(
        "--spares", type=int, default=0, metavar="S", help="have S more started, that wait to take a lost one's place"
    )
    elastic.add_argument("--name", metavar="NAME", help="a name for `lockstep resize NAME N`, besides the process id")
    hosts = parser.add_argument_group("several hosts", _HOSTS)
    hosts.add_argument(
        "--hosts",
        "--nnodes",
        metavar="H | a,b,c",
        help="how many hosts, to run this on each of them (2:4: from 2 to 4); or their names, to start them by ssh",
    )
    hosts.add_argument("--hostfile", metavar="FILE", help="as --hosts a,b,c: a host a line, `node0` or `node0 slots=8`")
    hosts.add_argument(
        "--ssh", default="ssh", metavar="COMMAND", help='how hosts are reached, as "ssh -p 2222" (default: %(default)s)'
    )
    hosts.add_argument(
        "--host-rank", "--node-rank", "--node_rank", type=int, metavar="R", help="this host's number, from 0"
    )
    hosts.add_argument(
        "--meet",
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        metavar="HOST:PORT",
        help="where all meet: an address of host 0, and a free port there",
    )
    hosts.add_argument("--join", metavar="HOST:PORT", help="add this host to an elastic run under way there")
    hosts.add_argument(
        "--store",
        metavar="etcd://A:2379,B:2379,C:2379",
        help="meet in an etcd cluster instead of at host 0, so that any host may die in an elastic run",
    )
    hosts.add_argument(
        "--secret-file", metavar="FILE", help="holds the run's secret, - is stdin (default: LOCKSTEP_SECRET)"
    )
    hosts.add_argument(
        "--meet-timeout",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long other hosts are waited for (default: %(default)g)",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python script, or a module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def _count(word: str) -> int | None:
    """A number of workers, or one of torchrun's words for as many as there are devices."""
    if word in ("auto", "gpu", "cpu"):
        return None
    try:
        return int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word} is no whole number, gpu or auto") from None


def _ranks(word: str) -> tuple[int, ...]:
    if not all(rank.strip().isdigit() for rank in word.split(",")):
        raise argparse.ArgumentTypeError(f"{word}: give the workers' numbers, as 0 or 0,4")
    return tuple(map(int, word.split(",")))


def _seconds(word: str) -> float:
    """A time that can be waited; raises what argparse makes one line of."""
    try:
        seconds = float(word)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 1e9:
        raise argparse.ArgumentTypeError(f"{word} is no number of seconds from 0 to 1e9")
    return seconds


def _allow_value(parser: argparse.ArgumentParser, option: str, inner: str) -> None:
    """Let `option=VALUE` be as good as `option`: argparse alone would take the script for the value."""
    parser.add_argument(inner, dest=option.strip("-"), help=argparse.SUPPRESS)
    parse = parser._parse_optional

    def parse_optional(word: str) -> Any:
        return parse(inner + word[len(option) :] if word.startswith(f"{option}=") else word)

    parser._parse_optional = parse_optional  # type: ignore[method-assign, assignment]


def run(args: argparse.Namespace) -> int:
    """Run the workers; returns the exit code of the first failure, or 0."""
    from lockstep.start import command, ssh
    from lockstep.start.relay import Output

    if args.hostfile or (args.hosts and not args.hosts.replace(":", "").isdigit()):
        return _run_by_ssh(args)
    _set_environment(args)
    worker = command.python_command(args.script, args.args, as_module=args.module)
    elastic = _elastic(args)
    if args.dry_run:
        return _show_plan(args, worker)
    hosts = _hosts(args)
    if args.secret_file == environment.STDIN:
        ssh.end_with_stdin()
    outcome = command.run(
        worker,
        workers=args.workers,
        threads=args.threads,
        output=Output(not args.no_prefix, args.only, Path(args.log_dir) if args.log_dir else None),
        notice=timedelta(seconds=args.notice),
        watch=args.watch,
        elastic=elastic,
        name=args.name,
        hosts=hosts,
    )
    style = Style.RED if outcome.failure else Style.YELLOW
    for text in closing_words(outcome):
        is_ours = text.startswith("lockstep run: ")
        print(terminal.styled(text, style, sys.stderr) if is_ours else text, file=sys.stderr)
    return outcome.status


def _run_by_ssh(args: argparse.Namespace) -> int:
    """Have this same command run on every host of a list."""
    from lockstep.start import ssh

    if args.host_rank is not None or args.join is not None or args.secret_file is not None:
        raise UsageError("a list of hosts says who is who: leave out --host-rank, --join and --secret-file.")
    hosts = ssh.read_hostfile(args.hostfile) if args.hostfile else ssh.parse_hosts(args.hosts)
    _elastic(args)
    meet = args.store or args.meet or ssh.meeting_point(hosts, args.ssh)
    count = len(args.words) - len(args.args) - 1
    options, script = [word for word in args.words[:count] if word not in ("--", "--dry-run")], args.words[count:]
    started = ssh.commands(hosts, args.ssh, "" if args.store else meet, options, script)
    if args.dry_run:
        print("\n".join(shlex.join(words) for words in started))
        print("The run's secret goes to each of them by its stdin.", file=sys.stderr)
        return 0
    return ssh.run(hosts, started, ssh.secret_of_run(), is_elastic=args.elastic)


def _set_environment(args: argparse.Namespace) -> None:
    """What the workers inherit from this process."""
    from lockstep.start import host

    for pair in args.env:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UsageError(f"--env {pair}: give NAME=VALUE.")
        os.environ[name] = value
    if args.devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = host.chosen_devices(args.devices, os.environ)
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # Else 0 is the fastest, and not the first.
    if args.bind == "none":
        os.environ[host.BIND] = "none"


def _show_plan(args: argparse.Namespace, worker: list[str]) -> int:
    """Print what would be started on this host: of each worker what it gets by its environment, and its command."""
    from lockstep.start import host

    size = host.num_workers(args.workers)
    place = environment.hosts_of(os.environ, args.hosts, args.host_rank, args.store or args.meet, args.join)
    num_threads = host.num_threads(args.threads, size, os.environ)
    if place is not None:
        who = "joins the run" if place.rank is None else f"is host {place.rank} of {place.hosts}, which meet"
        print(f"this host {who} at {place.meet}; ranks follow those of the hosts before it")
    for rank in range(size):
        told = host.variables(
            os.environ,
            rank=rank,
            size=size,
            port=0,
            num_threads=num_threads,
            secret="made when it starts",
            own_store="",
        )
        chosen = {environment.SECRET, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}
        chosen |= {"RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} if place is not None else set()
        shown = {name: value for name, value in sorted(told.items()) if name not in chosen}
        shown |= dict(pair.split("=", 1) for pair in args.env)
        if args.devices is not None:
            shown["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
        print(shlex.join([*(f"{name}={value}" for name, value in shown.items()), *worker]))
    return 0


def _elastic(args: argparse.Namespace) -> "Elastic | None":
    from lockstep.start.control import check_name
    from lockstep.start.elastic import DEFAULT_RESTARTS, Elastic

    if args.name is not None:
        check_name(args.name)

    if args.elastic:
        restarts = DEFAULT_RESTARTS if args.max_restarts is None else args.max_restarts
        return Elastic(args.min, args.max, restarts, args.spares)
    if args.min != 1 or args.spares or (args.max, args.max_restarts, args.name) != (None, None, None):
        raise UsageError(
            "--min, --max, --max-restarts, --spares and --name are for workers that come and go: give --elastic too."
        )
    return None


def _hosts(args: argparse.Namespace) -> "HostOptions | None":
    from lockstep.comm.etcd import endpoints
    from lockstep.start.hosts import HostOptions

    if args.store is not None:
        endpoints(args.store)
        if args.meet is not None:
            raise UsageError("--store says where the hosts meet: leave out --meet.")
    place = environment.hosts_of(os.environ, args.hosts, args.host_rank, args.store or args.meet, args.join)
    if place is None:
        return None
    secret = environment.required_secret(os.environ, args.secret_file)
    if place.rank is None and not args.elastic:
        raise UsageError("a host joins an elastic run only (--join, --hosts LEAST:MOST): give --elastic too.")
    return HostOptions(place.meet, secret, place.hosts, place.rank, timedelta(seconds=args.meet_timeout))


def closing_words(outcome: "RunOutcome") -> list[str]:
    """What is said after the workers' own output. The first failure's last words come last."""
    said = []
    if outcome.signum and outcome.signum != signal.SIGPIPE:  # After SIGPIPE, nobody listens.
        said.append(f"lockstep run: ended by {signal.Signals(outcome.signum).name}; no worker is left.")
    if outcome.lost:
        said.append(f"lockstep run: {outcome.lost}")
    failure = outcome.failure
    if failure is None:
        if outcome.size > 1 and not outcome.has_met and not outcome.signum and not outcome.lost:
            said.append(
                f"lockstep run: the {outcome.size} workers never met: each ran the whole script by itself. To train "
                "together, wrap the model in lockstep.DataParallel and the loader in lockstep.shard; see "
                "lockstep.join()."
            )
        return said
    if outcome.size == 1 and not outcome.is_relayed:
        # It had the terminal to itself, and has said there what there was to say; only a killed one could not.
        return [*said, f"lockstep run: the worker was {failure}."] if failure.code < 0 else said
    what = f"lockstep run: {failure.name} failed first ({failure})"
    if failure.culprit:
        what = f"lockstep run: {failure.name} failed ({failure}) because of {failure.culprit}"
    if not failure.stderr:
        return [*said, f"{what}; it said nothing on stderr."]
    where = f" (whole, with those of the others: {outcome.log})" if outcome.log else ""
    return [*said, f"{what}; its last words{where}:", failure.stderr]
