"""Surrogates: what a token's ratio and advantage lose, to be minimised.

Every function takes and returns ``[P, G, T]`` (P prompts, G completions of a prompt, T tokens); ``A`` are the
advantages, the same on each token of a completion, and ``ρ`` the importance ratio, of which
``grpo_jax.algorithms.ratios`` has several. Nothing here knows of masks but :func:`gmpo`, which averages.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from grpo_jax.algorithms.kl import MAX_LOG_RATIO
from grpo_jax.algorithms.ratios import completion_mean
from grpo_jax.types import Array


def clip(
    ratio: Array,
    advantages: Array,
    *,
    clip_low: float,
    clip_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
) -> Array:
    """PPO: ``-min(ρ A, ρ' A)`` with ``ρ'`` clipped to [1 - clip_low, 1 + clip_high].

    See "Proximal Policy Optimization Algorithms" (arXiv 1707.06347); with ``clip_high`` above ``clip_low``, "DAPO"
    (2503.14476). ``delta`` bounds the ρ of the unclipped branch, and so the loss of a negative advantage:
    "INTELLECT-2" (2505.07291). ``dual_clip`` c bounds that loss at ``-c A``: "Mastering Complex Control in MOBA
    Games with Deep Reinforcement Learning" (1912.09729).
    """
    unclipped = ratio if delta is None else jnp.minimum(ratio, delta)
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = -jnp.minimum(unclipped * advantages, clipped * advantages)
    if dual_clip is not None:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)
    return loss


def cispo(ratio: Array, advantages: Array, logps: Array, *, cispo_low: float, cispo_high: float) -> Array:
    """``-stop_gradient(clip(ρ, cispo_low, cispo_high)) A logp``: no token loses its gradient.

    See "MiniMax-M1" (arXiv 2506.13585). The weight alone is clipped; its bounds are absolute.
    """
    return -jax.lax.stop_gradient(jnp.clip(ratio, cispo_low, cispo_high)) * advantages * logps


def sapo(ratio: Array, advantages: Array, *, tau_pos: float, tau_neg: float) -> Array:
    """``-4/τ σ(τ (ρ - 1)) A``, τ by the sign of A: a gate that closes softly on both sides of ρ = 1.

    See "Soft Adaptive Policy Optimization" (arXiv 2511.20347). Its gradient at ρ = 1 is that of ``-ρ A``.
    """
    tau = jnp.where(advantages > 0, tau_pos, tau_neg).astype(ratio.dtype)
    return -jax.nn.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages


def reinforce(advantages: Array, logps: Array) -> Array:
    """``-A logp``: no ratio, no clip."""
    return -advantages * logps


def gmpo(log_ratio: Array, advantages: Array, mask: Array, *, gmpo_range: float) -> Array:
    """``-A (Π_t c_t)^(1/n)``: the geometric mean of a completion's clipped token ratios, on each of its tokens.

    ``c_t`` is ρ_t bounded by ``exp(gmpo_range)`` from above where A > 0, by ``exp(-gmpo_range)`` from below where
    A < 0. See "Geometric-Mean Policy Optimization" (arXiv 2507.20673).

    Args:
        log_ratio: ``logps - old_logps``, 0 where masked out.
        advantages: A.
        mask: bool; the completion's tokens.
        gmpo_range: how far the logarithm of a token's ratio may go.
    """
    above, below = jnp.minimum(log_ratio, gmpo_range), jnp.maximum(log_ratio, -gmpo_range)
    clipped = jnp.where(advantages > 0, above, jnp.where(advantages < 0, below, log_ratio))
    mean = completion_mean(jnp.where(mask, clipped, 0.0), mask)
    return -advantages * jnp.exp(jnp.clip(mean, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def clip_cov(ratio: Array, advantages: Array, selected: Array, *, clip_low: float, clip_high: float) -> Array:
    """:func:`clip`, and 0 for the tokens that :func:`~grpo_jax.algorithms.selection.covariance_tokens` selected.

    See "The Entropy Mechanism" (arXiv 2505.22617); like its released code, and unlike its formula, the other
    tokens are clipped as in PPO.
    """
    return jnp.where(selected, 0.0, clip(ratio, advantages, clip_low=clip_low, clip_high=clip_high))


def kl_cov(ratio: Array, advantages: Array, log_ratio: Array, selected: Array, *, kl_cov_coef: float) -> Array:
    """``-ρ A``, and ``+ kl_cov_coef |log ρ_t|`` for the tokens with the largest covariance (arXiv 2505.22617)."""
    # |x| by its sign: jnp.abs has the derivative 1 at 0, where every on-policy token is, and its minimum has 0.
    penalty = kl_cov_coef * log_ratio * jax.lax.stop_gradient(jnp.sign(log_ratio))
    return -ratio * advantages + jnp.where(selected, penalty, 0.0)
