"""Which steps are recorded: all, until that takes more of worker 0's time than watching may cost.

A step's record costs worker 0 some tenths of a millisecond for each worker. That is nothing for steps of a second,
and a lot for a hundred workers with steps of ten milliseconds. So worker 0 looks what its thread uses, and doubles or
halves the distance between recorded steps; the others follow what it publishes. A step that only some have told of,
while that changed, is left out.
"""

_MOST, _FEW = 0.006, 0.001
"""Parts of a core: above the one, fewer steps are recorded; below the other, more."""
_LOOKS_S = 5.0
"""How long is looked before anything is changed."""
_LARGEST = 1024


class Pace:
    """The distance between recorded steps."""

    def __init__(self) -> None:
        self.every = 1
        """One of so many is recorded: a power of two, so that the steps with norms (see noise.py) are among them."""
        self._since_s = self._used_s = 0.0
        self._has_begun = False

    def keeps(self, step: int) -> bool:
        """Whether `step` is recorded."""
        return step % self.every == 2 % self.every

    def see(self, now_s: float, used_s: float) -> None:
        """Worker 0: at `now_s`, its thread has used the processor for `used_s` in all."""
        if not self._has_begun:
            self._has_begun, self._since_s, self._used_s = True, now_s, used_s
        if now_s - self._since_s < _LOOKS_S:
            return
        part = (used_s - self._used_s) / (now_s - self._since_s)
        self._since_s, self._used_s = now_s, used_s
        if part > _MOST:
            self.every = min(2 * self.every, _LARGEST)
        elif part < _FEW:
            self.every = max(1, self.every // 2)
