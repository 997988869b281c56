"""One worker of bench/elastic.py, which starts it: the same small GPT, trained by one of the systems compared there.

    lockstep    lockstep.Trainer, under `lockstep run --elastic`, or without
    torchrun    torch DDP over gloo under `torchrun --max-restarts`: loads the last checkpoint, writes one now and then
    torchft     its DistributedDataParallel over gloo, with a manager of its own and the lighthouse of the run
    paced       lockstep.Trainer, a few steps at a time, whenever the benchmark says so

A worker writes what it does into a file of its own: `begin` when it has the samples of an attempt at a step, `commit`
when the step stands, each with the *era* of its world: what changes when its members do. Step k of the virtual data
set is made of the samples from k times the batch size on, so each sample belongs to one step.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
CONTEXT = 64
NUM_SAMPLES = 1 << 22
SHARDS = 4


class Block(nn.Module):
    """Attention and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """As in every GPT."""
        query, key, value = self.qkv(self.norms[0](x)).unflatten(-1, (3 * self.heads, 64)).transpose(1, 2).chunk(3, 1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """About 12 * layers * width ** 2 parameters."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.blocks(self.tokens(ids) + self.places.weight))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Samples(torch.utils.data.Dataset[tuple[int, Tensor]]):
    """Random tokens, and the number of the sample."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> tuple[int, Tensor]:
        generator = torch.Generator().manual_seed(number)
        return number, torch.randint(VOCABULARY, (CONTEXT + 1,), generator=generator)


def samples_of(step: int, part: int, batch: int) -> tuple[list[int], Tensor]:
    """One of SHARDS parts of the global batch of a step: its sample numbers and their tokens."""
    size, samples = batch // SHARDS, Samples()
    numbers = list(range(step * batch + part * size, step * batch + (part + 1) * size))
    return numbers, torch.stack([samples[number][1] for number in numbers])


class Log:
    """What one worker does, line by line; a line is whole once it is written, however the process ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = os.open(folder / f"{os.getpid()}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        self.write("start")

    def write(self, what: str, **facts: Any) -> None:
        """One line."""
        os.write(self._file, (json.dumps({"do": what, "t": time.monotonic(), **facts}) + "\n").encode())

    def end(self, step: int, tensors: Iterable[Tensor]) -> None:
        """The run is over; `tensors` are the weights."""
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        self.write("end", step=step, sha=digest.hexdigest())

    def is_over(self, step: int) -> bool:
        """Whether the benchmark has said that the run ends before this step."""
        try:
            return step >= int((self._folder / "stop").read_text())
        except FileNotFoundError:
            return False


def build(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer, alike everywhere."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = GPT(options.width, options.layers)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-4)


def run_lockstep(options: argparse.Namespace, log: Log) -> None:
    """As in the README; the loss function also writes down which samples it sees."""
    import lockstep

    world = lockstep.join(timeout=60)
    net, optimizer = build(options)

    def era() -> int:
        generation = world.generations.current if world.generations is not None else None
        return generation.number if generation is not None else 0

    def loss_and_log(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        log.write("begin", step=trainer.steps, era=era(), samples=batch[0].tolist())
        return loss_of(model, batch[1])

    if options.stages:
        _log_stages(log)
    trainer = lockstep.Trainer(net, optimizer, loss_and_log, shards=SHARDS, zero=options.zero, seed=0)
    log.write("ready")
    for batch in trainer.batches(Samples(), options.batch, shuffle=False):
        if log.is_over(trainer.steps):
            break
        trainer.step(batch)
        log.write("commit", step=trainer.steps - 1, era=era())
    tensors = trainer.state_dict()["tensors"]
    log.end(trainer.steps, (tensors[name] for name in sorted(tensors)))


def _log_stages(log: Log) -> None:
    """Write down when each part of a recovery is over, which nothing but recovery calls."""
    from lockstep.comm import group
    from lockstep.comm.generations import Generations
    from lockstep.elastic.recovery import Recovery
    from lockstep.train.trainer import Trainer

    def announce(owner: Any, name: str, stage: str, *, is_before: bool = False) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **named: Any) -> Any:
            if is_before:
                log.write("stage", stage=stage)
                return inner(*args, **named)
            try:
                return inner(*args, **named)
            finally:
                log.write("stage", stage=stage)

        setattr(owner, name, outer)

    announce(Recovery, "_regroup", "seen", is_before=True)
    announce(Trainer, "let_go", "let go")
    announce(Generations, "leave", "reported")
    announce(group, "end_groups", "groups ended")
    announce(Generations, "following", "decided")
    announce(group, "enter", "groups opened")
    announce(Recovery, "_catch_up", "caught up")
    announce(Recovery, "_go_back", "caught up")
    announce(Recovery, "_move", "wrapped")


def run_torchrun(options: argparse.Namespace, log: Log) -> None:
    """torch's own recipe: everybody starts again from what worker 0 has saved."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, saved = dist.get_rank(), Path(options.folder) / "checkpoint.pt"
    net, optimizer = build(options)
    model = nn.parallel.DistributedDataParallel(net)
    step, era = 0, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if saved.exists():
        state = torch.load(saved)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while not log.is_over(step):
        numbers, ids = samples_of(step, rank, options.batch)
        log.write("begin", step=step, era=era, samples=numbers)
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        log.write("commit", step=step, era=era)
        step += 1
        if step % options.save_every == 0 and rank == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
    log.end(step, net.state_dict().values())
    dist.destroy_process_group()


def run_torchft(options: argparse.Namespace, log: Log) -> None:
    """As torchft's train_ddp.py, each worker a replica group; but the samples of a step follow from its number.

    So a step that is discarded is made again from the same samples, where its DistributedSampler would go on.
    """
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    net, inner = build(options)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"replica_{options.replica}",
    )
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    log.write("ready")
    while not (Path(options.folder) / "go").exists():
        time.sleep(0.01)
    while not log.is_over(step := manager.current_step()):
        optimizer.zero_grad()
        numbers, ids = samples_of(step, options.replica, options.batch)
        loss = loss_of(model, ids)
        manager.wait_quorum()
        era, counts = manager._quorum_id, manager.is_participating()
        log.write("begin", step=manager.current_step(), era=era, samples=numbers if counts else [])
        loss.backward()
        optimizer.step()
        if manager.current_step() > step and counts:
            log.write("commit", step=manager.current_step() - 1, era=era)
    log.end(manager.current_step(), net.state_dict().values())
    manager.shutdown(wait=False)


