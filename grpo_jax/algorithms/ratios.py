"""Importance ratios between the policy and the one that a batch began with, of a token or of a whole completion.

Shapes: P prompts, G completions of a prompt, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.algorithms.kl import MAX_LOG_RATIO
from grpo_jax.types import Array


def log_ratio(logps: Array, old_logps: Array, mask: Array, *, ratio: str) -> Array:
    """Logarithm of the ratio that each token carries, clamped to ±20.

    With ``d = logps - old_logps`` and sums over a completion's n masked-in tokens:

    - ``token``: ``d``. "Proximal Policy Optimization Algorithms" (arXiv 1707.06347).
    - ``sequence``: ``Σ d / n``, the same for every token. "Group Sequence Policy Optimization" (2507.18071).
    - ``sequence_token``: the value of ``sequence``, and for each token the gradient of its own ``d`` (same).
    - ``trajectory``: ``Σ d``, the same for every token. TIC-GRPO (2508.02833).

    Args:
        logps: ``[P, G, T]`` log-probabilities under the policy.
        old_logps: ``[P, G, T]`` those of the policy at the start of this batch's updates.
        mask: ``[P, G, T]`` bool or 0/1; what is masked out may hold anything, NaN included.
        ratio: one of the names above.

    Returns:
        ``[P, G, T]``; where masked out, the completion's value, or 0 for the token forms.

    Raises:
        ValueError: an unknown ratio.
    """
    if ratio not in RATIOS:
        raise ValueError(f"ratio must be one of {list(RATIOS)}, got {ratio!r}")
    mask = mask.astype(bool)
    value = RATIOS[ratio](log_difference(logps, old_logps, mask), mask)
    return jnp.clip(value, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def log_difference(logps: Array, old_logps: Array, mask: Array) -> Array:
    """``logps - old_logps``, 0 where masked out: a NaN in the padding must not reach an exp, nor a gradient."""
    return jnp.where(mask.astype(bool), logps - old_logps, 0.0)


def completion_mean(values: Array, mask: Array) -> Array:
    """Mean over a completion's tokens of values that are 0 where masked out; the same on every token."""
    return jnp.broadcast_to(
        values.sum(axis=-1, keepdims=True) / jnp.maximum(mask.sum(axis=-1, keepdims=True), 1), values.shape
    )


def _trajectory(d: Array, mask: Array) -> Array:
    return jnp.broadcast_to(d.sum(axis=-1, keepdims=True), d.shape)


def _sequence_token(d: Array, mask: Array) -> Array:
    # d less itself is exactly 0: only its gradient is added.
    return jax.lax.stop_gradient(completion_mean(d, mask)) + (d - jax.lax.stop_gradient(d))


RATIOS: dict[str, Callable[[Array, Array], Array]] = {
    "token": lambda d, mask: d,
    "sequence": completion_mean,
    "sequence_token": _sequence_token,
    "trajectory": _trajectory,
}
