"""Loaders for evaluation, whose batches can be cut so that every worker has a sample of each, and none counts twice."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lockstep.data.order import cut


class EvenBatches:
    """The samples of a sampler in about as many batches as asked for, which differ by one sample at most.

    No batch has fewer samples than there are workers, if there are so many at all: else a worker would compute on
    another's sample in its place, and a metric that counts by itself would count that.
    """

    def __init__(self, sampler: Any, batch_size: int, workers: int) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self._num_batches = max(1, min(math.ceil(len(sampler) / batch_size), len(sampler) // workers))

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Sequence[Any]]:
        samples = list(self.sampler)
        for number in range(self._num_batches):
            yield cut(len(samples), self._num_batches, number).of(samples)


def for_evaluation(loader: DataLoader[Any], workers: int) -> DataLoader[Any]:
    """`loader`, or one with the same samples in batches that every one of `workers` gets a sample of.

    That is the loader itself where its last batch has enough; what is no plain loader of a map-style data set is left
    alone too.
    """
    batches = loader.batch_sampler
    is_plain = type(batches) is BatchSampler and not isinstance(loader.dataset, IterableDataset)
    if not is_plain or loader.drop_last or not hasattr(loader.sampler, "__len__"):
        return loader
    assert isinstance(batches, BatchSampler) and loader.batch_size is not None
    sampler: Any = loader.sampler
    last = len(sampler) % loader.batch_size or loader.batch_size
    if last >= workers or not len(sampler):
        return loader
    even: Any = EvenBatches(sampler, loader.batch_size, workers)
    return rebatched(loader, batch_sampler=even)


def rebatched(loader: DataLoader[Any], **batches: Any) -> DataLoader[Any]:
    """`loader` with other batches, whose options are given; all else is the same."""
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        **batches,
    )
