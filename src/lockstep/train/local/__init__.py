"""`lockstep.LocalSGD` and `lockstep.DiLoCo`: workers train by themselves, and exchange their weights now and then."""

from dataclasses import dataclass

from lockstep.errors import UsageError
from lockstep.train.local.optimizers import MakeOuter, nesterov
from lockstep.train.local.rounds import LocalStrategy, Rounds
from lockstep.train.strategy import TrainerOptions
from lockstep.wire import Wire


@dataclass(frozen=True, slots=True)
class LocalSGD(LocalStrategy):
    """Every worker makes updates of its own; every `every` steps their weights become the mean (Stich 2018).

        trainer = lockstep.Trainer(net, optimizer, loss_fn, shards=8, strategy=lockstep.LocalSGD(every=16))

    A worker's step is that of its optimizer on its shards of the global batch: the mean over what it counted, clipped
    by its own norm. So with N workers an update is from one Nth of the batch, and the learning rate is for that.

    every: steps of a round. Nothing is sent between exchanges.
    wire: one of `lockstep.wire`: how the weights' change since the last exchange is encoded while it travels.
    overlap: let the exchange travel while the next steps are computed. It is applied `delay` steps later, and keeps
        what the worker has learned meanwhile: weights += mean change - own change. Choose `delay`, at most `every`, so
        that as many steps take as long as the exchange: a worker waits for it there.
    average_state: exchange the optimizers' moments too: three times the volume with Adam, and better learning.

    Volume: 2(N-1)/N times the weights and floating-point buffers every `every` steps, or what the wire promises.
    Memory: the common weights, once the model; during an exchange the message, once the model (where gradients were:
    there are none then); over shared memory that stays. With `overlap` the message and the weights that were sent stay
    until they are applied. What the wire remembers.
    Exactness: not the training of one worker, and another one for every number of workers; the larger `every`, the
    further from it. With every=1 and SGD without momentum it is synchronous training but for rounding. For a fixed
    number of workers the same bits each time; after each exchange all workers hold the same bits of weights and
    buffers (with `overlap`: of the common weights). Optimizers keep moments of their own, unless `average_state`.
    """

    every: int
    wire: Wire | None = None
    overlap: bool = False
    delay: int = 1
    average_state: bool = False

    def __post_init__(self) -> None:
        self.check()

    def open(self, options: TrainerOptions) -> Rounds:
        """See Strategy."""
        return Rounds(options, self)


@dataclass(frozen=True, slots=True)
class DiLoCo(LocalStrategy):
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
        self.check()
        if self.outer is not None and not callable(self.outer):
            raise UsageError(
                f"DiLoCo(outer={type(self.outer).__name__}): the common weights are known when training begins, so "
                "give a function from a list of parameters to an optimizer, as lambda params: "
                "torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)."
            )

    def open(self, options: TrainerOptions) -> Rounds:
        """See Strategy."""
        return Rounds(options, self, self.outer if self.outer is not None else nesterov)
