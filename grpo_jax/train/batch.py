"""From a rollout and its rewards to a batch to train on, and the metrics of both."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from grpo_jax.algorithms.advantages import group_advantages, zero_spread
from grpo_jax.config import Config
from grpo_jax.types import Array, Rollout, TrainBatch

Metrics = dict[str, Array]


def make_batch(
    rollout: Rollout,
    rewards_PGK: Array,
    rewards_PG: Array,
    correct_PG: Array,
    key: Array,
    *,
    config: Config,
    reward_names: Sequence[str],
) -> tuple[TrainBatch, Metrics]:
    """Advantages, loss mask and metrics of a rollout; to be compiled.

    Args:
        rollout: what was sampled.
        rewards_PGK: one column a reward function; NaN where it gave none.
        rewards_PG: their weighted sum; NaN where all are missing.
        correct_PG: bool; the task's verdict on each completion.
        key: random key of the control that shuffles rewards.
        config: the run's configuration.
        reward_names: names of the K reward functions.

    Returns:
        The batch, without the log-probabilities of the old and the reference policy, and the metrics under
        their public names.
    """
    objective = config.objective
    trained_PG = rewards_PG
    if config.train.shuffle_rewards:
        # Far from the indices of samples, which the rollout folds into this key.
        shuffle_key = jax.random.fold_in(key, 2**31)
        trained_PG = jax.random.permutation(shuffle_key, rewards_PG.reshape(-1)).reshape(rewards_PG.shape)
    advantages_PG = group_advantages(
        trained_PG,
        estimator=objective.advantage,
        eps=objective.advantage_eps,
        ddof=objective.advantage_ddof,
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
        old_logps_PGT=None,
        ref_logps_PGT=None,
    )
    length_PG = rollout.completion_mask_PGT.sum(axis=-1)
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
    for column, name in enumerate(reward_names):
        metrics[f"Training/Reward/{name}/Mean"] = jnp.nanmean(rewards_PGK[..., column])
        metrics[f"Training/Reward/{name}/Std"] = jnp.nanstd(rewards_PGK[..., column])
    return batch, metrics
