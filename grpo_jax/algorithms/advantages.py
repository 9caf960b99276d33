"""From the rewards of a group to its advantages.

Shapes: P prompts, G completions of a prompt, K reward functions (the legend is in ``grpo_jax.types``). NaN marks a
missing reward: it takes no part in a statistic, and its own advantage is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from grpo_jax.types import Array


def group_advantages(
    rewards_PG: Array,
    *,
    estimator: str = "group",
    eps: float = 1e-4,
    ddof: int = 1,
    lengths_PG: Array | None = None,
) -> Array:
    """Compare each reward with its group, or with the batch.

    - ``group``: ``(r - mean) / (std + eps)``. "DeepSeekMath" (arXiv 2402.03300).
    - ``batch_std``: ``(r - mean) / (std of all rewards of the batch + eps)``. "Tricks or Traps?" (2508.08221).
    - ``center``: ``r - mean``. "Understanding R1-Zero-Like Training", Dr. GRPO (2503.20783).
    - ``batch``: ``(r - mean of the batch) / (std of the batch + eps)``. "REINFORCE++" (2501.03262).
    - ``batch_baseline``: ``r - mean``, over the standard deviation of that in the batch: its form with baseline.
    - ``leave_one_out``: ``r - mean of the others``. "Back to Basics", RLOO (2402.14740).
    - ``maxrl``: ``(r - mean) / mean``, 0 where the mean is not above 0 (and its rounding). "MaxRL" (2602.02710).
      With rewards 0 and 1 it follows the expansion of log p up to order G - 1.
    - ``opo``: ``r - Σ n r / Σ n``, the group's mean weighted by length. "On-Policy RL with Optimal Reward
      Baseline" (2505.23585).

    Where "the batch" is meant, pass the rewards of the whole optimizer batch.

    Args:
        rewards_PG: rewards; NaN where there is none.
        estimator: one of the names above.
        eps: added to the standard deviation.
        ddof: 0 divides the squared deviations by the number of rewards, 1 by one less.
        lengths_PG: completion lengths in tokens; needed by ``opo`` alone.

    Returns:
        ``[P, G]`` advantages: exactly 0 for a missing reward, in a group of equal rewards, and in a group
        with fewer than two rewards (for ``batch``: in such a batch, which is its group).

    Raises:
        ValueError: an unknown estimator, a group size below 2 (but for ``batch``), another ``ddof``, or
            ``opo`` without lengths.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {sorted(ESTIMATORS)}, got {estimator!r}")
    if estimator != "batch" and rewards_PG.shape[-1] < 2:
        raise ValueError(f"group_size must be at least 2 for advantage={estimator!r}, got {rewards_PG.shape[-1]}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 or 1, got {ddof}")
    if estimator == "opo" and lengths_PG is None:
        raise ValueError("lengths_PG must be given for advantage='opo', got None: its baseline weighs by length")
    if estimator == "batch":
        return _compare(rewards_PG.reshape(1, -1), _group, eps, ddof).reshape(rewards_PG.shape)
    return _compare(rewards_PG, ESTIMATORS[estimator], eps, ddof, lengths_PG)


