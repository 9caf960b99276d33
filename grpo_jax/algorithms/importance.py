"""Weights that correct for a sampler that is not the policy: other kernels, truncation, stale weights.

Shapes: P prompts, G completions of a prompt, T completion tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from grpo_jax.algorithms.aggregates import masked_mean
from grpo_jax.algorithms.ratios import log_ratio
from grpo_jax.types import Array

# The levels of a weight and the ratios (policy over sampler) that they are.
LEVELS = {"token": "token", "sequence": "trajectory"}
OUTSIDE = ("truncate", "drop")


def importance_weights(
    old_logps: Array,
    sampler_logps: Array,
    mask: Array,
    *,
    level: str = "token",
    outside: str = "truncate",
    low: float = 0.0,
    cap: float = 2.0,
) -> tuple[Array, dict[str, Array]]:
    """``exp(old - sampler)``, bounded, for the ``importance_weights`` of the policy loss.

    Truncated weights are those of "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (F. Yao et al., 2025); dropped ones those of IcePop (arXiv 2510.18855).

    Args:
        old_logps: ``[P, G, T]`` the policy at the start of this batch's updates; taken as constant.
        sampler_logps: ``[P, G, T]`` under the distribution that was really sampled from.
        mask: ``[P, G, T]`` bool or 0/1; what is masked out may hold anything.
        level: ``token``: each token its own; ``sequence``: the product over a completion, on each of its tokens.
        outside: ``truncate``: weights above ``cap`` become ``cap``; ``drop``: weights outside
            ``[low, cap]`` become 0.
        low: lower end of the band (``drop``).
        cap: upper end.

    Returns:
        ``(weights, metrics)``: ``[P, G, T]``, and ``importance`` (mean weight), ``importance_clipped`` and
        ``importance_dropped`` (shares of tokens).

    Raises:
        ValueError: an unknown level or ``outside``.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {list(LEVELS)}, got {level!r}")
    if outside not in OUTSIDE:
        raise ValueError(f"outside must be one of {list(OUTSIDE)}, got {outside!r}")
    raw = jax.lax.stop_gradient(jnp.exp(log_ratio(old_logps, sampler_logps, mask, ratio=LEVELS[level])))
    above, below = raw > cap, (raw < low) & (outside == "drop")
    dropped = (above | below) & (outside == "drop")
    weights = jnp.where(dropped, 0.0, jnp.minimum(raw, cap))
    return weights, {
        "importance": masked_mean(weights, mask),
        "importance_clipped": masked_mean(above & ~dropped, mask),
        "importance_dropped": masked_mean(dropped, mask),
    }
