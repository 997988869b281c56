"""torch's fully_shard (FSDP2).

Set up as torch's tutorial has it: `fully_shard` on every block of the model, then on the model, so that blocks are
gathered one ahead of their use and released after it; the optimizer is made of the sharded parameters, and fused.
"""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lockstep.bench import workloads
from lockstep.bench.variant import Setting, Variant, adamw


def sharded(setting: Setting) -> Variant:
    """Parameters, gradients and optimizer state split over all workers."""
    mesh = _mesh(setting)
    for unit in workloads.units(setting.module):
        fully_shard(unit, mesh=mesh)
    fully_shard(setting.module, mesh=mesh)
    return Variant(setting, setting.module, adamw(setting.module))


def _mesh(setting: Setting) -> DeviceMesh:
    if setting.group is not None:
        return DeviceMesh.from_group(setting.group, setting.device.type)
    return init_device_mesh(setting.device.type, (setting.world.size,))
