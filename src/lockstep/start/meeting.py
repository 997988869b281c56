"""The place where the workers of one launch meet: torch's key-value store, served by the launcher on loopback."""

import socket
import sys
import time
from types import TracebackType

from lockstep.environment import LOOPBACK
from lockstep.errors import LaunchError

HEAD_START_SECONDS = 0.3
"""A script that ends at once, by a typo or otherwise, ends before the launcher spends a second on importing torch."""


class Meeting:
    """A port of this process on loopback, open from the beginning, behind which a store is set up once it is needed.

    The socket listens before any worker starts, so no port can be lost to another program and no worker can come too
    early: their connections wait until `attend` has the store ready. It starts a thread; forks come before.
    """

    def __init__(self) -> None:
        try:
            self._listener = socket.create_server((LOOPBACK, 0), backlog=2048)
        except OSError as error:
            raise LaunchError(
                f"no port could be opened on {LOOPBACK}, where the workers are to meet: {error}. Is loopback up?"
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._store: object = None
        self._due = time.monotonic() + HEAD_START_SECONDS

    def attend(self) -> None:
        """Set up the store if it is time and nobody has; the launcher calls this again and again."""
        if self._store is None and ("torch" in sys.modules or time.monotonic() > self._due):
            self._store = self._serve()

    def _serve(self) -> object:
        from torch.distributed import TCPStore  # 1.5 s, while the workers are busy with the same.

        return TCPStore(
            LOOPBACK, self.port, is_master=True, wait_for_workers=False, master_listen_fd=self._listener.detach()
        )

    def close(self) -> None:
        """End the store, if there is one, and free the port. A forked worker calls this for its copy of the socket."""
        self._store = None
        self._listener.close()

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
