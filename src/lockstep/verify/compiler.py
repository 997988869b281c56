"""Keeps torch's compiler out of this process: runs that are compared are short, and compiling is not what is compared.

torch's optimizers load it even where nothing is compiled, only to tell it to look away; that is half the time that a
small script takes. So a stand-in does the looking away, and gives way to the compiler if anything else is asked of it.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

_NAME = "torch._dynamo"


def without_compiling(notice: Callable[[], None]) -> None:
    """Make torch.compile return what it was given; `notice` is called when it was asked for."""

    def compiled(model: Any = None, **_options: Any) -> Any:
        notice()
        return (lambda function: function) if model is None else model

    def compile_in_place(_module: nn.Module, *_args: Any, **_options: Any) -> None:
        notice()

    torch.compile = compiled
    nn.Module.compile = compile_in_place  # type: ignore[method-assign, assignment]
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _StandIn(_NAME)


class _StandIn(ModuleType):
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
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)
