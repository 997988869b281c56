"""A prediction held against a run that was watched: `lockstep plan --check run/`.

From the run come what its workers computed by themselves, its buckets and when they were full; from the machine the
way between the workers. So what is checked is what a plan says of communication, waiting and overlap.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from lockstep import terminal
from lockstep.errors import UsageError
from lockstep.plan import machine as machines
from lockstep.plan import simulation
from lockstep.plan.machine import Machine
from lockstep.plan.simulation import StepInputs
from lockstep.watching.number_format import milliseconds, percent
from lockstep.watching.run_folder import RunFolder, StepLine

_COMPUTED = ("forward", "backward")
_BETWEEN = ("data", "copy", "optimizer", "other")
_FEWEST = 8
"""Steps after which something can be said."""
LOOPBACK_BYTES_PER_S, LOOPBACK_LATENCY_S = 1.5e9, 60e-6
"""Of gloo between processes of one host, assumed where no machine is named."""


@dataclass(frozen=True, slots=True)
class Checked:
    """One run; durations in seconds."""

    script: str
    workers: int
    backend: str
    steps: int
    """That were looked at: the second half of the run."""
    predicted_s: float
    measured_s: float
    predicted_exposed_s: float
    """Communication that nothing hides, and waiting for the slowest."""
    measured_exposed_s: float
    alone_s: float
    """A worker's step without communication."""
    network: str

    @property
    def error(self) -> float:
        """Of the step's time, relative."""
        return self.predicted_s / self.measured_s - 1.0

    def lines(self) -> list[str]:
        """In words, for a terminal."""
        rows = [
            ["step", milliseconds(1e3 * self.predicted_s), milliseconds(1e3 * self.measured_s)],
            [
                "of it exposed and waiting",
                milliseconds(1e3 * self.predicted_exposed_s),
                milliseconds(1e3 * self.measured_exposed_s),
            ],
            ["efficiency", percent(self.alone_s / self.predicted_s), percent(self.alone_s / self.measured_s)],
        ]
        return [
            f"{self.script} on {self.workers} workers over {self.backend}, {self.steps} steps; {self.network}",
            *terminal.table(["", "predicted", "measured"], rows),
            f"predicted is {abs(100 * self.error):.1f} % {'more' if self.error > 0 else 'less'} than was measured.",
        ]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "script": self.script, "workers": self.workers, "backend": self.backend, "steps": self.steps,
            "predicted_s": self.predicted_s, "measured_s": self.measured_s, "error": self.error,
            "predicted_exposed_s": self.predicted_exposed_s, "measured_exposed_s": self.measured_exposed_s,
            "alone_s": self.alone_s, "network": self.network,
        }  # fmt: skip


def check(folder: Path, on: str | None = None) -> Checked:
    """Predict the recorded run's step, and compare. `on` names the machine; if not given, this one."""
    run = RunFolder(folder)
    facts = run.run
    steps = [step for step in run.steps() if step.get("wall_ms")]
    steps = steps[len(steps) // 2 :]
    if len(steps) < _FEWEST or facts.size < 2 or not facts.buckets:
        raise UsageError(
            f"'{folder}' has {len(steps)} steps in its second half, {facts.size} workers and {len(facts.buckets)} "
            f"buckets: to be held against a prediction it needs {_FEWEST} steps of two workers or more."
        )
    shares = {name: _typical(steps, name) for name in (*_COMPUTED, *_BETWEEN, "exposed", "waiting")}
    machine, network = _way(facts.hosts, facts.backend, facts.size, on)
    is_shared = "shm" in facts.backend and machine.hosts == 1
    given = StepInputs(
        workers=facts.size,
        per_host=machine.per_host,
        forward_s=shares["forward"],
        backward_s=shares["backward"],
        optimizer_s=0.0,
        between_s=sum(shares[name] for name in _BETWEEN),
        bucket_bytes=[float(bucket.num_bytes) for bucket in facts.buckets],
        bucket_ready=_ready(run, len(facts.buckets)),
        algorithm=simulation.SHARED_MEMORY if is_shared else simulation.RING,
        intra_latency_s=machine.intra.latency_s,
        intra_bytes_per_s=machine.intra.usable_bytes_per_s,
        inter_latency_s=machine.inter.latency_s,
        inter_bytes_per_s=machine.inter.usable_bytes_per_s,
        jitter=_jitter(steps),
    )
    times = simulation.simulate(given)
    return Checked(
        facts.script,
        facts.size,
        facts.backend,
        len(steps),
        times.step_s,
        median(step["wall_ms"] for step in steps) / 1e3,
        times.exposed_s + times.wait_s,
        shares["exposed"] + shares["waiting"],
        sum(shares[name] for name in (*_COMPUTED, *_BETWEEN)),
        network,
    )


def _way(hosts: Sequence[str], backend: str, size: int, on: str | None) -> tuple[Machine, str]:
    """The machine, and in words what is taken of it."""
    if on is not None:
        machine = machines.from_toml(Path(on)) if on.endswith(".toml") else machines.named(on)
        return machine.of(size), f"the network is that of {on}"
    if len(set(hosts)) > 1:
        raise UsageError(
            f"the run had {len(set(hosts))} hosts, and what is between them is not in its folder: name the machine, as "
            f"--on {size}xH100/{max(1, size // len(set(hosts)))}@400Gb."
        )
    if "nccl" in backend:
        raise UsageError(f"the run was on GPUs over nccl: name the machine, as --on {size}xH100.")
    if "shm" in backend:
        from lockstep.plan.measure import this_machine

        machine = machines.assembled("cpu", size, size)
        here = this_machine()
        link = here.intra if here.device.kind == "cpu" else machine.intra
        return replace(machine, intra=link), "shared memory as timed on this machine"
    link = machines.Link("loopback", LOOPBACK_BYTES_PER_S, LOOPBACK_LATENCY_S)
    return replace(machines.assembled("cpu", size, size), intra=link), "a loopback of 1.5 GB/s is assumed"


def _typical(steps: Sequence[StepLine], name: str) -> float:
    """Seconds of one share of a step: the median over steps of the median over workers."""
    shares = [median(float(worker["shares_ms"].get(name, 0.0)) for worker in step["workers"]) for step in steps]
    return median(shares) / 1e3


def _jitter(steps: Sequence[StepLine]) -> float:
    """By how much workers' passes of one step differ, relative, as a standard deviation."""
    offs = []
    for step in steps:
        computed = [sum(worker["shares_ms"].get(name, 0.0) for name in _COMPUTED) for worker in step["workers"]]
        middle = sum(computed) / len(computed)
        if middle > 0:
            offs.append(sum((each - middle) ** 2 for each in computed) / (len(computed) - 1) / middle**2)
    return math.sqrt(median(offs)) if offs else 0.0


def _ready(run: RunFolder, count: int) -> list[float]:
    """For each bucket the share of the backward pass that was over when it was full, from the steps in detail."""
    found: list[list[float]] = [[] for _ in range(count)]
    for place in [*run.trace_places().values()][-20:]:
        for worker in run.trace_at(place).workers:
            backward = next((span for span in worker.spans if span.name == "backward"), None)
            if backward is None or backward.length <= 0 or len(worker.flights) != count:
                continue
            for number, flight in enumerate(sorted(worker.flights, key=lambda each: each.launched)):
                share = (flight.launched - backward.begin) / backward.length
                found[number].append(min(1.0, max(0.0, share)))
    shares = [median(each) if each else (number + 1) / count for number, each in enumerate(found)]
    return [*itertools.accumulate(shares, max)]
