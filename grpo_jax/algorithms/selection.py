"""Tokens that a rule picks out of the whole optimizer batch.

Pick them once, over all micro-batches, and hand them to the loss: a part of a batch ranks its tokens otherwise.

Shapes: P prompts, G completions of a prompt, T completion tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from grpo_jax.algorithms.aggregates import masked_mean
from grpo_jax.config.combinations import COVARIANCE_SURROGATES
from grpo_jax.types import Array

# A share of a count is rounded as the exact product would be: 0.6 * 105 is 63.000004 in float32. Relative.
_ROUNDING = 3e-7


def top_entropy_tokens(entropy_PGT: Array, mask_PGT: Array, *, share: float) -> Array:
    """The ``share`` of the batch's tokens (rounded up) with the largest entropy, bool ``[P, G, T]``.

    See "Beyond the 80/20 Rule" (arXiv 2506.01939), which trains on a share of 0.2.
    """
    count = jnp.ceil(share * mask_PGT.astype(bool).sum() * (1 - _ROUNDING))
    return _largest(entropy_PGT, mask_PGT.astype(bool), count)


def covariance_tokens(
    logps: Array,
    advantages: Array,
    mask: Array,
    *,
    surrogate: str,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    key: Array | None = None,
) -> Array:
    """Tokens whose log-probability and advantage move together: those that collapse the entropy.

    ``cov_t = (logp_t - mean logp)(A_t - mean A)``, means over the batch's tokens. See "The Entropy Mechanism of
    Reinforcement Learning for Reasoning Language Models" (arXiv 2505.22617).

    Args:
        logps: ``[P, G, T]`` log-probabilities under the policy.
        advantages: ``[P, G]``.
        mask: ``[P, G, T]`` bool or 0/1.
        surrogate: ``clip_cov`` picks at random among the tokens with ``low <= cov <= high``; ``kl_cov`` takes
            the largest.
        share: share of the batch's tokens to pick, rounded down, and at least one.
        low: lower end of the band (``clip_cov``).
        high: upper end.
        key: random key (``clip_cov``); None for ``jax.random.key(0)``.

    Returns:
        bool ``[P, G, T]``.
    """
    assert surrogate in COVARIANCE_SURROGATES, surrogate
    mask = mask.astype(bool)
    logps, advantages = jax.lax.stop_gradient((logps, jnp.broadcast_to(advantages[..., None], mask.shape)))
    covariance = (logps - masked_mean(logps, mask)) * (advantages - masked_mean(advantages, mask))
    count = jnp.maximum(jnp.floor(share * mask.sum() * (1 + _ROUNDING)), 1)
    if surrogate == "kl_cov":
        return _largest(covariance, mask, count)
    candidates = mask & (covariance >= low) & (covariance <= high)
    draws = jax.random.uniform(jax.random.key(0) if key is None else key, mask.shape)
    return _largest(draws, candidates, count)


def _largest(values_PGT: Array, mask_PGT: Array, count: Array) -> Array:
    """The ``count`` largest masked-in values, bool; all of them where there are fewer."""
    order = jnp.argsort(jnp.where(mask_PGT, values_PGT, -jnp.inf), axis=None, descending=True)
    rank = jnp.zeros(order.shape, jnp.int32).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
    return (rank.reshape(mask_PGT.shape) < count) & mask_PGT
