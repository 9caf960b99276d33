"""Estimators of the KL divergence to the reference, a value a token.

With samples from the policy, the expectation of ``k1`` and ``k3`` is KL(policy || reference); ``k2`` is biased
in value, but summed over tokens on-policy it has the exact gradient of the token-level divergence. See
"Approximating KL Divergence" (J. Schulman, 2020). What each estimator's gradient is in expectation, as a term of
the loss, is tabulated in ``experiments/bias_table.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.types import Array

# exp() of a larger log-ratio overflows float32 at 88.7; e^20 is already far beyond any trust region.
MAX_LOG_RATIO = 20.0


def kl_penalty(logps: Array, ref_logps: Array, *, estimator: str = "k3") -> Array:
    """Estimate the KL divergence to the reference at each sampled token.

    With ``d = logps - ref_logps``: ``k1 = d``, ``k2 = d²/2``, ``k3 = e^-d + d - 1``; ``k3_straight_through`` has
    the value of ``k3`` and the gradient ``d`` of ``k2``. In ``k3``, ``-d`` is clamped to at most 20, so that value
    and gradient are finite at any log-ratio; a token beyond it has gradient 0.

    Args:
        logps: the policy's log-probabilities of the sampled tokens, any shape.
        ref_logps: the reference's, same shape; no gradient flows into them by the caller's choice.
        estimator: one of the names above.

    Raises:
        ValueError: an unknown estimator.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {sorted(ESTIMATORS)}, got {estimator!r}")
    return ESTIMATORS[estimator](logps - ref_logps)


def _k2(d: Array) -> Array:
    return jnp.square(d) / 2


def _k3(d: Array) -> Array:
    # Only this side overflows: for d >> 0 the exponential vanishes and the gradient is rightly 1.
    d = jnp.maximum(d, -MAX_LOG_RATIO)
    return jnp.exp(-d) + d - 1.0


def _straight_through(d: Array) -> Array:
    return _k2(d) + jax.lax.stop_gradient(_k3(d) - _k2(d))


ESTIMATORS: dict[str, Callable[[Array], Array]] = {
    "k1": lambda d: d,
    "k2": _k2,
    "k3": _k3,
    "k3_straight_through": _straight_through,
}
