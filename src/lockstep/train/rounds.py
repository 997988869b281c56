"""Training in rounds: every worker trains by itself for some steps, then the workers exchange what has changed.

    step      of this worker alone, with the user's optimizer
    send      at the end of a round: the change of the weights, and of floating-point buffers, since the last exchange
    receive   the mean change: at once, or some steps later if the exchange is to overlap with training
    check     now and then after an exchange, that the common weights are still equal

Between exchanges not a byte travels, so all workers must make the same steps: rounds are counted in them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.data.shard_source import GlobalBatch
from lockstep.errors import UsageError
from lockstep.replica import agreement, wrapping
from lockstep.replica.data_parallel import DataParallel
from lockstep.replica.integrity import Integrity
from lockstep.train.anchor import Anchor
from lockstep.train.feed import Feed, Loading
from lockstep.train.inner_state import level_scaler, make_equal
from lockstep.train.local_steps import LocalSteps
from lockstep.train.messages import Messages
from lockstep.train.outer import MakeOuter, Outer
from lockstep.train.result import StepResult
from lockstep.train.rhythm import Rhythm
from lockstep.train.strategy import Setting
from lockstep.wire import Full, Wire


class Rounds:
    """Makes the steps of one worker, and takes part in the exchanges."""

    def __init__(self, setting: Setting, rhythm: Rhythm, outer: MakeOuter | None = None) -> None:
        _require(setting)
        self._setting, self._rhythm, self._world = setting, rhythm, setting.world
        self.model = DataParallel(setting.module, reduces=False)
        self.model.companion = self
        self._steps = LocalSteps(setting, self.model)
        names, self._params, self._owners = wrapping.contents(setting.module)
        trained = self._trained()
        self._names = [names[index] for index in trained]
        self._weights: list[Tensor] = [self._params[index] for index in trained]
        self._anchors: dict[str, Anchor] = {}
        self._messages: list[Messages] = []
        self._outer: Outer | None = None
        self._drop_anchors(outer)
        self._integrity = _Common(self.model, self._anchors, self._names, setting.on_difference)
        self._num_steps = 0
        """Of this worker since it has last sent."""
        self._is_under_way = False
        """Whether changes have been sent and not been received."""
        self._is_equal = True
        """Whether all workers hold the same of everything, their optimizers' state included."""
        self._num_unchecked = 0
        """Steps since the common weights were compared."""
        self._has_met = False
        """Whether an exchange has ended in this step."""

    def _trained(self) -> list[int]:
        """Numbers of the parameters that may change on some worker."""
        groups = self._setting.optimizer.param_groups
        optimized = {id(param) for group in groups for param in group["params"]}
        mine = {n for n, param in enumerate(self._params) if param.requires_grad or id(param) in optimized}
        return sorted(set().union(*self._world.gather(mine)))

    def _buffers(self, are_floating: bool) -> list[Tensor]:
        buffers = [owner._buffers[name] for owner, name in self._owners]
        return [each for each in buffers if each is not None and each.is_floating_point() == are_floating]

    def _drop_anchors(self, outer: MakeOuter | None) -> None:
        # Alone, the mean change leads to where the worker is: there is nothing to do without an outer optimizer.
        if self._world.size > 1 or outer is not None:
            self._add("weights", self._names, lambda: self._weights, self._rhythm.wire)
        if self._world.size > 1 and self._buffers(True):
            names = [f"buffer {number}" for number in range(len(self._buffers(True)))]
            self._add("buffers", names, lambda: self._buffers(True), Full())
        if outer is not None:
            self._outer = Outer(outer, self._anchors["weights"].common, self._names)
            self._anchors["weights"].advance = self._outer

    def _add(self, what: str, names: list[str], tensors: Callable[[], list[Tensor]], wire: Wire | None) -> None:
        cap_mb, device = self._setting.bucket_cap_mb, self._world.device
        cap_bytes = wrapping.granularity(self._world, device, cap_mb, wire=wire).cap_bytes
        messages = Messages(self._world, names, tensors(), wire, cap_bytes)
        self._messages.append(messages)
        self._anchors[what] = Anchor(tensors, messages, self._world.size)

    # The steps

    def feed(self, dataset: Any, loading: Loading, seed: int) -> Feed:
        """See Stepper."""
        return self._setting.feed(dataset, loading, seed)

    def step(self, batch: GlobalBatch, seed: int, number: int) -> StepResult:
        """See Stepper; a step that fails here has not happened here, and the others know nothing of it."""
        result = self._steps.step(batch, seed, number)
        self._num_steps += 1
        self._num_unchecked += 1
        self._is_equal = False
        if self._is_under_way and self._num_steps == self._rhythm.delay:
            self._receive()
        if self._num_steps == self._rhythm.every:
            self._send(is_overlapped=self._rhythm.delay > 0)
        return result

    def _send(self, *, is_overlapped: bool) -> None:
        self._num_steps = 0
        for anchor in self._anchors.values():
            anchor.send(keeps=is_overlapped)
        self._is_under_way = True
        if not is_overlapped:
            self._receive()
            self._copy_first()
            if self._rhythm.averages_state:
                make_equal(self._setting.optimizer, self._params, self._world)

    def _receive(self) -> None:
        for anchor in self._anchors.values():
            anchor.receive()
        self._is_under_way, self._has_met = False, True

    def _copy_first(self) -> None:
        """Buffers of which there is no mean, such as counts, get worker 0's values."""
        rest = self._buffers(False) if self._world.size > 1 else []
        if rest:
            assert self._world.group is not None
            with torch.no_grad():
                agreement.broadcast(rest, self._world, 0, self._world.group)

    def check(self, steps: int) -> None:
        """See Stepper: the common weights are compared after the first exchange that comes after so many steps."""
        every = self._setting.check_every
        if every and self._has_met and self._num_unchecked >= every:
            self._num_unchecked = 0
            if self._integrity.check(steps).repaired and not self._rhythm.delay:
                self._go_back()
        self._has_met = False

    def _go_back(self) -> None:
        for anchor in self._anchors.values():
            anchor.go_back()

    # The end of a round before its time

    def end_feed(self) -> None:
        """Exchange what there is, so that all workers hold the same weights when a loop over batches has ended."""
        if self._is_under_way:
            self._receive()
            if not self._num_steps:  # Nothing was learned meanwhile, and yet the own weights are off by rounding.
                self._go_back()
                self._copy_first()
        if self._num_steps:
            self._send(is_overlapped=False)

    def agreed_steps(self, steps: int) -> int:
        """All workers make the same number of steps."""
        return steps

    def before_save(self) -> None:
        """End the round, and make the optimizers' state one, so that all replicas are equal."""
        if self._is_equal:
            return
        self.end_feed()
        make_equal(self._setting.optimizer, self._params, self._world)
        level_scaler(self._setting.scaler, self._world)
        self._is_equal = True

    # To go on later

    def after_load(self) -> None:
        """See Stepper: a round begins."""
        self._forget_round()
        for anchor in self._anchors.values():
            anchor.settle()
        self._is_equal = True

    def _forget_round(self) -> None:
        if self._is_under_way:
            for anchor in self._anchors.values():
                anchor.give_up()
        self._is_under_way, self._num_steps = False, 0

    def state_dict(self) -> dict[str, Any]:
        """What the outer optimizer keeps besides tensors."""
        return {"outer": self._outer.state_dict()} if self._outer is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Stepper; a checkpoint of another strategy has nothing of it."""
        if self._outer is not None:
            self._outer.load_state_dict(state.get("outer") or {})

    # What goes with the replica into checkpoints: see Companion

    def common_tensors(self) -> dict[str, Tensor]:
        """What the outer optimizer keeps; the common weights are the model's when it is saved."""
        return self._outer.tensors() if self._outer is not None else {}

    def load_common_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """See Companion."""
        self._forget_round()
        if self._outer is not None:
            self._outer.load_tensors(tensors)

    def own_tensors(self) -> dict[str, Tensor]:
        """What the wire remembers."""
        return self._messages[0].state_dict() if self._messages else {}

    def load_own_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """See Companion."""
        if self._messages:
            self._messages[0].load_state_dict(tensors)

    @property
    def num_bytes(self) -> int:
        """What this worker has sent of weights and buffers in the last exchange; an all-reduce counts as a ring."""
        return sum(messages.num_bytes for messages in self._messages)

    def release(self) -> None:
        """See Companion."""
        for messages in self._messages:
            messages.release()


class _Common(Integrity):
    """Compares the common weights and buffers."""

    def __init__(self, model: DataParallel, anchors: Mapping[str, Anchor], names: list[str], policy: str) -> None:
        super().__init__(model, None, every=0, policy=policy)
        self._anchors, self._names = anchors, names

    def _held(self) -> dict[str, Tensor]:
        held: dict[str, Tensor] = {}
        for what, anchor in self._anchors.items():
            names = self._names if what == "weights" else [f"{what} {n}" for n in range(len(anchor.common))]
            held |= {repr(name): common.detach() for name, common in zip(names, anchor.common, strict=True)}
        return held


def _require(setting: Setting) -> None:
    if setting.zero:
        raise UsageError(
            f"Trainer(zero={setting.zero}) with a strategy whose workers train by themselves: each needs everything "
            "for its own updates, so nothing can be split. Use zero=0."
        )
    if setting.wire is not None:
        raise UsageError(
            "Trainer(wire=...) encodes the gradients of every step, and this strategy sends none: give the wire to "
            "the strategy, as LocalSGD(every=50, wire=lockstep.wire.Int8())."
        )
