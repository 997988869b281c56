"""Workers that are killed, again and again: Lockstep against torchft and torchrun, and what being ready for it costs.

    python bench/elastic.py                               120 s of each with kill -9 every 5 s, and the same undisturbed
    python bench/elastic.py --every 20 --systems lockstep torchrun
    python bench/elastic.py --overhead                    steps of our own under --elastic against steps without
    python bench/elastic.py --systems lockstep --stages   where the time from a death to the next step goes

Every system trains the same small GPT with 4 workers on the CPU (bench/elastic_worker.py). After some steps, a worker
that trains is killed every few seconds, by a seeded choice; never the last one, nor while none trains. The same system
then makes as many steps undisturbed, right afterwards, and so in rounds, since the machine may be busy with something
else meanwhile. Systems whose software is not there are left out, and the table says why.

    lockstep          `lockstep run --elastic`; replacements start when a worker has died
    lockstep zero=1   the same, with the optimizer's state split over the workers
    lockstep spares   replacements have been started before, and wait; no others are started
    torchft           as it comes: a worker is dead when its heartbeat is missing for 5 s
    torchft 1s        when it is missing for 1 s
    torchrun          torch DDP with --max-restarts and a checkpoint every 20 steps

The columns. *committed*: steps that were committed in the measured time, each counted once. *again*: attempts at steps
beyond one for each: work done twice, or for nothing. *lost*, *repeated*: samples of the committed steps that went into
none, or into more than one. *seconds to next*: from a death to the first step committed without the dead worker that is
beyond all before; median and worst. *goodput*: samples per second that went into committed steps, against the same
system undisturbed, by round. *same end*: whether the final weights are those of the undisturbed run, by SHA-256.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lockstep.bench.interleave import compare, ratio

WORKER = Path(__file__).with_name("elastic_worker.py")
WORKERS = 4
LAUNCH = (sys.executable, "-m", "lockstep", "run")
LOOK_S = 0.02
MARGIN_STEPS = 10
"""How many steps before the end of a run its workers are told which step is the last: more than one looks ahead."""
PATIENCE_S = 240.0
"""A run that takes this much longer than it was to take has failed."""


@dataclass(slots=True)
class Run:
    """One run of a system: its processes, and what its workers have written down so far."""

    folder: Path
    launcher: subprocess.Popen[bytes] | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    """What the workers wrote, each with the process id as `pid`."""
    kills: list[tuple[float, int]] = field(default_factory=list)
    """When who was killed."""
    begun: float = 0.0
    """When the time measured began and ended."""
    ended: float = 0.0
    _read: dict[Path, int] = field(default_factory=dict)

    def look(self) -> None:
        """Read what is new in the workers' files."""
        for path in self.folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self.events += [{**json.loads(line), "pid": int(path.stem)} for line in whole.splitlines()]

    def of(self, what: str) -> list[dict[str, Any]]:
        """All events of a kind, in order of time."""
        return sorted((event for event in self.events if event["do"] == what), key=lambda event: event["t"])

    @property
    def done(self) -> int:
        """How many steps are committed."""
        return max((event["step"] + 1 for event in self.events if event["do"] == "commit"), default=0)

    def training(self) -> list[int]:
        """Processes that are alive and have committed a step in the newest era."""
        commits = self.of("commit")
        newest = max((event["era"] for event in commits), default=0)
        return sorted({event["pid"] for event in commits if event["era"] == newest and is_alive(event["pid"])})


def is_alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class System:
    """How workers of one system are started, and started again."""

    name = ""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def missing(self) -> str:
        """Why it cannot run here; empty if it can."""
        return ""

    def start(self, run: Run) -> None:
        """Start everything."""
        raise NotImplementedError

    def attend(self, run: Run) -> None:
        """Called again and again: start what has to be started again."""

    def end(self, run: Run) -> None:
        """Leave no process."""
        if run.launcher is not None:
            _end([run.launcher])

    def worker(self, system: str, run: Run, *words: str) -> list[str]:
        """The command line of one worker."""
        shape = ("--width", str(self.options.width), "--layers", str(self.options.layers))
        return [str(WORKER), system, str(run.folder), *shape, "--batch", str(self.options.batch), *words]


