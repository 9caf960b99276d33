"""From rewards to advantages once more: NumPy, float64, one reward at a time, nothing shared with the package.

A NaN reward is missing. Every choice that has a name is one entry of a dict, so the tests take their
parameters from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

Rows = np.ndarray


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def _std(values: Iterable[float], *, ddof: int) -> float:
    """Spread around the mean; one value alone, and values that are all the same, have none."""
    values = list(values)
    if max(values) == min(values):
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / max(len(values) - ddof, 1))


def _over(numerator: float, denominator: float) -> float:
    """0 / 0 is 0: without a spread nothing is better than anything."""
    return numerator / denominator if numerator else 0.0


def _present(rewards: Rows) -> list[tuple[int, list[int]]]:
    """``(prompt, its completions that have a reward)`` of every group of two rewards and more."""
    groups = []
    for p, row in enumerate(rewards):
        here = [g for g, r in enumerate(row) if not math.isnan(r)]
        if len(here) >= 2:
            groups.append((p, here))
    return groups


def _centered(rewards: Rows) -> Rows:
    """``r - mean`` in each group, exactly 0 where all are equal."""
    out = np.zeros_like(rewards)
    for p, here in _present(rewards):
        mine = [rewards[p, g] for g in here]
        if max(mine) > min(mine):
            for g in here:
                out[p, g] = rewards[p, g] - _mean(mine)
    return out


def _group(rewards: Rows, *, eps: float, ddof: int, lengths: Rows | None) -> Rows:
    out = _centered(rewards)
    for p, here in _present(rewards):
        spread = _std((rewards[p, g] for g in here), ddof=ddof)
        for g in here:
            out[p, g] = _over(out[p, g], spread + eps)
    return out


def _batch_std(rewards: Rows, *, eps: float, ddof: int, lengths: Rows | None) -> Rows:
    out = _centered(rewards)
    everyone = rewards[~np.isnan(rewards)]
    for p, here in _present(rewards):
        for g in here:
            out[p, g] = _over(out[p, g], _std(everyone, ddof=ddof) + eps)
    return out


def _center(rewards: Rows, *, eps: float, ddof: int, lengths: Rows | None) -> Rows:
    return _centered(rewards)


def _batch(rewards: Rows, *, eps: float, ddof: int, lengths: Rows | None) -> Rows:
    return _group(rewards.reshape(1, -1), eps=eps, ddof=ddof, lengths=None).reshape(rewards.shape)


def _batch_baseline(rewards: Rows, *, eps: float, ddof: int, lengths: Rows | None) -> Rows:
    out = _centered(rewards)
    present = ~np.isnan(rewards)
    for p, g in np.argwhere(present):
        out[p, g] = _over(out[p, g], _std(_centered(rewards)[present], ddof=ddof) + eps)
    return out


def _leave_one_out(rewards: Rows, *, eps: float, ddof: int, lengths: Rows | None) -> Rows:
    out = np.zeros_like(rewards)
    for p, here in _present(rewards):
        for g in here:
            out[p, g] = rewards[p, g] - _mean(rewards[p, other] for other in here if other != g)
    return out


def _maxrl(rewards: Rows, *, eps: float, ddof: int, lengths: Rows | None) -> Rows:
    out = _centered(rewards)
    for p, here in _present(rewards):
        mean = _mean(rewards[p, g] for g in here)
        for g in here:
            # Rewards of order 1: a mean below this is what rounding left of 0.
            out[p, g] = out[p, g] / mean if mean > 1e-14 else 0.0
    return out


def _opo(rewards: Rows, *, eps: float, ddof: int, lengths: Rows | None) -> Rows:
    assert lengths is not None
    out = np.zeros_like(rewards)
    for p, here in _present(rewards):
        tokens = math.fsum(lengths[p, g] for g in here)
        baseline = math.fsum(lengths[p, g] * rewards[p, g] for g in here) / tokens
        for g in here:
            out[p, g] = rewards[p, g] - baseline
    return out


ADVANTAGES: dict[str, Callable[..., Rows]] = {
    "group": _group,
    "batch_std": _batch_std,
    "center": _center,
    "batch": _batch,
    "batch_baseline": _batch_baseline,
    "leave_one_out": _leave_one_out,
    "maxrl": _maxrl,
    "opo": _opo,
}


def advantages(
    rewards_PG: Rows,
    *,
    estimator: str = "group",
    eps: float = 1e-4,
    ddof: int = 1,
    lengths_PG: Rows | None = None,
) -> Rows:
    """Advantages ``[P, G]`` of rewards ``[P, G]``."""
    rewards = np.asarray(rewards_PG, np.float64)
    return ADVANTAGES[estimator](rewards, eps=eps, ddof=ddof, lengths=lengths_PG)


# ---------------------------------------------------------------------------------- several rewards


def weighted_sum(rewards_PGK: Rows, weights_K: Rows) -> Rows:
    """The weighted sum of the rewards that are there; NaN where there is none."""
    out = np.full(rewards_PGK.shape[:2], np.nan)
    for p, g in np.ndindex(*out.shape):
        terms = [w * r for w, r in zip(weights_K, rewards_PGK[p, g], strict=True) if not math.isnan(r)]
        if terms:
            out[p, g] = math.fsum(terms)
    return out


def _sum_then_normalize(rewards: Rows, weights: Rows, *, estimator: str, **options: object) -> Rows:
    return advantages(weighted_sum(rewards, weights), estimator=estimator, **options)


def _normalize_then_sum(
    rewards: Rows, weights: Rows, *, estimator: str, eps: float, ddof: int, lengths_PG: Rows | None
) -> Rows:
    assert estimator == "group"
    total = np.zeros(rewards.shape[:2])
    for k, weight in enumerate(weights):
        total += weight * advantages(rewards[..., k], eps=eps, ddof=ddof)
    scored = ~np.isnan(rewards).all(axis=-1)
    if not scored.any():
        return total
    spread = _std(total[scored], ddof=ddof)
    return np.array([[_over(x, spread + eps) for x in row] for row in total])


METHODS: dict[str, Callable[..., Rows]] = {
    "sum_then_normalize": _sum_then_normalize,
    "normalize_then_sum": _normalize_then_sum,
}


def combine_rewards(
    rewards_PGK: Rows,
    weights_K: Rows,
    *,
    method: str = "sum_then_normalize",
    estimator: str = "group",
    eps: float = 1e-4,
    ddof: int = 1,
    lengths_PG: Rows | None = None,
) -> Rows:
    """Advantages ``[P, G]`` of several reward functions' rewards ``[P, G, K]``."""
    rewards, weights = np.asarray(rewards_PGK, np.float64), np.asarray(weights_K, np.float64)
    return METHODS[method](rewards, weights, estimator=estimator, eps=eps, ddof=ddof, lengths_PG=lengths_PG)


def soft_overlong(length: int, *, max_length: int, cache: int) -> float:
    """The penalty of one completion's length, from 0 down to -1."""
    if length <= max_length - cache:
        return 0.0
    if length >= max_length:
        return -1.0
    return (max_length - cache - length) / cache
