"""The loss: ratio, surrogate, aggregation, and their composition with KL and entropy.

Shapes: P prompts, G completions of a prompt, T completion tokens (the legend is in ``grpo_jax.types``).
Denominators are arguments: computed over the whole optimizer batch and handed to each micro-batch, they make the
sum over micro-batches equal to the loss of the whole, however the batch is split.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from grpo_jax.algorithms.kl import MAX_LOG_RATIO, kl_penalty
from grpo_jax.types import Array

Metrics = dict[str, Array]

SURROGATES = ("clip",)
RATIOS = ("token",)
AGGREGATES = ("sequence_mean", "token_mean", "constant")


def grpo_loss(
    logps_PGT: Array,
    advantages_PG: Array,
    mask_PGT: Array,
    *,
    old_logps_PGT: Array | None = None,
    ref_logps_PGT: Array | None = None,
    entropy_PGT: Array | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    surrogate: str = "clip",
    ratio: str = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregate: str = "token_mean",
    max_completion_length: int | None = None,
    denominator: Array | None = None,
    importance_weights_PGT: Array | None = None,
) -> tuple[Array, Metrics]:
    """Policy loss + ``beta`` * KL - ``entropy_coef`` * entropy, all aggregated alike.

    See "DeepSeekMath" (arXiv 2402.03300), equation 3; the KL term carries neither the ratio nor the
    importance weights.

    Args:
        logps_PGT: the policy's log-probabilities of the sampled tokens, at the sampling temperature.
        advantages_PG: from :func:`grpo_jax.algorithms.advantages.group_advantages`.
        mask_PGT: bool; tokens that take part in the loss.
        old_logps_PGT: the policy at the start of this batch's updates. None where this is the first of
            them: then they are ``logps_PGT`` themselves, without gradient.
        ref_logps_PGT: the reference's log-probabilities; needed where ``beta`` is not 0.
        entropy_PGT: the policy's token entropies; needed where ``entropy_coef`` is not 0.
        beta: weight of the KL term.
        kl_estimator: see :func:`grpo_jax.algorithms.kl.kl_penalty`.
        entropy_coef: weight of the entropy bonus.
        surrogate: see :func:`policy_loss`, as for the arguments that follow.
        ratio: see :func:`policy_loss`.
        clip_low: see :func:`policy_loss`.
        clip_high: see :func:`policy_loss`.
        aggregate: see :func:`policy_loss`.
        max_completion_length: see :func:`policy_loss`.
        denominator: see :func:`policy_loss`.
        importance_weights_PGT: see :func:`policy_loss`.

    Returns:
        ``(loss, metrics)``: those of :func:`policy_loss`, and ``policy_loss``, ``kl_loss``, ``kl``,
        ``entropy``.

    Raises:
        ValueError: ``beta`` without reference, or ``entropy_coef`` without entropies.
    """
    if beta != 0 and ref_logps_PGT is None:
        raise ValueError(f"beta is {beta} but ref_logps_PGT is None: pass the reference's log-probabilities")
    if entropy_coef != 0 and entropy_PGT is None:
        raise ValueError(f"entropy_coef is {entropy_coef} but entropy_PGT is None: pass the token entropies")
    mask_PGT = mask_PGT.astype(bool)
    if denominator is None:
        denominator = loss_denominator(mask_PGT, aggregate=aggregate, max_completion_length=max_completion_length)
    old_logps_PGT = jax.lax.stop_gradient(logps_PGT if old_logps_PGT is None else old_logps_PGT)
    loss, metrics = policy_loss(
        logps_PGT,
        old_logps_PGT,
        advantages_PG,
        mask_PGT,
        surrogate=surrogate,
        ratio=ratio,
        clip_low=clip_low,
        clip_high=clip_high,
        aggregate=aggregate,
        max_completion_length=max_completion_length,
        denominator=denominator,
        importance_weights=importance_weights_PGT,
    )
    metrics["policy_loss"] = loss
    if ref_logps_PGT is not None:
        # Masked before the estimator's exp: a NaN in the padding would otherwise reach the gradient.
        new_PGT = jnp.where(mask_PGT, logps_PGT, 0.0)
        ref_PGT = jax.lax.stop_gradient(jnp.where(mask_PGT, ref_logps_PGT, 0.0))
        kl_PGT = kl_penalty(new_PGT, ref_PGT, estimator=kl_estimator)
        kl_loss = beta * aggregate_tokens(kl_PGT, mask_PGT, aggregate=aggregate, denominator=denominator)
        loss = loss + kl_loss
        metrics["kl_loss"] = kl_loss
        metrics["kl"] = masked_mean(kl_penalty(new_PGT, ref_PGT, estimator="k3"), mask_PGT)
    if entropy_PGT is not None:
        if entropy_coef != 0:
            bonus = aggregate_tokens(entropy_PGT, mask_PGT, aggregate=aggregate, denominator=denominator)
            metrics["entropy_loss"] = -entropy_coef * bonus
            loss = loss + metrics["entropy_loss"]
        metrics["entropy"] = masked_mean(entropy_PGT, mask_PGT)
    return loss, {name: jax.lax.stop_gradient(value) for name, value in metrics.items()}


def policy_loss(
    logps: Array,
    old_logps: Array,
    advantages: Array,
    mask: Array,
    *,
    surrogate: str = "clip",
    ratio: str = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregate: str = "token_mean",
    max_completion_length: int | None = None,
    denominator: Array | None = None,
    importance_weights: Array | None = None,
) -> tuple[Array, Metrics]:
    """The clipped surrogate: ``-min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A)`` with ``ρ = exp(new - old)``.

    See "Proximal Policy Optimization Algorithms" (arXiv 1707.06347); with ``clip_high`` above ``clip_low``,
    "DAPO" (arXiv 2503.14476).

    Args:
        logps: ``[P, G, T]`` log-probabilities under the policy; gradients flow into them.
        old_logps: ``[P, G, T]`` those of the policy at the start of this batch's updates.
        advantages: ``[P, G]``.
        mask: ``[P, G, T]`` bool or 0/1; what is masked out may hold anything, NaN included.
        surrogate: ``clip``.
        ratio: ``token``.
        clip_low: how far the ratio may fall below 1 before a negative advantage has no more gradient.
        clip_high: how far it may rise above 1 before a positive advantage has none.
        aggregate: see :func:`loss_denominator`.
        max_completion_length: T of the run, for ``aggregate="constant"`` without ``denominator``.
        denominator: the whole optimizer batch's :func:`loss_denominator`; None: of these arrays.
        importance_weights: ``[P, G, T]`` multipliers of the surrogate, after clipping.

    Returns:
        ``(loss, metrics)``. Metrics (means over the masked-in tokens, except the extremes):
        ``clip_low_fraction`` and ``clip_high_fraction``, tokens whose gradient the clip removed;
        ``ratio_max`` and ``ratio_min``.

    Raises:
        ValueError: an unknown surrogate, ratio or aggregate; ``constant`` without a length.
    """
    if surrogate not in SURROGATES:
        raise ValueError(f"surrogate must be one of {list(SURROGATES)}, got {surrogate!r}")
    if ratio not in RATIOS:
        raise ValueError(f"ratio must be one of {list(RATIOS)}, got {ratio!r}")
    if denominator is None:
        denominator = loss_denominator(mask, aggregate=aggregate, max_completion_length=max_completion_length)
    mask = mask.astype(bool)
    # Masked before exp: a NaN or an overflow in the padding would otherwise reach the gradient.
    log_ratio = jnp.where(mask, logps - old_logps, 0.0)
    rho = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    advantages = advantages[..., None]
    clipped = jnp.clip(rho, 1 - clip_low, 1 + clip_high)
    loss_tokens = -jnp.minimum(rho * advantages, clipped * advantages)
    if importance_weights is not None:
        loss_tokens = loss_tokens * jax.lax.stop_gradient(importance_weights)
    loss = aggregate_tokens(loss_tokens, mask, aggregate=aggregate, denominator=denominator)
    metrics = {
        "clip_low_fraction": masked_mean((advantages < 0) & (rho < 1 - clip_low), mask),
        "clip_high_fraction": masked_mean((advantages > 0) & (rho > 1 + clip_high), mask),
        "ratio_max": jnp.max(rho, where=mask, initial=0.0),
        "ratio_min": jnp.min(rho, where=mask, initial=jnp.inf),
    }
    return loss, metrics


def loss_denominator(mask_PGT: Array, *, aggregate: str, max_completion_length: int | None = None) -> Array:
    """What the sum over tokens is divided by; compute it over the whole optimizer batch.

    - ``sequence_mean``: the number of completions; each token is first divided by its completion's length.
      The original GRPO (arXiv 2402.03300).
    - ``token_mean``: the number of tokens. DAPO (arXiv 2503.14476).
    - ``constant``: completions times ``max_completion_length``. Dr. GRPO (arXiv 2503.20783).

    A completion without any masked-in token is no completion here: masked out of the numerator, it is out of
    the denominator too.

    Raises:
        ValueError: an unknown aggregate, or ``constant`` without ``max_completion_length``.
    """
    if aggregate not in AGGREGATES:
        raise ValueError(f"aggregate must be one of {list(AGGREGATES)}, got {aggregate!r}")
    mask_PGT = mask_PGT.astype(bool)
    if aggregate == "token_mean":
        count = mask_PGT.sum()
    else:
        count = mask_PGT.any(axis=-1).sum()
    if aggregate == "constant":
        if max_completion_length is None:
            raise ValueError("max_completion_length must be given for aggregate='constant', got None")
        count = count * max_completion_length
    return jnp.maximum(count, 1)


def aggregate_tokens(values_PGT: Array, mask_PGT: Array, *, aggregate: str, denominator: Array) -> Array:
    """Sum the masked-in values, each over its completion's length for ``sequence_mean``, over ``denominator``."""
    mask_PGT = mask_PGT.astype(bool)
    values_PGT = jnp.where(mask_PGT, values_PGT, 0.0)
    if aggregate == "sequence_mean":
        values_PGT = values_PGT / jnp.maximum(mask_PGT.sum(axis=-1, keepdims=True), 1)
    return values_PGT.sum() / denominator


def masked_mean(values: Array, mask: Array) -> Array:
    """Mean of the values where the mask is true, whatever stands elsewhere; 0 where it never is."""
    mask = mask.astype(bool)
    return jnp.where(mask, values, 0.0).sum() / jnp.maximum(mask.sum(), 1)
