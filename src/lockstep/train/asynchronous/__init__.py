"""Asynchronous training with bounded staleness: a parameter server that is made of the workers themselves.

The parameters are cut into equal parts, one for each worker, its owner. An owner applies a gradient to its part when it
arrives, with the user's optimizer. A step of a worker, which computes from one shard that it has claimed:

    settle     wait until its gradient of the step before is applied at all owners
    read       the newest parameters of all owners, which note the version that was read
    run        forward and backward of the shard
    push       the gradient, cut by owner; each applies it, or keeps it as long as older readings could not bear it

The staleness of a gradient at an owner is the number of updates it has applied since that reading. `StalenessBound`
shows that none is above the bound as long as at most `staleness` readings are outstanding when another one is made: an
owner lets a reading wait for that. Each of N workers has at most one outstanding, so for staleness >= N - 1 none waits
and all owners are asked at once; else they are asked one after the other, in the order of ranks.

No deadlock. Who has read from all owners waits for nothing but its own pass and the links until the end of its push,
since owners receive whatever is sent; so its gradient arrives everywhere. At the last owner all that have read are such
workers. The oldest outstanding gradient can always be applied, so all are, and those that wait to read there get their
turn. So all that have read at the owner before it come to be such workers too, and so on down to the first: every
reading and every `settle` ends. (Hence `settle` before `read`: a worker that had read from one owner while another one
kept its last gradient could wait for a worker that waits for it.)

Nothing is lost or applied twice: a worker's messages to an owner come in order over one connection, and a gradient is
taken when it has arrived whole.

If a worker dies, its connections break, or on one host its process is seen to be gone. Each wait above looks for that
five times a second, and raises WorkerLost: `settle` (for an owner that died, or for an older gradient that will not
come), `read` (for a turn that will not come) and `push`. A worker in its own pass finds out in the
next `push`. Of a gradient on its way some owners may have applied their part, and others not: each part is applied
whole or not at all. A worker that is stopped, and goes on later, is waited for until the world's deadline.

Updates are applied in the order of arrival, so two runs never come to the same bits. After a meeting (the end of a loop
over batches, a save, an evaluation) all workers hold the same ones.
"""

from dataclasses import dataclass

from lockstep.errors import UsageError
from lockstep.replica.optimizer import Grain, grain_of
from lockstep.train.asynchronous.steps import Asynchronous
from lockstep.train.strategy import TrainerOptions


@dataclass(frozen=True, slots=True)
class Async:
    """Every worker makes steps for itself, as fast as it can, on parameters that all of them update.

        trainer = lockstep.Trainer(net, optimizer, loss_fn, shards=8, strategy=lockstep.Async(staleness=8))
        for batch in trainer.batches(dataset, batch_size=256, epochs=3):
            out = trainer.step(batch)

    staleness: how many updates of others may come between reading the parameters and applying the gradient that was
        computed from them. A worker that is too slow for that is waited for. 0 is one step at a time, all workers in
        turn; with less than the number of workers minus one, some always wait.

    A step trains on one shard, `batch_size / shards` samples, that this worker has claimed: fast workers make more
    steps, and every sample is used once in an epoch. Not reproducible: updates are applied as they arrive. The
    optimizer must work element by element. Memory, besides the model: gradients three times (as the pass leaves them,
    as they are sent, as those of others arrive), this worker's part of the parameters and of the optimizer's state.
    """

    staleness: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.staleness, int) or isinstance(self.staleness, bool) or self.staleness < 0:
            raise UsageError(f"Async(staleness={self.staleness!r}): a number of updates, 0 or more.")

    def open(self, options: TrainerOptions) -> Asynchronous:
        """See Strategy."""
        if options.zero:
            raise UsageError(f"zero={options.zero} with Async: it splits the optimizer's state anyway. Use zero=0.")
        if options.wire is not None:
            raise UsageError("wire with Async: gradients go to their owners as they are. Leave out one of the two.")
        if options.scaler is not None:
            raise UsageError(
                "scaler with Async: the loss scale would have to change on all workers at once. Use bfloat16 or "
                "float32."
            )
        if grain_of(options.optimizer, options.world.device) is not Grain.ELEMENT:
            raise UsageError(
                f"{type(options.optimizer).__name__} looks at whole tensors, and with Async every worker updates a "
                "part of them. Use an optimizer that works element by element, as SGD and Adam do."
            )
        return Asynchronous(options, self.staleness)