def combine_rewards(
    rewards_PGK: Array,
    weights_K: Array,
    *,
    method: str = "sum_then_normalize",
    eps: float = 1e-4,
    ddof: int = 1,
    estimator: str = "group",
    lengths_PG: Array | None = None,
) -> Array:
    """Advantages from several reward functions.

    - ``sum_then_normalize``: :func:`group_advantages` of the weighted sum.
    - ``normalize_then_sum``: each function's rewards are normalised in the group, and their weighted sum is
      divided by its standard deviation over the batch (+ eps), so that a function of small rewards counts as
      much as one of large ones. "GDPO" (arXiv 2601.05242). The paper also subtracts the batch's mean, which is
      0 by construction; it isn't computed here, so that rounding gives no advantage to a group of equal rewards.

    Args:
        rewards_PGK: one column a reward function; NaN where it gave none.
        weights_K: weights of the functions.
        method: one of the names above.
        eps: see :func:`group_advantages`.
        ddof: see :func:`group_advantages`.
        estimator: see :func:`group_advantages`; ``normalize_then_sum`` takes ``group`` alone.
        lengths_PG: see :func:`group_advantages`.

    Returns:
        ``[P, G]`` advantages; 0 where every function's reward is missing.

    Raises:
        ValueError: an unknown method, a number of weights other than K, or what :func:`group_advantages` refuses.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {list(METHODS)}, got {method!r}")
    if method == "sum_then_normalize":
        return group_advantages(
            weighted_sum(rewards_PGK, weights_K), estimator=estimator, eps=eps, ddof=ddof, lengths_PG=lengths_PG
        )
    if estimator != "group":
        raise ValueError(f"estimator must be 'group' for method='normalize_then_sum', got {estimator!r}")
    normalized_KPG = group_advantages(jnp.moveaxis(rewards_PGK, -1, 0), eps=eps, ddof=ddof)
    summed_PG = weighted_sum(jnp.moveaxis(normalized_KPG, 0, -1), weights_K)
    present_PG = ~jnp.isnan(rewards_PGK).all(axis=-1)
    return _over(summed_PG, _spread(summed_PG, present_PG, ddof, axis=(-2, -1)), eps)


def weighted_sum(rewards_PGK: Array, weights_K: Array) -> Array:
    """Each completion's total ``[P, G]`` over the reward functions that gave one; NaN where none did.

    Raises:
        ValueError: the number of weights is not K.
    """
    weights_K = jnp.asarray(weights_K, rewards_PGK.dtype)
    if weights_K.shape != rewards_PGK.shape[-1:]:
        raise ValueError(
            f"weights_K must be one a reward function: got {weights_K.size} for {rewards_PGK.shape[-1]} functions"
        )
    present_PGK = ~jnp.isnan(rewards_PGK)
    total_PG = (jnp.where(present_PGK, rewards_PGK, 0.0) * weights_K[None, None]).sum(axis=-1)
    return jnp.where(present_PGK.any(axis=-1), total_PG, jnp.nan)


def zero_spread(rewards_PG: Array) -> Array:
    """Which groups (bool ``[P]``) have no two different rewards, and hence nothing to teach."""
    group = _shift(rewards_PG)
    return ~jnp.any(group.present_PG & (group.shifted_PG != 0), axis=-1)


class _Group(NamedTuple):
    """Rewards less the group's first present one.

    Every deviation ignores a shift of the whole group; with it, equal rewards are equal to 0 before any sum is
    rounded (seven times 0.7 has a float32 standard deviation of 6e-8, not 0).
    """

    shifted_PG: Array
    """0 where missing."""
    present_PG: Array
    count_P1: Array
    """Rewards present."""
    anchor_P1: Array
    """The reward that was subtracted; 0 in a group without any."""
    lengths_PG: Array | None = None


def _shift(rewards_PG: Array, lengths_PG: Array | None = None) -> _Group:
    present_PG = ~jnp.isnan(rewards_PG)
    first_P1 = jnp.argmax(present_PG, axis=-1, keepdims=True)
    anchor_P1 = jnp.nan_to_num(jnp.take_along_axis(rewards_PG, first_P1, axis=-1))
    shifted_PG = jnp.where(present_PG, rewards_PG - anchor_P1, 0.0)
    return _Group(shifted_PG, present_PG, present_PG.sum(axis=-1, keepdims=True), anchor_P1, lengths_PG)


def _compare(
    rewards_PG: Array, estimator: Estimator, eps: float, ddof: int, lengths_PG: Array | None = None
) -> Array:
    """The estimator's advantages where there are two rewards to compare, else 0."""
    group = _shift(rewards_PG, lengths_PG)
    return jnp.where(group.present_PG & (group.count_P1 >= 2), estimator(group, eps, ddof), 0.0)