class Lockstep(System):
    """`lockstep run --elastic`."""

    def __init__(self, options: argparse.Namespace, zero: int = 0, *, has_spares: bool = False) -> None:
        super().__init__(options)
        self._zero, self._has_spares = zero, has_spares
        self.name = "lockstep" + (f" zero={zero}" if zero else "") + (" spares" if has_spares else "")

    def start(self, run: Run) -> None:
        """See System."""
        num_spares = int(self.options.seconds / self.options.rounds / self.options.every) if self._has_spares else 0
        stages = ["--stages"] if self.options.stages else []
        command = self.worker("lockstep", run, "--zero", str(self._zero), *stages)
        # All that are needed are there before; starting more would take the cores from those who train.
        limits = ["--spares", str(num_spares), "--max-restarts", "0"] if num_spares else ["--max-restarts", "1000"]
        run.launcher = _start(
            run,
            [*LAUNCH, "-n", str(WORKERS), "--elastic", *limits, *command],
        )
        _wait_for(run, "ready", WORKERS + num_spares)


class Torchrun(System):
    """torch's launcher: when one worker fails it ends all and starts them anew."""

    name = "torchrun"

    def start(self, run: Run) -> None:
        """See System."""
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
        command += ["--max-restarts", "1000", *self.worker("torchrun", run)]
        # Without it all attempts share one store (torch 2.13): gloo finds the addresses of the one before, and hangs.
        run.launcher = _start(run, [sys.executable, *command], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


class Torchft(System):
    """A lighthouse, and workers that are started again as soon as they have ended, by this process."""

    def __init__(self, options: argparse.Namespace, heartbeat_s: float | None = None) -> None:
        super().__init__(options)
        self._heartbeat = [] if heartbeat_s is None else ["--heartbeat_timeout_ms", str(int(1000 * heartbeat_s))]
        self.name = "torchft" if heartbeat_s is None else f"torchft {heartbeat_s:g}s"
        self._replicas: list[subprocess.Popen[bytes]] = []
        self._lighthouse = ""

    def missing(self) -> str:
        """See System."""
        if importlib.util.find_spec("torchft") is None:
            return "torchft is not installed: pip install -r bench/requirements.txt"
        tried = subprocess.run([sys.executable, "-c", "import torchft"], capture_output=True, text=True)
        return tried.stderr.strip().rpartition("\n")[2] if tried.returncode else ""

    def start(self, run: Run) -> None:
        """See System."""
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        self._lighthouse = f"http://localhost:{port}"
        command = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"[::]:{port}"]
        run.launcher = _start(run, [*command, "--min_replicas", "1", *self._heartbeat])
        self._replicas = [self._start_replica(run, number) for number in range(WORKERS)]
        _wait_for(run, "ready", WORKERS)
        (run.folder / "go").touch()

    def _start_replica(self, run: Run, number: int) -> subprocess.Popen[bytes]:
        command = self.worker("torchft", run, "--replica", str(number))
        return _start(run, [sys.executable, *command], TORCHFT_LIGHTHOUSE=self._lighthouse)

    def attend(self, run: Run) -> None:
        """See System."""
        for number, replica in enumerate(self._replicas):
            if replica.poll() not in (None, 0):
                self._replicas[number] = self._start_replica(run, number)

    def end(self, run: Run) -> None:
        """See System."""
        _end(self._replicas)
        super().end(run)


