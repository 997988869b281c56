"""Makes the folder of a plausible run: N workers, a few hundred steps, one of them slow in loading data."""

import json
import random
from pathlib import Path

BUCKETS = [(0, 1 << 20), (1, 14 << 20), (2, 14 << 20), (3, 12 << 20)]
STARTED = 1794741600.0


def write_run(folder, *, workers=4, steps=300, slow=2, detail=True, name="train.py", seed=0):
    """Write the folder and return it; worker `slow` loads its data slowly, or nobody does."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run_facts(workers, name)))
    dice = random.Random(seed)
    begin = 120_000.0
    with (folder / "steps.jsonl").open("w") as lines, (folder / "trace.jsonl").open("w") as details:
        for step in range(steps):
            parts, end = a_step(dice, step, begin, workers, slow)
            lines.write(json.dumps(step_facts(dice, step, begin, end, parts, steps, slow)) + "\n")
            if detail and (step < 20 or step % 50 == 0 or (slow is not None and step % 10 == 0)):
                details.write(json.dumps(trace_facts(step, parts)) + "\n")
            begin = end
    return folder


def run_facts(workers, name):
    return {
        "version": 1, "lockstep": "0.1.0", "torch": "2.13.0", "started": "2026-11-15T12:00:00Z", "script": name,
        "size": workers, "device": "cpu", "backend": "shm", "hosts": [f"node{rank // 2}" for rank in range(workers)],
        "num_params": 10_700_000, "grad_bytes": 42_800_000, "single_ms": 182.0,
        "buckets": [
            {"place": place, "num_bytes": size, "params": [f"blocks.{place}.mlp.weight", f"blocks.{place}.mlp.bias"]}
            for place, size in BUCKETS
        ],
    }  # fmt: skip


def a_step(dice, step, begin, workers, slow):
    """Every worker's moments (us) in one step, as dicts, and the end of the step."""
    parts = []
    for rank in range(workers):
        data = dice.gauss(9, 1.5) + (dice.gauss(64, 9) if rank == slow else 0) + (400 if step == 0 else 0)
        forward, backward = dice.gauss(52, 1.5), dice.gauss(104, 2.5)
        parts.append({"rank": rank, "data": max(1.0, data), "copy": 2.1, "forward": forward, "backward": backward})
    for part in parts:
        part["begin"] = begin
        part["forward_at"] = begin + 1e3 * (part["data"] + part["copy"])
        part["backward_at"] = part["forward_at"] + 1e3 * part["forward"]
        part["backward_end"] = part["backward_at"] + 1e3 * part["backward"]
        fractions = [0.22, 0.5, 0.76, 1.0]
        part["ready"] = [part["backward_at"] + f * 1e3 * part["backward"] for f in fractions]
        part["launched"] = [ready + 150 for ready in part["ready"]]
    free = 0.0
    reduced = []
    for place, size in BUCKETS:
        free = max(free, *(part["launched"][place] for part in parts)) + 900 + size / 2.2e3
        reduced.append(free)
    all_launched = max(part["launched"][-1] for part in parts)
    for part in parts:
        part["reduced"] = reduced
        part["waiting_end"] = max(all_launched, part["backward_end"])
        part["optimizer_at"] = max(reduced[-1], part["backward_end"])
        part["end"] = part["optimizer_at"] + 1e3 * dice.gauss(11, 0.5)
    end = max(part["end"] for part in parts)
    return parts, end


def shares_of(part, end):
    shares = {kind: part[kind] for kind in ("data", "copy", "forward", "backward")}
    shares["waiting"] = (part["waiting_end"] - part["backward_end"]) / 1e3
    shares["exposed"] = (part["optimizer_at"] - part["waiting_end"]) / 1e3
    shares["optimizer"] = (part["end"] - part["optimizer_at"]) / 1e3
    shares["other"] = (end - part["end"]) / 1e3
    return shares


def step_facts(dice, step, begin, end, parts, steps, slow):
    wall = (end - begin) / 1e3
    progress = step / 300
    last = max(parts, key=lambda part: part["backward_end"])
    others = sorted(part["backward_end"] for part in parts if part is not last) or [last["backward_end"]]
    late = (last["backward_end"] - others[len(others) // 2]) / 1e3
    return {
        "step": step, "time": STARTED + end / 1e6, "wall_ms": wall,
        "loss": 1.9 + 2.6 * 2 ** (-progress * 4) + dice.gauss(0, 0.05),
        "grad_norm": 0.7 + 1.8 * 2 ** (-progress * 6) + abs(dice.gauss(0, 0.15)),
        "lr": 0.001 * min(1, (step + 1) / 50), "batch": 256, "samples_per_s": 256e3 / wall, "efficiency": 182 / wall,
        "sent_bytes": 64_200_000, "bus_gb_per_s": 2.2 + dice.gauss(0, 0.12), "mfu": 0.31,
        "noise_scale": None if step < 15 else 300 + 1500 * min(1, progress * 1.3) + dice.gauss(0, 40),
        "last": {"worker": last["rank"], "late_ms": late, "cause": "data" if last["rank"] == slow else "compute"},
        "verdict": "" if slow is None else f"worker {slow} holds everyone up by 64 ms a step, 97 % of it in data",
        "workers": [
            {"rank": part["rank"], "begin_us": begin, "wall_ms": wall, "hidden_ms": 17.0,
             "shares_ms": shares_of(part, end)}
            for part in parts
        ],
    }  # fmt: skip


def trace_facts(step, parts):
    workers = []
    for part in parts:
        copy_at = part["begin"] + 1e3 * part["data"]
        spans = [
            ["data", part["begin"], copy_at], ["copy", copy_at, part["forward_at"]],
            ["forward", part["forward_at"], part["backward_at"]],
            ["backward", part["backward_at"], part["backward_end"]],
            ["waiting", part["backward_end"], part["waiting_end"]],
            ["exposed", part["waiting_end"], part["optimizer_at"]],
            ["optimizer", part["optimizer_at"], part["end"]],
        ]  # fmt: skip
        buckets = [
            {"place": place, "num_bytes": size, "ready_us": part["ready"][place],
             "launched_us": part["launched"][place], "reduced_us": part["reduced"][place]}
            for place, size in BUCKETS
        ]  # fmt: skip
        workers.append({"rank": part["rank"], "spans": spans, "buckets": buckets})
    return {"step": step, "workers": workers}


def write_hang(folder, text="worker 1 did not arrive"):
    hangs = Path(folder) / "hangs"
    hangs.mkdir()
    facts = {
        "time": STARTED,
        "step": 12,
        "bucket": 3,
        "params": ["head.weight", "head.bias"],
        "missing": [1],
        "text": text,
    }
    (hangs / "hang.json").write_text(json.dumps(facts))
    for rank in range(2):
        (hangs / f"worker-{rank}.txt").write_text(
            f'Thread main of worker {rank}\n  File "train.py", line 31 in forward\n'
        )