def _mean(group: _Group) -> Array:
    """Mean of the shifted rewards, ``[P, 1]``."""
    return group.shifted_PG.sum(axis=-1, keepdims=True) / jnp.maximum(group.count_P1, 1)


def _spread(deviations: Array, present: Array, ddof: int, axis: int | tuple[int, int] = -1) -> Array:
    """Standard deviation of what is present, from deviations that are 0 elsewhere."""
    count = present.sum(axis=axis, keepdims=True)
    return jnp.sqrt(jnp.square(deviations).sum(axis=axis, keepdims=True) / jnp.maximum(count - ddof, 1))


def _over(deviations: Array, spread: Array, eps: float) -> Array:
    """``deviations / (spread + eps)``, and 0 where that is 0 / 0."""
    spread = spread + eps
    return deviations / jnp.where(spread > 0, spread, 1.0)


def _center(group: _Group, eps: float, ddof: int) -> Array:
    return jnp.where(group.present_PG, group.shifted_PG - _mean(group), 0.0)


def _group(group: _Group, eps: float, ddof: int) -> Array:
    deviations_PG = _center(group, eps, ddof)
    return _over(deviations_PG, _spread(deviations_PG, group.present_PG, ddof), eps)


def _batch_std(group: _Group, eps: float, ddof: int) -> Array:
    rewards_PG = jnp.where(group.present_PG, group.shifted_PG + group.anchor_P1, jnp.nan)
    batch = _shift(rewards_PG.reshape(1, -1))
    return _over(_center(group, eps, ddof), _spread(_center(batch, eps, ddof), batch.present_PG, ddof), eps)


def _batch_baseline(group: _Group, eps: float, ddof: int) -> Array:
    # The deviations' mean over the batch is 0 by construction, and isn't subtracted: see combine_rewards.
    deviations_PG = _center(group, eps, ddof)
    return _over(deviations_PG, _spread(deviations_PG, group.present_PG, ddof, axis=(-2, -1)), eps)


def _leave_one_out(group: _Group, eps: float, ddof: int) -> Array:
    others_PG = group.shifted_PG.sum(axis=-1, keepdims=True) - group.shifted_PG
    return group.shifted_PG - others_PG / jnp.maximum(group.count_P1 - 1, 1)


def _maxrl(group: _Group, eps: float, ddof: int) -> Array:
    mean_P1 = group.anchor_P1 + _mean(group)
    # Weighted sums that cancel leave a mean of some roundings, which is no success to divide by.
    size_P1 = jnp.abs(group.anchor_P1) + jnp.abs(group.shifted_PG).max(axis=-1, keepdims=True)
    solved_P1 = mean_P1 > 8 * jnp.finfo(mean_P1.dtype).eps * size_P1
    return jnp.where(solved_P1, _center(group, eps, ddof) / jnp.where(solved_P1, mean_P1, 1.0), 0.0)


def _opo(group: _Group, eps: float, ddof: int) -> Array:
    assert group.lengths_PG is not None
    weights_PG = jnp.where(group.present_PG, group.lengths_PG, 0).astype(group.shifted_PG.dtype)
    total_P1 = weights_PG.sum(axis=-1, keepdims=True)
    baseline_P1 = (weights_PG * group.shifted_PG).sum(axis=-1, keepdims=True) / jnp.maximum(total_P1, 1)
    return group.shifted_PG - baseline_P1


Estimator = Callable[[_Group, float, int], Array]

METHODS = ("sum_then_normalize", "normalize_then_sum")
ESTIMATORS: dict[str, Estimator] = {
    "group": _group,
    "batch_std": _batch_std,
    "center": _center,
    "batch": _group,  # the whole batch as one group
    "batch_baseline": _batch_baseline,
    "leave_one_out": _leave_one_out,
    "maxrl": _maxrl,
    "opo": _opo,
}
