"""Memory that XLA's CPU backend frees after a call stays with the process for the next one, in large pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys

import jax

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
# <sys/mman.h>
_MADV_HUGEPAGE = 14


def keep_freed_memory() -> None:
    """Under glibc, for the whole process: one heap for all threads, and on CPUs none of it is given back.

    Otherwise each step on a CPU begins with fresh pages, all of which the kernel has to map and clear. What the
    process may come to hold lies in large pages where the kernel has them: a step walks through far more memory
    than the processor's table of small ones covers.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    # Before the backend starts its threads: a thread's own arena is given back whenever it is empty.
    libc.mallopt(_M_ARENA_MAX, 1)
    if jax.default_backend() != "cpu":
        return
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never
    _reserve_large_pages(libc, os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2)


def _reserve_large_pages(libc: ctypes.CDLL, size: int) -> None:
    """Let the allocator's next ``size`` bytes be large pages; until they are used, they are addresses only."""
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(size)
    if block is None:
        return
    start = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
    libc.madvise(start, (block + size - start) // mmap.PAGESIZE * mmap.PAGESIZE, _MADV_HUGEPAGE)
    libc.free(block)
