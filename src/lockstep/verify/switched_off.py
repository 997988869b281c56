"""Switched off in scripts that are verified: what one worker and many cannot have in common, and what takes long.

Dropout: each worker draws its own random numbers, so the masks of one worker on the whole batch are not those of many
on its parts. The training is right nevertheless, and to compare it, dropout has to be off. That it was there is noted,
since masks that are the same on every worker are a mistake that people make. `lockstep.Trainer` draws them shard by
shard, the same on any number of workers: there they stay.

torch's compiler: runs that are compared are short, and compiling is not what is compared. torch's optimizers load it
even where nothing is compiled, only to tell it to look away; that is half the time that a small script takes. So a
stand-in does the looking away, and gives way to the compiler if anything else is asked of it.
"""

import functools
import hashlib
import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

_COMPILER = "torch._dynamo"
_DROPOUTS = ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")
_TRAIN_BY_DEFAULT = ("dropout", "dropout1d", "dropout2d", "dropout3d")


def without_dropout(is_unwanted: Callable[[], bool]) -> None:
    """Make dropout do nothing in this process if `is_unwanted`, which is asked whenever it would do something."""
    for name in _DROPOUTS:
        setattr(F, name, _off(getattr(F, name), name in _TRAIN_BY_DEFAULT, is_unwanted))
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"):
        setattr(torch, name, _off(getattr(torch, name), True, is_unwanted))
    attention = F.scaled_dot_product_attention

    @functools.wraps(attention)
    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> Any:
        if dropout_p > 0 and is_unwanted():
            dropout_p = 0.0
        return attention(query, key, value, attn_mask, dropout_p, *args, **kwargs)

    F.scaled_dot_product_attention = attend


def without_recurrent_dropout(model: nn.Module) -> bool:
    """The same for the recurrent networks in `model`, which have it inside; returns whether any had it."""
    found = [module for module in model.modules() if isinstance(module, nn.RNNBase) and module.dropout > 0]
    for module in found:
        module.dropout = 0.0
    return bool(found)


def watch_seeding(notice: Callable[[], None]) -> None:
    """Have `notice` called when torch's generator is seeded."""
    seed = torch.manual_seed

    @functools.wraps(seed)
    def manual_seed(value: Any) -> Any:
        notice()
        return seed(value)

    torch.manual_seed = torch.random.manual_seed = manual_seed  # type: ignore[assignment]


def random_state(device: torch.device) -> str:
    """A digest of the state of the generator that a model on `device` draws from."""
    is_gpu = device.type == "cuda" and torch.cuda.is_initialized()
    state = torch.cuda.get_rng_state(device) if is_gpu else torch.get_rng_state()
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


def _off(function: Callable[..., Any], trains_by_default: bool, is_unwanted: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(function)
    def dropout(input: Any, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:
        named = next((kwargs.pop(name) for name in ("training", "train") if name in kwargs), trains_by_default)
        training, *rest = args if args else (named,)
        if training and p > 0 and is_unwanted():
            training = False
        return function(input, p, training, *rest, **kwargs)

    return dropout


def without_compiling(notice: Callable[[], None]) -> None:
    """Make torch.compile return what it was given; `notice` is called when it was asked for."""

    def compiled(model: Any = None, **_options: Any) -> Any:
        notice()
        return (lambda function: function) if model is None else model

    def compile_in_place(_module: nn.Module, *_args: Any, **_options: Any) -> None:
        notice()

    torch.compile = compiled
    nn.Module.compile = compile_in_place  # type: ignore[method-assign, assignment]
    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = CompilerStandIn(_COMPILER)


class CompilerStandIn(ModuleType):
    """Does nothing where there is nothing to compile, and is replaced by the compiler when it is asked for more."""

    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # Cleared when a process group is opened.

    def graph_break(self, msg: str = "") -> None:
        """Nothing is being traced."""

    def disable(self, fn: Any = None, recursive: bool = True, **_options: Any) -> Any:
        """`fn` as it is: nothing is being traced."""
        return (lambda function: function) if fn is None else fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        return getattr(importlib.import_module(_COMPILER), name)
