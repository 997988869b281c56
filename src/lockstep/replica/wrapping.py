"""What was asked for when a model is wrapped, and whether it can be had."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import UsageError
from lockstep.replica.layout import overlaps
from lockstep.replica.local_params import local_part
from lockstep.replica.precision import Precision
from lockstep.torch_private import is_dtensor, is_made_of_others, root_of
from lockstep.wire import Auto, Half, Int8, Wire
from lockstep.wire.auto import require_wire
from lockstep.world import World, join

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class WrapOptions:
    """What the user asked for, as far as it decides what a wrapped model is made of: see DataParallel."""

    init_sync: bool
    starts_buffers_equal: bool
    """Whether all start from worker 0's buffers as well."""
    keeps_buffers_equal: bool
    """Whether buffers that some worker changed are sent after a step."""
    bucket_cap_mb: float | None
    optimizer: torch.optim.Optimizer | None
    zero: int
    blocks: Sequence[str | type[nn.Module]] | None
    precision: Precision | None
    wire: Wire | Auto | Literal["auto"] | None
    gather_wire: Int8 | Half | None
    """How parameters are encoded while they are gathered."""
    reduces: bool
    keeps_units: bool
    """Whether parts must hold whole units of tensors, as the trainer's norms count."""
    reshard_after_forward: bool | None

    def check(self, module: nn.Module) -> None:
        """Raise UsageError unless `module` can be wrapped as asked."""
        _require_module(module)
        _require_memory(module, is_split=bool(self.zero))
        _require_stage(self.zero, self.optimizer, self.precision, module)
        is_plain = not self.zero and self.wire is None and self.reduces and not self.keeps_units
        if not is_plain and any(isinstance(each, nn.parallel.DistributedDataParallel) for each in module.modules()):
            raise UsageError(
                "this model, or a part of it, is wrapped already, and reduces its gradients by itself: give Trainer, "
                "or DataParallel with zero=1 to 3 or wire=..., the module itself (model.module)."
            )
        require_wire(self.wire)
        if self.gather_wire is not None and (self.zero != 3 or not isinstance(self.gather_wire, Int8 | Half)):
            raise UsageError(
                f"gather_wire={self.gather_wire!r} with zero={self.zero}: it says how parameters are encoded while "
                "they are gathered, which zero=3 does, and is lockstep.wire.Int8() or lockstep.wire.Half()."
            )
        if self.reshard_after_forward not in (None, True, False):
            raise UsageError(f"reshard_after_forward={self.reshard_after_forward!r}: True, False, or None to choose.")
        cap_mb = self.bucket_cap_mb
        is_number = isinstance(cap_mb, int | float) and not isinstance(cap_mb, bool)
        if cap_mb is not None and not (is_number and 0 < cap_mb < math.inf):
            raise UsageError(f"bucket_cap_mb={cap_mb!r}: a bucket must have a size, in megabytes, above 0.")
        without_memory = [name for name, param in module.named_parameters() if param.is_meta and not is_dtensor(param)]
        if without_memory and not self.zero:
            raise UsageError(
                f"{without_memory[0]!r} is on the meta device: give it memory with module.to_empty(device=...), or "
                "split the model with zero=3, which makes it part by part."
            )


def _require_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise UsageError(f"DataParallel takes a torch.nn.Module, got {type(module).__name__}.")
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UsageError(f"{name!r} has no shape yet: run a forward pass of the lazy module before wrapping it.")
        if is_dtensor(param) and param.is_meta:
            raise UsageError(
                f"{name!r} is a DTensor on the meta device: give it memory and values before it is wrapped, "
                "net.to_empty(device=...) and then net.init_weights() or whatever sets them; it is this worker's part "
                "alone."
            )
        if overlaps(local_part(param)):
            raise UsageError(
                f"{name!r} has elements that share memory (shape {list(param.shape)}, strides {list(param.stride())}, "
                "as expand() makes them), so they cannot be updated one by one. Make it of tensor.clone(), or expand "
                "a smaller parameter in the forward pass."
            )


