"""Keys and values of tokens, as attention and its kernels take them. Shapes: see grpo_jax/models/attention.py."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from grpo_jax.types import Array


class KV(NamedTuple):
    """Keys, rotated to their positions, and values: ``[P, K, S, H]`` (a group's) or ``[P, K, G, S, H]``."""

    k: Array
    v: Array


class Context(NamedTuple):
    """Keys and values of earlier tokens, and which of them count: ``[P, S]`` or ``[P, G, S]``, like the keys."""

    kv: KV
    mask: Array


def round_up(size: int, multiple: int) -> int:
    """The least multiple that is not below ``size``."""
    return -(-size // multiple) * multiple


def padded(x: Array, axis: int, size: int) -> Array:
    """``x`` with zeros after the end of an axis, up to ``size``."""
    return jnp.pad(x, [(0, size - x.shape[i] if i == axis else 0) for i in range(x.ndim)])
