"""What is asked of a model and of the arguments when it is wrapped."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import UsageError
from lockstep.replica import agreement, layout
from lockstep.replica.batch_norm import SyncBatchNorm
from lockstep.replica.layout import Granularity
from lockstep.world import World, join


def require_module(module: object) -> None:
    """Raise UsageError unless this is a module that can be wrapped."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"DataParallel takes a torch.nn.Module, got {type(module).__name__}.")
    if isinstance(module, nn.parallel.DistributedDataParallel) or hasattr(module, "require_backward_grad_sync"):
        raise UsageError("this model is wrapped already: give DataParallel the module itself.")
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UsageError(f"{name!r} has no shape yet: run a forward pass of the lazy module before wrapping it.")


def require_memory(module: nn.Module) -> None:
    """Raise UsageError if a parameter has none."""
    for name, param in module.named_parameters():
        if param.is_meta:
            raise UsageError(
                f"{name!r} is on the meta device: give it memory with module.to_empty(device=...), or split the model "
                "with zero=3, which makes it part by part."
            )


def world_of(group: dist.ProcessGroup | None, mesh: dist.DeviceMesh | None) -> World:
    """The workers to reduce over."""
    if group is not None and mesh is not None:
        raise UsageError("DataParallel takes process_group or device_mesh, not both.")
    world = join()
    if mesh is not None:
        if mesh.ndim != 1:
            raise UsageError(f"device_mesh must have one dimension, got {mesh.ndim}; pick one: mesh['dp'].")
        group = mesh.get_group()
    return world if group is None else world.within(group)


def input_device(device_ids: Sequence[int | torch.device] | None) -> torch.device | None:
    """Where inputs are moved, if anywhere."""
    if not device_ids:
        return None
    if len(device_ids) != 1:
        raise UsageError(f"device_ids must name one device, got {list(device_ids)}: one worker drives one device.")
    device = device_ids[0]
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def contents(module: nn.Module) -> tuple[list[str], list[nn.Parameter], list[tuple[nn.Module, str]]]:
    """Names, parameters, and where each buffer lives; without those that torch's users had DDP ignore."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    named = [(name, param) for name, param in module.named_parameters() if name not in ignored]
    owners = []
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            full_name = f"{prefix}.{name}" if prefix else name
            if buffer is not None and id(buffer) not in seen and full_name not in ignored:
                seen.add(id(buffer))
                owners.append((owner, name))
    return [name for name, _ in named], [param for _, param in named], owners


def is_equal_anyway(owner: nn.Module, _name: str) -> bool:
    """Whether every worker computes the same values for the buffer by itself."""
    return isinstance(owner, SyncBatchNorm) and owner.process_group is None


def start_equal(
    world: World,
    names: Sequence[str],
    params: Sequence[nn.Parameter],
    owners: Sequence[tuple[nn.Module, str]],
    *,
    with_buffers: bool,
) -> None:
    """Raise ModelMismatch where models differ; set weights and buffers to worker 0's."""
    assert world.group is not None
    buffers = [owner._buffers[name] for owner, name in owners] if with_buffers else []
    agreement.require_same(world, agreement.describe(zip(names, params, strict=True)), "parameter")
    known = [(name, buffer) for (_, name), buffer in zip(owners, buffers, strict=False) if buffer is not None]
    agreement.require_same(world, agreement.describe(known), "buffer")
    there = [tensor for tensor in (*params, *(buffer for _, buffer in known)) if not tensor.is_meta]
    with torch.no_grad():
        agreement.broadcast(there, world, 0, world.group)


def trained_anywhere(world: World, params: Sequence[nn.Parameter]) -> list[int]:
    """Parameters that need a gradient on some worker: all workers must lay out the same buckets."""
    mine = [index for index, param in enumerate(params) if param.requires_grad]
    return sorted(set().union(*world.gather(mine)))


def sparse_params(module: nn.Module, params: Sequence[nn.Parameter]) -> frozenset[int]:
    """Parameters whose gradients will be sparse."""
    weights = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}
    return frozenset(index for index, param in enumerate(params) if id(param) in weights)


def granularity(
    world: World,
    device: torch.device,
    cap_mb: float | None,
    *,
    wire: object = None,
    zero: int = 0,
) -> Granularity:
    """What fits the way that buckets travel; the user's cap counts where there is one."""
    is_coded = wire is not None and device.type == "cuda"
    # Within a host a message costs more than what a smaller one would hide.
    share = layout.ALL_OF_REST if world.peers.are_on_one_host or is_coded else layout.SHARE_OF_REST
    if cap_mb is None:
        cap_mb = getattr(wire, "bucket_mb", None) if is_coded else None
    if cap_mb is not None:
        if cap_mb <= 0:
            raise UsageError(f"bucket_cap_mb={cap_mb}: a bucket must have a size.")
        return Granularity(int(cap_mb * (1 << 20)), share)
    if device.type == "cuda" and wire is None and not zero:
        return Granularity(layout.LARGE_BUCKET_BYTES, max(share, layout.HALF_OF_REST), growth=layout.GROWTH)
    return Granularity(share_of_rest=share)
