"""What the reducer says: of what it waits for, and of what went wrong."""

from collections.abc import Callable, Sequence

from lockstep.errors import StepVoid, UsageError
from lockstep.replica.bucket import Bucket
from lockstep.world import World


def reducing(names: Sequence[str], bucket: Bucket, step: int) -> Callable[[], str]:
    """What a worker is doing that waits for `bucket`; put together only if it has to be said."""

    def text() -> str:
        held = [repr(names[index]) for index in bucket.indices]
        some = ", ".join(held[:3]) + (f" and {len(held) - 3} more" if len(held) > 3 else "")
        return f"reducing bucket {bucket.place} of step {step}" + (f" ({some})" if some else "")

    return text


def void(world: World, step: int) -> StepVoid:
    """A step that failed on some worker; every worker asks, those that failed say so."""
    failed = [str(rank) for rank, has_failed in enumerate(world.gather(False)) if has_failed]
    return StepVoid(
        f"worker {world.rank}: the backward pass of worker {', '.join(failed)} failed in step {step}, so this step's "
        "gradients are void on every worker. Its own output says why. To go on, call optimizer.zero_grad() and take "
        "the next batch, on every worker."
    )


def mixed_weights(world: World, num_explicit: int, num_active: int) -> UsageError:
    """Some workers gave weights of their own, and others did not."""
    return UsageError(
        f"worker {world.rank}: {num_explicit} of {num_active} workers called lockstep.backward(loss, weight=...) in "
        "this step and the others loss.backward(), so their gradients have no common weight. Use the same call on "
        "every worker."
    )


def came_in_portions(world: World, names: Sequence[str], step: int) -> UsageError:
    """Gradients came after their bucket had left, where everything is to be added in one order."""
    return UsageError(
        f"worker {world.rank}: the gradient of {', '.join(map(repr, names[:3]))} came in portions in step {step}, and "
        "not in the first step, so it cannot be added in the order that gives the same bits on any number of workers. "
        "Use torch.utils.checkpoint with use_reentrant=False."
    )