def _start(run: Run, command: list[str], **variables: str) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables}
    with (run.folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(run: Run, what: str, count: int) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while len(run.of(what)) < count:
        run.look()
        if time.monotonic() > give_up:
            raise RuntimeError(f"no {count} workers came to {what!r}: {_tail(run)}")
        time.sleep(LOOK_S)


def _tail(run: Run) -> str:
    return (run.folder / "output.txt").read_text(errors="replace")[-1500:]


# --- One run ---


def disturbed(system: System, options: argparse.Namespace, folder: Path, seconds: float, seed: int) -> Run:
    """A run whose workers are killed for so many seconds after its warm-up."""
    run, choose = Run(folder), random.Random(seed)
    with _running(system, run):
        _go_on_until(system, run, lambda: run.done >= options.warmup, "its warm-up")
        run.begun = time.monotonic()
        run.ended = run.begun + seconds
        due = run.begun + options.every
        while time.monotonic() < run.ended:
            _attend(system, run)
            if time.monotonic() >= due:
                due += options.every
                victims = run.training()
                if len(victims) > 1:
                    victim = choose.choice(victims)
                    run.kills.append((time.monotonic(), victim))
                    os.kill(victim, signal.SIGKILL)
        _stop_at(run, run.done + MARGIN_STEPS)
        _go_on_until(system, run, lambda: _has_ended(run), "its end")
    return run


def undisturbed(system: System, options: argparse.Namespace, folder: Path, steps: int) -> Run:
    """A run of so many steps, timed from its warm-up to its end."""
    run = Run(folder)
    _stop_at(run, steps)
    with _running(system, run):
        _go_on_until(system, run, lambda: _has_ended(run), "its end")
    times: dict[int, float] = {}
    for event in run.of("commit"):
        times.setdefault(event["step"] + 1, event["t"])
    run.begun, run.ended = times[options.warmup], times[steps]
    return run


@contextlib.contextmanager
def _running(system: System, run: Run) -> Iterator[None]:
    try:
        system.start(run)
        yield
    finally:
        system.end(run)
        run.look()
        for pid in {event["pid"] for event in run.events}:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def _attend(system: System, run: Run) -> None:
    run.look()
    system.attend(run)
    time.sleep(LOOK_S)


def _go_on_until(system: System, run: Run, is_done: Any, what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not is_done():
        _attend(system, run)
        if time.monotonic() > give_up:
            raise RuntimeError(f"{system.name} did not come to {what}; it said last: {_tail(run)}")


def _stop_at(run: Run, step: int) -> None:
    (run.folder / "stop.new").write_text(str(step))
    (run.folder / "stop.new").replace(run.folder / "stop")


def _has_ended(run: Run) -> bool:
    ends = {event["pid"] for event in run.of("end")}
    return bool(ends) and not set(run.training()) - ends


# --- What it came to ---


@dataclass(slots=True)
class Tally:
    """What the rounds of one system came to."""

    committed: int = 0
    again: int = 0
    lost: int = 0
    repeated: int = 0
    kills: int = 0
    to_next_s: list[float] = field(default_factory=list)
    goodputs: list[float] = field(default_factory=list)
    are_same: list[bool] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, run: Run, calm: Run, batch: int, warmup: int) -> None:
        """One round: a disturbed run, and an undisturbed one of as many steps."""
        firsts = _first_commits(run)
        committed = [step for step, t in firsts.items() if run.begun <= t <= run.ended]
        self.committed += len(committed)
        self.kills += len(run.kills)
        used = self._add_samples(run, batch)
        self.to_next_s += [took for kill in run.kills if (took := _to_next(run, kill)) is not None]
        rate = sum(used[step] for step in committed) / (run.ended - run.begun)
        calm_rate = (calm.done - warmup) * batch / (calm.ended - calm.begun)
        self.goodputs.append(rate / calm_rate)
        ends = {event["sha"] for event in run.of("end")} | {event["sha"] for event in calm.of("end")}
        self.are_same.append(len(ends) == 1)
        for name, seconds in _stages(run):
            self.stages[name].append(seconds)

    def _add_samples(self, run: Run, batch: int) -> Counter[int]:
        """Count what went into no step, or several; returns how many samples each step was made of."""
        last_eras = {event["step"]: event["era"] for event in run.of("commit")}
        attempts: dict[tuple[int, int], list[int]] = defaultdict(list)
        for event in run.of("begin"):
            attempts[event["step"], event["era"]] += event["samples"]
        used = Counter(number for at in last_eras.items() for number in set(attempts[at]))
        expected = range(run.done * batch)
        self.again += len(attempts) - len(last_eras)
        self.lost += sum(not used[number] for number in expected)
        self.repeated += sum(count - 1 for count in used.values() if count > 1)
        return Counter(number // batch for number in used)

    def row(self) -> str:
        """The line of the table."""
        times = self.to_next_s
        took = f"{median(times):.2f} / {max(times):.2f}" if times else "-"
        return (
            f"{self.kills:7}{self.committed:11}{self.again:7}{self.lost:7}{self.repeated:10}{took:>18}"
            f"{', '.join(f'{each:.2f}' for each in self.goodputs):>14}   {'yes' if all(self.are_same) else 'no'}"
        )


def _first_commits(run: Run) -> dict[int, float]:
    """When each step was first committed. One that is rolled back is committed again; it counts once."""
    times: dict[int, float] = {}
    for event in run.of("commit"):
        times.setdefault(event["step"], event["t"])
    return times


def _to_next(run: Run, kill: tuple[float, int]) -> float | None:
    """Seconds from a death to the first commit of a step beyond all before, in an era without the dead worker."""
    killed_at, victim = kill
    known = [event for event in run.events if event["do"] == "begin"]
    era = max((event["era"] for event in known if event["pid"] == victim), default=0)
    most = max((event["step"] for event in run.of("commit") if event["t"] <= killed_at), default=-1)
    beyond = [event["t"] for event in run.of("commit") if event["step"] > most and event["era"] > era]
    return min(beyond) - killed_at if beyond else None


STAGES = ("seen", "let go", "reported", "decided", "groups opened", "caught up", "wrapped", "step")


def _stages(run: Run) -> Iterator[tuple[str, float]]:
    """How long each part of each recovery took, for the worker that was through it first."""
    told = run.of("stage")
    for at, (killed_at, _) in enumerate(run.kills):
        until = run.kills[at + 1][0] if at + 1 < len(run.kills) else float("inf")
        before = killed_at
        for name in STAGES:
            if name == "step":
                times = [e["t"] for e in run.of("commit") if before < e["t"]]
            else:
                times = [e["t"] for e in told if e["stage"] == name and before < e["t"] < until]
            if not times:
                break
            yield name, min(times) - before
            before = min(times)


# --- What being elastic costs ---


def overhead(options: argparse.Namespace, folder: Path) -> None:
    """Steps with --elastic and without, in turns of a few, by several crews of fresh processes."""
    print(f"{'':8}{'crew':>5}{'ms a step':>12}{'elastic / plain, time':>26}{'CPU time':>26}{'copies':>9}")
    for zero in options.zero:
        crews = []
        for number in range(options.crews):
            place = folder / f"crew{zero}.{number}"
            place.mkdir()
            crews.append(_crew(options, place, zero))
            _print_overhead(zero, str(number), crews[-1:])
        _print_overhead(zero, "all", crews)


def _print_overhead(zero: int, name: str, crews: list[dict[str, Any]]) -> None:
    """A row: the ratio of the turns' times, and of what they took of the cores, which others disturb less."""
    elastic, plain = (np.concatenate([crew[kind] for crew in crews], axis=0) for kind in ("elastic", "plain"))
    cells = []
    for column in (0, 1):
        found = compare({"elastic": elastic[:, column], "plain": plain[:, column]}, ratio, "elastic", "plain")
        cells.append(f"{found.median:.4f} ({found.low:.4f}-{found.high:.4f})")
    step_ms, copies = 1000 * float(np.median(plain[:, 0])), elastic[:, 2].sum() / elastic[:, 0].sum()
    print(f"zero={zero:<3}{name:>5}{step_ms:>12.1f}{cells[0]:>26}{cells[1]:>26}{copies:>9.4f}", flush=True)


def _crew(options: argparse.Namespace, folder: Path, zero: int) -> dict[str, Any]:
    """For each kind and turn: seconds of a step, of the cores by all workers, and of the copies of what is split."""
    kinds = {"plain": [], "elastic": ["--elastic"]}
    system, shuffler = System(options), random.Random(0)
    with contextlib.ExitStack() as stack:
        workers: dict[str, list[Connection[Any, Any]]] = {}
        for kind, words in kinds.items():
            run = Run(folder / kind)
            run.folder.mkdir()
            address = str(run.folder / "turns")
            with Listener(address) as listener:
                command = system.worker("paced", run, "--zero", str(zero), "--address", address)
                run.launcher = _start(run, [*LAUNCH, "-n", str(options.workers), *words, *command])
                stack.callback(_end, [run.launcher])
                workers[kind] = [listener.accept() for _ in range(options.workers)]
            for worker in workers[kind]:
                worker.recv()
        turns: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
        names = list(kinds)
        for number in range(options.turns + 2):
            shuffler.shuffle(names)
            for kind in names:
                measured = _turn(workers[kind], options.steps)
                if number >= 2:
                    turns[kind].append([each / options.steps for each in measured])
        for kind in kinds:
            for worker in workers[kind]:
                worker.send(0)
    return {kind: np.array(measured) for kind, measured in turns.items()}


def _turn(workers: "list[Connection[Any, Any]]", steps: int) -> tuple[float, float, float]:
    for worker in workers:
        worker.send(steps)
    took, used, copied = zip(*[worker.recv() for worker in workers], strict=True)
    return max(took), sum(used), max(copied)


# --- The whole ---


def main() -> None:
    """Run what was asked for, and print the table."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # What was started ends with it.
    print(_machine())
    with tempfile.TemporaryDirectory(prefix="lockstep-elastic-") as folder:
        if options.overhead:
            overhead(options, Path(folder))
        else:
            storm(options, Path(folder))


def storm(options: argparse.Namespace, folder: Path) -> None:
    """All systems in turn, round by round."""
    known = systems(options)
    tallies = {name: Tally() for name in options.systems}
    reasons = {name: reason for name in options.systems if (reason := known[name].missing())}
    for number in range(options.rounds):
        for name, tally in tallies.items():
            if name in reasons:
                continue
            place = folder / f"{name.replace(' ', '-')}.{number}"
            try:
                _one_round(known[name], options, place, number, tally)
            except RuntimeError as error:
                reasons[name] = str(error)
    print(_table(tallies, reasons))
    print(f"load at the end: {', '.join(f'{each:.1f}' for each in os.getloadavg())}")


def _one_round(system: System, options: argparse.Namespace, place: Path, number: int, tally: Tally) -> None:
    for kind in ("killed", "calm"):
        (place / kind).mkdir(parents=True)
    began = time.monotonic()
    run = disturbed(system, options, place / "killed", options.seconds / options.rounds, options.seed + number)
    steps = run.of("end")[0]["step"]
    calm = undisturbed(system, options, place / "calm", steps)
    tally.add(run, calm, options.batch, options.warmup)
    took_s, load = time.monotonic() - began, os.getloadavg()[0]
    print(f"round {number}, {took_s:.0f} s, load {load:.1f}; so far:\n{system.name:18}{tally.row()}", flush=True)
    if options.keep:
        place.rename(Path(options.keep) / place.name)


def systems(options: argparse.Namespace) -> dict[str, System]:
    """All that are known, by name."""
    known = [
        Lockstep(options),
        Lockstep(options, zero=1),
        Lockstep(options, has_spares=True),
        Torchft(options),
        Torchft(options, 1.0),
        Torchrun(options),
    ]
    return {system.name: system for system in known}


def _table(tallies: dict[str, Tally], reasons: dict[str, str]) -> str:
    head = f"{'':18}{'kills':>7}{'committed':>11}{'again':>7}{'lost':>7}{'repeated':>10}"
    lines = [head + f"{'seconds to next':>18}{'goodput':>14}   same end"]
    for name, tally in tallies.items():
        lines.append(f"{name:18}" + (f" does not run here: {reasons[name]}" if name in reasons else tally.row()))
    for name, tally in tallies.items():
        if tally.stages:
            parts = [f"{stage} {1000 * median(tally.stages[stage]):.0f}" for stage in STAGES if tally.stages[stage]]
            lines.append(f"{name}, ms by stage (median): {', '.join(parts)}")
    return "\n".join(lines)


def _machine() -> str:
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    versions = []
    for package in ("torch", "torchft-nightly"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    loads = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return f"{os.cpu_count()} cores,{cpu.partition(':')[2]}; {', '.join(versions)}; load at the start: {loads}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ["lockstep", "lockstep zero=1", "lockstep spares", "torchft", "torchft 1s", "torchrun"]
    parser.add_argument("--systems", nargs="+", choices=known, default=known, metavar="NAME", help=", ".join(known))
    parser.add_argument("--seconds", type=float, default=120, help="of kills for each system (default 120)")
    parser.add_argument("--every", type=float, default=5, help="seconds from one kill to the next (default 5)")
    parser.add_argument("--rounds", type=int, default=2, help="in so many parts, in turn (default 2)")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the first seconds count (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of who is killed")
    parser.add_argument("--width", type=int, default=256, help="of the model (default 256: 3.3M parameters)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="samples of the global batch (default 8)")
    parser.add_argument("--stages", action="store_true", help="print where the time of our recoveries goes")
    parser.add_argument("--keep", help="a folder for what the workers wrote")
    parser.add_argument("--overhead", action="store_true", help="measure steps with and without --elastic instead")
    parser.add_argument("--workers", type=int, default=2, help="for --overhead (default 2)")
    parser.add_argument("--zero", type=int, nargs="+", default=[0, 1], help="for --overhead (default 0 1)")
    parser.add_argument("--crews", type=int, default=4, help="for --overhead (default 4)")
    parser.add_argument("--turns", type=int, default=30, help="of each crew and kind, for --overhead (default 30)")
    parser.add_argument("--steps", type=int, default=10, help="of a turn, for --overhead (default 10)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
