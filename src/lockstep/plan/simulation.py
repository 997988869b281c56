"""One step of training as events: computing and messages, each in a lane, and who waits for what. Pure arithmetic.

Phases of a step, for `accumulation` micro-batches:

    forward     one stretch of computing; with zero=3 one per bucket, each after its parameters were gathered
    backward    one stretch per bucket; at its end the bucket leaves, if this pass sends
    reduce      messages, one after the other in one lane, beside the computing; computing is slower meanwhile
    update      when all buckets are back; then, with zero=1 and 2, parameters are gathered

Every worker does the same, at the speed of the slowest: what is expected of the slowest of N is in closed form, so
nothing here is random and the same inputs give the same numbers. Plain floats and lists: `plan`'s page and the
playground run the same arithmetic in JavaScript, and a test holds the two together.
"""

import math
from dataclasses import dataclass, field, replace

RING, TREE, HIERARCHICAL, SHARED_MEMORY, NAIVE, FASTEST = "ring", "tree", "hierarchical", "shm", "naive", "auto"
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all_reduce", "reduce_scatter", "all_gather"

SIMULATED_PASSES = 3
"""Micro-batches that are simulated one by one; those between the first and the last two are all alike."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything that a step's time follows from."""

    workers: int
    per_host: int
    """Workers of one host."""
    forward_s: float
    """Computing of one micro-batch on one worker, as if it were alone."""
    backward_s: float
    optimizer_s: float
    """One worker's update of the whole model; with zero=1 to 3 each takes its part of it."""
    bucket_bytes: list[float]
    """Of the gradients in each bucket, in the order in which buckets leave."""
    bucket_ready: list[float]
    """For each bucket the share of the backward pass that is over when it is full; never falling, 1 at most."""
    gather_bytes: list[float] = field(default_factory=list)
    """Of the parameters that belong to each bucket; used with zero=1 to 3."""
    accumulation: int = 1
    """Micro-batches in a step."""
    reduces_each: bool = False
    """Whether gradients are sent after every micro-batch, and not after the last one only."""
    zero: int = 0
    regathers: bool = True
    """With zero=3: whether parameters are gathered for the backward pass again."""
    algorithm: str = FASTEST
    """ring, tree, hierarchical, shm, naive, or auto for the fastest of the first three."""
    intra_latency_s: float = 0.0
    """Of one message between two workers of one host; over shared memory, of one barrier."""
    intra_bytes_per_s: float = 1e30
    """What one worker sends within its host; over shared memory, what one worker reduces."""
    inter_latency_s: float = 0.0
    """Of one message between two hosts."""
    inter_bytes_per_s: float = 1e30
    """What one host sends to others, all its workers together."""
    message_s: float = 0.0
    """What a collective call costs by itself, in the lane of messages."""
    launch_s: float = 0.0
    """What a bucket costs the computing of the worker: copies, hooks, the call."""
    wire_factor: float = 1.0
    """Bytes that travel for one byte of a bucket."""
    wire_s_per_byte: float = 0.0
    """Encoding and decoding of one byte of a bucket, in the lane of messages."""
    contention: float = 0.0
    """Share of the computing's speed that is lost while a message is on its way; 1 where nothing can overlap."""
    jitter: float = 0.0
    """Relative standard deviation of the time of one pass, from pass to pass and worker to worker."""
    spread: float = 0.0
    """Relative standard deviation of the workers' speeds, which lasts."""
    straggler: float = 1.0
    """How many times as long as the others the slowest worker takes, where one is known to be slow."""
    loader_s: float = 0.0
    """What preparing one micro-batch takes, beside the training."""
    between_s: float = 0.0
    """What the loop does between two steps, on the worker itself; counted with the optimizer."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a lane was busy with, in seconds since the step began."""

    lane: str
    """"compute" or "network"."""
    name: str
    """forward, backward, reduce, gather, update."""
    index: int
    """Of the bucket; -1 for none."""
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a step takes, in seconds: the first five add up to `step_s`."""

    compute_s: float
    """Forward and backward passes of a worker of usual speed."""
    wait_s: float
    """For the slowest worker."""
    exposed_s: float
    """Communication that nothing hides, and what computing lost to communication beside it."""
    optimizer_s: float
    data_s: float
    """Waiting for the loader."""
    step_s: float
    network_s: float
    """How long messages were on their way, hidden or not."""
    sent_bytes: float
    """By one worker, averaged, as the algorithm counts them; over shared memory, reduced."""
    spans: list[Span]
    """Of the slowest worker; at most SIMULATED_PASSES micro-batches."""


def simulate(given: StepInputs) -> StepTimes:
    """One step."""
    passes = given.accumulation
    if passes <= SIMULATED_PASSES:
        return _simulate(given)
    if not (given.zero == 3 or given.reduces_each):
        return _simulate(given)  # All passes but the last are one stretch there.
    full, less = (_simulate(replace(given, accumulation=SIMULATED_PASSES - each)) for each in (0, 1))
    more = passes - SIMULATED_PASSES
    # The worker's luck evens out over the passes, so what is waited for is computed for all of them.
    compute = (given.forward_s + given.backward_s) * passes
    wait = compute * (slowest(given) - 1.0)
    exposed = max(0.0, full.exposed_s + more * (full.exposed_s - less.exposed_s))
    busy = compute + wait + exposed + full.optimizer_s
    data = max(0.0, given.loader_s * passes - busy)
    return StepTimes(
        compute,
        wait,
        exposed,
        full.optimizer_s,
        data,
        busy + data,
        full.network_s + more * (full.network_s - less.network_s),
        full.sent_bytes + more * (full.sent_bytes - less.sent_bytes),
        full.spans,
    )


def _simulate(given: StepInputs) -> StepTimes:
    slow = slowest(given)
    lanes = _Lanes(given.contention)
    is_alone = given.workers <= 1
    gathers = given.zero == 3 and not is_alone
    sent = 0.0
    passes = given.accumulation
    buckets = len(given.bucket_bytes)
    shares = _shares(given.bucket_ready)
    first_pass = 0
    if not gathers and not given.reduces_each:
        first_pass = passes - 1
        if first_pass > 0:
            lanes.compute("passes", -1, first_pass * (given.forward_s + given.backward_s) * slow, -1)
    for number in range(first_pass, passes):
        sends = not is_alone and (given.reduces_each or number == passes - 1)
        # Forward
        if gathers:
            order = [*range(buckets - 1, -1, -1)]
            arrivals = _gather_ahead(lanes, given, order, lanes.num_stretches)
            for place, bucket in enumerate(order):
                lanes.compute("forward", bucket, given.forward_s * shares[bucket] * slow, arrivals[place])
            lanes.compute("forward", -1, given.forward_s * (1.0 - sum(shares[:buckets])) * slow, -1)
            sent += sum(sent_bytes(given, ALL_GATHER, given.gather_bytes[bucket]) for bucket in order)
        else:
            lanes.compute("forward", -1, given.forward_s * slow, -1)
        # Backward
        arrivals = [-1] * buckets
        if gathers and given.regathers:
            # What the last stretch of the forward pass used is still there.
            arrivals = [-1, *_gather_ahead(lanes, given, [*range(1, buckets)], lanes.num_stretches + 1)]
            sent += sum(sent_bytes(given, ALL_GATHER, given.gather_bytes[bucket]) for bucket in range(1, buckets))
        for bucket in range(buckets):
            launch = given.launch_s if sends else 0.0
            lanes.compute("backward", bucket, given.backward_s * shares[bucket] * slow + launch, arrivals[bucket])
            if sends:
                num_bytes = given.bucket_bytes[bucket]
                kind = REDUCE_SCATTER if given.zero else ALL_REDUCE
                lanes.message("reduce", bucket, reduce_seconds(given, kind, num_bytes))
                sent += sent_bytes(given, kind, num_bytes * given.wire_factor)
        lanes.compute("backward", -1, given.backward_s * (1.0 - sum(shares[:buckets])) * slow, -1)
    lanes.run()
    optimizer = given.optimizer_s / (given.workers if given.zero else 1) + given.between_s
    lanes.compute("update", -1, optimizer, -1)
    lanes.run()
    if given.zero in (1, 2) and not is_alone:
        for bucket in range(buckets):
            lanes.message("gather", bucket, message_seconds(given, ALL_GATHER, given.gather_bytes[bucket]))
            sent += sent_bytes(given, ALL_GATHER, given.gather_bytes[bucket])
        lanes.run()
    compute = (given.forward_s + given.backward_s) * passes
    wait = compute * (slow - 1.0)
    exposed = max(0.0, lanes.now - compute - wait - optimizer)
    data = max(0.0, given.loader_s * passes - lanes.now)
    return StepTimes(compute, wait, exposed, optimizer, data, lanes.now + data, lanes.network_s, sent, lanes.spans)


def _shares(ready: list[float]) -> list[float]:
    """Which share of a pass belongs to each bucket."""
    return [end - (ready[place - 1] if place else 0.0) for place, end in enumerate(ready)]


def _gather_ahead(lanes: "_Lanes", given: StepInputs, order: list[int], begin: int) -> list[int]:
    """Gathers for the stretches from number `begin` on, each launched when the stretch before its own begins."""
    return [
        lanes.message_at(
            begin + place - 2, "gather", bucket, message_seconds(given, ALL_GATHER, given.gather_bytes[bucket])
        )
        for place, bucket in enumerate(order)
    ]


class _Lanes:
    """The two lanes of a worker: stretches of computing in order, messages in order of their launch.

    Phases: `compute` and `message` only note what is to be done; `run` lets time pass until all of it is done.
    """

    def __init__(self, contention: float) -> None:
        self._speed = 1.0 - contention
        self.now = 0.0
        self.network_s = 0.0
        self.spans: list[Span] = []
        self._work: list[tuple[str, int, float, int]] = []
        """Name, bucket, seconds, and the message that must have arrived before, or -1."""
        self._messages: list[tuple[str, int, float]] = []
        self._launches: dict[int, list[int]] = {}
        """The messages that are launched when so many stretches are done, in the order in which they were noted."""
        self._arrived: set[int] = set()
        self._done = 0

    @property
    def num_stretches(self) -> int:
        """Stretches of computing so far."""
        return len(self._work)

    def compute(self, name: str, bucket: int, seconds: float, needs: int) -> None:
        """Compute for so long, when message number `needs` has arrived; -1 for none."""
        self._work.append((name, bucket, seconds, needs))

    def message(self, name: str, bucket: int, seconds: float) -> int:
        """Launch a message when the stretch before is done; returns its number."""
        return self.message_at(len(self._work) - 1, name, bucket, seconds)

    def message_at(self, stretch: int, name: str, bucket: int, seconds: float) -> int:
        """Launch a message when this stretch is done; returns its number."""
        self._messages.append((name, bucket, seconds))
        number = len(self._messages) - 1
        self._launches.setdefault(max(self._done, stretch + 1), []).append(number)
        return number

    def run(self) -> None:
        """Let time pass until nothing is left to do."""
        queue: list[int] = [*self._launches.pop(self._done, [])]
        work_left = self._work[self._done][2] if self._done < len(self._work) else 0.0
        message_left = self._messages[queue[0]][2] if queue else 0.0
        work_began = message_began = self.now
        while self._done < len(self._work) or queue:
            computes = self._done < len(self._work) and (
                self._work[self._done][3] < 0 or self._work[self._done][3] in self._arrived
            )
            speed = self._speed if queue else 1.0
            work_takes = work_left / speed if computes and speed > 0.0 else math.inf
            if computes and work_left <= 0.0:
                work_takes = 0.0
            message_takes = message_left if queue else math.inf
            takes = min(work_takes, message_takes)
            self.now += takes
            if computes:
                work_left -= takes * speed
            if queue:
                message_left -= takes
                self.network_s += takes
            if queue and message_takes <= work_takes:
                name, bucket, _ = self._messages[queue[0]]
                self.spans.append(Span("network", name, bucket, message_began, self.now))
                self._arrived.add(queue.pop(0))
                if queue:
                    message_left, message_began = self._messages[queue[0]][2], self.now
                if self._done < len(self._work) and not computes:
                    work_began = self.now
            else:
                name, bucket, seconds, _ = self._work[self._done]
                if seconds > 0.0:
                    self.spans.append(Span("compute", name, bucket, work_began, self.now))
                self._done += 1
                launched = self._launches.pop(self._done, [])
                if not queue and launched:
                    message_left, message_began = self._messages[launched[0]][2], self.now
                queue += launched
                if self._done < len(self._work):
                    work_left, work_began = self._work[self._done][2], self.now


# What a message takes: latency and bytes, by algorithm


def reduce_seconds(given: StepInputs, kind: str, num_bytes: float) -> float:
    """A bucket of gradients: encoded, sent, decoded."""
    return message_seconds(given, kind, num_bytes * given.wire_factor) + num_bytes * given.wire_s_per_byte


def message_seconds(given: StepInputs, kind: str, num_bytes: float) -> float:
    """A collective over all workers, of a tensor that has so many bytes as a whole."""
    if given.workers <= 1:
        return 0.0
    if given.algorithm != FASTEST:
        return given.message_s + _collective(given, given.algorithm, kind, num_bytes)
    ways = [RING, TREE, HIERARCHICAL]
    return given.message_s + min(_collective(given, way, kind, num_bytes) for way in ways)


def _collective(given: StepInputs, algorithm: str, kind: str, num_bytes: float) -> float:
    size = given.workers
    local = min(size, given.per_host)
    hosts = math.ceil(size / given.per_host)
    rounds = 2 if kind == ALL_REDUCE else 1
    intra_s, inter_s = num_bytes / given.intra_bytes_per_s, num_bytes / given.inter_bytes_per_s
    if algorithm == SHARED_MEMORY and hosts == 1:
        # Everybody reads M bytes and writes M; scattered, writes a part; gathered, nothing, since all see one memory.
        moved = {ALL_REDUCE: 1.0, REDUCE_SCATTER: 0.5 + 0.5 / size, ALL_GATHER: 0.0}[kind]
        return 2.0 * given.intra_latency_s + moved * intra_s
    if algorithm == NAIVE:
        if hosts == 1:
            return given.intra_latency_s + (size - 1) * intra_s
        return given.inter_latency_s + local * (size - local) * inter_s
    if algorithm == TREE and kind == ALL_REDUCE:
        depth = math.ceil(math.log2(hosts)) if hosts > 1 else 0
        latency = 2.0 * (depth * given.inter_latency_s + (local - 1) * given.intra_latency_s)
        return latency + 2.0 * (max(intra_s, inter_s) if hosts > 1 else intra_s)
    if algorithm == HIERARCHICAL and hosts > 1:
        inside = (local - 1) * given.intra_latency_s + (local - 1) / local * intra_s
        between = (hosts - 1) * given.inter_latency_s + (hosts - 1) / hosts * inter_s
        return rounds * (inside + between)
    # A ring through all workers, each host entered once; it is as fast as its slowest link.
    latency = given.inter_latency_s if hosts > 1 else given.intra_latency_s
    slowest_s = max(intra_s, inter_s) if hosts > 1 else intra_s
    return rounds * ((size - 1) * latency + (size - 1) / size * slowest_s)


def sent_bytes(given: StepInputs, kind: str, num_bytes: float) -> float:
    """What one worker sends of such a message, as a ring does; nobody can send less on average."""
    size = given.workers
    if given.algorithm == NAIVE:
        return (size - 1) * num_bytes
    return (2 if kind == ALL_REDUCE else 1) * (size - 1) / size * num_bytes


# The slowest of many


def slowest(given: StepInputs) -> float:
    """How many times as long as a usual worker the slowest one is expected to compute."""
    deviation = math.sqrt(given.jitter * given.jitter / max(1, given.accumulation) + given.spread * given.spread)
    by_chance = 1.0 + expected_max(given.workers) * deviation
    return max(by_chance, given.straggler if given.workers > 1 else 1.0)


def expected_max(count: int) -> float:
    """The expected largest of `count` standard normal numbers: Blom's approximation, within 0.03 of the truth."""
    return _normal_quantile((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def _normal_quantile(p: float) -> float:
    """Where the normal distribution reaches `p`, of at least a half: Abramowitz and Stegun 26.2.23, within 0.00045."""
    t = math.sqrt(-2.0 * math.log(1.0 - p))
    over = 2.515517 + t * (0.802853 + t * 0.010328)
    under = 1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308))
    return t - over / under


# Faults


def best_interval(write_s: float, mtbf_s: float) -> float:
    """Seconds of training between two checkpoints that lose the least: Daly 2006, of higher order than Young 1974."""
    if write_s >= 2.0 * mtbf_s:
        return mtbf_s
    share = write_s / (2.0 * mtbf_s)
    return math.sqrt(2.0 * write_s * mtbf_s) * (1.0 + math.sqrt(share) / 3.0 + share / 9.0) - write_s


def checkpointed_goodput(interval_s: float, write_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the time that ends up as training, where a fault sends all back to the last checkpoint (Daly 2006)."""
    if mtbf_s == math.inf:
        return interval_s / (interval_s + write_s)
    exponent = (interval_s + write_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 700.0:
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * (math.exp(exponent) - 1.0))


def elastic_goodput(workers: int, step_s: float, recover_s: float, replace_s: float, mtbf_s: float) -> float:
    """The same where the others go on: half a step and the recovery are lost, and a worker until it is replaced."""
    if mtbf_s == math.inf:
        return 1.0
    stands = (recover_s + 0.5 * step_s) / mtbf_s
    absent = min(1.0, replace_s / mtbf_s / workers)
    return (1.0 - absent) / (1.0 + stands)
