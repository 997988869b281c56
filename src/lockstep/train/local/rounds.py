"""Training in rounds: every worker trains by itself for some steps, then the workers exchange what has changed.

    step      of this worker alone, with the user's optimizer
    send      at the end of a round: the change of the weights, and of floating-point buffers, since the last exchange
    receive   the mean change: at once, or some steps later if the exchange is to overlap with training
    check     now and then after an exchange, that the common weights are still equal

Between exchanges not a byte travels, so all workers must make the same steps: rounds are counted in them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import seeds
from lockstep.data import batch as batches
from lockstep.data.source import GlobalBatch
from lockstep.errors import UsageError
from lockstep.replica import agreement, modules
from lockstep.replica.data_parallel import DataParallel
from lockstep.replica.engine import granularity
from lockstep.train.integrity import ReplicaComparison
from lockstep.train.local.anchor import Advance, Anchor, copy_of, follow
from lockstep.train.local.optimizers import MakeOuter, OuterOptimizer, equalize_scaler, equalize_state
from lockstep.train.strategy import (
    ShardLoss,
    Stepper,
    StepResult,
    TrainerOptions,
    mean_loss,
    scale_grads,
    step_optimizer,
)
from lockstep.wire import Full, Wire


class LocalStrategy:
    """What `LocalSGD` and `DiLoCo` have in common: when workers exchange, and over which wire."""

    every: int
    wire: Wire | None
    overlap: bool
    delay: int
    average_state: bool

    def check(self) -> None:
        """Raise UsageError for arguments that cannot be right."""
        name, every, delay = type(self).__name__, self.every, self.delay
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UsageError(f"{name}(every={every!r}): the workers exchange every so many steps, 1 or more.")
        if not isinstance(delay, int) or isinstance(delay, bool) or not 1 <= delay <= every:
            raise UsageError(
                f"{name}(every={every}, delay={delay!r}): an exchange must have ended when the next one begins, so "
                f"delay is 1 to {every} steps."
            )
        methods = ("open", "bytes_promised")
        if self.wire is not None and not all(callable(getattr(self.wire, method, None)) for method in methods):
            raise UsageError(f"{name}(wire={self.wire!r}): use one of lockstep.wire, as lockstep.wire.Int8(), or None.")
        if self.average_state and self.overlap:
            raise UsageError(
                f"{name}(overlap=True, average_state=True): state cannot be averaged some steps late. Use one."
            )


class Rounds(Stepper):
    """Makes the steps of one worker, and takes part in the exchanges."""

    def __init__(self, options: TrainerOptions, strategy: LocalStrategy, outer: MakeOuter | None = None) -> None:
        _require(options)
        super().__init__(options, DataParallel(options.module, reduces=False))
        self.model._engine.drive()
        self._strategy = strategy
        self._local = LocalStep(options, self.model)
        self._outer: OuterOptimizer | None = None
        self._anchors = self._drop_anchors(outer)
        self._comparison = ReplicaComparison(options.world, options.on_difference)
        self._num_steps = 0
        """Of this worker since it has last sent."""
        self._num_unchecked = 0
        """Steps since the common weights were compared."""
        self._is_under_way = False
        """Whether changes have been sent and not been received."""
        self._has_received = False
        """Whether an exchange has ended in this step."""
        self._is_equal = True
        """Whether all workers hold the same of everything, their optimizers' state included."""
        self.model._engine.strategy = self

    def _drop_anchors(self, make_outer: MakeOuter | None) -> dict[str, Anchor]:
        """Take what workers hold now for common: weights and floating-point buffers."""
        anchors: dict[str, Anchor] = {}
        is_alone = self._options.world.size == 1
        # Alone, the mean change leads to where the worker is: there is nothing to do without an outer optimizer.
        if not is_alone or make_outer is not None:
            names, params = self._trained()
            common = copy_of(params)
            if make_outer is not None:
                self._outer = OuterOptimizer(make_outer, common, names)
            advance = self._outer or follow
            anchors["weights"] = self._anchor(names, lambda: params, common, self._strategy.wire, advance)
        buffers = self._buffers(are_floating=True)
        if not is_alone and buffers:
            names = [f"buffers {number}" for number in range(len(buffers))]
            tensors = functools.partial(self._buffers, are_floating=True)
            anchors["buffers"] = self._anchor(names, tensors, copy_of(buffers), Full(), follow)
        return anchors

    def _anchor(
        self,
        names: Sequence[str],
        tensors: Callable[[], list[Tensor]],
        common: list[nn.Parameter],
        wire: Wire | None,
        advance: Advance,
    ) -> Anchor:
        cap_mb = self._options.bucket_cap_mb
        cap_bytes = granularity(self._options.world, self._options.world.device, cap_mb, wire=wire).cap_bytes
        return Anchor(self._options.world, names, tensors, wire, cap_bytes, common, advance)

    def _trained(self) -> tuple[list[str], list[Tensor]]:
        """Names of the parameters that may change on some worker, and these."""
        names, params, _ = modules.contents(self._options.module)
        optimized = {id(param) for group in self._options.optimizer.param_groups for param in group["params"]}
        mine = {n for n, param in enumerate(params) if param.requires_grad or id(param) in optimized}
        numbers = sorted(set().union(*self._options.world.gather_json(sorted(mine))))
        return [names[number] for number in numbers], [params[number] for number in numbers]

    def _buffers(self, *, are_floating: bool) -> list[Tensor]:
        """Those that the module has now: it may have put others into their places."""
        _, _, owners = modules.contents(self._options.module)
        buffers = [owner._buffers[name] for owner, name in owners]
        return [each for each in buffers if each is not None and each.is_floating_point() == are_floating]

    # The steps

    def step(self, batch: GlobalBatch, seed: int, number: int) -> StepResult:
        """See Stepper; a step that fails here has not happened here, and the others know nothing of it."""
        result = self._local.run(batch, seed, number)
        self._num_steps += 1
        self._num_unchecked += 1
        self._is_equal = False
        strategy = self._strategy
        if self._is_under_way and self._num_steps == strategy.delay:
            self._receive()
        if self._num_steps == strategy.every:
            self._send(is_overlapped=strategy.overlap)
        return result

    def _send(self, *, is_overlapped: bool) -> None:
        self._num_steps = 0
        for anchor in self._anchors.values():
            anchor.send(keeps=is_overlapped)
        self._is_under_way = True
        if not is_overlapped:
            self._receive()
            self._copy_first()
            if self._strategy.average_state:
                self._equalize_state()

    def _receive(self) -> None:
        for anchor in self._anchors.values():
            anchor.receive()
        self._is_under_way, self._has_received = False, True

    def _copy_first(self) -> None:
        """Buffers of which there is no mean, such as counts, get worker 0's values."""
        rest = self._buffers(are_floating=False) if self._options.world.size > 1 else []
        if rest:
            assert self._options.world.group is not None
            with torch.no_grad():
                agreement.broadcast(rest, self._options.world, 0, self._options.world.group)

    def _equalize_state(self) -> None:
        equalize_state(self._options.optimizer, modules.contents(self._options.module)[1], self._options.world)

    def check(self, steps: int) -> None:
        """See Stepper: the common weights are compared after the first exchange that comes after so many steps."""
        every = self._options.check_every
        if every and self._has_received and self._num_unchecked >= every:
            self._num_unchecked = 0
            held = {
                repr(name): common.detach()
                for anchor in self._anchors.values()
                for name, common in zip(anchor.names, anchor.common, strict=True)
            }
            if self._comparison.check(held, steps) and not self._strategy.overlap:
                self._go_back()
        self._has_received = False

    def _go_back(self) -> None:
        for anchor in self._anchors.values():
            anchor.go_back()

    # The end of a round before its time

    def end_batches(self, steps: int) -> int:
        """See Stepper: exchange what there is, so that all workers hold the same weights."""
        if self._is_under_way:
            self._receive()
            if not self._num_steps:  # Nothing was learned meanwhile, and yet the own weights are off by rounding.
                self._go_back()
                self._copy_first()
        if self._num_steps:
            self._send(is_overlapped=False)
        return steps

    def before_save(self, steps: int) -> int:
        """See Stepper: end the round, and make the optimizers' state one."""
        if not self._is_equal:
            self.end_batches(steps)
            self._equalize_state()
            equalize_scaler(self._options.scaler, self._options.world)
            self._is_equal = True
        return steps

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

    # What goes with the replica into checkpoints: see StrategyTensors

    def common_tensors(self) -> dict[str, Tensor]:
        """What the outer optimizer keeps; the common weights are the model's when it is saved."""
        return self._outer.tensors() if self._outer is not None else {}

    def load_common_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """See StrategyTensors."""
        self._forget_round()
        if self._outer is not None:
            self._outer.load_tensors(tensors)

    def own_tensors(self) -> dict[str, Tensor]:
        """What the wire remembers."""
        return self._anchors["weights"].wire_state() if self._anchors else {}

    def load_own_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """See StrategyTensors."""
        if self._anchors:
            self._anchors["weights"].load_wire_state(tensors)

    @property
    def num_bytes(self) -> int:
        """What this worker has sent of weights and buffers in the last exchange; an all-reduce counts as a ring."""
        return sum(anchor.num_bytes for anchor in self._anchors.values())

    def release(self) -> None:
        """See StrategyTensors."""
        for anchor in self._anchors.values():
            anchor.release()


