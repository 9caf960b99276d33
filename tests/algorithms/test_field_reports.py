"""Faults that other GRPO code has had in its loss, log-probabilities, KL, masks and groups; the right values.

Those of other parts are tested beside them: a temperature of 0 in ``test_config.py``; sampler and trainer that
differ in ``train/test_step.py``; a truncated sampler in ``rollout/test_engine.py``; padding in
``models/test_decoder.py``; several ends of sequence in ``test_tokenizer.py``; what each KL estimator's gradient is
on average in ``test_bias_table.py``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grpo_jax.algorithms.advantages import group_advantages, zero_spread
from grpo_jax.algorithms.aggregates import loss_denominator, masked_mean
from grpo_jax.algorithms.importance import importance_weights
from grpo_jax.algorithms.kl import kl_penalty
from grpo_jax.algorithms.logprobs import token_logps
from grpo_jax.algorithms.objectives import grpo_loss
from tests.algorithms import reference

AGGREGATE_NAMES = sorted(reference.AGGREGATES)


def uneven_batch(lengths: list[list[int]], seed: int = 0) -> dict[str, Any]:
    """Positional arguments of grpo_loss for completions of the given lengths."""
    rng = np.random.default_rng(seed)
    shape = (*np.shape(lengths), int(np.max(lengths)))
    return {
        "logps": jnp.asarray(-rng.exponential(1.0, shape)),
        "advantages": jnp.asarray(rng.normal(size=shape[:2])),
        "mask": jnp.asarray(np.arange(shape[2]) < np.array(lengths)[..., None]),
    }


@functools.partial(
    jax.jit,
    static_argnames=("aggregate", "max_completion_length", "surrogate", "dual_clip", "beta", "kl_estimator"),
)
def value_and_gradient(logps: Any, advantages: Any, mask: Any, **options: Any) -> Any:
    """The loss and its gradient; arrays by keyword as grpo_loss names them."""
    return jax.value_and_grad(lambda x: grpo_loss(x, advantages, mask, **options)[0])(logps)


def gradient_of(logps: Any, advantages: Any, mask: Any, **options: Any) -> Any:
    """Off-policy, with clipped tokens on both sides."""
    return value_and_gradient(logps, advantages, mask, old_logps_PGT=1.1 * logps, **options)[1]


# ----------------------------------------------------------------------- loss and normalisation


@pytest.mark.parametrize("aggregate", AGGREGATE_NAMES)
@pytest.mark.parametrize("axis", [0, 1], ids=["4x1", "1x4"])
def test_accumulation_divides_once(x64, aggregate, axis) -> None:
    """One batch and its four micro-batches, of one prompt each or of a quarter of each group: one gradient."""
    batch = uneven_batch([[3, 1, 2, 4], [7, 7, 5, 1], [2, 5, 3, 3], [1, 1, 6, 2]])
    denominator = loss_denominator(batch["mask"], aggregate=aggregate, max_completion_length=7)
    whole = gradient_of(**batch, aggregate=aggregate, max_completion_length=7)
    quarters = [
        {name: jax.lax.slice_in_dim(array, i, i + 1, axis=axis) for name, array in batch.items()} for i in range(4)
    ]
    parts = [gradient_of(**part, aggregate=aggregate, denominator=denominator) for part in quarters]
    np.testing.assert_allclose(jnp.concatenate(parts, axis=axis), whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("aggregate", AGGREGATE_NAMES)
def test_devices_with_10_and_1000_tokens_update_like_one_with_1010(x64, aggregate) -> None:
    batch = uneven_batch([[4, 6], [500, 500]])
    whole = gradient_of(**batch, aggregate=aggregate, max_completion_length=500)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    split = {k: jax.device_put(v, NamedSharding(mesh, PartitionSpec("data"))) for k, v in batch.items()}
    got = gradient_of(**split, aggregate=aggregate, max_completion_length=500)
    np.testing.assert_allclose(got, whole, rtol=1e-12, atol=1e-15)
    if aggregate == "token_mean":
        # Each unclipped token weighs 1/1010 of its -rho A, on either device.
        rho = np.exp(np.asarray(batch["logps"]) * -0.1)
        expected = -rho * np.asarray(batch["advantages"])[..., None] * np.asarray(batch["mask"]) / 1010
        unclipped = np.asarray(got) != 0
        assert unclipped[0].any() and unclipped[1].any()
        np.testing.assert_allclose(np.asarray(got)[unclipped], expected[unclipped], rtol=1e-12)


@pytest.mark.parametrize("aggregate", AGGREGATE_NAMES)
def test_masked_tokens_are_in_neither_numerator_nor_denominator(aggregate) -> None:
    """A completion of 100 tokens kept, nine masked out, the loss of each token 1: it's 1, not 0.1.

    (Or all 100 of them, where a completion's tokens are summed.)
    """
    mask = jnp.zeros((1, 10, 100), bool).at[0, 0].set(True)
    logps = jnp.zeros((1, 10, 100))
    options = {"aggregate": aggregate, "max_completion_length": 100}
    loss, _ = value_and_gradient(logps, jnp.full((1, 10), -1.0), mask, **options)
    expected = 100.0 if aggregate == "sequence_sum" else 1.0
    np.testing.assert_allclose(loss, expected, rtol=1e-6)  # float32 rounding of a sum of 100


@pytest.mark.parametrize("kl_estimator", ["k2", "k3", "k3_straight_through"])
def test_a_step_on_the_kl_term_alone_lowers_the_kl(x64, kl_estimator) -> None:
    """Advantages 0, ten tokens in the proportions of the policy. (k1 has no gradient in expectation.)"""
    counts = jnp.array([5, 3, 2])
    logits, ref = jnp.log(counts / 10), jnp.log(jnp.array([0.2, 0.2, 0.6]))
    tokens = jnp.repeat(jnp.arange(3), counts, total_repeat_length=10)[None, :, None]
    mask = jnp.ones((1, 10, 1), bool)

    def loss(logits: Any) -> Any:
        logps = jax.nn.log_softmax(logits)[tokens]
        return grpo_loss(
            logps, jnp.zeros((1, 10)), mask, ref_logps_PGT=ref[tokens], beta=1.0, kl_estimator=kl_estimator
        )[0]

    def divergence(logits: Any) -> Any:
        logps = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logps) * (logps - ref))

    before, after = divergence(logits), divergence(logits - 0.1 * jax.jit(jax.grad(loss))(logits))
    assert after < before - 1e-3


@pytest.mark.parametrize(("rho", "expected"), [(0.5, 0.8), (2.5, 2.5), (5.0, 5.0)])
def test_the_surrogate_takes_the_minimum_for_negative_advantages(rho, expected) -> None:
    one = jnp.ones((1, 1, 1))
    loss, _ = value_and_gradient(
        jnp.log(rho * one), jnp.full((1, 1), -1.0), one.astype(bool), old_logps_PGT=0 * one
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)  # float32 exp of a log


def test_a_dual_clip_reaches_the_loss() -> None:
    """A = -1, ratio 5, c = 3."""
    one = jnp.ones((1, 1, 1))
    loss, _ = value_and_gradient(
        jnp.log(5 * one), jnp.full((1, 1), -1.0), one.astype(bool), old_logps_PGT=0 * one, dual_clip=3.0
    )
    np.testing.assert_allclose(loss, 3.0, rtol=1e-6)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(("rho", "weight"), [(0.5, 0.8), (1.1, 1.1), (3.0, 1.2)])
def test_cispo_takes_its_weight_as_a_constant(x64, advantage, rho, weight) -> None:
    """The gradient is -w A, also where w is clipped, and for either sign of A."""
    new, mask, advantages = jnp.full((1, 1, 1), -1.0), jnp.ones((1, 1, 1), bool), jnp.full((1, 1), advantage)
    options = {"surrogate": "cispo", "cispo_low": 0.8, "cispo_high": 1.2, "old_logps_PGT": new - math.log(rho)}
    _, gradient = value_and_gradient(new, advantages, mask, **options)
    np.testing.assert_allclose(gradient, -weight * advantage, rtol=1e-12)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_ratio_is_not_taken_as_a_constant_nor_the_old_policy_as_a_variable(x64, advantage) -> None:
    """d loss / d new = -rho A inside the clip range; on-policy it's -A and not 0."""
    new, mask = jnp.full((1, 1, 1), -1.0), jnp.ones((1, 1, 1), bool)
    advantages = jnp.full((1, 1), advantage)
    _, on_policy = value_and_gradient(new, advantages, mask)
    np.testing.assert_allclose(on_policy, -advantage, rtol=1e-12)
    _, off_policy = value_and_gradient(new, advantages, mask, old_logps_PGT=new - 0.1)
    np.testing.assert_allclose(off_policy, -advantage * math.exp(0.1), rtol=1e-12)


def test_chunked_and_full_log_probabilities_give_the_same_update() -> None:
    """Through the whole loss: value, and gradients of hidden states and output matrix."""
    rng = np.random.default_rng(0)
    P, G, T, D, V = 2, 2, 5, 4, 11
    hidden, head = jnp.asarray(rng.normal(size=(P * G * T, D))), jnp.asarray(rng.normal(size=(V, D)))
    targets = jnp.asarray(rng.integers(0, V, P * G * T))
    advantages, mask = jnp.asarray(rng.normal(size=(P, G))), jnp.ones((P, G, T), bool)

    def loss(hidden: Any, head: Any, chunk_size: int) -> Any:
        outputs = token_logps(hidden, head, targets, temperature=0.7, vocab_size=V, chunk_size=chunk_size)
        logps, entropy = (x.reshape(P, G, T) for x in outputs)
        terms = {"ref_logps_PGT": logps - 0.1, "beta": 0.1, "entropy_PGT": entropy, "entropy_coef": 0.1}
        return grpo_loss(logps, advantages, mask, **terms)[0]

    f = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)
    value, gradients = f(hidden, head, P * G * T)
    chunked_value, chunked_gradients = f(hidden, head, 3)
    np.testing.assert_allclose(chunked_value, value, rtol=1e-5)
    for x, y in zip(chunked_gradients, gradients, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)  # float32 sums in another order


