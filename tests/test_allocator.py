"""Temporaries of a compiled program lie where those of the call before lay."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import resource
import sys
import jax
import jax.numpy as jnp
from grpo_jax.allocator import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

@jax.jit
def products(x):
    return (x @ x.T) @ x

x = jnp.ones((4000, 4))
for _ in range(3):
    products(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    products(x).block_until_ready()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_no_page_is_mapped_again_for_a_later_call() -> None:
    faults = {
        mode: int(
            subprocess.run(
                [sys.executable, "-c", _PROGRAM, mode], capture_output=True, text=True, check=True
            ).stdout
        )
        for mode in ("kept", "default")
    }
    # The product has 64 MB, which are 15,625 pages of 4 KiB.
    if faults["default"] < 10_000:
        pytest.skip("the kernel maps large pages unasked")
    assert faults["kept"] < 200
