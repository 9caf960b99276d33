from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.config import Config, ObjectiveConfig, RolloutConfig, TrainConfig
from grpo_jax.metrics import metric_meaning
from grpo_jax.train.batch import Metrics, make_batch, take_groups
from grpo_jax.types import Rollout, TrainBatch

P, G, S, T = 3, 4, 2, 5
NAN = np.nan
REWARDS_PG = np.array([[1, 0, 0, 1], [0.5, 0.5, 0.5, 0.5], [2, -1, 0, 4]], np.float32)
CORRECT_PG = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0]], bool)
LENGTHS_PG = np.array([[1, 2, 3, 4], [5, 5, 1, 2], [3, 3, 5, 1]])
FINISHED_PG = LENGTHS_PG < T
MASK_PGT = np.arange(T)[None, None] < LENGTHS_PG[..., None]


def rollout() -> Rollout:
    return Rollout(
        prompt_PS=jnp.full((P, S), 7),
        prompt_mask_PS=jnp.ones((P, S), bool),
        completion_PGT=jnp.where(MASK_PGT, 3, 0),
        completion_mask_PGT=jnp.asarray(MASK_PGT),
        sampler_logps_PGT=jnp.where(MASK_PGT, -1.5, 0.0),
        finished_PG=jnp.asarray(FINISHED_PG),
    )


def batch_of(
    rewards_PG: np.ndarray = REWARDS_PG,
    rewards_PGK: np.ndarray | None = None,
    *,
    shuffle: bool = False,
    key: int = 0,
    ref_logps_PGT: np.ndarray | None = None,
    weights: tuple[float, ...] | None = None,
    **objective: Any,
) -> tuple[TrainBatch, Metrics]:
    config = Config(
        rollout=RolloutConfig(num_prompts=P, group_size=G, max_completion_length=T),
        objective=ObjectiveConfig(**objective),
        train=TrainConfig(shuffle_rewards=shuffle),
    )
    columns = rewards_PG[..., None] if rewards_PGK is None else rewards_PGK
    batch, combined_PG, metrics = make_batch(
        rollout(),
        jnp.asarray(columns),
        jnp.asarray(CORRECT_PG),
        None,
        None if ref_logps_PGT is None else jnp.asarray(ref_logps_PGT),
        jax.random.key(key),
        config=config,
        reward_names=[f"r{k}" for k in range(columns.shape[-1])],
        reward_weights=weights or (1.0,) + (0.0,) * (columns.shape[-1] - 1),
    )
    if weights is None:
        np.testing.assert_array_equal(combined_PG, rewards_PG)
    return batch, metrics


def advantages(rewards_PG: np.ndarray) -> np.ndarray:
    """Each group's rewards, less their mean, over their standard deviation; those present alone."""
    mean_P = np.nanmean(rewards_PG, axis=1)
    std_P = np.nanstd(rewards_PG, axis=1, ddof=1)
    return np.nan_to_num((rewards_PG - mean_P[:, None]) / (std_P[:, None] + 1e-4))


def test_the_rollout_goes_into_the_batch() -> None:
    batch, _ = batch_of()
    np.testing.assert_allclose(batch.advantages_PG, advantages(REWARDS_PG), atol=1e-5)  # float32
    np.testing.assert_array_equal(batch.advantages_PG[1], np.zeros(G))
    np.testing.assert_array_equal(batch.loss_mask_PGT, MASK_PGT)
    for name in ("prompt_PS", "prompt_mask_PS", "completion_PGT", "sampler_logps_PGT"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(rollout(), name))
    assert batch.old_logps_PGT is None and batch.ref_logps_PGT is None


def test_missing_rewards_have_advantage_0_and_count_in_no_statistic() -> None:
    rewards_PG = REWARDS_PG.copy()
    rewards_PG[0, 1] = rewards_PG[2, 3] = NAN
    rewards_PG[1] = NAN
    batch, metrics = batch_of(rewards_PG)
    expected = np.zeros((P, G))
    expected[[0, 2]] = advantages(rewards_PG[[0, 2]])
    assert expected[0, 1] == expected[2, 3] == 0
    np.testing.assert_allclose(batch.advantages_PG, expected, atol=1e-5)  # float32
    assert metrics["Training/MissingRewards"] == pytest.approx(6 / 12)
    assert metrics["Training/RewardMean"] == pytest.approx(np.nanmean(rewards_PG))
    assert metrics["Training/RewardStd"] == pytest.approx(np.nanstd(rewards_PG))
    assert metrics["Training/ZeroSpreadGroups"] == pytest.approx(1 / 3)


def test_truncated_completions_can_be_masked_and_keep_their_part_in_the_advantages() -> None:
    kept, _ = batch_of()
    batch, _ = batch_of(truncated="mask")
    np.testing.assert_array_equal(batch.loss_mask_PGT, MASK_PGT & FINISHED_PG[..., None])
    assert not batch.loss_mask_PGT[1, 0].any() and batch.loss_mask_PGT[0, 0].any()
    np.testing.assert_array_equal(batch.advantages_PG, kept.advantages_PG)


def test_groups_of_equal_rewards_can_be_masked() -> None:
    batch, _ = batch_of(zero_spread="mask")
    expected = MASK_PGT.copy()
    expected[1] = False
    np.testing.assert_array_equal(batch.loss_mask_PGT, expected)