# ----------------------------------------------------------------- log-probabilities, KL, precision


@pytest.mark.parametrize("kl_estimator", sorted(reference.KL))
@pytest.mark.parametrize("reference_minus_new", [89.0, 1000.0, -89.0])
def test_kl_far_from_the_reference_has_finite_value_and_gradient(kl_estimator, reference_minus_new) -> None:
    new, mask = jnp.full((1, 1, 1), -1.0), jnp.ones((1, 1, 1), bool)
    options = {"ref_logps_PGT": new + reference_minus_new, "beta": 1.0, "kl_estimator": kl_estimator}
    value, gradient = value_and_gradient(new, jnp.zeros((1, 1)), mask, **options)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    assert np.isfinite(kl_penalty(jnp.float32(0), jnp.float32(89), estimator=kl_estimator))


def test_a_straight_through_kl_has_the_value_of_k3_and_the_gradient_of_k2(x64) -> None:
    new, ref, mask = jnp.full((1, 1, 1), -1.0), jnp.full((1, 1, 1), -1.7), jnp.ones((1, 1, 1), bool)
    options = {"ref_logps_PGT": ref, "beta": 1.0, "kl_estimator": "k3_straight_through"}
    value, gradient = value_and_gradient(new, jnp.zeros((1, 1)), mask, **options)
    np.testing.assert_allclose(value, math.exp(-0.7) + 0.7 - 1, rtol=1e-12)
    np.testing.assert_allclose(gradient, 0.7, rtol=1e-12)


