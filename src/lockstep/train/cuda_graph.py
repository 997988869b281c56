"""How kernels are recorded as a CUDA graph, to be launched as one."""

from collections.abc import Callable
from typing import TypeVar

import torch

from lockstep.errors import UsageError

Result = TypeVar("Result")

MOST_KINDS = 64
"""Of what could be recorded, so many kinds are counted; beyond, counting begins anew."""


def record(what: str, body: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of the kernels that `body` launches on the current stream, and what it returned; nothing has run yet.

    Raises UsageError if `body` does something that cannot be recorded.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads (those that pin memory) may go on calling CUDA meanwhile.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            result = body()
    except RuntimeError as error:
        raise UsageError(
            f"{what} cannot be recorded as a CUDA graph: {str(error).splitlines()[0]} Nothing in it may make the host "
            "wait for the device (.item(), a tensor printed, a branch on its value). Leave cuda_graph=True out to run "
            "it as it is."
        ) from error
    return graph, result
