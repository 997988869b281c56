"""The state of an optimizer that is split over the workers, as torch's own `optimizer.state_dict()` has it, and back.

So that checkpoints of other libraries are the same files with any `zero`, on any number of workers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.keep.checks import MODEL, OPTIMIZER
from lockstep.keep.save_load import restore_state, whole_state
from lockstep.replica.data_parallel import DataParallel

Groups = list[list[str]]
"""The names of the parameters of each group."""


def groups_of(optimizer: torch.optim.Optimizer, module: nn.Module) -> Groups:
    """Which parameters of `module` an optimizer has; to be asked before it is split."""
    names = {id(param): name for name, param in module.named_parameters()}
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def whole_optimizer_state(model: DataParallel, optimizer: torch.optim.Optimizer, groups: Groups) -> dict[str, Any]:
    """What `optimizer.state_dict()` would be were nothing split; every worker calls this, and has memory for it."""
    whole = whole_state(model, optimizer)
    scalars = whole["optimizer"]["scalars"]
    numbers = {name: number for number, name in enumerate(name for names in groups for name in names)}
    state: dict[int, dict[str, Any]] = {number: dict(scalars.get(name, {})) for name, number in numbers.items()}
    for path, tensor in whole["tensors"].items():
        if path.startswith(OPTIMIZER):
            name, _, key = path.removeprefix(OPTIMIZER).rpartition("/")
            state[numbers[name]][key] = tensor
    settings = whole["optimizer"]["groups"]
    return {
        "state": {number: values for number, values in state.items() if values},
        "param_groups": [
            {**given, "params": [numbers[name] for name in names]}
            for given, names in zip(settings, groups, strict=True)
        ],
    }


def restore_optimizer(
    model: DataParallel,
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> None:
    """Set model and split optimizer to `weights` and a `state_dict` of torch's; every worker calls this."""
    own = {name for name, _ in (*model.module.named_parameters(), *model.module.named_buffers())}
    tensors = {MODEL + name: value.detach() for name, value in weights.items() if name in own}
    scalars: dict[str, dict[str, Any]] = {}
    names = [name for names in groups for name in names]
    for number, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{names[number]}/{key}"] = value
            else:
                scalars.setdefault(names[number], {})[key] = value
    settings = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    restore_state(model, optimizer, {"tensors": tensors, "optimizer": {"scalars": scalars, "groups": settings}})
