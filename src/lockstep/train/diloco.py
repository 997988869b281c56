"""`lockstep.DiLoCo`: workers train by themselves, and an outer optimizer takes their mean change for a gradient."""

from dataclasses import dataclass

from lockstep.errors import UsageError
from lockstep.train.outer import MakeOuter, nesterov
from lockstep.train.rhythm import rhythm
from lockstep.train.rounds import Rounds
from lockstep.train.strategy import Setting
from lockstep.wire import Wire


@dataclass(frozen=True, slots=True)
class DiLoCo:
    """Local updates for `every` steps, then one outer update from the workers' mean change (Douillard et al. 2023).

        trainer = lockstep.Trainer(net, adamw, loss_fn, shards=8, strategy=lockstep.DiLoCo(every=100))

    The inner optimizer is the trainer's; a worker's step is as with `LocalSGD`. At the end of a round the outer
    optimizer steps the weights of the round's beginning, with the mean over the workers of (weights at the beginning -
    weights now) for a gradient, and all workers go on from the result. Alone, the outer step is made all the same.

    every: steps of a round; DiLoCo is made for many, 50 to 500. Nothing is sent between exchanges.
    outer: a function from a list of parameters to a torch optimizer; if not given
        `lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)`.
    wire, overlap, delay, average_state: as of `LocalSGD`.

    Volume: as of `LocalSGD`.
    Memory: the weights of the round's beginning, once the model, and the outer optimizer's state on every worker: with
    the default once more the model. During an exchange the message, as with `LocalSGD`.
    Exactness: not the training of one worker, and another one for every number of workers. For a fixed number of
    workers the same bits each time; after each exchange all workers hold the same bits of weights, buffers and outer
    state, since all compute them from the same sums (with `overlap`: of the common weights). With outer SGD(lr=1)
    without momentum it is `LocalSGD`.
    """

    every: int
    outer: MakeOuter | None = None
    wire: Wire | None = None
    overlap: bool = False
    delay: int = 1
    average_state: bool = False

    def __post_init__(self) -> None:
        rhythm("DiLoCo", self.every, self.wire, self.overlap, self.delay, self.average_state)
        if self.outer is not None and not callable(self.outer):
            raise UsageError(
                f"DiLoCo(outer={type(self.outer).__name__}): the common weights are known when training begins, so "
                "give a function from a list of parameters to an optimizer, as lambda params: "
                "torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)."
            )

    def open(self, setting: Setting) -> Rounds:
        """See Strategy."""
        chosen = rhythm("DiLoCo", self.every, self.wire, self.overlap, self.delay, self.average_state)
        return Rounds(setting, chosen, self.outer if self.outer is not None else nesterov)
