"""Starting loader processes from a worker that has had process groups."""

import gc
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


def start(loader: DataLoader[Any]) -> Iterator[Any]:
    """`iter(loader)`, with whatever is garbage here kept from being collected in the processes that it forks.

    Groups that were left are often garbage in cycles. Collected in a forked process, gloo's end threads that are not
    there, and the process dies of a segmentation fault.
    """
    gc.freeze()
    try:
        return iter(loader)
    finally:
        gc.unfreeze()
