"""C's allocator keeps memory that was freed; here it is asked to give some of it back to the kernel."""

import contextlib
import ctypes

M_MMAP_THRESHOLD = -3
"""The number of this setting in C's malloc.h."""
LARGE_BLOCK_BYTES = 1 << 20


def trim() -> None:
    """Give back what is free now: whole parameters have just been freed, and nothing of their size will come."""
    with contextlib.suppress(OSError, AttributeError):  # Other C libraries have no such function.
        ctypes.CDLL(None).malloc_trim(0)


def give_back_large_blocks() -> None:
    """Give blocks of a megabyte and more back as soon as they are freed, from now on; costs page faults.

    Where buffers come and go in several threads (gloo has its own), the allocator would keep several times what is
    in use.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