def _require_memory(module: nn.Module, *, is_split: bool) -> None:
    """Raise UsageError for parameters that are made of other tensors, where these would have to be sent or moved."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, param in module.named_parameters():
        if name in ignored or is_dtensor(param) or not is_made_of_others(param):
            continue
        if is_split or not _is_like_memory(param):
            raise UsageError(
                f"{name!r} is a {type(param).__name__}, made of other tensors, so its elements cannot be "
                f"{'split over the workers' if is_split else 'sent'} as they lie in memory. One that is trained has to "
                "be a plain tensor (float8 layers of torchao: without enable_fsdp_float8_all_gather; "
                "gather_wire=wire.Int8() saves as many bytes). A frozen one, the same on all workers, can be left "
                "alone: lockstep.DataParallel._set_params_and_buffers_to_ignore_for_model(net, [names])."
            )


def _is_like_memory(param: torch.Tensor) -> bool:
    try:
        param.detach().view(-1).view(torch.uint8)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _require_stage(zero: object, optimizer: object, precision: object, module: nn.Module) -> None:
    if precision is not None and not isinstance(precision, Precision):
        raise UsageError(f"precision must be a lockstep.Precision, got {type(precision).__name__}.")
    if precision is not None and not zero:
        raise UsageError("precision keeps master weights with the optimizer: give DataParallel zero=1, 2 or 3 as well.")
    if zero not in STAGES or isinstance(zero, bool):
        raise UsageError(f"zero={zero!r}: the stages are 0 (nothing split), 1, 2 and 3.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    held = {param for group in optimizer.param_groups for param in group["params"]} if optimizer is not None else set()
    if optimizer is not None and not zero and held.isdisjoint(module.parameters()):
        raise UsageError(
            f"this {type(optimizer).__name__} has no parameter of this model, so its steps would not train it. Make it "
            "from the parameters of the model that is wrapped, after it was moved or converted."
        )
    if zero and optimizer is None:
        raise UsageError(f"zero={zero} splits the optimizer over the workers: DataParallel(net, optimizer=optimizer).")


@dataclass(frozen=True, slots=True)
class DataWorlds:
    """The workers that train on different data, seen from one of them."""

    all: World
    """Those that gradients are added over."""
    split: World
    """Those over which zero=1 to 3 splits: all, or one replica's."""
    replicas: World | None = None
    """Those that own the same part of the split as this one, one of each replica; None where nobody else does."""
    num_in_mesh: int = 0
    """How many workers are in the mesh of which these are some dimensions; 0 without one."""


def data_worlds(group: dist.ProcessGroup | None, mesh: dist.DeviceMesh | None) -> DataWorlds:
    """The workers to reduce over."""
    if group is not None and mesh is not None:
        raise UsageError(
            "Cannot specify both process_group and device_mesh arguments. A mesh has groups: give device_mesh alone."
        )
    world = join()
    if mesh is None or mesh.ndim == 1:
        given = mesh if mesh is not None else group
        data = world if given is None else world.within(given)
        return DataWorlds(data, data, None, root_of(mesh).size() if mesh is not None else 0)
    if mesh.ndim != 2:
        raise UsageError(
            f"device_mesh has {mesh.ndim} dimensions ({mesh}): give one that data is parallel over, mesh['dp'], or "
            "two, mesh['replicate', 'split'], of which zero=1 to 3 splits over the second."
        )
    data = world.within(mesh)
    replicas, split = (world.among(dist.get_process_group_ranks(each), each) for each in mesh.get_all_groups())
    return DataWorlds(data, split, replicas, root_of(mesh).size())


def input_device(device_ids: Sequence[int | torch.device] | None) -> torch.device | None:
    """Where inputs are moved, if anywhere."""
    if device_ids is None:
        return None
    if not isinstance(device_ids, Sequence) or isinstance(device_ids, str) or len(device_ids) > 1:
        raise UsageError(f"device_ids must be a list of one device, got {device_ids!r}: one worker drives one device.")
    if not device_ids:
        return None
    try:
        device = torch.device("cuda", device_ids[0]) if isinstance(device_ids[0], int) else torch.device(device_ids[0])
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device_ids={device_ids!r} names no device of torch's: {error}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device_ids={device_ids!r}: this worker sees {torch.cuda.device_count()} GPUs. Use [world.device], or "
            "leave it out and call net.to(world.device)."
        )
    return device