def test_the_sampling_temperature_is_in_the_trainers_log_probabilities() -> None:
    head = jnp.array([[2.0], [1.0], [0.0]])
    logps, _ = token_logps(jnp.ones((3, 1)), head, jnp.arange(3), temperature=0.5, vocab_size=3, chunk_size=8)
    np.testing.assert_allclose(logps, [-0.14293, -2.14293, -4.14293], rtol=0, atol=5e-6)  # five digits given


def test_samples_of_a_truncated_distribution_weigh_their_kept_mass(x64) -> None:
    """Kept mass 0.9, unchanged weights: every token's surrogate weighs exp(old - sampler) = 0.9."""
    old = jnp.log(jnp.array([[[0.5, 0.4]]]))
    sampler = old - jnp.log(0.9)
    mask, advantages = jnp.ones((1, 1, 2), bool), jnp.ones((1, 1))

    def gradient(sampler: Any) -> Any:
        weights, metrics = importance_weights(old, sampler, mask)
        assert metrics["importance"] == pytest.approx(float(weights[0, 0, 0]), rel=1e-12)
        options = {"old_logps_PGT": old, "importance_weights_PGT": weights}
        return value_and_gradient(old, advantages, mask, **options)[1]

    np.testing.assert_allclose(gradient(sampler), [[[-0.45, -0.45]]], rtol=1e-12)
    np.testing.assert_allclose(gradient(old), [[[-0.5, -0.5]]], rtol=1e-12)


