"""What is found in a module: its parameters and buffers, its blocks, and what of it has no memory yet.

Blocks are what is gathered and released together. Models are built of lists of like modules: the layers of a
transformer, the stages of a ResNet. Each member of such a list is a block; what is in none (embeddings, heads, and
weights that several blocks share) belongs to the model itself.

Models built under `torch.device("meta")` have shapes and no memory: they are given values part by part. A module's own
parameters and buffers are made when a bucket needs one of them, by its `reset_parameters()`, as torch's modules have
it. Each module draws from a generator that is a function of the world's seed and the module's name, so all workers make
the same values, whatever is made when, and nothing has to be sent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import UsageError
from lockstep.replica.batch_norm import SyncBatchNorm
from lockstep.replica.layout import is_dense
from lockstep.replica.local_params import local_param, whole_param
from lockstep.seeds import derive


def contents(module: nn.Module) -> tuple[list[str], list[nn.Parameter], list[tuple[nn.Module, str]]]:
    """Names, parameters, and where each buffer lives; without those that torch's users had DDP ignore.

    Nor those of a part that is wrapped already, whose own wrapper sends them.

    Parameters are as the engine sees them: of a DTensor what this worker holds, see local_params.py.
    """
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    wrapped = [inner for inner in module.modules() if isinstance(inner, DistributedDataParallel)]
    seen = {id(tensor) for inner in wrapped for tensor in (*inner.parameters(), *inner.buffers())}
    named = [
        (name, param) for name, param in module.named_parameters() if name not in ignored and id(param) not in seen
    ]
    owners = []
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            full_name = f"{prefix}.{name}" if prefix else name
            if buffer is not None and id(buffer) not in seen and full_name not in ignored:
                seen.add(id(buffer))
                owners.append((owner, name))
    return [name for name, _ in named], [local_param(param) for _, param in named], owners


def close_gaps(params: Sequence[nn.Parameter]) -> None:
    """Let parameters with gaps in memory lie row by row, as they would where they are split.

    Kernels round by how their operands lie, so bits would depend on what is split. Dense ones keep their format.
    """
    for param in params:
        if not is_dense(param):
            param.data = param.data.clone(memory_format=torch.contiguous_format)


def is_equal_anyway(owner: nn.Module, _name: str) -> bool:
    """Whether every worker computes the same values for the buffer by itself."""
    return isinstance(owner, SyncBatchNorm) and owner.process_group is None


def sparse_params(module: nn.Module, params: Sequence[nn.Parameter]) -> frozenset[int]:
    """Parameters whose gradients will be sparse."""
    weights = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}
    return frozenset(index for index, param in enumerate(params) if id(param) in weights)


class MetaParams:
    """What is still on the meta device."""

    def __init__(self, module: nn.Module, device: torch.device, seed: int) -> None:
        self._device, self._seed = device, seed
        self._names = {owner: name for name, owner in module.named_modules() if _has_meta(owner)}
        self._owners: dict[Tensor, list[nn.Module]] = {}
        for owner in self._names:
            for param in owner._parameters.values():
                if param is not None:
                    self._owners.setdefault(param, []).append(owner)
            if not callable(getattr(owner, "reset_parameters", None)):
                raise UsageError(
                    f"{self._names[owner] or 'the model'!r} ({type(owner).__name__}) has parameters or buffers on the "
                    "meta device and no reset_parameters() that could give them values. Write one, or build the model "
                    "on a real device."
                )

    def make(self, params: Sequence[Tensor]) -> None:
        """Give values to `params`, and to whatever else their modules hold."""
        wanted = {id(owner) for param in params if param.is_meta for owner in self._owners[param]}
        for owner in self._names:
            if id(owner) in wanted:
                self._make(owner)

    def make_rest(self) -> None:
        """Give values to all that is left: modules that have buffers only."""
        for owner in self._names:
            self._make(owner)

    def _make(self, owner: nn.Module) -> None:
        if not _has_meta(owner):
            return  # A tied weight has its values from the first of its modules.
        for param in owner._parameters.values():
            if param is not None and param.is_meta:
                # The object stays: optimizers and wrappers know it.
                made = nn.Parameter(torch.empty_like(param, device=self._device), requires_grad=param.requires_grad)
                torch.utils.swap_tensors(param, made)
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.empty_like(buffer, device=self._device)
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(derive(self._seed, "meta", self._names[owner]))
            owner.reset_parameters()  # type: ignore[operator]  # Checked in the constructor.


def has_meta(module: nn.Module) -> bool:
    """Whether anything of `module` is on the meta device."""
    return any(_has_meta(owner) for owner in module.modules())


def _has_meta(owner: nn.Module) -> bool:
    tensors = [*owner._parameters.values(), *owner._buffers.values()]
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


def find_blocks(module: nn.Module, wanted: Sequence[str | type[nn.Module]] | None = None) -> list[nn.Module]:
    """The blocks of `module` in registration order: those `wanted` by name or class, else members of lists."""
    if wanted is None:
        return _members_of_lists(module)
    names = {each for each in wanted if isinstance(each, str)}
    classes = tuple(each for each in wanted if isinstance(each, type))
    named = [(name, child) for name, child in module.named_modules() if child is not module]
    if unknown := names - {name for name, _ in named}:
        raise UsageError(f"blocks={sorted(unknown)}: the model has no submodules of these names.")
    blocks = [child for name, child in named if name in names or (classes and isinstance(child, classes))]
    for block in blocks:
        inner = {id(child) for child in block.modules() if child is not block}
        if any(id(other) in inner for other in blocks):
            raise UsageError(f"blocks: a block lies within another {type(block).__name__}; name only one of them.")
    if not blocks:
        raise UsageError("blocks: the model has no submodule of these classes.")
    return blocks


def _members_of_lists(module: nn.Module) -> list[nn.Module]:
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    if isinstance(module, nn.ModuleList | nn.Sequential) and _are_alike(children):
        return children
    return [block for child in children for block in _members_of_lists(child)]


def _are_alike(children: Sequence[nn.Module]) -> bool:
    """Whether the children are of one class with parts of its own, and not, say, a list of Linears."""
    classes = {type(child) for child in children}
    return len(children) > 1 and len(classes) == 1 and all(any(True for _ in child.children()) for child in children)


def assign(module: nn.Module, params: Sequence[Tensor], blocks: Sequence[nn.Module]) -> list[int]:
    """For each parameter the number of its block, or -1 if it belongs to the model itself."""
    users: dict[int, set[int]] = {id(param): {-1} for param in _outside(module, blocks)}
    for number, block in enumerate(blocks):
        for param in block.parameters():
            users.setdefault(id(param), set()).add(number)
    whole = map(whole_param, params)
    return [next(iter(own)) if len(own := users.get(id(param), {-1})) == 1 else -1 for param in whole]


def _outside(module: nn.Module, blocks: Sequence[nn.Module]) -> list[Tensor]:
    """Parameters of submodules that are in no block."""
    inside = {id(child) for block in blocks for child in block.modules()}
    owners = [child for child in module.modules() if id(child) not in inside]
    return [param for owner in owners for param in owner._parameters.values() if param is not None]
