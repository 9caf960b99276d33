"""The loss: ratio, surrogate, aggregation, and their composition with KL and entropy.

Shapes: P prompts, G completions of a prompt, T completion tokens (the legend is in ``grpo_jax.types``). Each part
is an independent choice, and lives in the module of its name: ``ratios``, ``surrogates``, ``aggregates``, ``kl``,
``importance``, ``selection``.
"""

from __future__ import annotations

import math
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp

from grpo_jax.algorithms import surrogates
from grpo_jax.algorithms.aggregates import aggregate_tokens, loss_denominator, masked_mean
from grpo_jax.algorithms.kl import kl_penalty
from grpo_jax.algorithms.ratios import log_difference, log_ratio
from grpo_jax.algorithms.selection import covariance_tokens
from grpo_jax.config.combinations import check_kl, check_surrogate
from grpo_jax.types import Array

Metrics = dict[str, Array]


class SurrogateOptions(TypedDict, total=False):
    """What :func:`grpo_loss` hands on to :func:`policy_loss`, which explains and defaults each."""

    surrogate: str
    ratio: str
    clip_low: float
    clip_high: float
    delta: float | None
    dual_clip: float | None
    cispo_low: float
    cispo_high: float
    tau_pos: float
    tau_neg: float
    gmpo_range: float
    kl_cov_coef: float
    cov_share: float
    cov_low: float
    cov_high: float
    selected: Array | None
    key: Array | None


