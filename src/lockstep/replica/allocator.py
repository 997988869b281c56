"""C's allocator, and what it does with memory that was freed: keep it for the next step, or give it to the kernel.

A step frees what the next one asks for again: activations and gradients. glibc gives free memory at the end of its
heap back as soon as there is enough of it, and the kernel then hands it out anew page by page, each page zeroed; what
that takes is shown by `lockstep bench step --variants nocomm kept`. So while a model trains on the CPU, nothing is
given back but blocks of 32 MB and more, which glibc always maps by themselves. Whoever has tuned glibc by its own
variables is left alone. Other C libraries have no such settings.
"""

import contextlib
import ctypes
import os

M_TRIM_THRESHOLD = -1
"""The number of this setting in C's malloc.h;"""
M_MMAP_THRESHOLD = -3
"""and of this one."""
NEVER = -1
LARGE_BLOCK_BYTES = 1 << 20
LARGEST_KEPT_BYTES = 32 << 20
"""The most that glibc takes, and what it comes to by itself where such blocks are freed."""
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def trim() -> None:
    """Give back what is free now: whole parameters have just been freed, and nothing of their size will come."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Keep what a step frees for the next one, from now on, instead of having the kernel zero it anew."""
    if not _is_tuned():
        _set(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        _set(M_TRIM_THRESHOLD, NEVER)


def give_back_large_blocks() -> None:
    """Give blocks of a megabyte and more back as soon as they are freed, from now on; costs page faults.

    Where buffers come and go in several threads (gloo has its own), the allocator would keep several times what is
    in use.
    """
    if not _is_tuned():
        _set(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        _set(M_TRIM_THRESHOLD, 2 * LARGE_BLOCK_BYTES)  # As glibc would by itself.


def _is_tuned() -> bool:
    """Whether the user has decided."""
    return any(name in os.environ for name in _VARIABLES) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")


def _set(name: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(name, value)
