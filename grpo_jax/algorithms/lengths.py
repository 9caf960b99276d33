"""Length control: a penalty for completions near and beyond a limit."""

from __future__ import annotations

import jax.numpy as jnp

from grpo_jax.types import Array


def soft_overlong(lengths: Array, *, max_length: int, cache: int) -> Array:
    """DAPO's soft overlong punishment, to be added to the reward.

    0 up to ``max_length - cache``, from there linear to -1 at ``max_length``, and -1 beyond. See "DAPO"
    (arXiv 2503.14476), equation 13.

    Args:
        lengths: completion lengths in tokens, any shape.
        max_length: length from which the penalty is whole.
        cache: tokens over which it grows.

    Returns:
        Penalties in [-1, 0], of the shape of ``lengths``, float32 at least.

    Raises:
        ValueError: ``cache`` not in 1..max_length.
    """
    if not 1 <= cache <= max_length:
        raise ValueError(f"cache must be at least 1 and at most max_length ({max_length}), got {cache}")
    return jnp.clip((max_length - cache - lengths) / cache, -1.0, 0.0)
