"""Where the trainer's batches come from: samples and streams, with loader processes, and resumed."""

import pytest
import torch
from test_trainer_bits import Samples, digest, make


class Stream(torch.utils.data.IterableDataset):
    """Draws its samples at random while it is read; counts what was read."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for _ in range(self.count):
            yield torch.randn(12), torch.randint(5, ()).item()


class Resumable(Stream):
    """The same from a counter, which it can say and be set to."""

    num_read = start = 0

    def __iter__(self):
        for number in range(self.start, self.count):
            self.num_read += 1
            self.start = number + 1
            yield torch.full((12,), float(number)), number % 5
        self.start = 0

    def state_dict(self):
        return {"start": self.start}

    def load_state_dict(self, state):
        self.start = state["start"]


def doubled(samples):
    x, y = torch.utils.data.default_collate(samples)
    return x * (2 + torch.rand(())), y


def from_source(world, kind, processes, stop_at, state):
    dataset = {"samples": Samples("mlp", 50), "stream": Stream(50), "resumable": Resumable(50)}[kind]
    trainer = make("mlp", "sgd")
    if state is not None:
        trainer.load_state_dict(state)
    context = "fork" if processes else None  # Others would have to import torch first.
    feed = trainer.batches(dataset, 16, 2, collate_fn=doubled, num_workers=processes, multiprocessing_context=context)
    for batch in feed:
        trainer.step(batch)
        if trainer.steps == stop_at:
            return trainer.state_dict(), digest(trainer), 0
    return None, digest(trainer), getattr(dataset, "num_read", 0)


@pytest.mark.parametrize(("kind", "processes"), [("samples", 2), ("stream", 1), ("resumable", 1)])
def test_sources_with_loader_processes_and_resumed(pool, kind, processes):
    _, expected, _ = pool.run(1, from_source, kind, 0, None, None)[0]
    assert pool.run(2, from_source, kind, processes, None, None)[0][1] == expected
    state, _, _ = pool.run(2, from_source, kind, processes, 6, None)[0]
    for _, found, num_read in pool.run(3, from_source, kind, 0, None, state):
        assert found == expected
        assert num_read == (50 - 32 if kind == "resumable" else 0)
