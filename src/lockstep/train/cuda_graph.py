"""Steps of a lone worker on a GPU as CUDA graphs: recorded once for each kind of shard and of update, then replayed.

A GPU waits for its host where a model's kernels are short: launching each costs some microseconds. A graph is launched
as one. It holds the same kernels in the same order, so the same bits come out; random numbers too, since a replay draws
from the generator as it is seeded then.

    GraphedPasses   forward and backward of a shard
    GraphedUpdate   norm, clip, update
    DeviceRates     learning rates in tensors on the device, which a recording can read

What is fixed in a recording of passes: the shapes of the shard, the numbers in it that are not tensors, the size of the
global batch, where the parameters lie, which of them are trained, and which modules are in training. In one of an
update: what a group of parameters has (betas, decay) but its learning rate. All of that is compared before a replay,
and another recording made where it differs. What else Python did in `loss_fn` is not repeated.

Tensors of a recording (inputs, loss, gradients) keep their memory; gradients are overwritten by the next replay.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.data import batch as batches
from lockstep.data import tree
from lockstep.errors import UsageError
from lockstep.train.strategy import ShardLoss, TrainerOptions

WARM_UP_SHARDS = 3
"""Shards of a kind that run as they are first, so that everything lazy is done."""
WARM_UP_UPDATES = 1
"""Updates of a kind that run as they are first: state that is made in a recording would be made in every replay."""
MOST_GRAPHS = 4
"""Recordings to keep: each has memory for its own activations. What is of further kinds runs as it is."""
MOST_KINDS = 64
"""Of what could be recorded, so many kinds are counted; beyond, counting begins anew."""

_PLAIN = (bool, int, float, str, bytes, type(None))

Result = TypeVar("Result")
Compute = Callable[[Any, int, int], ShardLoss]
"""Forward and backward of a shard on the device, given its size and that of the global batch."""


@dataclass(frozen=True, slots=True)
class GraphedCall(Generic[Result]):
    """What was recorded of one kind."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    """Where a recording of passes reads the shard."""
    grads: list[Tensor | None]
    """Of all parameters, in their order: what passes leave, or where an update reads."""
    result: Result


class _Graphs(Generic[Result]):
    """Recordings by kind."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._by_kind: dict[Hashable, GraphedCall[Result]] = {}
        self._seen: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._by_kind)

    def forget(self) -> None:
        """Something that recordings depend on has been replaced."""
        self._by_kind.clear()
        self._seen.clear()

    def get(self, kind: Hashable, record: Callable[[], GraphedCall[Result]]) -> GraphedCall[Result] | None:
        """The recording of `kind`, which is made if it has been seen often enough; None to run it as it is."""
        if kind not in self._by_kind:
            if len(self._seen) == MOST_KINDS:
                self._seen.clear()
            self._seen[kind] += 1
            if self._seen[kind] <= self._warm_up or len(self._by_kind) == MOST_GRAPHS:
                return None
            self._by_kind[kind] = record()
        return self._by_kind[kind]


class GraphedStep:
    """The recordings of one trainer. Its steps run on a stream of their own, since the default one cannot record."""

    def __init__(self, options: TrainerOptions, compute: Compute, rates: "DeviceRates | None") -> None:
        self._device = options.world.device
        self._stream = torch.cuda.Stream(self._device)
        self.passes = GraphedPasses(options.module, self._device, compute)
        self.update = (
            GraphedUpdate(options.optimizer, options.module, rates)
            if rates is not None and options.scaler is None  # Which would read from the device whether to step.
            else None
        )

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """A block whose kernels run after those that were launched before it, and before those after it."""
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def forget(self) -> None:
        """Weights or optimizer state have been replaced."""
        self.passes.graphs.forget()
        if self.update is not None:
            self.update.graphs.forget()


