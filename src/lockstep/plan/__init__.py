"""Know before you run: what fits, how fast it will be, how far it scales, what to choose.

`lockstep.plan(...)` is a function: it is this package, called. In the order in which to read it:

workload      what is to be trained, in numbers; models: architectures by name and by size; script: a user's own
machine       what it is trained on, by name or from a file; measure: this machine
memory        what a worker holds, by component
timing        what a step computes and sends; simulation: the step as events (pure; the playground has it too)
published     runs that others measured: what they say of the like, and how far predictions of them are off
advice        what to choose, and why
outcome       all of that, put together; page: as a page; check: against a recorded run
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """The package as a function, so that `lockstep.plan(...)` and `lockstep.plan.machine` are both what they seem."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from lockstep.plan.outcome import plan

        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
