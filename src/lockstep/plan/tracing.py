"""One step, watched: what memory it takes when, in which order gradients come, and what each layer computes.

The step usually runs on torch's fake tensors, which have shapes, dtypes and devices, and no memory: so a model of any
size is traced on any machine, in the time of its Python code. It may as well run on real ones. A dispatch mode sees
every operation, and with it every storage that comes, and when its last tensor goes. Gradients of parameters go as soon
as they arrive, since the engine copies them into its buckets then (see replica/bucket.py).

    forward     from the beginning
    backward    from the first node of autograd's on
    update      from the optimizer's step on

What kernels allocate inside themselves is not seen, but for the copies that oneDNN's convolutions make on CPUs.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from lockstep.replica.modules import assign, find_blocks
from lockstep.torch_private import in_backward

FORWARD, BACKWARD, UPDATE, SCRATCH = "forward", "backward", "update", "scratch"
_aten = torch.ops.aten
_PAGE_BYTES = 4096
"""To which oneDNN aligns its memory, so that a hole between tensors of the same size is too small for it."""


@dataclass(frozen=True, slots=True)
class StorageUse:
    """One piece of memory of a step."""

    num_bytes: int
    born: int
    """Number of the event with which it came."""
    died: int | None
    """And with which it went; None if it is there after the step."""
    phase: str
    """In which part of the step it came; or SCRATCH, for what a kernel has inside itself."""
    layer: int
    """The layer that had begun last."""
    is_saved: bool = False
    """Whether it came in the forward pass and goes in the backward pass, or later."""


@dataclass(frozen=True, slots=True)
class TracedParam:
    """One parameter, as the step found it."""

    name: str
    numel: int
    itemsize: int
    """Bytes of one element."""
    layer: int
    """Which layer it is of."""
    block: int
    """Which block, of those that are gathered as one (zero=3); -1 for none."""
    is_trained: bool

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class StepTrace:
    """What one step of one worker does and takes."""

    samples: int
    """In the batch that it was traced with."""
    params: tuple[TracedParam, ...]
    """In their order of registration."""
    arrivals: tuple[int, ...]
    """Numbers of parameters in the order in which their gradients came."""
    layers: tuple[str, ...]
    """Modules with parameters of their own, in the order in which they ran first."""
    layer_flops: tuple[float, ...]
    """Of their forward pass and what follows until the next one, for the whole batch."""
    buffer_bytes: int
    batch_bytes: int
    """Of the inputs."""
    uses: tuple[StorageUse, ...]
    """Of forward and backward pass, in the order in which they came."""
    update: tuple[StorageUse, ...] = ()
    """Of the optimizer's first step: what does not die is its state."""

    @property
    def saved_bytes(self) -> int:
        """What lives from the forward into the backward pass, each storage once."""
        return sum(use.num_bytes for use in self.uses if use.is_saved)

    @property
    def activation_peak(self) -> int:
        """The most that forward and backward pass have at a time, beside parameters and buckets."""
        return live_peak(self.uses)

    @property
    def state_bytes(self) -> int:
        """What the optimizer keeps."""
        return sum(use.num_bytes for use in self.update if use.died is None)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            **asdict(self),
            "params": [[p.name, p.numel, p.itemsize, p.layer, p.block, p.is_trained] for p in self.params],
            "uses": [list(astuple(use)) for use in self.uses],
            "update": [list(astuple(use)) for use in self.update],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "StepTrace":
        """From what `to_json` gave."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        given["params"] = tuple(TracedParam(*each) for each in values["params"])
        for name in ("uses", "update"):
            given[name] = tuple(StorageUse(*each) for each in values[name])
        return cls(**given)

    def at(self, samples: int, other: "StepTrace | None" = None) -> "StepTrace":
        """The same for another number of samples.

        other: a trace with another number, from which follows what grows with it. Without that, all does but what has
        the size of a parameter.
        """
        if samples == self.samples:
            return self
        ratio = samples / self.samples
        if other is not None and len(other.uses) == len(self.uses) and other.samples != self.samples:
            step = (samples - self.samples) / (other.samples - self.samples)
            sizes = [
                a.num_bytes + step * (b.num_bytes - a.num_bytes) for a, b in zip(self.uses, other.uses, strict=True)
            ]
        else:
            fixed = {param.num_bytes for param in self.params}
            sizes = [use.num_bytes if use.num_bytes in fixed else use.num_bytes * ratio for use in self.uses]
        uses = tuple(replace(use, num_bytes=max(1, round(size))) for use, size in zip(self.uses, sizes, strict=True))
        flops = tuple(each * ratio for each in self.layer_flops)
        return replace(self, samples=samples, uses=uses, layer_flops=flops, batch_bytes=round(self.batch_bytes * ratio))


def live_peak(uses: Sequence[StorageUse]) -> int:
    """The most bytes that are there at a time."""
    changes = [(use.born, use.num_bytes) for use in uses]
    changes += [(use.died, -use.num_bytes) for use in uses if use.died is not None]
    now = peak = 0
    for _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak


class Tracer(TorchDispatchMode):
    """Watches the steps of one model: `watching` around each, `trace` after it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        named = dict(module.named_parameters())
        self._params = list(named.values())
        self._names = list(named)
        self._blocks = assign(module, self._params, find_blocks(module))
        self._module = module
        self._layer_of = {owner: name for name, owner in module.named_modules() if owner._parameters}
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self._now = 0
        self.phase = FORWARD
        self._known = {_key(tensor) for tensor in (*self._params, *self._module.buffers())}
        self._inputs: dict[int, int] = {}
        self._alive: dict[int, Any] = {}
        self._uses: list[list[Any]] = []
        """Bytes, born, died, phase, layer."""
        self._backward_begun: int | None = None
        self._arrivals: list[int] = []
        self._layers: list[nn.Module] = []
        self._flops: list[float] = []
        self._layer = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A block in which forward and backward passes, and updates, are seen."""
        hooks = [each.register_forward_pre_hook(self._enter_layer) for each in self._layer_of]
        for index, param in enumerate(self._params):
            if param.requires_grad:
                hooks.append(param.register_post_accumulate_grad_hook(self._arrived(index)))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def ignore(self, tensor: Tensor, *, is_input: bool = False) -> None:
        """Do not count this one: it was there before, or counts elsewhere."""
        self._known.add(_key(tensor))
        if is_input:
            self._inputs[_key(tensor)] = tensor.untyped_storage().nbytes()

    def begin_update(self) -> None:
        """The optimizer is about to step."""
        self.phase = UPDATE

    def trace(self, samples: int) -> StepTrace:
        """What has been seen."""
        owners = {id(p): owner for owner in reversed(self._layer_of) for p in owner._parameters.values()}
        layers = [*self._layers, *(owner for owner in self._layer_of if owner not in self._layers)]
        numbers = {owner: number for number, owner in enumerate(layers)}
        params = tuple(
            TracedParam(
                name, param.numel(), param.element_size(), numbers[owners[id(param)]], block, param.requires_grad
            )
            for name, param, block in zip(self._names, self._params, self._blocks, strict=True)
        )
        begun = self._backward_begun
        uses = [
            StorageUse(
                size, born, died, phase, layer, phase == FORWARD and begun is not None and (died or begun) >= begun
            )
            for size, born, died, phase, layer in self._uses
        ]
        return StepTrace(
            samples,
            params,
            tuple(dict.fromkeys(self._arrivals)),
            tuple(self._layer_of[owner] for owner in layers),
            tuple(self._flops) + (0.0,) * (len(layers) - len(self._flops)),
            sum(buffer.untyped_storage().nbytes() for buffer in self._module.buffers()),
            sum(self._inputs.values()),
            tuple(use for use in uses if use.phase != UPDATE),
            tuple(use for use in uses if use.phase == UPDATE),
        )

    # What happens in a step

    def _enter_layer(self, module: nn.Module, _inputs: Any) -> None:
        if self.phase != FORWARD or in_backward():
            return
        if module not in self._layers:
            self._layers.append(module)
            self._flops.append(0.0)
        self._layer = self._layers.index(module)

    def _arrived(self, index: int) -> Callable[[Tensor], None]:
        def arrived(param: Tensor) -> None:
            self._arrivals.append(index)
            if param.grad is not None and _key(param.grad) not in self._known:
                place = torch.empty_like(param)  # In a bucket, which counts elsewhere.
                self._drop(place)
                param.grad = place

        return arrived

    def _drop(self, tensor: Tensor) -> None:
        """What was seen last is not to count."""
        if self._alive.pop(_key(tensor), None) is not None:
            self._uses.pop()
        self.ignore(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and see what it made."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.phase == FORWARD and in_backward():
            self.phase, self._backward_begun = BACKWARD, self._now
        scratch = [self._add(size, SCRATCH) for size in _scratch(func, args, result)]
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        for number in scratch:
            self._end(number)
        if self.phase == FORWARD and self._flops:
            self._flops[self._layer] += _flops(func, args, kwargs, result)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._alive or not storage.nbytes():
            return
        number = self._add(storage.nbytes())
        self._alive[key] = weakref.ref(storage, lambda _: self._gone(key, number))

    def _gone(self, key: int, number: int) -> None:
        if self._alive.pop(key, None) is not None:
            self._end(number)

    def _add(self, num_bytes: int, phase: str | None = None) -> int:
        self._now += 1
        self._uses.append([num_bytes, self._now, None, phase or self.phase, self._layer])
        return len(self._uses) - 1

    def _end(self, number: int) -> None:
        self._now += 1
        self._uses[number][2] = self._now


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _scratch(func: Any, args: Sequence[Any], result: Any) -> list[int]:
    """Bytes of copies inside the kernel: oneDNN's convolutions lay out anew what they read and write.

    As measured by the process's peak around single convolutions of nine shapes: forward the larger of input and output,
    and the weights; backward input and output, or the weights where those are larger.
    """
    if func is _aten.convolution.default and args[0].device.type == "cpu":
        return [_PAGE_BYTES + max(_bytes(args[0]), _bytes(result)), _PAGE_BYTES + _bytes(args[1])]
    if func is _aten.convolution_backward.default and args[0].device.type == "cpu":
        grad, inputs, weight = (_PAGE_BYTES + _bytes(tensor) for tensor in args[:3])
        return [grad, inputs] if grad + inputs >= weight else [weight]
    return []


def _flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    if func is _aten._scaled_dot_product_flash_attention_for_cpu.default:  # Which torch's table does not have.
        return float(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    count = flop_registry.get(getattr(func, "_overloadpacket", None))
    return float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def trace_step(
    build: Callable[[], tuple[nn.Module, Sequence[Tensor], torch.optim.Optimizer]], samples: int | None = None
) -> StepTrace:
    """A step of `model(*batch).backward()` and an update, without values, of what `build` returns.

    samples: in the batch; the length of its first tensor, if not given.
    """
    with FakeTensorMode():
        module, batch, optimizer = build()
        tracer = Tracer(module)
        for tensor in batch:
            tracer.ignore(tensor, is_input=True)
        with tracer.watching():
            module(*batch).backward()
            tracer.begin_update()
            optimizer.step()
        return tracer.trace(len(batch[0]) if samples is None else samples)
