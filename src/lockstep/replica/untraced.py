"""Keeps torch.compile out of a wrapper's own methods."""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Untraced:
    """A method that torch.compile leaves alone, while it still compiles the module called inside.

    `torch.compiler.disable(recursive=False)` does that, but imports the whole compiler, which takes two seconds. So
    the method is given that treatment when it is first looked up with the compiler loaded: torch.compile(model)
    looks it up before anything is traced.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, model: nn.Module | None, owner: type) -> Any:
        if model is None:
            return self._method
        if "torch._dynamo" not in sys.modules:
            return functools.partial(self._method, model)
        bound = functools.partial(self._method, weakref.proxy(model))  # The model is not to hold itself.
        model.__dict__["forward"] = torch.compiler.disable(bound, recursive=False)
        return model.__dict__["forward"]