def test_metrics_against_numpy() -> None:
    columns_PGK = np.stack([REWARDS_PG, np.full((P, G), NAN, np.float32)], axis=-1)
    columns_PGK[0, :2, 1] = [3.0, 5.0]
    batch, metrics = batch_of(REWARDS_PG, columns_PGK)
    expected = {
        "Training/AdvantageNorm": np.sqrt(np.mean(advantages(REWARDS_PG) ** 2)),
        "Training/RewardMean": REWARDS_PG.mean(),
        "Training/RewardStd": REWARDS_PG.std(),
        "Training/MissingRewards": 0.0,
        "Training/ZeroSpreadGroups": 1 / 3,
        "Training/Reward/r0/Mean": REWARDS_PG.mean(),
        "Training/Reward/r0/Std": REWARDS_PG.std(),
        "Training/Reward/r1/Mean": 4.0,
        "Training/Reward/r1/Std": 1.0,
        "Performance/SuccessRate": 4 / 12,
        "Performance/CompletionLength": LENGTHS_PG.mean(),
        "Performance/CompletionLengthMax": 5,
        "Performance/TruncatedShare": 3 / 12,
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-5, abs=1e-6), name  # float32
        assert metric_meaning(name) is not None


def test_shuffled_rewards_are_other_prompts_rewards() -> None:
    """All advantages come from a permutation over the whole batch; the metrics show the true rewards."""
    rewards_PG = np.arange(P * G, dtype=np.float32).reshape(P, G) ** 2
    plain, metrics = batch_of(rewards_PG, advantage="center")
    first, shuffled_metrics = batch_of(rewards_PG, advantage="center", shuffle=True)
    again, _ = batch_of(rewards_PG, advantage="center", shuffle=True)
    second, _ = batch_of(rewards_PG, advantage="center", shuffle=True, key=1)
    np.testing.assert_array_equal(first.advantages_PG, again.advantages_PG)
    for other in (plain, second):
        assert not np.allclose(first.advantages_PG, other.advantages_PG)
    for name in ("Training/RewardMean", "Training/RewardStd", "Training/Reward/r0/Mean"):
        assert metrics[name] == shuffled_metrics[name]


def test_the_soft_overlong_penalty_is_part_of_the_reward_and_not_of_its_metrics() -> None:
    # Free up to 2 tokens, then -1/3 a token, whole at 5.
    batch, metrics = batch_of(overlong_cache=3, overlong_length=5, advantage="center")
    penalty_PG = -np.clip((LENGTHS_PG - 2) / 3, 0, 1)
    shaped_PG = REWARDS_PG + penalty_PG
    expected = shaped_PG - shaped_PG.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(batch.advantages_PG, expected, atol=1e-6)  # float32
    assert metrics["Training/OverlongPenalty"] == pytest.approx(penalty_PG.mean())
    assert metrics["Training/RewardMean"] == pytest.approx(REWARDS_PG.mean())
    assert metrics["Training/ZeroSpreadGroups"] == pytest.approx(1 / 3), "read from the rewards, not from lengths"


def test_a_completion_without_any_reward_gets_none_from_its_length() -> None:
    rewards_PG = REWARDS_PG.copy()
    rewards_PG[0, 3] = NAN
    batch, _ = batch_of(rewards_PG, overlong_cache=3, advantage="center")
    assert batch.advantages_PG[0, 3] == 0
    shaped = rewards_PG[0, :3] - np.clip((LENGTHS_PG[0, :3] - 2) / 3, 0, 1)
    np.testing.assert_allclose(batch.advantages_PG[0, :3], shaped - shaped.mean(), atol=1e-6)  # float32


def test_the_kl_can_be_taken_off_the_reward() -> None:
    ref_PGT = np.random.default_rng(0).normal(-2, 1, (P, G, T)).astype(np.float32)
    batch, metrics = batch_of(beta=0.1, kl_in="reward", ref_logps_PGT=ref_PGT, advantage="center")
    k1_PG = np.where(MASK_PGT, -1.5 - ref_PGT, 0).sum(axis=-1)  # -1.5: the sampler's log-probabilities
    shaped_PG = REWARDS_PG - 0.1 * k1_PG
    np.testing.assert_allclose(batch.advantages_PG, shaped_PG - shaped_PG.mean(1, keepdims=True), atol=1e-5)
    assert metrics["Training/KLPenalty"] == pytest.approx(-0.1 * k1_PG.mean(), rel=1e-5)
    assert metrics["Training/RewardMean"] == pytest.approx(REWARDS_PG.mean())


def test_reward_functions_can_be_normalised_one_by_one() -> None:
    columns_PGK = np.stack([REWARDS_PG, 100.0 * CORRECT_PG], axis=-1).astype(np.float32)
    batch, _ = batch_of(None, columns_PGK, weights=(1.0, 0.5), combine="normalize_then_sum")  # type: ignore[arg-type]
    summed = advantages(columns_PGK[..., 0]) + 0.5 * advantages(columns_PGK[..., 1])
    expected = summed / (summed.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(batch.advantages_PG, expected, atol=1e-5)  # float32


def test_the_optimal_baseline_weighs_by_length() -> None:
    batch, _ = batch_of(advantage="opo")
    baseline_P = (LENGTHS_PG * REWARDS_PG).sum(axis=1) / LENGTHS_PG.sum(axis=1)
    np.testing.assert_allclose(batch.advantages_PG, REWARDS_PG - baseline_P[:, None], atol=1e-6)  # float32


def test_groups_are_taken_from_another_rollout() -> None:
    mine, other = rollout(), jax.tree.map(lambda x: x + 1 if x.dtype != bool else ~x, rollout())
    got = jax.jit(take_groups)(mine, other, jnp.array([-1, 2, 0]))
    for name, value in vars(got).items():
        a, b = np.asarray(getattr(mine, name)), np.asarray(getattr(other, name))
        np.testing.assert_array_equal(value, np.stack([a[0], b[2], b[0]]), err_msg=name)
