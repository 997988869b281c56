"""The keys of a run, as a launcher sees them: what other launchers and the workers have said."""

import time
from collections.abc import Callable, Sequence

from lockstep.comm.key_client import KeyClient
from lockstep.comm.store_server import Op
from lockstep.errors import LaunchError

PREFIX = "hosts/"
"""How the keys begin that launchers set."""
CALL_S = 2.0
"""How long the store has for one answer."""
_PAUSE_S = 0.1


class Alone(LaunchError):
    """This launcher cannot reach the others any more, and has ended its workers."""


class RunKeys:
    """The keys of the run as a launcher sees them: as they were at the last `refresh`, with what it has set since.

    Calls are tried again until they succeed, or until `is_alone` says that the run is lost to this launcher: then they
    raise Alone.
    """

    def __init__(self, client: KeyClient, prefixes: Sequence[str], is_alone: Callable[[], str] = lambda: "") -> None:
        self.client = client
        self.prefixes = tuple(prefixes)
        """What `refresh` looks at."""
        self._is_alone = is_alone
        self._seen: dict[str, str] = {}

    def refresh(self) -> None:
        """Look at all keys under the prefixes."""
        found = self.call(Op.LIST, *self.prefixes)
        self._seen = {key.decode(): value.decode() for key, value in zip(found[::2], found[1::2], strict=True)}

    def get(self, key: str) -> str | None:
        """What a key held when it was looked at last."""
        return self._seen.get(key)

    def under(self, prefix: str) -> dict[str, str]:
        """All keys that begin so, without this beginning."""
        return {key.removeprefix(prefix): value for key, value in self._seen.items() if key.startswith(prefix)}

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._seen[key] = value
        self.call(Op.SET, key, value)

    def forget(self, prefix: str) -> None:
        """Drop the keys that begin so, and break off waits for such keys."""
        self._seen = {key: value for key, value in self._seen.items() if not key.startswith(prefix)}
        self.call(Op.FORGET, prefix)

    def ask(self, key: str) -> str | None:
        """What a key holds now, wherever it is."""
        found = self.call(Op.LIST, key)
        return {name.decode(): value.decode() for name, value in zip(found[::2], found[1::2], strict=True)}.get(key)

    def call_add(self, key: str) -> str:
        """Add 1 to a number; returns the sum."""
        return self.call(Op.ADD, key, "1")[0].decode()

    def call(self, operation: Op, *operands: str) -> list[bytes]:
        """Ask the store."""
        while True:
            try:
                return self.client.call(operation, *operands, timeout_s=CALL_S)
            except OSError as error:
                if why := self._is_alone():
                    raise Alone(why) from error
            time.sleep(_PAUSE_S)