def grpo_loss(
    logps_PGT: Array,
    advantages_PG: Array,
    mask_PGT: Array,
    *,
    old_logps_PGT: Array | None = None,
    ref_logps_PGT: Array | None = None,
    entropy_PGT: Array | None = None,
    policy_mask_PGT: Array | None = None,
    importance_weights_PGT: Array | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    kl_unbiased: bool = False,
    entropy_coef: float = 0.0,
    aggregate: str = "token_mean",
    max_completion_length: int | None = None,
    denominator: Array | None = None,
    **options: Unpack[SurrogateOptions],
) -> tuple[Array, Metrics]:
    """Policy loss + ``beta`` * KL - ``entropy_coef`` * entropy, all aggregated alike.

    See "DeepSeekMath" (arXiv 2402.03300), equation 3; the KL term carries neither the ratio nor the
    importance weights, unless ``kl_unbiased`` asks for the ratio.

    Args:
        logps_PGT: the policy's log-probabilities of the sampled tokens, at the sampling temperature.
        advantages_PG: from :func:`grpo_jax.algorithms.advantages.group_advantages`.
        mask_PGT: bool; tokens that take part in the loss.
        old_logps_PGT: the policy at the start of this batch's updates. None where this is the first of
            them: then they are ``logps_PGT`` themselves, without gradient.
        ref_logps_PGT: the reference's log-probabilities; needed where ``beta`` is not 0.
        entropy_PGT: the policy's token entropies; needed where ``entropy_coef`` is not 0.
        policy_mask_PGT: bool; tokens whose surrogate counts (those of large entropy). The others stay in
            the denominator, the KL and the entropy.
        importance_weights_PGT: multipliers of the surrogate, from :mod:`grpo_jax.algorithms.importance`.
        beta: weight of the KL term.
        kl_estimator: see :func:`grpo_jax.algorithms.kl.kl_penalty`.
        kl_unbiased: multiply the estimate by the token ratio, through which gradient flows: "DeepSeek-V3.2"
            (arXiv 2512.02556).
        entropy_coef: weight of the entropy bonus.
        aggregate: see :func:`grpo_jax.algorithms.aggregates.loss_denominator`.
        max_completion_length: T of the run, for ``aggregate="constant"`` without ``denominator``.
        denominator: the whole optimizer batch's; None: of these arrays.
        **options: those of :func:`policy_loss`.

    Returns:
        ``(loss, metrics)``: those of :func:`policy_loss`, and ``policy_loss``, ``kl_loss``, ``kl``,
        ``entropy_loss``, ``entropy``.

    Raises:
        ValueError: ``beta`` without reference, ``entropy_coef`` without entropies, or choices that make no
            sense together.
    """
    if beta != 0 and ref_logps_PGT is None:
        raise ValueError(f"beta is {beta} but ref_logps_PGT is None: pass the reference's log-probabilities")
    if entropy_coef != 0 and entropy_PGT is None:
        raise ValueError(f"entropy_coef is {entropy_coef} but entropy_PGT is None: pass the token entropies")
    check_kl(kl_estimator, kl_unbiased)
    mask_PGT = mask_PGT.astype(bool)
    if denominator is None:
        denominator = loss_denominator(mask_PGT, aggregate=aggregate, max_completion_length=max_completion_length)
    old_logps_PGT = jax.lax.stop_gradient(logps_PGT if old_logps_PGT is None else old_logps_PGT)
    weights_PGT = importance_weights_PGT
    if policy_mask_PGT is not None:
        weights_PGT = jnp.where(policy_mask_PGT.astype(bool), 1.0 if weights_PGT is None else weights_PGT, 0.0)
    loss, metrics = policy_loss(
        logps_PGT,
        old_logps_PGT,
        advantages_PG,
        mask_PGT,
        aggregate=aggregate,
        denominator=denominator,
        importance_weights=weights_PGT,
        **options,
    )
    metrics["policy_loss"] = loss
    if ref_logps_PGT is not None:
        # Masked before the estimator's exp: a NaN in the padding would otherwise reach the gradient.
        new_PGT = jnp.where(mask_PGT, logps_PGT, 0.0)
        ref_PGT = jax.lax.stop_gradient(jnp.where(mask_PGT, ref_logps_PGT, 0.0))
        kl_PGT = kl_penalty(new_PGT, ref_PGT, estimator=kl_estimator)
        if kl_unbiased:
            kl_PGT = kl_PGT * jnp.exp(log_ratio(logps_PGT, old_logps_PGT, mask_PGT, ratio="token"))
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
    delta: float | None = None,
    dual_clip: float | None = None,
    cispo_low: float = 0.0,
    cispo_high: float = 5.0,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    gmpo_range: float = 0.4,
    kl_cov_coef: float = 1.0,
    cov_share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    selected: Array | None = None,
    key: Array | None = None,
    aggregate: str = "token_mean",
    max_completion_length: int | None = None,
    denominator: Array | None = None,
    importance_weights: Array | None = None,
) -> tuple[Array, Metrics]:
    """A surrogate of a ratio and the advantages, a token, aggregated.

    Args:
        logps: ``[P, G, T]`` log-probabilities under the policy; gradients flow into them.
        old_logps: ``[P, G, T]`` those of the policy at the start of this batch's updates; constants.
        advantages: ``[P, G]``.
        mask: ``[P, G, T]`` bool or 0/1; what is masked out may hold anything, NaN included.
        surrogate: ``clip``, ``cispo``, ``sapo``, ``reinforce``, ``gmpo``, ``clip_cov`` or ``kl_cov``: see the
            functions of :mod:`grpo_jax.algorithms.surrogates`.
        ratio: ``token``, ``sequence``, ``sequence_token`` or ``trajectory``: see
            :func:`grpo_jax.algorithms.ratios.log_ratio`.
        clip_low: how far the ratio may fall below 1 before a negative advantage has no more gradient.
        clip_high: how far it may rise above 1 before a positive advantage has none.
        delta: bound of the unclipped branch, above ``1 + clip_high``.
        dual_clip: bound of the loss of a negative advantage, above 1.
        cispo_low: least weight (``cispo``).
        cispo_high: largest weight (``cispo``).
        tau_pos: sharpness of the gate for positive advantages (``sapo``).
        tau_neg: sharpness of the gate for the others (``sapo``).
        gmpo_range: bound of the logarithm of a token's ratio (``gmpo``).
        kl_cov_coef: weight of the penalty (``kl_cov``).
        cov_share: share of tokens that are selected (``clip_cov``, ``kl_cov``).
        cov_low: least covariance of a candidate (``clip_cov``).
        cov_high: largest covariance of a candidate (``clip_cov``).
        selected: bool ``[P, G, T]``, the whole optimizer batch's
            :func:`~grpo_jax.algorithms.selection.covariance_tokens`; None: of these arrays.
        key: random key of that selection (``clip_cov``).
        aggregate: see :func:`grpo_jax.algorithms.aggregates.loss_denominator`.
        max_completion_length: T of the run, for ``aggregate="constant"`` without ``denominator``.
        denominator: the whole optimizer batch's; None: of these arrays.
        importance_weights: ``[P, G, T]`` multipliers of the surrogate, after clipping; constants.

    Returns:
        ``(loss, metrics)``. Metrics (shares of the masked-in tokens, but for the extremes): ``clip_low_fraction``
        and ``clip_high_fraction``, tokens whose gradient a clip removed or bounded on that side;
        ``ratio_max`` and ``ratio_min``.

    Raises:
        ValueError: an unknown choice, choices that make no sense together, or ``constant`` without a length.
    """
    check_surrogate(surrogate, ratio, clip_high=clip_high, delta=delta, dual_clip=dual_clip)
    if denominator is None:
        denominator = loss_denominator(mask, aggregate=aggregate, max_completion_length=max_completion_length)
    mask = mask.astype(bool)
    # Masked before exp: a NaN or an overflow in the padding would otherwise reach the gradient.
    new, d = jnp.where(mask, logps, 0.0), log_difference(logps, old_logps, mask)
    rho = jnp.exp(log_ratio(logps, old_logps, mask, ratio=ratio))
    A = jnp.broadcast_to(advantages[..., None], mask.shape)
    low, high = 0.0, math.inf  # outside of what the ratio is clipped
    if surrogate == "clip":
        low, high = 1 - clip_low, 1 + clip_high
        loss_tokens = surrogates.clip(
            rho, A, clip_low=clip_low, clip_high=clip_high, delta=delta, dual_clip=dual_clip
        )
    elif surrogate == "cispo":
        low, high = cispo_low, cispo_high
        loss_tokens = surrogates.cispo(rho, A, new, cispo_low=cispo_low, cispo_high=cispo_high)
    elif surrogate == "sapo":
        loss_tokens = surrogates.sapo(rho, A, tau_pos=tau_pos, tau_neg=tau_neg)
    elif surrogate == "reinforce":
        loss_tokens = surrogates.reinforce(A, new)
    elif surrogate == "gmpo":
        low, high = math.exp(-gmpo_range), math.exp(gmpo_range)
        loss_tokens = surrogates.gmpo(d, A, mask, gmpo_range=gmpo_range)
    else:
        if selected is None:
            selected = covariance_tokens(
                logps, advantages, mask, surrogate=surrogate, share=cov_share, low=cov_low, high=cov_high, key=key
            )
        if surrogate == "clip_cov":
            low, high = 1 - clip_low, 1 + clip_high
            loss_tokens = surrogates.clip_cov(rho, A, selected, clip_low=clip_low, clip_high=clip_high)
        else:
            loss_tokens = surrogates.kl_cov(rho, A, d, selected, kl_cov_coef=kl_cov_coef)
    if importance_weights is not None:
        # Masked: a NaN times a gradient of 0 would reach the other tokens through a completion's ratio.
        loss_tokens = loss_tokens * jax.lax.stop_gradient(jnp.where(mask, importance_weights, 0.0))
    loss = aggregate_tokens(loss_tokens, mask, aggregate=aggregate, denominator=denominator)
    two_sided = surrogate == "cispo"  # its bounds hold whatever the advantage's sign
    metrics = {
        "clip_low_fraction": masked_mean(((A < 0) | (two_sided & (A > 0))) & (rho < low), mask),
        "clip_high_fraction": masked_mean(((A > 0) | (two_sided & (A < 0))) & (rho > high), mask),
        # 1 where there is no token at all: an infinity would spoil averages and plots.
        "ratio_max": jnp.where(mask.any(), jnp.max(rho, where=mask, initial=0.0), 1.0),
        "ratio_min": jnp.where(mask.any(), jnp.min(rho, where=mask, initial=jnp.inf), 1.0),
    }
    return loss, metrics
