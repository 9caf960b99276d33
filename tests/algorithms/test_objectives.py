"""What the loss is made of: options of the surrogates, KL, entropy, weights, masks, metrics, denominators."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from grpo_jax.algorithms import aggregates, objectives
from tests.algorithms import reference
from tests.algorithms.batches import (
    AGGREGATE_NAMES,
    EXACT,
    MAX_COMPLETION_LENGTH,
    Batch,
    batches,
    denominators_of,
    loss_and_gradient,
    loss_of,
    random_batch,
    reference_gradients,
    reference_losses,
    reference_tokens,
)

# Choices beside those that every combination is tested with: what is left out is at its default.
VARIANTS: dict[str, dict[str, Any]] = {
    "clip": {},
    "clip-delta": {"delta": 1.35, "clip_high": 0.1},
    "clip-dual_clip": {"dual_clip": 1.1},
    "clip-delta-dual_clip": {"delta": 1.4, "dual_clip": 1.2, "clip_low": 0.1},
    "clip-delta-sequence": {"delta": 1.25, "ratio": "sequence"},
    "clip-dual_clip-trajectory": {"dual_clip": 1.3, "ratio": "trajectory"},
    "cispo": {"surrogate": "cispo"},
    "sapo": {"surrogate": "sapo"},
    "gmpo": {"surrogate": "gmpo"},
    "clip_cov": {"surrogate": "clip_cov"},
    "kl_cov": {"surrogate": "kl_cov"},
    **{
        f"kl-{name}{'-unbiased' * unbiased}": {"beta": 0.3, "kl_estimator": name, "kl_unbiased": unbiased}
        for name, unbiased in [*((name, False) for name in reference.KL), ("k1", True), ("k3", True)]
    },
    "entropy": {"entropy_coef": -0.2},
}
over_variants = pytest.mark.parametrize("name", VARIANTS)


VARIED = ("new", "old", "ref", "weights")


@jax.jit
def every_variant(batch: Batch) -> dict[str, Any]:
    """Loss, and its gradients for new and for what should be constant."""

    def loss(floats: dict[str, Any], options: dict[str, Any]) -> Any:
        return loss_of(batch._replace(**floats), **options)[0]

    floats = {name: getattr(batch, name) for name in VARIED}
    return {name: jax.value_and_grad(loss)(floats, options) for name, options in VARIANTS.items()}


@over_variants
@settings(max_examples=12)
@given(batch=batches())
def test_loss_of_a_variant_equals_reference(x64, name, batch) -> None:
    expected = reference_losses(batch, **VARIANTS[name])[AGGREGATE_NAMES.index("token_mean")]
    largest = max(1.0, float(np.abs(reference_tokens(batch, **VARIANTS[name])).max()))
    np.testing.assert_allclose(every_variant(batch)[name][0], expected, rtol=1e-12, atol=1e-13 * largest)


@over_variants
def test_gradient_of_a_variant_equals_finite_differences(x64, name) -> None:
    # Ratios far enough out for every bound to be reached; one batch alone might miss the rarest.
    for seed in (31, 32):
        batch = random_batch(seed, spread=0.5)
        got = every_variant(batch)[name][1]["new"]
        expected = reference_gradients(batch, **VARIANTS[name])[AGGREGATE_NAMES.index("token_mean")]
        # Central differences of step 1e-6: noise of 1e-16 * value / step, about 1e-10.
        np.testing.assert_allclose(got, expected, rtol=1e-7, atol=2e-9)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("clip-delta", {"clip_high": 0.1}),
        ("clip-dual_clip", {}),
        ("clip-delta-sequence", {"ratio": "sequence"}),
        ("clip-dual_clip-trajectory", {"ratio": "trajectory"}),
    ],
)
def test_a_variant_differs_from_the_plain_one(name, other) -> None:
    """Else the two tests above could not fail for its sake."""
    batch = random_batch(31, spread=0.5)
    assert (reference_losses(batch, **VARIANTS[name]) != reference_losses(batch, **other)).all()


def test_defaults_are_those_of_the_papers() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(objectives.policy_loss).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    for name, value in {
        "surrogate": "clip",
        "ratio": "token",
        "aggregate": "token_mean",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "delta": None,
        "dual_clip": None,
        "cispo_low": 0.0,
        "cispo_high": 5.0,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "gmpo_range": 0.4,
        "kl_cov_coef": 1.0,
        "cov_share": 2e-4,
        "cov_low": 1.0,
        "cov_high": 5.0,
    }.items():
        assert defaults[name] == value, name


# ------------------------------------------------------------------------------- constants and weights


def test_without_old_log_probabilities_the_policy_itself_is_old(x64) -> None:
    batch = random_batch(12)
    expected = jax.jit(loss_and_gradient)(batch._replace(old=batch.new))
    got = jax.jit(loss_and_gradient)(batch._replace(old=None))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert np.abs(got[1]).max() > 1e-3


@over_variants
def test_no_gradient_flows_into_what_is_constant(x64, name) -> None:
    """Old and reference log-probabilities and importance weights."""
    _, gradients = every_variant(random_batch(13))[name]
    for constant in ("old", "ref", "weights"):
        assert (np.asarray(gradients[constant]) == 0).all(), constant
    assert np.abs(gradients["new"]).max() > 1e-3


def test_entropy_gradient_pushes_entropy_up(x64) -> None:
    batch = random_batch(14)
    loss = lambda e: loss_of(batch._replace(entropy=e), entropy_coef=0.5)[0]  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(batch.entropy)
    np.testing.assert_allclose(gradient, -0.5 * batch.mask / batch.mask.sum(), **EXACT)


@jax.jit
def surrogate_and_kl(batch: Batch) -> dict[str, Any]:
    """Losses a pair of aggregates, of the surrogate alone and of the KL alone."""
    still = batch._replace(advantages_PG=0 * batch.advantages_PG)
    return {
        "surrogate": jnp.stack([loss_of(batch, aggregate=name)[0] for name in AGGREGATE_NAMES]),
        "kl": jnp.stack([loss_of(still, beta=1.0, aggregate=name)[0] for name in AGGREGATE_NAMES]),
    }


def test_importance_weights_multiply_the_surrogate_and_not_the_kl(x64) -> None:
    batch = random_batch(15)
    whole = batch._replace(weights=np.ones_like(batch.weights))
    plain, weighted = surrogate_and_kl(whole), surrogate_and_kl(whole._replace(weights=0.9 * whole.weights))
    np.testing.assert_allclose(weighted["surrogate"], 0.9 * plain["surrogate"], **EXACT)
    np.testing.assert_array_equal(weighted["kl"], plain["kl"])


def test_the_policy_mask_takes_tokens_out_of_the_surrogates_numerator_alone(x64) -> None:
    """The two halves add up: denominators, ratios and KL know nothing of it."""
    batch = random_batch(16)
    whole, half, other = (
        surrogate_and_kl(batch._replace(policy_mask=mask))
        for mask in (np.ones_like(batch.policy_mask), batch.policy_mask, ~batch.policy_mask)
    )
    np.testing.assert_allclose(half["surrogate"] + other["surrogate"], whole["surrogate"], **EXACT)
    np.testing.assert_array_equal(half["kl"], whole["kl"])
    assert (np.abs(half["surrogate"]) > 1e-3).all()


# ------------------------------------------------------------------------------------------- metrics


def test_loss_is_the_sum_of_its_reported_parts(x64) -> None:
    batch = random_batch(17)
    loss, metrics = jax.jit(lambda b: loss_of(b, beta=0.3, entropy_coef=0.2, kl_estimator="k2"))(batch)
    parts = metrics["policy_loss"] + metrics["kl_loss"] + metrics["entropy_loss"]
    np.testing.assert_allclose(loss, parts, **EXACT)
    new, ref = batch.new[batch.mask], batch.ref[batch.mask]
    np.testing.assert_allclose(metrics["kl_loss"], 0.3 * ((new - ref) ** 2 / 2).mean(), **EXACT)
    # Whatever is in the loss, the reported divergence is the unbiased estimate.
    np.testing.assert_allclose(metrics["kl"], (np.exp(ref - new) - (ref - new) - 1).mean(), **EXACT)
    np.testing.assert_allclose(metrics["entropy"], batch.entropy[batch.mask].mean(), **EXACT)
    np.testing.assert_allclose(metrics["entropy_loss"], -0.2 * batch.entropy[batch.mask].mean(), **EXACT)


RATIOS = ("token", "sequence", "trajectory")
CLIP = {"clip_low": 0.1, "clip_high": 0.3}


@jax.jit
def clipped(batch: Batch) -> dict[str, Any]:
    """Gradient and metrics of the clipped surrogate alone, with every ratio."""
    bare = batch._replace(ref=None, entropy=None)
    return {ratio: loss_and_gradient(bare, ratio=ratio, **CLIP)[1:] for ratio in RATIOS}


@given(batch=batches())
def test_clip_fractions_and_extremes_of_the_ratio(x64, batch) -> None:
    got = clipped(batch)
    d = np.where(batch.mask, batch.new - batch.old, 0.0)
    total, n = d.sum(axis=-1, keepdims=True), np.maximum(batch.mask.sum(axis=-1, keepdims=True), 1)
    A = np.broadcast_to(batch.advantages_PG[..., None], d.shape)[batch.mask]
    for ratio, log_ratio in zip(RATIOS, (d, total / n + 0 * d, total + 0 * d), strict=True):
        rho, (_, metrics) = np.exp(np.clip(log_ratio, -20, 20))[batch.mask], got[ratio]
        np.testing.assert_allclose(metrics["clip_low_fraction"], ((A < 0) & (rho < 0.9)).mean(), **EXACT)
        np.testing.assert_allclose(metrics["clip_high_fraction"], ((A > 0) & (rho > 1.3)).mean(), **EXACT)
        np.testing.assert_allclose(metrics["ratio_max"], rho.max(), rtol=1e-12)
        np.testing.assert_allclose(metrics["ratio_min"], rho.min(), rtol=1e-12)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_clip_counts_where_it_takes_the_gradient(x64, ratio) -> None:
    batch = random_batch(2)
    everywhere = np.ones_like(batch.policy_mask)
    gradient, metrics = clipped(batch._replace(policy_mask=everywhere))[ratio]
    without = batch.mask & (np.asarray(gradient) == 0)
    negative = (batch.advantages_PG < 0)[..., None]
    for name, tokens in (("clip_low_fraction", without & negative), ("clip_high_fraction", without & ~negative)):
        assert tokens.any()
        np.testing.assert_allclose(metrics[name], tokens.sum() / batch.mask.sum(), **EXACT)


# -------------------------------------------------------------------------------------- aggregation


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [("token_mean", 5), ("sequence_mean", 2), ("constant", 2 * MAX_COMPLETION_LENGTH), ("sequence_sum", 2)],
)
def test_loss_denominator(aggregate, expected) -> None:
    """Completions without a token are none."""
    mask = jnp.array([[[1, 1, 1], [0, 0, 0]], [[1, 1, 0], [0, 0, 0]]])
    options = {"aggregate": aggregate, "max_completion_length": MAX_COMPLETION_LENGTH}
    assert aggregates.loss_denominator(mask, **options) == expected
    assert aggregates.loss_denominator(0 * mask, **options) > 0


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    # Values 1 2 3 | 4: (1+2+3+4)/4, (6/3 + 4/1)/2, 10/(2*8), 10/2.
    [("token_mean", 2.5), ("sequence_mean", 3.0), ("constant", 0.625), ("sequence_sum", 5.0)],
)
def test_aggregate_tokens(aggregate, expected) -> None:
    mask = jnp.array([[[1, 1, 1], [1, 0, 0]]])
    values = jnp.array([[[1.0, 2.0, 3.0], [4.0, np.nan, np.inf]]])
    denominator = aggregates.loss_denominator(
        mask, aggregate=aggregate, max_completion_length=MAX_COMPLETION_LENGTH
    )
    got = aggregates.aggregate_tokens(values, mask, aggregate=aggregate, denominator=denominator)
    np.testing.assert_allclose(got, expected, rtol=1e-6)  # a few float32 roundings


def test_the_denominator_is_that_of_the_arrays_unless_given(x64) -> None:
    batch = random_batch(18)
    whole = denominators_of(batch.mask)

    @jax.jit
    def losses(batch: Batch, whole: dict[str, Any]) -> Any:
        own = [loss_of(batch, aggregate=name)[0] for name in AGGREGATE_NAMES]
        same = [loss_of(batch, aggregate=n, denominator=whole[n])[0] for n in AGGREGATE_NAMES]
        half = [loss_of(batch, aggregate=n, denominator=2 * whole[n])[0] for n in AGGREGATE_NAMES]
        return jnp.stack(own), jnp.stack(same), 2 * jnp.stack(half)

    own, same, doubled = losses(batch, whole)
    np.testing.assert_array_equal(own, same)
    np.testing.assert_allclose(doubled, own, **EXACT)
