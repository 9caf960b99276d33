"""Memory that XLA's CPU backend frees after each call is kept by the process, for the next call."""

from __future__ import annotations

import ctypes
import platform

import jax

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """On CPUs under glibc: stop the allocator from giving a step's temporaries back to the system.

    Otherwise each step begins with fresh pages, all of which the kernel has to map and clear.
    """
    if jax.default_backend() == "cpu" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