class LocalStep:
    """A step of one worker by itself: its shards of the global batch, and an update from them. Nothing is sent."""

    def __init__(self, options: TrainerOptions, model: DataParallel) -> None:
        self._options, self._model = options, model
        begin, end = options.shard_range
        self._row = torch.zeros(2, end - begin, dtype=torch.float64, device=options.world.device)
        """Losses and weights of this worker's shards, in order."""
        self._is_weighted = False
        """Whether `loss_fn` has ever given weights of its own."""

    def run(self, batch: GlobalBatch, seed: int, number: int) -> StepResult:
        """Make step `number`; if that raises, the weights are as they were.

        A worker whose shards have no samples makes no update; its schedule goes on like that of the others.
        """
        options = self._options
        self._row.zero_()
        samples = sum(shard.size for shard in batch.shards)
        try:
            with options.determinism():
                for place, shard in enumerate(batch.shards):
                    if not shard.size:
                        continue
                    seeds.seed_everything(seeds.derive(seed, "step", number, shard.number))
                    with options.world.events.copying():
                        moved = batches.move(shard.batch, options.world.device, non_blocking=True)
                    loss = ShardLoss.of(options.loss_fn(self._model, moved), shard.size)
                    self._row[0, place] = loss.value.detach().reshape(())
                    self._row[1, place] = loss.weight
                    self._is_weighted = self._is_weighted or loss.is_weighted
                    # By the share of the samples; where losses weigh something else, the total is known in the end.
                    loss.backward(samples, options.scaler)
        except BaseException:
            self._model.zero_grad()
            raise
        return self._commit(samples, number + 1)

    def _commit(self, samples: int, number: int) -> StepResult:
        """The step takes effect, here."""
        options = self._options
        loss, weight = mean_loss(*self._row)
        norm, lr = torch.zeros_like(loss), options.lr
        if samples:
            if options.scaler is not None:
                options.scaler.unscale_(options.optimizer)
            ratio = torch.where(weight == 0, 1.0, samples / weight)
            grads = self._grads()
            if grads:
                norm = nn.utils.get_total_norm(grads).to(ratio) * ratio
            scale_grads(grads, ratio if self._is_weighted else None, norm, options.clip)
            step_optimizer(options.optimizer, options.scaler)
            self._model.zero_grad()
        if options.scheduler is not None:
            options.scheduler.step()
        return StepResult(number, options.scaler is not None, loss, norm, weight, lr)

    def _grads(self) -> list[Tensor]:
        """The gradients' numbers: of sparse ones those that are there."""
        found = []
        for param in self._model.module.parameters():
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.coalesce()
                found.append(param.grad._values())
            elif param.grad is not None:
                found.append(param.grad)
        return found


def _require(options: TrainerOptions) -> None:
    if options.zero:
        raise UsageError(
            f"Trainer(zero={options.zero}) with a strategy whose workers train by themselves: each needs everything "
            "for its own updates, so nothing can be split. Use zero=0."
        )
    if options.wire is not None:
        raise UsageError(
            "Trainer(wire=...) encodes the gradients of every step, and this strategy sends none: give the wire to "
            "the strategy, as LocalSGD(every=50, wire=lockstep.wire.Int8())."
        )
