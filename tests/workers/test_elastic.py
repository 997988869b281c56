"""Workers that die, fall silent, join and leave: the run ends in the bits of one that nothing happened to."""

import functools
import hashlib
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from amount import some
from elastic_runs import STEPS, digest, hashes, loss_fn, make, run, samples, show_step, train
from models import MLP
from processes import is_alive, wait_until

import lockstep
from lockstep import faults
from lockstep.elastic.snapshots import Snapshots

WORKERS = 3
STEP = 5
"""In which workers fail."""
WITHIN_S = 90


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The hash of a run that nothing happened to."""

    @functools.cache
    def undisturbed(kind="mlp", steps=STEPS):
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        said = run(folder, workers=1, elastic=None, backend=None, kind=kind, steps=steps)
        return hashes(said, steps).pop()

    return undisturbed


# Every point, every place


def faults_at(point, action, victims):
    """What happens to whom, and what has to happen before that for them to come to that point."""
    of_step = f" of step {STEP}" if point in ("compute", "exchange", "vote", "commit", "snapshot") else ""
    faults = [f"worker {victim}: {action} at {point}{of_step}" for victim in victims]
    if point in ("boundary", "regroup", "sending state", "receiving state", "replay"):
        # Somebody else is lost first, so that there is a state to be told and a newcomer to be told it.
        other = next(number for number in range(WORKERS) if number not in victims)
        # One that dies amid its update leaves nothing that could be used as it is: steps are made again.
        faults.append(f"worker {other}: die at {'commit' if point == 'replay' else 'vote'} of step {STEP - 1}")
    return "; ".join(faults)


POINTS = ("join", "compute", "exchange", "vote", "commit", "boundary", "regroup", "sending state", "receiving state")
SPLIT_POINTS = ("snapshot", "replay")
VICTIMS = [(0,), (1,), (2,), (0, 2)]
EVERYTHING = [
    (point, action, backend, zero, victims)
    for point, action, backend, zero, victims in itertools.product(
        (*POINTS, *SPLIT_POINTS), ("die", "exit", "raise", "stop"), ("shm", "gloo"), (0, 1, 3), VICTIMS
    )
    if (zero or point not in SPLIT_POINTS)
    # Two that die together, one behind the other, take a part with them: the run starts anew, see below.
    and (action == "die" or (victims in ((1,), (0, 2)) and zero != 1))
    and (action, victims) != ("raise", (0, 2))  # What fails on two workers ends the run, see below.
    # All members that are left: nobody waits for them, as when a whole run is suspended, until they are continued.
    and not (point in ("boundary", "regroup") and (action, victims) == ("stop", (0, 2)))
]
SELECTION = [
    ("compute", "die", "shm", 0, (0,)),
    ("exchange", "die", "gloo", 3, (1,)),
    ("vote", "die", "shm", 0, (0, 2)),
    ("boundary", "die", "gloo", 0, (0,)),
    ("receiving state", "die", "shm", 3, (0,)),
    ("snapshot", "die", "shm", 1, (2,)),
    ("replay", "die", "gloo", 3, (0,)),
    ("exchange", "raise", "shm", 3, (0,)),
]


@pytest.mark.parametrize(("point", "action", "backend", "zero", "victims"), some(SELECTION, EVERYTHING))
def test_whoever_fails_wherever_the_end_has_the_same_bits(tmp_path, undisturbed, point, action, backend, zero, victims):
    timeout = 6 if action == "stop" else 60  # Silence in the first steps is given up after this.
    said = run(
        tmp_path / "run",
        workers=WORKERS,
        faults=faults_at(point, action, victims),
        backend=backend,
        zero=zero,
        timeout=timeout,
    )
    assert hashes(said) == {undisturbed()}
    assert said["took_s"] < WITHIN_S


# What scripts do besides


class Stream(torch.utils.data.IterableDataset):
    """Numbers that depend on those before them, so that only its state tells how to go on."""

    def __init__(self, count):
        self.count, self.at, self.x = count, 0, 1.0

    def __iter__(self):
        while self.at < self.count:
            self.at, self.x = self.at + 1, (self.x * 1.37 + 0.11) % 1.0
            yield torch.full((12,), self.x) + torch.arange(12) / 12, self.at % 5
        self.at, self.x = 0, 1.0

    def state_dict(self):
        return {"at": self.at, "x": self.x}

    def load_state_dict(self, state):
        self.at, self.x = state["at"], state["x"]


class Noisy(torch.utils.data.Dataset):
    """Changed by random numbers each time a sample is fetched."""

    def __init__(self, plain):
        self.plain = plain

    def __len__(self):
        return len(self.plain)

    def __getitem__(self, index):
        x, y = self.plain[index]
        return x + 0.1 * torch.randn_like(x), y


def accuracy(model, shard):
    x, y = shard
    return {"accuracy": (model(x).argmax(1) == y).float().mean(), "loss": loss_fn(model, shard)}


def with_feature(folder, feature, backend=None, zero=0, pause_s=0.01):
    """Train with one thing that scripts do; the digest, the steps, and what else is to be the same."""
    lockstep.join(timeout=60, backend=backend)
    torch.manual_seed(11 + os.getpid() % 3 * (feature == "seed after join"))  # Workers that draw different weights.
    options, loading, data, seen = {}, {}, samples("mlp"), []
    if feature == "scaler":
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    if feature == "loaders":
        data, loading = Noisy(data), {"num_workers": 2, "multiprocessing_context": "fork"}
    if feature == "stream":
        data, loading = Stream(150), {"shuffle": False}
    if feature == "stream in a loader":
        data, loading = Stream(150), {"shuffle": False, "num_workers": 1, "multiprocessing_context": "fork"}
    trainer = make("mlp", zero, **options)
    if feature == "own batches":
        # What the script makes itself has to follow from what the trainer knows: a newcomer begins at some step.
        generator = torch.Generator()
        while trainer.steps < STEPS:
            generator.manual_seed(trainer.steps)
            show_step(folder, trainer.steps)
            trainer.step(MLP.batch(40, generator, torch.float))
            time.sleep(pause_s)
        return digest(trainer), trainer.steps, seen
    for batch in trainer.batches(data, batch_size=40, epochs=100, **loading):
        if trainer.steps == STEPS:
            break
        trainer.step(batch)
        time.sleep(pause_s)
        if feature == "evaluate and save" and trainer.steps % 4 == 0:
            seen.append(trainer.evaluate(samples("mlp", 37), accuracy, batch_size=16))
            trainer.save(Path(folder, "checkpoint"), wait=trainer.steps % 8 == 0)
        if feature == "evaluate every step":
            seen.append(trainer.evaluate(samples("mlp", 37), accuracy, batch_size=16))
    return digest(trainer), trainer.steps, seen[-1:]


FEATURES = (
    "scaler", "loaders", "stream", "stream in a loader", "evaluate and save", "evaluate every step", "seed after join",
)  # fmt: skip


@pytest.mark.parametrize("zero", some([0], [0, 2, 3]))
@pytest.mark.parametrize("backend", some(["shm"], ["shm", "gloo"]))
@pytest.mark.parametrize("feature", some(["scaler", "loaders", "stream", "evaluate and save"], FEATURES))
def test_what_scripts_do_besides(tmp_path, feature, backend, zero):
    undisturbed = run(tmp_path / "one", with_feature, workers=1, elastic=None, feature=feature, pause_s=0)
    faults = "worker 1: die at vote of step 4; worker 0: die at compute of step 9; worker 2: die at commit of step 12"
    said = run(tmp_path / "run", with_feature, faults=faults, feature=feature, backend=backend, zero=zero)
    assert hashes(said) == hashes(undisturbed)
    if feature.startswith("evaluate"):
        assert {str(result[2]) for result in said["results"]} == {str(undisturbed["results"][0][2])}
    assert "newcomer" in said["err"]


def test_with_batches_of_its_own_a_run_goes_on_with_fewer(tmp_path):
    undisturbed = run(tmp_path / "one", with_feature, workers=1, elastic=None, feature="own batches", pause_s=0)
    dying = "worker 1: die at vote of step 4; worker 0: die at compute of step 9"
    said = run(tmp_path / "run", with_feature, faults=dying, feature="own batches", backend="shm", pause_s=0.1)
    assert len(said["results"]) == 1 and hashes(said) == hashes(undisturbed)
    assert "cannot be let in: this script makes its batches itself" in said["err"]


# One after the other


@pytest.mark.parametrize(
    ("faults", "zero"),
    [
        ("worker 0: die at vote of step 5; worker 1: die at regroup", 0),
        ("worker 2: die at vote of step 5; worker 0: die at regroup", 3),
        ("worker 2: die at vote of step 5; worker 3: die at receiving state; worker 4: die at join", 0),
        ("worker 2: die at vote of step 5; worker 3: die at receiving state", 3),
        ("worker 2: die at vote of step 5; worker 0: die at sending state", 0),
        ("worker 2: die at commit of step 5; worker 0: die at replay", 1),
        ("worker 0: die at commit of step 5; worker 1: die at commit of step 5", 0),
        ("worker 0: die at exchange of step 5; worker 3: die at compute of step 8; worker 4: die at join", 0),
    ],
)
def test_deaths_during_recovery(tmp_path, undisturbed, faults, zero):
    said = run(tmp_path / "run", faults=faults, backend="shm", zero=zero, pause_s=0.02)
    assert hashes(said) == {undisturbed()}


def notes_copies(folder, backend, zero, kind):
    """As `train`; leaves a file where copies had to serve. They are taken in the first step of a generation alone."""
    choose = Snapshots.choose

    def noted(self, world):
        Path(folder, f"{os.getpid()}.chosen").touch()
        return choose(self, world)

    Snapshots.choose, Snapshots.is_due = noted, lambda self, call: not self._kept
    return train(folder, backend, kind=kind, zero=zero, pause_s=0.02)


@pytest.mark.parametrize(
    ("faults", "zero", "kind", "serve_copies"),
    [
        ("worker 1: die at compute of step 9; worker 2: die at compute of step 9", 1, "cnn", False),
        ("worker 0: die at compute of step 9; worker 3: die at receiving state", 3, "mlp", False),
        ("worker 1: die at commit of step 9", 2, "cnn", True),
    ],
)
def test_over_shm_parts_outlive_their_owners(tmp_path, undisturbed, faults, zero, kind, serve_copies):
    """Unless a worker dies amid its update: neighbours that die together would take their copies along."""
    options = {"function": notes_copies, "backend": "shm", "zero": zero, "kind": kind}
    said = run(tmp_path / "run", faults=faults, **options)
    assert hashes(said) == {undisturbed(kind)}
    assert bool(list((tmp_path / "run").glob("*.chosen"))) == serve_copies


def loads_another(folder, path, backend=None, zero=0, kills=False):
    """After five steps all go on from the checkpoint of another run; three steps later one is killed."""
    lockstep.join(timeout=60, backend=backend)
    trainer = make("mlp", zero)
    has_loaded = False
    while trainer.steps < STEPS:
        for batch in trainer.batches(samples("mlp"), batch_size=40, epochs=100):
            if trainer.steps == (STEPS if has_loaded else 5):
                break
            if kills and has_loaded and trainer.steps == 7 and trainer.world.size == 3 and trainer.world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.step(batch)
        if not has_loaded:
            trainer.load(path)
            has_loaded = True
    return digest(trainer), trainer.steps


def saves_another(folder):
    lockstep.join()
    trainer = make("mlp")
    for batch in trainer.batches(samples("mlp"), batch_size=40):
        trainer.step(batch)
        with torch.no_grad():
            for param in trainer.model.parameters():
                param.mul_(1.1)
        if trainer.steps == 4:
            trainer.save(Path(folder, "checkpoint"))
            break
    return digest(trainer), trainer.steps


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_was_before_a_checkpoint_was_loaded_does_not_come_back(tmp_path, backend):
    run(tmp_path / "other", saves_another, workers=1, elastic=None)
    options = {"path": str(tmp_path / "other" / "checkpoint")}
    wanted = hashes(run(tmp_path / "one", loads_another, workers=1, elastic=None, **options))
    options |= {"backend": backend, "zero": 1, "kills": True}
    assert hashes(run(tmp_path / "run", loads_another, elastic={"max_restarts": 0}, **options)) == wanted


def test_one_is_left_and_goes_on_alone(tmp_path, undisturbed):
    faults = "worker 0: die at vote of step 5; worker 2: die at exchange of step 7"
    said = run(tmp_path / "run", faults=faults, elastic={"max_restarts": 0}, backend="shm")
    assert len(said["results"]) == 1 and hashes(said) == {undisturbed()}
    assert "it is not replaced" in said["err"]


def dies_while_replicas_are_compared(folder, backend, zero):
    """A worker dies when a step has taken effect, while the workers still talk about it."""
    lockstep.join(timeout=60, backend=backend)
    trainer = make(zero=zero, check_every=4)
    if os.environ["LOCKSTEP_MEMBER"] == "1":
        trainer._stepper.check = lambda steps: steps % 4 or os.kill(os.getpid(), signal.SIGKILL)
    for batch in trainer.batches(samples("mlp"), batch_size=40, epochs=100):
        if trainer.steps == STEPS:
            break
        trainer.step(batch)
    return digest(trainer), trainer.steps


@pytest.mark.parametrize("zero", [0, 1])
def test_a_step_that_has_taken_effect_is_not_made_again(tmp_path, undisturbed, zero):
    said = run(tmp_path / "run", function=dies_while_replicas_are_compared, backend="gloo", zero=zero)
    assert hashes(said) == {undisturbed()}


def test_with_fewer_than_the_least_they_wait_for_others(tmp_path, undisturbed):
    said = run(
        tmp_path / "run",
        faults="worker 1: die at vote of step 5; worker 3: die at compute of step 8",
        elastic={"min": 3},
        backend="gloo",
    )
    assert len(said["results"]) == 3 and hashes(said) == {undisturbed()}
    assert "2 workers" not in said["err"]


def from_checkpoint(folder, backend, zero=0, steps=STEPS):
    """As `train`, with a checkpoint every four steps."""
    lockstep.join(timeout=60, backend=backend)
    trainer = make("mlp", zero)
    path = Path(folder, "checkpoint")
    began = trainer.load(path, missing="ok").step if path.exists() else 0
    for batch in trainer.batches(samples("mlp"), batch_size=40, epochs=100):
        if trainer.steps == steps:
            break
        trainer.step(batch)
        if trainer.steps % 4 == 0:
            trainer.save(path)
    return digest(trainer), trainer.steps, began


@pytest.mark.parametrize(
    ("backend", "zero", "faults"),
    [
        ("shm", 0, "; ".join(f"worker {number}: die at vote of step 10" for number in range(3))),
        ("gloo", 3, "; ".join(f"worker {number}: die at vote of step 10" for number in range(2))),
    ],
)
def test_where_the_state_is_lost_all_start_anew_from_the_checkpoint(tmp_path, undisturbed, backend, zero, faults):
    said = run(tmp_path / "run", from_checkpoint, faults=faults, backend=backend, zero=zero)
    assert hashes(said) == {undisturbed()}
    assert {result[2] for result in said["results"]} == {8}
    assert "all 3 start anew" in said["err"]


def plain(folder, backend):
    """A loop of its own, with DataParallel: no worker can be replaced alone."""
    world = lockstep.join(timeout=60, backend=backend, seed=5)
    net = MLP()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model = lockstep.DataParallel(net)
    began = lockstep.load(Path(folder, "checkpoint"), model, optimizer, missing="ok")
    data = samples("mlp")
    for step in range(began.step if began else 0, STEPS):
        faults.at("compute", step)
        x, y = data[step * 6 + world.rank * 2 : step * 6 + world.rank * 2 + 2]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step % 4 == 3:
            lockstep.save(Path(folder, "checkpoint"), model, optimizer, step=step + 1)
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest(), STEPS


def test_a_script_without_a_trainer_starts_anew_from_its_checkpoint(tmp_path):
    undisturbed = run(tmp_path / "one", plain, backend="shm")
    said = run(tmp_path / "run", plain, faults="worker 1: die at compute of step 10", backend="shm")
    assert hashes(said) == hashes(undisturbed)
    assert "without a lockstep.Trainer no worker can be replaced alone" in said["err"]
    assert said["err"].count("start anew") == 1


# What ends a run


def fails(folder, backend, where, who=None):
    """Train until an error that no other worker would be spared."""
    world = lockstep.join(timeout=60, backend=backend)
    trainer = make("mlp")
    for batch in trainer.batches(samples("mlp"), batch_size=40, epochs=100):
        if trainer.steps >= STEP and where == "between" and who in (None, world.rank):
            raise ValueError("no such thing")
        if trainer.steps == STEP and where == "loss":
            trainer.model.register_forward_pre_hook(lambda *_: 1 / 0)
        trainer.step(batch)
        if trainer.steps == STEPS:
            break
    return digest(trainer), trainer.steps


@pytest.mark.parametrize(
    ("where", "who", "error"),
    [
        ("between", None, "ValueError: no such thing"),
        ("between", 1, "ValueError: no such thing"),
        ("loss", None, "ZeroDiv"),
    ],
)
def test_an_error_of_the_script_ends_the_run_once(tmp_path, where, who, error):
    said = run(tmp_path / "run", fails, backend="shm", where=where, who=who)
    assert said["error"].startswith(error), said
    assert said["err"].count("has ended") <= 3


def test_a_function_that_fails_before_it_joins_ends_the_run(tmp_path):
    said = run(tmp_path / "run", never_joins, backend="shm")
    assert said["error"].startswith("KeyError")


def never_joins(folder, backend):
    raise KeyError("early")


def test_a_function_that_never_joins_is_run_once_by_each(tmp_path):
    said = run(tmp_path / "run", alone, backend="shm")
    assert said["results"] == ["alone"] * 3


def alone(folder, backend):
    return "alone"


# Signals and resizing, with the real launcher


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from elastic_runs import train_on
print("HASH", *train_on({folder!r}, steps={steps}, kind="mlp", pause_s={pause_s}), flush=True)
"""


