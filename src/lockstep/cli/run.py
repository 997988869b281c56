"""`lockstep run`: start workers on this host, or on several, relay their output, report the first failure."""

import argparse
import os
import signal
import sys
from datetime import timedelta
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
Run this command on every host, with the same --meet, --hosts and secret, and a --host-rank of its own. The secret
keeps everybody else out; it comes from LOCKSTEP_SECRET or a file, and one is made by: openssl rand -hex 16
-n is the number of workers on this host; hosts may differ. Under Slurm (srun lockstep run) hosts, rank and place are
known, in a Kubernetes Job the rank. torchrun's --nnodes, --node-rank and --rdzv-endpoint mean the same.
See docs/hosts.md.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "run",
        help="start workers and run a script on each",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-n", "--workers", type=int, metavar="N", help="number of workers (default: one per GPU, or per core without)"
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
    parser.add_argument("--no-prefix", action="store_true", help="relay lines without the worker's number")
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
    hosts.add_argument("--hosts", "--nnodes", type=int, metavar="H", help="how many hosts: run this on each of them")
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
    hosts.add_argument("--secret-file", metavar="FILE", help="holds the run's secret (default: LOCKSTEP_SECRET)")
    hosts.add_argument(
        "--meet-timeout",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long other hosts are waited for (default: %(default)g)",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python script, or a module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


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
    from lockstep.start import command

    outcome = command.run(
        command.python_command(args.script, args.args, as_module=args.module),
        workers=args.workers,
        threads=args.threads,
        prefix=not args.no_prefix,
        notice=timedelta(seconds=args.notice),
        watch=args.watch,
        elastic=_elastic(args),
        name=args.name,
        hosts=_hosts(args),
    )
    style = Style.RED if outcome.failure else Style.YELLOW
    for text in closing_words(outcome):
        is_ours = text.startswith("lockstep run: ")
        print(terminal.styled(text, style, sys.stderr) if is_ours else text, file=sys.stderr)
    return outcome.status


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
    if args.join and not args.elastic:
        raise UsageError("--join adds a host to an elastic run: give --elastic too.")
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
