"""A checkpoint's tensors as one ordinary safetensors file, for inference and other tools."""

import os
import secrets
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from torch import Tensor

from lockstep.errors import CheckpointError, UsageError
from lockstep.keep import part, safetensors, shelf
from lockstep.keep.checkpoint import Checkpoint


def export(checkpoint: Checkpoint, path: str | PathLike[str], prefix: str = "") -> Path:
    """Write the tensors whose names start with `prefix`, without it, whole and in their shapes, to the file `path`.

    Called by one worker. The file appears when it is complete, in place of a former one; at no time is more than a
    part of one tensor in memory. Raises CheckpointError if the checkpoint is damaged or the file cannot be written.
    """
    target = Path(path)
    names = {name.removeprefix(prefix): name for name in checkpoint.tensors if name.startswith(prefix)}
    if not names or "" in names:
        raise UsageError(f"{checkpoint.path} has no tensors with names that start with {prefix!r} and go on.")
    specs = {
        short: safetensors.Spec(checkpoint.tensors[name].dtype, checkpoint.tensors[name].shape)
        for short, name in names.items()
    }
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        safetensors.write_streamed(draft, specs, lambda short: _parts(checkpoint, names[short]), {"format": "pt"})
        os.replace(draft, target)  # noqa: PTH105
        shelf.sync(target.parent)
    except OSError as error:
        raise CheckpointError(part.describe(error, 0, target).replace("worker 0 ", "", 1)) from error
    finally:
        part.remove(draft)
    return target


def _parts(checkpoint: Checkpoint, name: str) -> Iterator[Tensor]:
    info = checkpoint.tensors[name]
    length = safetensors.STAGING_BYTES // info.dtype.itemsize
    for begin in range(0, info.numel, length):
        yield checkpoint.read(name, begin, min(begin + length, info.numel))
