"""The second half of a step (norm, clip, update) as a CUDA graph; see recorded_passes.py for the first.

Numbers that change from step to step must lie on the device for that: learning rates are put into tensors while the
optimizer runs, on any number of workers, since an update with a rate in single precision ends in other bits. What else
a group of parameters has (betas, decay) is compared before a replay, and another recording made where it differs.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.train.cuda_graph import MOST_KINDS, record

MOST = 4
"""Recordings to keep; updates of further kinds run as they are."""


class Rates:
    """The learning rates of an optimizer, in tensors on the device."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._tensors = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        self._values: list[float | None] = [None] * len(self._tensors)
        optimizer._warned_capturable_if_run_uncaptured = True  # That is meant, here.
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
        for state in optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(device)

    @contextlib.contextmanager
    def in_tensors(self) -> Iterator[None]:
        """A block in which the optimizer has its rates as tensors; outside it has those that it was given."""
        groups = self._optimizer.param_groups
        before = [group["lr"] for group in groups]
        for group, tensor in zip(groups, self._tensors, strict=True):
            if not isinstance(group["lr"], Tensor):
                group["lr"] = tensor
        try:
            yield
        finally:
            for group, lr in zip(groups, before, strict=True):
                group["lr"] = lr

    def refresh(self) -> None:
        """Bring the tensors up to date."""
        for place, (group, tensor) in enumerate(zip(self._optimizer.param_groups, self._tensors, strict=True)):
            lr = group["lr"]
            if not isinstance(lr, Tensor) and lr != self._values[place]:
                tensor.fill_(lr)
                self._values[place] = lr


def can_be_recorded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step reads nothing from the device, and takes its rate as a tensor."""
    return all(group.get("capturable") is not None or group.get("fused") for group in optimizer.param_groups)


@dataclass(frozen=True, slots=True)
class Recording:
    """One kind of update."""

    graph: torch.cuda.CUDAGraph
    grads: list[Tensor | None]
    """Where it reads the gradients, of all parameters in their order."""
    result: Tensor


class RecordedUpdate:
    """The recordings of one optimizer on a lone worker."""

    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module, rates: Rates) -> None:
        self._optimizer, self._params, self._rates = optimizer, list(module.parameters()), rates
        self._recordings: dict[Hashable, Recording] = {}
        self._seen: set[Hashable] = set()

    def forget(self) -> None:
        """The optimizer's state has been replaced."""
        self._recordings.clear()
        self._seen.clear()

    def run(self, body: Callable[[], Tensor], circumstances: Hashable, prepare: Callable[[], None]) -> Tensor:
        """What `body` returns, which updates the parameters by their gradients.

        `prepare` is called before a recording: nothing can be copied from the host during it.
        """
        self._rates.refresh()
        kind = self._kind(circumstances)
        if kind is None or self._is_listened_to():
            return self._run_as_it_is(body)
        if kind not in self._recordings:
            if kind not in self._seen or len(self._recordings) == MOST:
                if len(self._seen) == MOST_KINDS:
                    self._seen.clear()
                self._seen.add(kind)  # State that is made in a recording would be made in every replay.
                return self._run_as_it_is(body)
            prepare()
            self._recordings[kind] = self._record(body)
        recording = self._recordings[kind]
        self._bring(recording)
        recording.graph.replay()
        return recording.result.clone()

    def _run_as_it_is(self, body: Callable[[], Tensor]) -> Tensor:
        with self._rates.in_tensors():
            return body()

    def _record(self, body: Callable[[], Tensor]) -> Recording:
        grads = [param.grad for param in self._params]
        with self._rates.in_tensors():
            graph, result = record("the optimizer's step", body)
        return Recording(graph, grads, result)

    def _bring(self, recording: Recording) -> None:
        """Copy the gradients to where the recording reads them, unless they are there."""
        there, here = [], []
        for param, grad in zip(self._params, recording.grads, strict=True):
            if grad is None:
                continue
            assert param.grad is not None
            if param.grad.data_ptr() != grad.data_ptr():
                there.append(grad)
                here.append(param.grad)
        if there:
            torch._foreach_copy_(there, here)

    def _kind(self, circumstances: Hashable) -> Hashable | None:
        """What must be the same of two updates; None if that cannot be told."""
        groups: list[Any] = []
        for group in self._optimizer.param_groups:
            others = tuple((name, value) for name, value in group.items() if name not in ("params", "lr"))
            if any(isinstance(value, Tensor) for _, value in others):
                return None
            groups.append((others, len(group["params"]), id(group["lr"]) if isinstance(group["lr"], Tensor) else None))
        params = tuple((param.data_ptr(), param.grad is None) for param in self._params)
        kind = (tuple(groups), params, circumstances)
        try:
            hash(kind)
        except TypeError:
            return None
        return kind

    def _is_listened_to(self) -> bool:
        """Whether somebody wants to be called at every step."""
        return bool(self._optimizer._optimizer_step_pre_hooks or self._optimizer._optimizer_step_post_hooks)
