"""Estimators of the KL divergence to the reference, a value a token.

With samples from the policy, the expectation of ``k1`` and ``k3`` is KL(policy || reference); ``k2`` is biased
and has the exact gradient. See "Approximating KL Divergence" (J. Schulman, 2020).
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from grpo_jax.types import Array

# exp() of a larger log-ratio overflows float32 at 88.7; e^20 is already far beyond any trust region.
MAX_LOG_RATIO = 20.0


def kl_penalty(logps: Array, ref_logps: Array, *, estimator: str = "k3") -> Array:
    """Estimate the KL divergence to the reference at each sampled token.

    With ``d = logps - ref_logps``: ``k1 = d``, ``k2 = d²/2``, ``k3 = e^-d + d - 1``. In ``k3``, ``-d`` is clamped
    to at most 20, so that value and gradient are finite for any finite input; a token beyond it has gradient 0.

    Args:
        logps: the policy's log-probabilities of the sampled tokens, any shape.
        ref_logps: the reference's, same shape; no gradient flows into them by the caller's choice.
        estimator: ``k1``, ``k2`` or ``k3``.

    Raises:
        ValueError: an unknown estimator.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {sorted(ESTIMATORS)}, got {estimator!r}")
    return ESTIMATORS[estimator](logps - ref_logps)


def _k3(d: Array) -> Array:
    # Only this side overflows: for d >> 0 the exponential vanishes and the gradient is rightly 1.
    d = jnp.maximum(d, -MAX_LOG_RATIO)
    return jnp.exp(-d) + d - 1.0


ESTIMATORS: dict[str, Callable[[Array], Array]] = {
    "k1": lambda d: d,
    "k2": lambda d: jnp.square(d) / 2,
    "k3": _k3,
}
