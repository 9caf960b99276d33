"""From a rollout and its rewards to a batch to train on, and the metrics of both."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from grpo_jax.algorithms.advantages import combine_rewards, weighted_sum, zero_spread
from grpo_jax.algorithms.lengths import soft_overlong
from grpo_jax.config import Config
from grpo_jax.mesh import GROUP_AXES, PROMPT_AXES, constrain
from grpo_jax.types import PROMPT_FIELDS, Array, Rollout, TrainBatch

Metrics = dict[str, Array]


def make_batch(
    rollout: Rollout,
    rewards_PGK: Array,
    correct_PG: Array,
    old_logps_PGT: Array | None,
    ref_logps_PGT: Array | None,
    key: Array,
    *,
    config: Config,
    reward_names: Sequence[str],
    reward_weights: Sequence[float],
) -> tuple[TrainBatch, Array, Metrics]:
    """Advantages, loss mask and metrics of a rollout; to be compiled.

    Args:
        rollout: what was sampled.
        rewards_PGK: one column a reward function; NaN where it gave none.
        correct_PG: bool; the task's verdict on each completion.
        old_logps_PGT: the policy before this batch's updates; None where it is the sampler's.
        ref_logps_PGT: the reference policy; None without one.
        key: random key of the control that shuffles rewards.
        config: the run's configuration.
        reward_names: names of the K reward functions.
        reward_weights: their weights.

    Returns:
        The batch, the combined rewards ``[P, G]`` before any shaping (NaN where all are missing), and the
        metrics under their public names.
    """
    objective = config.objective
    length_PG = rollout.completion_mask_PGT.sum(axis=-1)
    rewards_PG = weighted_sum(rewards_PGK, jnp.asarray(reward_weights))
    columns_PGK, weights, shaping = _shaped(
        rollout, rewards_PGK, old_logps_PGT, ref_logps_PGT, list(reward_weights), config
    )
    trained_PG = rewards_PG
    if config.train.shuffle_rewards:
        # Far from the indices of samples, which the rollout folds into this key.
        order = jax.random.permutation(jax.random.fold_in(key, 2**31), rewards_PG.size)
        trained_PG = rewards_PG.reshape(-1)[order].reshape(rewards_PG.shape)
        columns_PGK = columns_PGK.reshape(rewards_PG.size, -1)[order].reshape(columns_PGK.shape)
    advantages_PG = combine_rewards(
        columns_PGK,
        jnp.asarray(weights),
        method=objective.combine,
        eps=objective.advantage_eps,
        ddof=objective.advantage_ddof,
        estimator=objective.advantage,
        lengths_PG=length_PG,
    )
    equal_P = zero_spread(trained_PG)
    kept_PG = jnp.ones_like(rollout.finished_PG)
    if objective.truncated == "mask":
        kept_PG &= rollout.finished_PG
    if objective.zero_spread == "mask":
        kept_PG &= ~equal_P[:, None]
    batch = TrainBatch(
        prompt_PS=rollout.prompt_PS,
        prompt_mask_PS=rollout.prompt_mask_PS,
        completion_PGT=rollout.completion_PGT,
        loss_mask_PGT=rollout.completion_mask_PGT & kept_PG[..., None],
        sampler_logps_PGT=rollout.sampler_logps_PGT,
        advantages_PG=advantages_PG,
        old_logps_PGT=old_logps_PGT,
        ref_logps_PGT=ref_logps_PGT,
    )
    metrics = {
        "Training/AdvantageNorm": jnp.sqrt(jnp.mean(jnp.square(advantages_PG))),
        "Training/RewardMean": jnp.nanmean(rewards_PG),
        "Training/RewardStd": jnp.nanstd(rewards_PG),
        "Training/MissingRewards": jnp.isnan(rewards_PG).mean(),
        "Training/ZeroSpreadGroups": equal_P.mean(),
        "Performance/SuccessRate": correct_PG.mean(),
        "Performance/CompletionLength": length_PG.mean(),
        "Performance/CompletionLengthMax": length_PG.max(),
        "Performance/TruncatedShare": 1 - rollout.finished_PG.mean(),
    }
    metrics |= {f"Training/{name}": jnp.nanmean(x_PG) for name, x_PG in shaping.items()}
    for column, name in enumerate(reward_names):
        metrics[f"Training/Reward/{name}/Mean"] = jnp.nanmean(rewards_PGK[..., column])
        metrics[f"Training/Reward/{name}/Std"] = jnp.nanstd(rewards_PGK[..., column])
    return batch, rewards_PG, metrics


def _shaped(
    rollout: Rollout,
    rewards_PGK: Array,
    old_logps_PGT: Array | None,
    ref_logps_PGT: Array | None,
    weights: list[float],
    config: Config,
) -> tuple[Array, list[float], dict[str, Array]]:
    """The reward columns with those of length and KL beside them, all weights, and the new ones by name."""
    objective, mask_PGT = config.objective, rollout.completion_mask_PGT
    shaping: dict[str, Array] = {}
    if objective.overlong_cache > 0:
        shaping["OverlongPenalty"] = soft_overlong(
            mask_PGT.sum(axis=-1),
            max_length=objective.overlong_length or config.rollout.max_completion_length,
            cache=objective.overlong_cache,
        )
    if objective.kl_in == "reward" and ref_logps_PGT is not None:
        # The sampler's, where these are the policy's own.
        policy_PGT = rollout.sampler_logps_PGT if old_logps_PGT is None else old_logps_PGT
        k1_PG = jnp.where(mask_PGT, policy_PGT - ref_logps_PGT, 0.0).sum(axis=-1)
        shaping["KLPenalty"] = -objective.beta * k1_PG
    # A completion whose every reward is missing stays without one.
    missing_PG = jnp.isnan(rewards_PGK).all(axis=-1)
    columns = [jnp.where(missing_PG, jnp.nan, x_PG)[..., None] for x_PG in shaping.values()]
    return jnp.concatenate([rewards_PGK, *columns], axis=-1), [*weights, *(1.0 for _ in columns)], shaping


def join_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """One rollout of N parts, the i-th of which holds its prompts i, i + N, ...; to be compiled."""

    def join(arrays: list[Array], axes: tuple[str, ...]) -> Array:
        joined = jnp.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:])
        return constrain(joined, (*axes, *(None,) * (joined.ndim - len(axes))))

    return Rollout(**{name: join([getattr(part, name) for part in parts], _axes(name)) for name in vars(parts[0])})


def take_groups(rollout: Rollout, other: Rollout, source_P: Array) -> Rollout:
    """``rollout`` with the groups of ``other`` where ``source_P`` names one (-1: none); to be compiled."""

    def take(mine: Array, others: Array, axes: tuple[str, ...]) -> Array:
        takes = (source_P >= 0).reshape(-1, *(1,) * (mine.ndim - 1))
        merged = jnp.where(takes, jnp.take(others, jnp.maximum(source_P, 0), axis=0), mine)
        return constrain(merged, (*axes, *(None,) * (mine.ndim - len(axes))))

    return Rollout(**{name: take(mine, getattr(other, name), _axes(name)) for name, mine in vars(rollout).items()})


def _axes(name: str) -> tuple[str, ...]:
    """Leading logical axes of a rollout's field."""
    return PROMPT_AXES if name in PROMPT_FIELDS else GROUP_AXES
