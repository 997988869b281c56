"""What torch's DDP logs of a model, by torch's names and in its units: `model._get_ddp_logging_data()`.

What is known of the model, its buckets and the environment is looked up when it is asked for. Of a pass, five readings
of the host's clock are kept, and of those passes that torch samples (the first ten, then every hundredth) their
differences: `PassTimes`. On GPUs, where the host is ahead of what it queues, these say nothing and are left out.
"""

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.replica.bucket import Bucket, Buckets
from lockstep.torch_private import num_gloo_threads

clock = time.perf_counter_ns
ALWAYS_SAMPLED = 10
"""So many passes are sampled at any rate."""
SAMPLE_RATE = 100
ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
OF_BACKEND = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        *("NCCL_SOCKET_IFNAME", "NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING"),
        *("NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT"),
    ),
}
"""Variables that torch logs, where the backend takes part."""


class PassTimes:
    """When the phases of this replica's synchronised passes began and ended; the reducer sets what is public here."""

    def __init__(self) -> None:
        self.sample_rate = SAMPLE_RATE
        self.iteration = 0
        """How many passes had ended when the last one was sampled."""
        self.is_sampled = False
        """Whether the pass in progress will be, so that the order of its gradients is wanted."""
        self.order: Sequence[int] = ()
        """Parameters in the order of their gradients, in the last pass that was observed."""
        self.backward_ns = self.launched_ns = self.computed_ns = self.reduced_ns = 0
        """The first gradient was due; the first bucket left; the last gradient was there; the last bucket was back."""
        self._forward_ns = 0
        self._step = -1
        self._last: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._num_sampled = 0

    def before_forward(self, step: int) -> None:
        """A forward pass begins, `step` synchronised passes having ended."""
        if step == self._step:
            return  # Several forward passes, and one backward pass over them.
        self._step = step
        if step and self._is_due(step):
            self._sample()
        self.is_sampled = self._is_due(step + 1)
        self._forward_ns = clock()

    def _is_due(self, step: int) -> bool:
        return step <= ALWAYS_SAMPLED or step % self.sample_rate == 0

    def _sample(self) -> None:
        forward, backward, computed = self._forward_ns, self.backward_ns, self.computed_ns
        launched, reduced = self.launched_ns, self.reduced_ns
        if not forward <= backward <= min(computed, launched) <= max(computed, launched) <= reduced:
            return  # The step was made otherwise, as by `sync_gradients`.
        self.iteration = self._step
        lasted = {
            "forward_compute_time": backward - forward,
            "backward_compute_time": computed - backward,
            "backward_comm_time": reduced - launched,
            "backward_compute_comm_overlap_time": max(0, computed - launched),
        }
        self._num_sampled += 1
        self._sums = {name: self._sums.get(name, 0) + value for name, value in lasted.items()}
        since_epoch = time.time_ns() - clock()
        moments = {
            "forward_compute_time_start": forward,
            "backward_compute_time_start": backward,
            "backward_comm_time_start": launched,
            "backward_compute_time_end": computed,
            "backward_comm_time_end": reduced,
        }
        self._last = {**lasted, **{name: moment + since_epoch for name, moment in moments.items()}}

    def data(self) -> dict[str, int]:
        """In nanoseconds; moments since 1970."""
        return {**self._last, **{f"avg_{name}": total // self._num_sampled for name, total in self._sums.items()}}


def sizes(buckets: Sequence[Bucket]) -> str:
    """Bytes of gradients in each bucket."""
    found = [sum(view.nbytes for view in bucket.views) for bucket in buckets if bucket.indices]
    return ", ".join(map(str, found))


def of_buckets(
    params: Sequence[Tensor], buckets: Buckets, order: Sequence[int], unused: Sequence[int]
) -> dict[str, Any]:
    """How gradients came and travelled in the last step; torch numbers parameters among those that are trained."""
    numbers = list(itertools.accumulate((param.requires_grad for param in params), initial=0))
    filled = [bucket for bucket in buckets.all if bucket.indices]
    placed = [" ".join(str(numbers[index]) for index in bucket.indices) for bucket in filled]
    return {
        "num_buckets_reduced": sum(bucket.place not in buckets.unsent for bucket in filled),
        "rebuilt_bucket_sizes": sizes(filled),
        "rebuilt_per_bucket_param_indices": ", ".join(placed),
        "prev_iteration_grad_ready_order_indices": ", ".join(str(numbers[index]) for index in order),
        "unused_parameter_size": sum(params[index].nbytes for index in unused if params[index].requires_grad),
    }


def environment(backend: str, group: dist.ProcessGroup | None, environ: Mapping[str, str] = os.environ) -> Any:
    """What torch logs of the environment."""
    names = [*ENVIRONMENT, *(name for kind, own in OF_BACKEND.items() if kind in backend for name in own)]
    data: dict[str, Any] = {name.lower(): environ.get(name, "N/A") for name in names}
    return {**data, "gloo_num_threads": num_gloo_threads(group)} if "gloo" in backend else data
