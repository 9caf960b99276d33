"""Bias and variance of every advantage, ratio, aggregate and KL term on a policy that can be enumerated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bias.exact import VOCAB_SIZE, Batches, Moments, World, advantages, completion_tree, moments

from grpo_jax.algorithms.advantages import ESTIMATORS
from grpo_jax.algorithms.aggregates import AGGREGATES
from grpo_jax.algorithms.kl import kl_penalty
from grpo_jax.algorithms.ratios import RATIOS, log_ratio

GROUP_SIZE, MAX_LENGTH = 4, 2
# Two prompts, a hard one and an easy one, and their completions as the tree orders them: the token that ends, then
# "a" and "b" ended, then "aa", "ab", "ba", "bb". What is right is long.
REWARDS = {
    "binary": ((0, 0, 0, 1, 0, 0, 0), (0, 0, 1, 1, 1, 1, 1)),
    "graded": ((0, 0.5, 0.5, 1, 0.5, 0.5, 0.5), (0, 0.5, 1, 0.5, 1, 0.5, 1)),
}
CLIPS = {"on-policy": math.inf, "off-policy": math.inf, "off-policy, clip 0.2": 0.2}
KL_TERMS = (
    ("k1", False),
    ("k2", False),
    ("k3", False),
    ("k3_straight_through", False),
    ("k1", True),
    ("k3", True),
)
# Name: ratio, aggregate, and whether k1 is the current policy's or, as rewards are made, that of the sampler.
KL_IN_REWARD = {
    "reward k1, token ratio": ("token", "sequence_sum", False),
    "reward k1, trajectory ratio": ("trajectory", "sequence_mean", False),
    "reward current k1, trajectory ratio": ("trajectory", "sequence_mean", True),
}
# Of the advantages that need neither a batch nor lengths.
WEIGHTED = ("group", "center", "leave_one_out", "maxrl")
WEIGHTED_SIZES = (2, 4, 16, 64)

Row = dict[str, Any]


def make_world(
    seed: int, rewards_PC: Sequence[Sequence[float]], *, off_policy: bool, max_length: int = MAX_LENGTH
) -> World:
    """Random logits; the policy has moved from its sampler's (if off-policy), and further from the reference's."""
    tree = completion_tree(max_length)
    shape = (len(rewards_PC), tree.num_states, VOCAB_SIZE)
    rng = np.random.default_rng(seed)
    policy, to_sampler, to_reference = (size * rng.normal(size=shape) for size in (0.5, 0.4, 0.7))
    sampler = policy + to_sampler if off_policy else policy
    return World(tree, policy, sampler, policy + to_reference, np.array(rewards_PC, float))


def compare(found: Moments, true_PK: np.ndarray, *, factor: float = 1.0) -> Row:
    """How an estimate g of the gradient, divided by its known factor, differs from the true one.

    ``bias``: ||E g - true|| / ||true||. ``scale``: the c that brings c * true nearest to E g. ``cosine`` and
    ``angle`` (degrees): of E g and the true gradient. ``variance``: trace of the covariance of g / ||true||²;
    ``noise``: the same for g / c, so that it's free of the scale. What E g = 0 leaves undefined is None.
    """
    mean_PK, norm = found.mean_PK / factor, float(np.linalg.norm(true_PK))
    variance = found.variance / (factor * norm) ** 2
    bias, size = float(np.linalg.norm(mean_PK - true_PK)) / norm, float(np.linalg.norm(mean_PK)) / norm
    if size < 1e-12:
        return {"bias": bias, "scale": 0.0, "cosine": None, "angle": None, "variance": variance, "noise": None}
    scale = float((mean_PK * true_PK).sum()) / norm**2
    # By the tangent: near 0 a cosine has lost the angle's digits.
    angle = math.degrees(math.atan2(float(np.linalg.norm(mean_PK - scale * true_PK)) / norm, scale))
    measured = {"bias": bias, "scale": scale, "cosine": scale / size, "angle": angle}
    return {**measured, "variance": variance, "noise": variance / scale**2}


def known_factor(aggregate: str, advantage: str = "") -> float:
    """What an estimate carries by definition: ``constant`` 1 / T, and ``center`` (G - 1) / G."""
    own = (GROUP_SIZE - 1) / GROUP_SIZE if advantage == "center" else 1.0
    return own / MAX_LENGTH if aggregate == "constant" else own


def policy_rows(seed: int) -> Iterator[Row]:
    """Every advantage x ratio x aggregate, against the gradient of E[r]."""
    for (reward, table), (situation, clip) in itertools.product(REWARDS.items(), CLIPS.items()):
        world = make_world(seed, table, off_policy=situation != "on-policy")
        batches = [Batches(world, prompt, group_size=GROUP_SIZE) for prompt in range(len(table))]
        true_PK = np.asarray(jax.grad(world.expected_reward)(world.policy_PSV)).reshape(len(table), -1)
        advantages_by = {name: [prompt.advantages(name) for prompt in batches] for name in ESTIMATORS}
        for advantage, ratio in itertools.product(ESTIMATORS, RATIOS):
            for aggregate, found in moments(batches, advantages_by[advantage], ratio=ratio, clip=clip).items():
                factor = known_factor(aggregate, advantage)
                yield {
                    "reward": reward,
                    "situation": situation,
                    "advantage": advantage,
                    "ratio": ratio,
                    "aggregate": aggregate,
                    "known_factor": factor,
                    **compare(Moments(-found.mean_PK, found.variance), true_PK, factor=factor),
                }


def kl_rows(seed: int) -> Iterator[Row]:
    """Every KL term x aggregate, and KL in the reward, against the gradients of both divergences; one prompt."""
    for situation in ("on-policy", "off-policy"):
        world = make_world(
            seed, [[0.0] * len(completion_tree(MAX_LENGTH).mask_CT)], off_policy=situation != "on-policy"
        )
        targets = {
            "token": jax.value_and_grad(world.token_kl)(world.policy_PSV),
            "sequence": jax.value_and_grad(world.sequence_kl)(world.policy_PSV),
        }
        for term, aggregate, value, found in _kl_terms(world):
            for target, (true, gradient_PSV) in targets.items():
                factor = known_factor(aggregate)
                yield {
                    "situation": situation,
                    "term": term,
                    "aggregate": aggregate,
                    "target": target,
                    "known_factor": factor,
                    "value_bias": value / float(true) - 1,
                    **compare(found, np.asarray(gradient_PSV).reshape(1, -1), factor=factor),
                }


def _kl_terms(world: World) -> Iterator[tuple[str, str, float, Moments]]:
    """Name, aggregate, expected sum over a completion's tokens, and moments of the gradient of each KL term."""
    batches = Batches(world, 0, group_size=GROUP_SIZE)
    for estimator, unbiased in KL_TERMS:
        name, value = f"ratio x {estimator}" if unbiased else estimator, _kl_value(world, estimator, unbiased)
        options = {"beta": 1.0, "kl_estimator": estimator, "kl_unbiased": unbiased}
        found = moments([batches], [np.zeros_like(batches.rewards_BPG)], ratio="token", **options)
        yield from ((name, aggregate, value, found[aggregate]) for aggregate in AGGREGATES)
    for name, (ratio, aggregate, current) in KL_IN_REWARD.items():
        logps_B1GT = batches.logps_B1GT if current else batches.old_B1GT
        rewards_BPG = -(logps_B1GT - batches.ref_B1GT).sum(axis=-1)
        found = moments([batches], [batches.advantages("leave_one_out", rewards_BPG)], ratio=ratio)
        yield name, aggregate, float(batches.weights_B @ -rewards_BPG.mean(axis=(1, 2))), found[aggregate]


