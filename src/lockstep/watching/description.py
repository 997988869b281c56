"""What a run is: the contents of run.json."""

import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.replica.data_parallel import DataParallel


class Description:
    """The facts of a run. The training thread notes when buckets have changed; the background thread writes them."""

    def __init__(self, model: DataParallel) -> None:
        world = model.world
        self._reducer = model.reducer
        params = list(model.module.parameters())
        self._facts: dict[str, Any] = {
            "version": 1,
            "lockstep": lockstep.__version__,
            "torch": torch.__version__,
            "started": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "script": Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "",
            "size": world.size,
            "device": _device(world.device),
            "backend": world.backend,
            "hosts": [peer.host.partition("/")[0] for peer in world.peers.all],
            "num_params": sum(param.numel() for param in params),
            "grad_bytes": sum(param.numel() * param.element_size() for param in params if param.requires_grad),
        }
        self._buckets = self._list_buckets()
        self._last_place: object = None
        self._single_ns: float | None = None
        self._is_changed = True

    def see_step(self) -> None:
        """Look whether buckets have been laid out anew; costs a comparison."""
        if self._reducer is None or self._reducer.buckets[-1] is self._last_place:
            return
        self._last_place = self._reducer.buckets[-1]
        self._buckets = self._list_buckets()
        self._is_changed = True

    def to_json(self, single_ns: float | None, *, is_last: bool = False) -> dict[str, Any] | None:
        """run.json, if something has changed; `single_ns` is T_1."""
        is_known_at_last = single_ns is not None and self._single_ns is None
        if not (self._is_changed or is_known_at_last or is_last):
            return None
        self._is_changed = False
        self._single_ns = single_ns
        single_ms = None if single_ns is None else round(single_ns / 1e6, 3)
        return {**self._facts, "buckets": self._buckets, "single_ms": single_ms}

    def _list_buckets(self) -> list[dict[str, Any]]:
        if self._reducer is None:
            return []
        names: Sequence[str] = self._reducer.names
        return [
            {"place": each.place, "num_bytes": each.num_bytes, "params": [names[index] for index in each.indices]}
            for each in self._reducer.buckets
        ]


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
