"""Words in shared memory: how one process tells another that something is there, and how the other sleeps till then.

A word is 32 bits, aligned, in memory that several processes map. It counts up and wraps; `reached` compares modulo
2**32, which is right as long as two workers are less than 2**31 signals apart. Unless said otherwise a word has one
writer, so that no atomic read-modify-write is needed, only an aligned 4-byte store, which every machine that Linux
runs on makes visible as a whole.

**Order of memory.** A writer stores its data, calls `publish`, and stores the word. A reader loads the word, sees
the new value, calls `observe`, and loads the data. The reader must then see the data.

- x86-64: stores become visible in program order and loads are made in program order (TSO), so both are nothing.
  String and vector copies keep that order once they have returned; C libraries end non-temporal copies by `sfence`.
  The compiler cannot move anything, since data and word are touched by separate calls of the interpreter.
- arm64 and others: stores may become visible, and loads be made, in any order. Both functions are then a full fence
  (`atomic_thread_fence(seq_cst)` of libatomic, `dmb ish` on arm64). Where libatomic is missing, the `membarrier`
  system call takes its place: its global expedited form is documented to be a full barrier in the calling thread
  between what precedes and what follows it. Where there is neither, `fence` raises LaunchError.

**Sleeping.** `wait` returns at once if the word has already changed: the kernel compares it under the lock that
`wake` takes, and the writer always stores before it wakes, so no wake-up is lost. Waits are not private to the
process (no FUTEX_PRIVATE_FLAG) since the sleepers are other processes.
"""

import ctypes
import ctypes.util
import functools
import os
import platform
from collections.abc import Callable

from lockstep.errors import LaunchError

FUTEX_WAIT, FUTEX_WAKE = 0, 1
ALL_SLEEPERS = 2**31 - 1
WRAP = 2**32
MEMBARRIER_CMD_GLOBAL_EXPEDITED = 1 << 1
SEQ_CST = 5
ORDERED_STORES = ("x86_64", "AMD64", "i686", "i386")
"""Machines on which stores and loads keep program order."""

SYSCALL_NUMBERS = {
    "x86_64": {"futex": 202, "membarrier": 324},
    "aarch64": {"futex": 98, "membarrier": 283},
    "riscv64": {"futex": 98, "membarrier": 283},
    "ppc64le": {"futex": 221, "membarrier": 365},
    "s390x": {"futex": 238, "membarrier": 356},
}


class _TimeSpec(ctypes.Structure):
    """C's struct timespec."""

    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def reached(word: int, target: int) -> bool:
    """Whether a counter that shows `word` has come to `target`, both modulo 2**32."""
    return (word - target) % WRAP < 2**31


class Futex:
    """The kernel's sleep and wake on words of shared memory, and the fences around them; one per process suffices."""

    def __init__(self) -> None:
        sleeping = ctypes.CDLL(None, use_errno=False).syscall  # Releases the interpreter while it sleeps.
        waking = ctypes.PyDLL(None).syscall  # Never blocks: keeping the interpreter is cheaper than handing it over.
        sleeping.restype = waking.restype = ctypes.c_long
        self._number = ctypes.c_long(SYSCALL_NUMBERS[platform.machine()]["futex"])
        self._wait_op, self._wake_op = ctypes.c_int(FUTEX_WAIT), ctypes.c_int(FUTEX_WAKE)
        self._all_sleepers = ctypes.c_int(ALL_SLEEPERS)
        self._sleeping, self._waking = sleeping, waking
        self.publish = fence()
        """To be called between storing data and storing the word that announces it."""
        self.observe = self.publish
        """To be called between loading a word and loading the data that it announces."""

    def wait(self, address: int, seen: int, seconds: float) -> None:
        """Sleep while the word at `address` is `seen`, at most `seconds`; may return early, so look again."""
        limit = _TimeSpec(int(seconds), int(seconds % 1 * 1e9))
        self._sleeping(
            self._number, ctypes.c_void_p(address), self._wait_op, ctypes.c_uint32(seen), ctypes.byref(limit)
        )

    def wake(self, address: ctypes.c_void_p) -> None:
        """Wake every thread that sleeps on the word at `address`."""
        self._waking(self._number, address, self._wake_op, self._all_sleepers)


def fence() -> Callable[[], None]:
    """The full memory fence of this machine, as a function; does nothing where program order is kept anyway."""
    if platform.machine() in ORDERED_STORES:
        return _nothing
    return _library_fence() or _kernel_fence()


def _nothing() -> None:
    pass


def _library_fence() -> Callable[[], None] | None:
    for name in (ctypes.util.find_library("atomic"), "libatomic.so.1"):
        try:
            found = ctypes.PyDLL(name).atomic_thread_fence if name else None
        except (OSError, AttributeError):
            continue
        if found is not None:
            found.restype = None
            return functools.partial(found, ctypes.c_int(SEQ_CST))
    return None


def _kernel_fence() -> Callable[[], None]:
    call = ctypes.PyDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    barrier = functools.partial(
        call,
        ctypes.c_long(SYSCALL_NUMBERS[platform.machine()]["membarrier"]),
        ctypes.c_int(MEMBARRIER_CMD_GLOBAL_EXPEDITED),
        ctypes.c_uint(0),
        ctypes.c_int(0),
    )
    if barrier() != 0:
        raise LaunchError(
            f"backend shm: this machine ({platform.machine()}) needs a memory fence, and neither libatomic nor the "
            f"membarrier system call is there ({os.strerror(ctypes.get_errno())}). Install libatomic1, or use gloo."
        )
    return lambda: (barrier(), None)[1]