class GraphedPasses:
    """Forward and backward of one model's shards on a lone worker."""

    def __init__(self, module: nn.Module, device: torch.device, compute: Compute) -> None:
        self._modules, self._params = list(module.modules()), list(module.parameters())
        self._device, self._compute = device, compute
        self.graphs: _Graphs[ShardLoss] = _Graphs(WARM_UP_SHARDS)
        self._addresses: tuple[int, ...] = ()
        """Where the parameters lie, for those recordings."""

    def run(self, batch: Any, size: int, total: int, *, is_last: bool) -> ShardLoss | None:
        """Replay the passes of a shard; None if it is to be run as it is.

        Afterwards the parameters have its gradients: those of the recording for the last shard of a step, and copies
        for the others, whose gradients are still needed when the next one runs.
        """
        content = shard_kind(batch)
        if content is None:
            return None
        addresses = tuple(param.data_ptr() for param in self._params)
        if addresses != self._addresses:  # Recordings read the parameters where they were: none is of use.
            self.graphs.forget()
            self._addresses = addresses
        kind = (content, size, total, self._circumstances())
        graphed = self.graphs.get(kind, lambda: self._record(batch, size, total))
        if graphed is None:
            return None
        for kept, tensor in zip(graphed.inputs, _tensors(batch), strict=True):
            kept.copy_(tensor, non_blocking=True)
        graphed.graph.replay()
        grads = graphed.grads if is_last else copies(graphed.grads)
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = grad
        return graphed.result

    def _circumstances(self) -> Hashable:
        trained = tuple(param.requires_grad for param in self._params)
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        return trained, tuple(module.training for module in self._modules), autocast

    def _record(self, batch: Any, size: int, total: int) -> GraphedCall[ShardLoss]:
        kept = cloned(batches.move(batch, self._device, non_blocking=True))
        graph, loss = record("what loss_fn and the model do", lambda: self._compute(kept, size, total))
        grads = [param.grad for param in self._params]
        return GraphedCall(graph, _tensors(kept), grads, replace(loss, value=loss.value.detach()))


class DeviceRates:
    """The learning rates of an optimizer, in tensors on the device.

    Used on any number of workers, since an update with a rate in single precision ends in other bits.
    """

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


class GraphedUpdate:
    """The updates of one optimizer on a lone worker."""

    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module, rates: DeviceRates) -> None:
        self._optimizer, self._params, self._rates = optimizer, list(module.parameters()), rates
        self.graphs: _Graphs[Tensor] = _Graphs(WARM_UP_UPDATES)

    def run(self, body: Callable[[], Tensor], circumstances: Hashable, prepare: Callable[[], None]) -> Tensor:
        """What `body` returns, which updates the parameters by their gradients.

        `prepare` is called before a recording: nothing can be copied from the host during it.
        """

        def record_body() -> GraphedCall[Tensor]:
            prepare()
            grads = [param.grad for param in self._params]
            with self._rates.in_tensors():
                graph, result = record("the optimizer's step", body)
            return GraphedCall(graph, [], grads, result)

        self._rates.refresh()
        kind = self._kind(circumstances)
        graphed = self.graphs.get(kind, record_body) if kind is not None else None
        if graphed is None:
            with self._rates.in_tensors():
                return body()
        self._bring_grads(graphed.grads)
        graphed.graph.replay()
        return graphed.result.clone()

    def _bring_grads(self, read: Sequence[Tensor | None]) -> None:
        """Copy the gradients to where the recording reads them, unless they are there."""
        there, here = [], []
        for param, grad in zip(self._params, read, strict=True):
            if grad is None:
                continue
            assert param.grad is not None
            if param.grad.data_ptr() != grad.data_ptr():
                there.append(grad)
                here.append(param.grad)
        if there:
            torch_private.foreach_("copy", there, here)

    def _kind(self, circumstances: Hashable) -> Hashable | None:
        """What must be the same of two updates; None if that cannot be told, or a hook wants to see every step."""
        if torch_private.has_step_hooks(self._optimizer):
            return None
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


def shard_kind(batch: Any) -> Hashable | None:
    """What must be the same of two shards to run the same recording; None if that cannot be told."""
    kinds: list[Hashable] = []
    for leaf in tree.leaves(batch):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            kinds.append((leaf.shape, leaf.dtype))
        elif isinstance(leaf, _PLAIN):
            kinds.append((type(leaf), leaf))
        else:
            return None
    return tuple(kinds)


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(batch) if isinstance(leaf, Tensor)]


def cloned(batch: Any) -> Any:
    """`batch` with copies of its tensors."""
    if isinstance(batch, Tensor):
        return batch.clone()
    held = tree.children(batch)
    return batch if held is None else tree.rebuild(batch, [cloned(child) for child in held])


def copies(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copies of the gradients that there are, bit by bit."""
    present = [grad for grad in grads if grad is not None]
    fresh = [torch.empty_like(grad) for grad in present]
    torch_private.foreach_("copy", fresh, present)
    rest = iter(fresh)
    return [None if grad is None else next(rest) for grad in grads]
