"""From the rewards of a group to its advantages.

Shapes: P prompts, G completions of a prompt (the legend is in ``grpo_jax.types``). NaN marks a missing reward:
it takes no part in a statistic, and its own advantage is 0.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from grpo_jax.types import Array


def group_advantages(rewards_PG: Array, *, estimator: str = "group", eps: float = 1e-4, ddof: int = 1) -> Array:
    """Compare each reward with its group.

    - ``group``: ``(r - mean) / (std + eps)``. See "DeepSeekMath" (arXiv 2402.03300).
    - ``center``: ``r - mean``. See "Understanding R1-Zero-Like Training" (arXiv 2503.20783).
    - ``leave_one_out``: ``r - mean of the others``. See "Back to Basics" (arXiv 2402.14740).

    Args:
        rewards_PG: rewards; NaN where there is none.
        estimator: one of the names above.
        eps: added to the standard deviation (``group``).
        ddof: 0 divides the squared deviations by the number of rewards, 1 by one less (``group``).

    Returns:
        ``[P, G]`` advantages: exactly 0 for a missing reward, in a group of equal rewards, and in a group
        with fewer than two rewards.

    Raises:
        ValueError: an unknown estimator, a group size below 2, or another ``ddof``.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {sorted(ESTIMATORS)}, got {estimator!r}")
    if rewards_PG.shape[-1] < 2:
        raise ValueError(f"group_size must be at least 2 for advantage={estimator!r}, got {rewards_PG.shape[-1]}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 or 1, got {ddof}")
    shifted_PG, present_PG, count_P1 = _shift(rewards_PG)
    advantages_PG = ESTIMATORS[estimator](shifted_PG, present_PG, count_P1, eps, ddof)
    return jnp.where(present_PG & (count_P1 >= 2), advantages_PG, 0.0)


def zero_spread(rewards_PG: Array) -> Array:
    """Which groups (bool ``[P]``) have no two different rewards, and hence nothing to teach."""
    shifted_PG, present_PG, _ = _shift(rewards_PG)
    return ~jnp.any(present_PG & (shifted_PG != 0), axis=-1)


def _shift(rewards_PG: Array) -> tuple[Array, Array, Array]:
    """Rewards less the group's first present one (0 where missing), their presence, and their number.

    Every estimator ignores a shift of the whole group; with it, equal rewards are equal to 0 before any sum is
    rounded (seven times 0.7 has a float32 standard deviation of 6e-8, not 0).
    """
    present_PG = ~jnp.isnan(rewards_PG)
    first_P1 = jnp.argmax(present_PG, axis=-1, keepdims=True)
    anchor_P1 = jnp.take_along_axis(rewards_PG, first_P1, axis=-1)
    shifted_PG = jnp.where(present_PG, rewards_PG - anchor_P1, 0.0)
    return shifted_PG, present_PG, present_PG.sum(axis=-1, keepdims=True)


def _center(r_PG: Array, present_PG: Array, count_P1: Array, eps: float, ddof: int) -> Array:
    return r_PG - r_PG.sum(axis=-1, keepdims=True) / jnp.maximum(count_P1, 1)


def _group(r_PG: Array, present_PG: Array, count_P1: Array, eps: float, ddof: int) -> Array:
    deviation_PG = jnp.where(present_PG, _center(r_PG, present_PG, count_P1, eps, ddof), 0.0)
    variance_P1 = jnp.square(deviation_PG).sum(axis=-1, keepdims=True) / jnp.maximum(count_P1 - ddof, 1)
    spread_P1 = jnp.sqrt(variance_P1) + eps
    return deviation_PG / jnp.where(spread_P1 > 0, spread_P1, 1.0)


def _leave_one_out(r_PG: Array, present_PG: Array, count_P1: Array, eps: float, ddof: int) -> Array:
    return r_PG - (r_PG.sum(axis=-1, keepdims=True) - r_PG) / jnp.maximum(count_P1 - 1, 1)


ESTIMATORS: dict[str, Callable[[Array, Array, Array, float, int], Array]] = {
    "group": _group,
    "center": _center,
    "leave_one_out": _leave_one_out,
}
