"""The workers that hold the other parts of a model whose parameters are DTensors: the mesh of its tensor parallelism.

Buckets travel between workers that hold the same parts (the world of the wrapped model). What is said of the model as a
whole needs the others too: which values replicas start from, the norm of all gradients, one checkpoint.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.replica import agreement
from lockstep.replica.collectives import finish
from lockstep.replica.local_params import local_part, whole_param
from lockstep.torch_private import is_dtensor
from lockstep.world import World, join


class ModelMesh:
    """A mesh over which parameters are cut, seen from one worker. Every worker that holds a part makes one."""

    def __init__(self, data: World, mesh: Any) -> None:
        self._mesh = mesh
        self.world: World = join().within(mesh)
        """The workers of the mesh: together they hold one model."""
        rows = data.gather_json([peer.rank for peer in self.world.peers.all])
        self.holders: World = join().among(sorted(set().union(*rows)))
        """All that hold a part of this model or of a replica of it."""

    @staticmethod
    def find(data: World, names: Sequence[str], params: Sequence[nn.Parameter]) -> "ModelMesh | None":
        """The mesh of the DTensors among `params`, if there are any; UsageError where these cannot be trained."""
        named = [(name, whole_param(param)) for name, param in zip(names, params, strict=True)]
        found = [(name, whole) for name, whole in named if is_dtensor(whole)]
        if not found:
            return None
        first, mesh = found[0][0], found[0][1].device_mesh
        data_ranks = {peer.rank for peer in data.peers.all}
        for name, whole in found:
            _require_simple(name, whole)
            if whole.device_mesh != mesh:
                raise UsageError(
                    f"{first!r} is a DTensor on {mesh} and {name!r} on {whole.device_mesh}: the parameters of a model "
                    "must be on one mesh, whose gradients are clipped and saved together. Give parallelize_module the "
                    "same mesh for all of them."
                )
        shared = data_ranks & set(mesh.mesh.flatten().tolist()) - {data.peers.me.rank}
        if shared:
            raise UsageError(
                f"{first!r} is a DTensor on {mesh}, and worker {min(shared)} holds another part of it than worker "
                f"{data.peers.me.rank}: their gradients cannot be averaged. Say over which dimension of the mesh the "
                "data is parallel: DataParallel(net, device_mesh=mesh['dp']). If torch's fully_shard made it, leave "
                "that out: zero=3 splits parameters here."
            )
        return ModelMesh(data, mesh)

    def counts(self, param: Tensor) -> bool:
        """Whether this worker speaks for what it holds of a parameter, of which other workers of the mesh have copies.

        Over all of the mesh every element is counted once. A plain tensor is taken for the same on all of them.
        """
        coordinate = self._mesh.get_coordinate()
        whole = whole_param(param)
        if not is_dtensor(whole):
            return not any(coordinate)
        return all(place.is_shard() or not at for place, at in zip(whole.placements, coordinate, strict=True))

    def start_equal(
        self, names: Sequence[str], params: Sequence[nn.Parameter], owners: Sequence[tuple[nn.Module, str]]
    ) -> None:
        """Set what all workers of the mesh have whole to its first worker's; as between replicas, see `agreement`."""
        if self.world.size == 1:
            return
        pairs = [(name, param) for name, param in zip(names, params, strict=True) if _is_whole(whole_param(param))]
        kept = [(owner, name) for owner, name in owners if _is_whole(owner._buffers[name])]
        agreement.start_equal(
            self.world, [name for name, _ in pairs], [param for _, param in pairs], kept, with_buffers=True
        )

    def require_same_grads(self, names: Sequence[str], params: Sequence[nn.Parameter], norms: Sequence[float]) -> None:
        """Raise UsageError where copies of a plain parameter got gradients of different `norms`: they would drift."""
        triples = zip(names, params, norms, strict=True)
        plain = [(name, norm) for name, param, norm in triples if not is_dtensor(whole_param(param))]
        for rank, theirs in enumerate(self.world.gather_json([norm for _, norm in plain])):
            for (name, here), there in zip(plain, theirs, strict=True):
                if not math.isclose(here, there, rel_tol=1e-2, abs_tol=1e-12):
                    raise UsageError(
                        f"{name!r} is a plain tensor, the same on all {self.world.size} workers of {self._mesh}, and "
                        f"its gradient has norm {here:.6g} here and {there:.6g} on worker {rank} of the mesh: each saw "
                        "a part of the activations only. Make its module part of the plan of parallelize_module "
                        "(SequenceParallel() for a norm), so that its gradients are summed."
                    )


def _is_whole(tensor: Tensor | None) -> bool:
    """Whether all workers of its mesh have all of it."""
    return tensor is not None and (not is_dtensor(tensor) or all(p.is_replicate() for p in tensor.placements))  # type: ignore[attr-defined]


def _require_simple(name: str, whole: Any) -> None:
    for place in whole.placements:
        if not (place.is_replicate() or (place.is_shard() and type(place).__name__ == "Shard")):
            raise UsageError(
                f"{name!r} is a DTensor with placement {place}, and only Shard(dim) and Replicate() can be trained "
                "here. If torch's fully_shard made it, leave that out: DataParallel(net, optimizer=optimizer, zero=3, "
                "device_mesh=mesh['dp']) splits the parameters itself."
            )
    shard_begins(whole)


def shard_begins(whole: Any) -> tuple[int, ...]:
    """In each dimension of a DTensor the index of the first element that this worker holds."""
    begins, sizes = [0] * whole.ndim, list(whole.shape)
    for mesh_dim, (place, at) in enumerate(zip(whole.placements, whole.device_mesh.get_coordinate(), strict=True)):
        if place.is_shard():
            length = -(-sizes[place.dim] // whole.device_mesh.size(mesh_dim))
            begin = min(at * length, sizes[place.dim])
            begins[place.dim] += begin
            sizes[place.dim] = min(length, sizes[place.dim] - begin)
    held = tuple(local_part(whole).shape)
    if held != tuple(sizes):
        raise UsageError(
            f"a DTensor of shape {list(whole.shape)} with {whole.placements} has {list(held)} on this worker, and "
            f"{sizes} were expected: it was not cut as torch's distribute_tensor does."
        )
    return tuple(begins)


def all_reduce(value: Tensor, op: Any, world: World, doing: str) -> None:
    """Replace `value` by what `op` makes of those of all workers of `world`."""
    if world.size > 1:
        group = world.host_group if value.device.type == "cpu" else world.group
        finish(partial(dist.all_reduce, value, op, group=group, async_op=True), world, value.device, doing)
