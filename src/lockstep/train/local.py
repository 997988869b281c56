"""`lockstep.LocalSGD`: workers train by themselves, and average their weights every so many steps."""

from dataclasses import dataclass

from lockstep.train.rhythm import rhythm
from lockstep.train.rounds import Rounds
from lockstep.train.strategy import Setting
from lockstep.wire import Wire


@dataclass(frozen=True, slots=True)
class LocalSGD:
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
        rhythm("LocalSGD", self.every, self.wire, self.overlap, self.delay, self.average_state)

    def open(self, setting: Setting) -> Rounds:
        """See Strategy."""
        return Rounds(setting, rhythm("LocalSGD", self.every, self.wire, self.overlap, self.delay, self.average_state))
