"""Kills, stops, leavings and joins at random moments, one after the other: the undisturbed bits."""

import os
import random
import signal
import time

import pytest
from amount import some
from elastic_runs import ElasticRun, hashes, run, train_on
from processes import is_alive

(DEADLINE_S,) = some([600], [1800])
FEWEST, MOST = 2, 8
(EVENTS,) = some([5], [200])
STEPS_PER_EVENT = 6


class Storm:
    """What happens to one run; the same seed draws the same, as far as moments can be the same."""

    def __init__(self, run, seed):
        self.folder, self._run, self._chance = run.folder, run, random.Random(seed)
        self.told = []

    def members(self):
        """Process ids and steps of the workers that train."""
        found = {}
        for path in self.folder.glob("*.step"):
            pid = int(path.stem)
            if is_alive(pid) and (text := path.read_text()):
                found[pid] = int(text)
        return found

    def blow(self):
        """One event, if there is somebody for it."""
        members = self.members()
        what = self._chance.choices(["kill", "resize", "leave", "two", "stop"], [10, 4, 3, 2, 0.7])[0]
        least = {"kill": 2, "leave": 2, "two": 3, "stop": 2, "resize": 1}[what]
        if len(members) < least:
            return False
        if what == "resize":
            wanted = self._chance.randint(FEWEST, MOST)
            part = self.folder / "wanted.part"
            part.write_text(str(wanted))
            part.rename(self.folder / "wanted")
            self.told.append((what, wanted))
            return True
        victims = self._chance.sample(sorted(members), 2 if what == "two" else 1)
        signum = {"leave": signal.SIGTERM, "stop": signal.SIGSTOP}.get(what, signal.SIGKILL)
        for victim in victims:
            try:
                os.kill(victim, signum)
            except ProcessLookupError:
                return False
        self.told.append((what, victims, max(members.values())))
        return True

    def rage(self, count, last_step):
        """`count` events, each after a random while; ends early when the training is nearly over."""
        give_up = time.monotonic() + DEADLINE_S
        while len(self.told) < count and time.monotonic() < give_up and is_alive(self._run.pid):
            time.sleep(self._chance.uniform(0.02, 0.4))
            members = self.members()
            if not members or max(members.values()) < 2:
                continue
            if max(members.values()) > last_step - 10:
                break
            self.blow()
        for path in self.folder.glob("*.step"):  # Who is stopped and was not missed goes on.
            if is_alive(int(path.stem)):
                os.kill(int(path.stem), signal.SIGCONT)


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize(
    ("kind", "zero", "backend", "seed"),
    some(
        [("gpt", 0, "shm", 1)],
        [(kind, zero, backend, 7) for kind in ("gpt", "cnn") for zero in (0, 3) for backend in ("shm", "gloo")],
    ),
)
def test_the_bits_outlive_a_storm(tmp_path, kind, zero, backend, seed):
    steps = 30 + STEPS_PER_EVENT * EVENTS
    calm = run(tmp_path / "one", train_on, workers=1, elastic=None, kind=kind, steps=steps, limit_s=DEADLINE_S)
    undisturbed = hashes(calm, steps)
    limits = {"min": 1, "max": MOST, "max_restarts": 10_000}
    run_ = ElasticRun(
        tmp_path / "run", train_on, workers=4, elastic=limits, kind=kind, steps=steps, zero=zero, backend=backend,
        pause_s=0.05, limit_s=DEADLINE_S,
    )  # fmt: skip
    storm = Storm(run_, seed)
    storm.rage(EVENTS, steps)
    said = run_.finish()
    print(len(storm.told), storm.told, said["took_s"], said["err"][-3000:])
    assert hashes(said, steps) == undisturbed, (storm.told, said["err"])
    assert len(storm.told) > EVENTS / 2
