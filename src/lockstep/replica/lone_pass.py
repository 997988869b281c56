"""A pass of a worker that sends nothing, for those who listen."""

from collections.abc import Callable
from typing import Any

from lockstep.events import Kind
from lockstep.replica.moments import QuietPass, num_samples
from lockstep.replica.pass_edges import call_at_begin
from lockstep.world import World

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def tell_of(call: Call, world: World, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `call` returns for these inputs; tells when it begins and ends, and its backward pass as well."""
    events = world.events
    events.emit(Kind.FORWARD, num_samples=num_samples(world, (inputs, kwargs)))
    output = call(inputs, kwargs)
    events.emit(Kind.FORWARDED)
    call_at_begin(output, QuietPass(events, -1))
    return output
