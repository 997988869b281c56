"""What one worker and many cannot have in common, switched off in both: dropout masks.

Each worker draws its own random numbers, so the masks of one worker on the whole batch are not those of many on its
parts. The training is right nevertheless, and to compare it, dropout has to be off. That it was there is noted, since
masks that are the same on every worker are a mistake that people make. `lockstep.Trainer` draws them shard by shard,
the same on any number of workers: there they stay.
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

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