def test_log_probabilities_from_bfloat16_are_never_positive() -> None:
    """A token of nearly all the probability, among 1000 others."""
    hidden = jnp.ones((4, 8), jnp.bfloat16)
    head = jnp.full((1000, 8), -1.0, jnp.bfloat16).at[3].set(1.3)
    logps, _ = token_logps(hidden, head, jnp.full(4, 3), temperature=1.0, vocab_size=1000, chunk_size=2)
    kept = 8 * (float(jnp.bfloat16(1.3)) + 1.0)
    assert logps.dtype == jnp.float32
    assert (np.asarray(logps) <= 0).all()
    np.testing.assert_allclose(logps, -math.log1p(999 * math.exp(-kept)), rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------- masks, tokens


def test_the_token_that_ends_a_completion_is_trained_on() -> None:
    """The mask is 1 on it, and its gradient is that of any other token, also when it's the only one."""
    mask = jnp.array([[[1, 1, 1], [1, 0, 0]]])
    _, gradient = value_and_gradient(jnp.zeros((1, 2, 3)), jnp.ones((1, 2)), mask)
    np.testing.assert_allclose(gradient, -mask / 4, rtol=1e-6)


def test_an_end_as_the_first_token_is_a_completion_of_length_one() -> None:
    mask = jnp.array([[[1, 1, 1], [1, 0, 0]]])
    assert loss_denominator(mask, aggregate="sequence_mean") == 2
    _, gradient = value_and_gradient(jnp.zeros((1, 2, 3)), jnp.ones((1, 2)), mask, aggregate="sequence_mean")
    np.testing.assert_allclose(gradient.sum(axis=-1), [[-0.5, -0.5]], rtol=1e-6)


def test_ids_beyond_the_tokenizer_have_probability_zero() -> None:
    hidden, head = jnp.ones((2, 1)), jnp.array([[0.0], [0.0], [50.0], [60.0]])
    logps, entropy = token_logps(hidden, head, jnp.array([0, 3]), temperature=1.0, vocab_size=2, chunk_size=1)
    np.testing.assert_allclose(logps, [-math.log(2), -math.inf], rtol=1e-6)
    np.testing.assert_allclose(entropy, [math.log(2)] * 2, rtol=1e-6)


# --------------------------------------------------------------------------------- rewards and groups


def test_a_missing_reward_is_not_a_reward_of_zero() -> None:
    got = group_advantages(jnp.array([[1.0, 0.0, 0.5, math.nan]]), estimator="group")
    np.testing.assert_allclose(got, [[0.9998, -0.9998, 0.0, 0.0]], rtol=0, atol=1e-5)  # four digits given
    assert got[0, 3] == 0


def test_seven_rewards_of_0_7_are_a_group_without_spread() -> None:
    rewards = jnp.full((1, 7), 0.7, jnp.float32)
    assert float(np.std(np.asarray(rewards))) != 0  # NumPy's float32 standard deviation is fooled
    assert bool(zero_spread(rewards)[0])
    assert (np.asarray(group_advantages(rewards, estimator="group")) == 0).all()


def test_groups_without_spread_keep_their_kl_gradient_unless_masked_out() -> None:
    rewards = jnp.array([[1.0, 1.0], [1.0, 0.0]])
    advantages, spread = group_advantages(rewards), ~zero_spread(rewards)
    logps, mask = jnp.full((2, 2, 3), -1.0), jnp.ones((2, 2, 3), bool)

    def gradient(mask: Any) -> Any:
        return value_and_gradient(logps, advantages, mask, ref_logps_PGT=logps - 0.5, beta=0.1)[1]

    assert (np.asarray(gradient(mask)[0]) != 0).all()
    masked = gradient(mask & spread[:, None, None])
    assert (np.asarray(masked[0]) == 0).all()
    # Masked out of the denominator too: the remaining group weighs as much as on its own.
    np.testing.assert_allclose(masked[1], 2 * gradient(mask)[1], rtol=1e-6)


@pytest.mark.parametrize("estimator", sorted(reference.ADVANTAGES))
def test_equal_rewards_of_a_group_get_equal_advantages(estimator) -> None:
    """Leave-one-out subtracts a mean of the others, and divides by no spread of the others."""
    lengths = jnp.array([[3, 1, 40, 7]])
    got = group_advantages(jnp.array([[1.0, 0.0, 0.0, 0.0]]), estimator=estimator, lengths_PG=lengths)
    first, *zeros = np.asarray(got)[0]
    assert zeros[0] == zeros[1] == zeros[2] < 0 < first
    if estimator == "leave_one_out":
        np.testing.assert_allclose([first, *zeros], [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)


def test_nan_behind_the_mask_stays_there() -> None:
    assert masked_mean(jnp.array([1.0, 2.0, math.nan, 4.0]), jnp.array([1, 0, 0, 1])) == 2.5
    gradient = jax.grad(masked_mean)(jnp.array([1.0, 2.0, math.nan, 4.0]), jnp.array([1, 0, 0, 1]))
    np.testing.assert_array_equal(gradient, [0.5, 0, 0, 0.5])
