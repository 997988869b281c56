"""A user's own script as a workload."""

from collections.abc import Mapping

from lockstep.plan.tracing import StepTrace
from lockstep.plan.workload import Layer, Workload


def workload_of(trace: StepTrace, *, name: str, batch: int, **known: object) -> Workload:
    """The workload of a traced step; `known` says more of it, by the fields of Workload."""
    samples = max(1, trace.samples)
    tensors: dict[int, list[int]] = {}
    blocks: dict[int, int] = {}
    for param in trace.params:
        if param.is_trained:
            tensors.setdefault(param.layer, []).append(param.numel)
        blocks[param.layer] = max(blocks.get(param.layer, -1), param.block)
    kept: dict[int, int] = {}
    for use in trace.uses:
        if use.is_saved:
            kept[use.layer] = kept.get(use.layer, 0) + use.num_bytes
    layers, seen = [], {-1}
    for number, layer in enumerate(trace.layers):
        block = blocks.get(number, -1)
        inputs = 0 if block in seen else next((u.num_bytes for u in trace.uses if u.is_saved and u.layer == number), 0)
        seen.add(block)
        layers.append(
            Layer(
                layer,
                tuple(tensors.get(number, ())),
                trace.layer_flops[number] / samples,
                kept.get(number, 0) / samples,
                boundary_bytes=inputs / samples,
                block=block,
            )
        )
    sizes = {param.dtype.itemsize for param in trace.params if param.is_trained}
    width = max(sizes, default=4)
    count = max(1, sum(param.numel for param in trace.params if param.is_trained))
    facts: dict[str, object] = {
        "param_bytes": width,
        "grad_bytes": width,
        "optimizer_bytes": trace.state_bytes / count,
        "batch": batch,
        "micro_batch": samples,
        "buffer_bytes": trace.buffer_bytes,
        "transient_bytes": max(0.0, trace.activation_peak - trace.saved_bytes) / samples,
        "input_bytes": trace.batch_bytes / samples,
    }
    more: Mapping[str, object] = {**facts, **known}
    return Workload(name, tuple(layers), **more)  # type: ignore[arg-type]
