"""A split optimizer's `state_dict` as torch's own would be were nothing split, and back.

So that checkpoints of other libraries are the same files with any `zero`, on any number of workers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.keep.checks import MODEL, OPTIMIZER
from lockstep.keep.save_load import restore_state, whole_state
from lockstep.replica.data_parallel import DataParallel
from lockstep.replica.optimizer import SplitOptimizer
from lockstep.world import World


class WholeState:
    """`state_dict` and `load_state_dict` of an optimizer that `model` is split with; every worker calls them."""

    def __init__(self, model: DataParallel, optimizer: SplitOptimizer) -> None:
        self._model, self._optimizer = model, optimizer.optimizer
        names = {id(param): name for name, param in model.module.named_parameters()}
        self._groups = [[names[id(param)] for param in group] for group in optimizer.whole_groups]
        self._names = [name for group in self._groups for name in group]
        """Of the parameters, in the order in which torch numbers them."""

    def state_dict(self) -> dict[str, Any]:
        """All of it, on every worker, in host memory."""
        whole = whole_state(self._model, self._optimizer)
        numbers = {name: number for number, name in enumerate(self._names)}
        state: dict[int, dict[str, Any]] = {
            numbers[name]: dict(values) for name, values in whole["optimizer"]["scalars"].items()
        }
        for path, tensor in whole["tensors"].items():
            if path.startswith(OPTIMIZER):
                name, _, key = path.removeprefix(OPTIMIZER).rpartition("/")
                state.setdefault(numbers[name], {})[key] = tensor
        settings = zip(whole["optimizer"]["groups"], self._groups, strict=True)
        return {
            "state": dict(sorted(state.items())),
            "param_groups": [{**given, "params": [numbers[name] for name in group]} for given, group in settings],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, or torch's own, on any number of workers."""
        with self._model.whole_params():
            weights, module = self._model.module.state_dict(), self._model.module
            own = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}  # What is tied, once.
            tensors = {MODEL + name: weights[name].clone() for name in own & weights.keys()}
        scalars: dict[str, dict[str, Any]] = {}
        for number, values in state["state"].items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"{OPTIMIZER}{self._names[number]}/{key}"] = value
                else:
                    scalars.setdefault(self._names[number], {})[key] = value
        groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
        whole = {"tensors": tensors, "optimizer": {"scalars": scalars, "groups": groups}}
        restore_state(self._model, self._optimizer, whole)


def whole_state_of(optimizer: torch.optim.Optimizer, world: World) -> Any:
    """What has the whole `state_dict` of `optimizer`: itself, or a WholeState where a model is split with it."""
    for model in world.replicas:
        if isinstance(model, DataParallel) and model._made is not None:
            split = model._made.split_optimizer
            if split is not None and split.optimizer is optimizer:
                return WholeState(model, split)
    return optimizer
