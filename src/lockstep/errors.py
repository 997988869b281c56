"""What can go wrong, as one tree.

    LockstepError
    ├── LaunchError         the workers could not be started, or the environment does not add up
    ├── UsageError          the library was called in a way that cannot be right
    │   └── ModelMismatch   the workers hold different models
    ├── WorkerLost          a peer died, left or does not answer
    ├── ReplicaDiffers      workers that should hold the same bits do not
    ├── StepVoid            a peer's backward pass failed: this step's gradients are void everywhere
    ├── WorkerFailed        a started worker failed in a way that cannot be raised as itself
    └── CheckpointError     a checkpoint could not be written, or what is there cannot be read

Each class has an entry in docs/troubleshooting.md. Messages say what was found, why it matters and what to do.
"""


class LockstepError(RuntimeError):
    """Root of every error that Lockstep raises by itself."""


class LaunchError(LockstepError):
    """The launch environment is partial or contradictory, or workers could not be started."""


class UsageError(LockstepError, ValueError):
    """An argument or a call that cannot be right."""


class ModelMismatch(UsageError):
    """The model differs between workers."""


class WorkerLost(LockstepError):
    """A peer died, left early or did not answer within the deadline."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        """The workers that are gone, as far as known."""


class ReplicaDiffers(LockstepError):
    """Parameters, buffers or optimizer state differ between workers that should hold the same bits."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        """The workers that differ from the majority; all of them, where it cannot be told which are right."""


class StepVoid(LockstepError):
    """A peer's backward pass failed, so this step's gradients are void on every worker."""


class WorkerFailed(LockstepError):
    """A worker started by `launch` failed and its exception could not be brought over as itself."""


class CheckpointError(LockstepError):
    """A checkpoint could not be written, the same on every worker, or a file of one is missing or damaged."""
