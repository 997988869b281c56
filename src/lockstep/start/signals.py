"""The signals by which a launcher is told to end, collected until it looks.

They are not raised as exceptions where they arrive: measured, one that arrives while torch is being imported can get
lost there.
"""

import signal
from types import FrameType, TracebackType

_TAKEN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


class Signals:
    """While open, collects what would have ended this process, and that nobody reads its output any more (SIGPIPE).

    A signal that whoever started us has set to be ignored (nohup, a shell's background job) stays ignored; not so
    SIGPIPE, since it is Python itself that ignores it. For the main thread.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        """Numbers of the signals, in the order in which they came."""
        self._before: dict[int, signal._HANDLER] = {}

    @property
    def came_again(self) -> bool:
        """Whether there was more than one: whoever sends them does not want to wait."""
        return len(self.received) > 1

    def _take(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)

    def __enter__(self) -> "Signals":
        for signum in _TAKEN:
            if signum == signal.SIGPIPE or signal.getsignal(signum) != signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