def _kl_value(world: World, estimator: str, unbiased: bool) -> float:
    """Expectation of the sum over a completion's tokens."""
    logps_PCT, old_PCT, ref_PCT = (
        world.logps_PCT(logits) for logits in (world.policy_PSV, world.sampler_PSV, world.reference_PSV)
    )
    value_PCT = kl_penalty(logps_PCT, ref_PCT, estimator=estimator)
    if unbiased:
        mask_PCT = jnp.asarray(world.tree.mask_CT)[None]
        value_PCT *= jnp.exp(log_ratio(logps_PCT, old_PCT, mask_PCT, ratio="token"))
    return float((world.probabilities_PC(world.sampler_PSV)[..., None] * value_PCT).sum())


def weight_rows() -> Iterator[Row]:
    """The factor of a prompt's own gradient in the expected one, by its success rate: binary rewards, on-policy.

    An advantage that depends on rewards alone has the expectation E[A (r - p)] / (p (1 - p)) times the gradient of
    the success rate p, whatever the policy.
    """
    largest = max(WEIGHTED_SIZES)
    for advantage, size in itertools.product(WEIGHTED, WEIGHTED_SIZES):
        # Row k has k successes. All sizes are padded alike, with missing rewards, and so compiled once.
        rewards_BPG = np.full((largest + 1, 1, largest), np.nan)
        rewards_BPG[:, 0, :size] = np.tri(largest + 1, size, -1)
        advantages_BPG = advantages(rewards_BPG, np.ones_like(rewards_BPG), estimator=advantage)
        for success in (0.05, 0.5):
            chance_B = [math.comb(size, k) * success**k * (1 - success) ** (size - k) for k in range(largest + 1)]
            covariance_B = np.nansum(advantages_BPG * (rewards_BPG - success), axis=(1, 2)) / size
            weight = float(np.array(chance_B) @ covariance_B / (success * (1 - success)))
            yield {"advantage": advantage, "group_size": size, "success": success, "weight": weight}