@pytest.mark.skipif("FULL" not in os.environ, reason="every worker imports torch")
def test_run_is_resized_by_name_and_by_signals_and_loses_no_step(tmp_path, undisturbed):
    steps = 400
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path), steps=steps, pause_s=0.3))
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--max", "4", "--elastic", "--name", "resized"]
    launcher = subprocess.Popen([*command, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def have_come(number):
        wait_until(lambda: sum(is_alive(int(p.stem)) for p in tmp_path.glob("*.step")) == number, f"{number} workers")

    try:
        have_come(2)
        assert resize("resized", "3").returncode == 0
        have_come(3)
        launcher.send_signal(signal.SIGUSR1)
        have_come(4)
        refused = resize(str(launcher.pid), "5")
        assert refused.returncode == 2 and "started for 1 to 4" in refused.stderr
        launcher.send_signal(signal.SIGUSR2)
        have_come(3)
        assert resize("resized", "1").returncode == 0
        have_come(1)
        (tmp_path / "hurry").touch()
        out, err = launcher.communicate(timeout=90)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, err
    assert f"HASH {undisturbed('mlp', steps)} {steps}" in out
    assert "replacement" not in err
    unknown = resize("resized", "2")
    assert unknown.returncode == 2 and "there is no elastic run 'resized' of yours" in unknown.stderr


def resize(*words):
    command = [sys.executable, "-m", "lockstep", "resize", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def leaves(folder, backend, steps=STEPS):
    """As `train`; the first worker asks itself to leave, once."""
    world = lockstep.join(timeout=60, backend=backend)
    trainer = make("mlp")
    for batch in trainer.batches(samples("mlp"), batch_size=40, epochs=100):
        if trainer.steps == steps:
            break
        if trainer.steps == STEP and world.generations.member == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        trainer.step(batch)
        time.sleep(0.02)
    return digest(trainer), trainer.steps


def test_who_is_asked_to_leave_is_replaced_at_no_cost(tmp_path, undisturbed):
    said = run(tmp_path / "run", leaves, elastic={"max_restarts": 0}, backend="shm")
    assert hashes(said) == {undisturbed()}
    assert "without 0" in said["err"] and "newcomer 3" in said["err"]


def leaves_at_once(folder, backend, steps=STEPS):
    """As `leaves`, and asks again before its step is over, which ends it; one worker after the other."""
    world = lockstep.join(timeout=60, backend=backend)
    trainer = make("mlp")
    for batch in trainer.batches(samples("mlp"), batch_size=40, epochs=100):
        if trainer.steps == steps:
            break
        if trainer.steps in (3, 6, 9) and world.generations.member == trainer.steps // 3 - 1:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        trainer.step(batch)
        time.sleep(0.02)
    return digest(trainer), trainer.steps


def test_who_is_ended_by_a_second_signal_is_replaced_however_many_they_are(tmp_path, undisturbed):
    """Three that end alike have not met an error of the script's."""
    said = run(tmp_path / "run", leaves_at_once, elastic={"max_restarts": 3}, backend="shm")
    assert hashes(said) == {undisturbed()}
    assert said["err"].count("has ended: killed by SIGTERM") == 3


CHAOS_SCRIPT = """
import torch, lockstep
world = lockstep.join(timeout=60)
torch.manual_seed(0{own_seed})
net = torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.BatchNorm1d(40), torch.nn.GELU(), torch.nn.Linear(40, 5))
data = torch.utils.data.TensorDataset(torch.randn(400, 12), torch.randint(5, (400,)))
loss = lambda model, shard: torch.nn.functional.cross_entropy(model(shard[0]), shard[1])
trainer = lockstep.Trainer(net, torch.optim.AdamW(net.parameters()), loss, shards=4, seed=3, zero={zero})
for batch in trainer.batches(data, batch_size=40, epochs=2):
    trainer.step(batch)
"""


@pytest.mark.timeout(300)
@pytest.mark.skipif("FULL" not in os.environ, reason="every worker imports torch")
@pytest.mark.parametrize(("zero", "own_seed", "code"), [(0, "", 0), (3, "", 0), (0, " + time.time_ns() % 1000", 1)])
def test_verify_under_kills(tmp_path, zero, own_seed, code):
    (tmp_path / "train.py").write_text("import time\n" + CHAOS_SCRIPT.format(zero=zero, own_seed=own_seed))
    command = [sys.executable, "-m", "lockstep", "verify", "--chaos", "-n", "2", "--kills", "2", "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert ended.returncode == code, ended.stdout + ended.stderr
    said = "Verdict: the same bits, after 2 kills in 20 steps" if code == 0 else "before you blame the kills"
    assert said in " ".join(ended.stdout.split())