def run_paced(options: argparse.Namespace, log: Log) -> None:
    """Make so many steps as the benchmark asks for, tell how long each took, and wait for the next turn."""
    import lockstep
    from lockstep.elastic.snapshots import Snapshots

    copying_s = 0.0
    take = Snapshots.take

    def timed_take(*args: Any) -> None:
        nonlocal copying_s
        begun = time.perf_counter()
        take(*args)
        copying_s += time.perf_counter() - begun

    Snapshots.take = timed_take  # type: ignore[method-assign]
    world = lockstep.join(timeout=60)
    net, optimizer = build(options)
    trainer = lockstep.Trainer(
        net, optimizer, lambda model, batch: loss_of(model, batch[1]), shards=SHARDS, zero=options.zero, seed=0
    )
    batches: Iterator[Any] = trainer.batches(Samples(), options.batch, shuffle=False)
    with Client(options.address) as driver:
        driver.send(world.rank)
        while steps := driver.recv():
            copying_s, begun, used = 0.0, time.perf_counter(), time.process_time()
            for _ in range(steps):
                trainer.step(next(batches))
            driver.send((time.perf_counter() - begun, time.process_time() - used, copying_s))


RUNS = {"lockstep": run_lockstep, "torchrun": run_torchrun, "torchft": run_torchft, "paced": run_paced}


def main() -> None:
    """What one process does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=RUNS)
    parser.add_argument("folder", help="where workers write what they do")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="samples of the global batch (default 8)")
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--replica", type=int, default=0, help="which part of a batch is this worker's, for torchft")
    parser.add_argument(
        "--save-every", type=int, default=20, help="steps from one checkpoint to the next, for torchrun"
    )
    parser.add_argument("--stages", action="store_true", help="also write down the parts of a recovery")
    parser.add_argument("--address", default="", help="where the benchmark gives turns, for paced")
    options = parser.parse_args()
    RUNS[options.system](options, Log(Path(options.folder)))


if __name__ == "__main__":
    sys.exit(main())
