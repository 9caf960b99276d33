from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.algorithms import objectives
from tests.algorithms import reference
from tests.algorithms.batches import (
    COMBINATIONS,
    EXACT,
    EXTRAS,
    GOLDEN,
    MAX_COMPLETION_LENGTH,
    Batch,
    golden_batch,
    jitted_loss_and_gradient,
    loss_and_gradient,
    loss_of,
    on_device,
    random_batch,
    reference_loss,
)

AGGREGATE_NAMES = sorted(reference.AGGREGATES)

# Names of the file -> keyword arguments; a row with any other key is of a variant that isn't offered.
GOLDEN_KEYS = {
    "surrogate": "surrogate",
    "ratio": "ratio",
    "clip_low": "clip_low",
    "clip_high": "clip_high",
    "aggregate": "aggregate",
    "kl": "kl_estimator",
    "beta": "beta",
}


def golden_rows() -> list[tuple[dict[str, Any], str, float]]:
    rows = []
    for row in GOLDEN["losses"]:
        rest = dict(row)
        expected, name = rest.pop("loss"), rest.pop("advantages", "group (eps 1e-4, ddof 1)")
        offered = (
            set(rest) <= set(GOLDEN_KEYS)
            and rest["surrogate"] in objectives.SURROGATES
            and rest["ratio"] in objectives.RATIOS
            and rest["aggregate"] in objectives.AGGREGATES
        )
        if offered:
            rows.append(({GOLDEN_KEYS[key]: value for key, value in rest.items()}, name, expected))
    return rows


GOLDEN_ROWS = golden_rows()
GOLDEN_SINGLE_TOKENS = [row for row in GOLDEN["single_token"] if set(row) <= {"A", "rho", "clip", "loss"}]


def test_every_name_has_a_reference() -> None:
    assert set(objectives.SURROGATES) == set(reference.SURROGATES)
    assert set(objectives.RATIOS) == set(reference.RATIOS)
    assert set(objectives.AGGREGATES) == set(reference.AGGREGATES)


def test_golden_rows_are_all_there() -> None:
    # Three aggregations with and without KL, and the asymmetric clip.
    assert len(GOLDEN_ROWS) == 3 * 2 + 1
    assert len(GOLDEN_SINGLE_TOKENS) == 3


@pytest.mark.parametrize("run", [loss_and_gradient, jitted_loss_and_gradient], ids=["eager", "jit"])
@pytest.mark.parametrize(("options", "advantages_name", "expected"), GOLDEN_ROWS)
def test_golden_losses(x64, run, options, advantages_name, expected) -> None:
    batch = golden_batch(advantages_name=advantages_name)
    loss, _, metrics = run(on_device(batch), **options)
    assert loss.dtype == jnp.float64
    np.testing.assert_allclose(loss, expected, **EXACT)
    np.testing.assert_allclose(reference_loss(batch, **options), expected, **EXACT)
    if options["clip_high"] == 0.2:
        fraction = GOLDEN["clip_fraction_token_mean"]
        np.testing.assert_allclose(metrics["clip_low_fraction"], fraction["low"], **EXACT)
        np.testing.assert_allclose(metrics["clip_high_fraction"], fraction["high"], **EXACT)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda o: "-".join(o.values()))
def test_equals_reference(x64, options, seed) -> None:
    batch = random_batch(seed)
    got, _, _ = jitted_loss_and_gradient(on_device(batch), **options, **EXTRAS)
    np.testing.assert_allclose(got, reference_loss(batch, **options, **EXTRAS), **EXACT)


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda o: "-".join(o.values()))
def test_gradient_equals_finite_differences(x64, options) -> None:
    """Old and reference log-probabilities, entropies and weights held fixed."""
    batch = random_batch(11)
    _, gradient, _ = jitted_loss_and_gradient(on_device(batch), **options, **EXTRAS)
    expected = reference.finite_differences(
        lambda new: reference_loss(batch._replace(new=new), **options, **EXTRAS), batch.new
    )
    # Central differences of step 1e-6: noise of 1e-16 * value / step, about 1e-10.
    np.testing.assert_allclose(gradient, expected, rtol=1e-7, atol=2e-9)
    assert np.abs(expected).max() > 1e-3


@pytest.mark.parametrize("aggregate", AGGREGATE_NAMES)
def test_gradient_on_policy_equals_finite_differences(x64, aggregate) -> None:
    """Without old log-probabilities the ratio's denominator is the policy itself, held fixed."""
    batch = random_batch(12)
    _, gradient, _ = jitted_loss_and_gradient(on_device(batch)._replace(old=None), aggregate=aggregate)
    expected = reference.finite_differences(
        lambda new: reference_loss(batch._replace(old=batch.new, new=new), aggregate=aggregate), batch.new
    )
    np.testing.assert_allclose(gradient, expected, rtol=1e-7, atol=2e-9)


@pytest.mark.parametrize("aggregate", AGGREGATE_NAMES)
def test_float32_is_close_to_float64(aggregate) -> None:
    batch = random_batch(3)
    small = on_device(Batch(*(x if x.dtype == bool else x.astype(np.float32) for x in batch)))
    got, gradient, _ = jitted_loss_and_gradient(small, aggregate=aggregate, **EXTRAS)
    assert got.dtype == gradient.dtype == jnp.float32
    # Eighty terms of order 1, each with a rounding of 6e-8.
    expected = reference_loss(batch, aggregate=aggregate, **EXTRAS)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", GOLDEN_SINGLE_TOKENS, ids=lambda c: f"A{c['A']}-rho{c['rho']}")
def test_golden_single_tokens(x64, case) -> None:
    loss, _ = objectives.policy_loss(
        jnp.log(jnp.full((1, 1, 1), case["rho"])),
        jnp.zeros((1, 1, 1)),
        jnp.full((1, 1), case["A"]),
        jnp.ones((1, 1, 1), bool),
        clip_low=case["clip"],
        clip_high=case["clip"],
    )
    np.testing.assert_allclose(loss, case["loss"], **EXACT)


@pytest.mark.parametrize("aggregate", AGGREGATE_NAMES)
def test_on_policy_the_ratio_is_one_and_the_gradient_that_of_reinforce(x64, aggregate) -> None:
    batch = random_batch(8)._replace(weights=np.ones((4, 4, 5)))
    batch_on_policy = on_device(batch)._replace(old=None)
    loss, gradient, metrics = jitted_loss_and_gradient(batch_on_policy, aggregate=aggregate)
    assert metrics["ratio_max"] == metrics["ratio_min"] == 1
    assert metrics["clip_low_fraction"] == metrics["clip_high_fraction"] == 0
    # REINFORCE: the aggregate of -A log p, which is linear in the log-probabilities.
    length = batch.mask.sum(axis=-1, keepdims=True)
    completions = (length > 0).sum()
    weight = {
        "token_mean": batch.mask / batch.mask.sum(),
        "sequence_mean": batch.mask / np.maximum(length, 1) / completions,
        "constant": batch.mask / (completions * MAX_COMPLETION_LENGTH),
    }[aggregate]
    np.testing.assert_allclose(gradient, -batch.advantages_PG[..., None] * weight, **EXACT)
    batch_with_old = on_device(batch._replace(old=batch.new))
    explicit = jitted_loss_and_gradient(batch_with_old, aggregate=aggregate)
    np.testing.assert_allclose(loss, explicit[0], **EXACT)
    np.testing.assert_allclose(gradient, explicit[1], **EXACT)


def test_a_clip_counts_where_it_takes_the_gradient(x64) -> None:
    batch = random_batch(9, P=8, T=12)._replace(weights=np.ones((8, 4, 12)))
    _, gradient, metrics = jitted_loss_and_gradient(on_device(batch), clip_low=0.1, clip_high=0.3)
    without = batch.mask & (np.asarray(gradient) == 0)
    negative = (batch.advantages_PG < 0)[..., None]
    tokens = batch.mask.sum()
    assert (without & negative).sum() > 0 and (without & ~negative).sum() > 0
    np.testing.assert_allclose(metrics["clip_low_fraction"], (without & negative).sum() / tokens, **EXACT)
    np.testing.assert_allclose(metrics["clip_high_fraction"], (without & ~negative).sum() / tokens, **EXACT)
    ratios = np.exp(batch.new - batch.old)[batch.mask]
    np.testing.assert_allclose(metrics["ratio_max"], ratios.max(), **EXACT)
    np.testing.assert_allclose(metrics["ratio_min"], ratios.min(), **EXACT)


@pytest.mark.parametrize("log_ratio", [-1000.0, -89.0, 89.0, 1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("kl_estimator", sorted(reference.KL))
def test_extreme_log_ratios_stay_finite_in_float32(log_ratio, advantage, kl_estimator) -> None:
    batch = random_batch(10, dtype=np.float32)
    batch = batch._replace(
        old=batch.new - np.float32(log_ratio),
        ref=batch.new + np.float32(log_ratio),
        advantages_PG=np.full_like(batch.advantages_PG, advantage),
    )
    loss, gradient, metrics = jitted_loss_and_gradient(on_device(batch), beta=1.0, kl_estimator=kl_estimator)
    assert all(np.isfinite(x).all() for x in (loss, gradient, *metrics.values()))


def test_no_gradient_flows_into_old_reference_and_weights(x64) -> None:
    batch = on_device(random_batch(13))
    gradients = jax.grad(lambda b: loss_of(b, **EXTRAS)[0], allow_int=True)(batch)
    for name in ("old", "ref", "weights"):
        assert (np.asarray(getattr(gradients, name)) == 0).all(), name
    assert np.abs(gradients.new).max() > 0


def test_entropy_gradient_pushes_entropy_up(x64) -> None:
    batch = on_device(random_batch(14))
    gradient = jax.grad(lambda e: loss_of(batch._replace(entropy=e), entropy_coef=0.5)[0])(batch.entropy)
    np.testing.assert_allclose(gradient, -0.5 * batch.mask / batch.mask.sum(), **EXACT)


def test_importance_weights_multiply_the_surrogate_and_not_the_kl(x64) -> None:
    batch = random_batch(15)
    ones = np.ones_like(batch.weights)
    kl_only = batch._replace(advantages_PG=np.zeros_like(batch.advantages_PG))
    plain, _ = loss_of(on_device(kl_only._replace(weights=ones)), beta=1.0)
    weighted, _ = loss_of(on_device(kl_only._replace(weights=0.9 * ones)), beta=1.0)
    np.testing.assert_allclose(weighted, plain, **EXACT)
    plain, _ = loss_of(on_device(batch._replace(weights=ones)))
    weighted, _ = loss_of(on_device(batch._replace(weights=0.9 * ones)))
    np.testing.assert_allclose(weighted, 0.9 * plain, **EXACT)


def test_loss_is_the_sum_of_its_reported_parts(x64) -> None:
    batch = on_device(random_batch(16))
    loss, metrics = loss_of(batch, beta=0.3, entropy_coef=0.0)
    np.testing.assert_allclose(loss, metrics["policy_loss"] + metrics["kl_loss"], **EXACT)
    np.testing.assert_allclose(metrics["kl_loss"], 0.3 * metrics["kl"], **EXACT)
    np.testing.assert_allclose(metrics["entropy"], batch.entropy[batch.mask].mean(), **EXACT)


@pytest.mark.parametrize(("aggregate", "expected"), [("token_mean", 5), ("sequence_mean", 2), ("constant", 2 * 8)])
def test_loss_denominator(aggregate, expected) -> None:
    mask = jnp.array([[[1, 1, 1], [0, 0, 0]], [[1, 1, 0], [0, 0, 0]]])
    got = objectives.loss_denominator(mask, aggregate=aggregate, max_completion_length=8)
    assert got == expected


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    # Values 1 2 3 | 4: with the denominators of this mask, (1+2+3+4)/4, (6/3 + 4/1)/2, 10/(2*8).
    [("token_mean", 2.5), ("sequence_mean", 3.0), ("constant", 0.625)],
)
def test_aggregate_tokens(aggregate, expected) -> None:
    mask = jnp.array([[[1, 1, 1], [1, 0, 0]]])
    values = jnp.array([[[1.0, 2.0, 3.0], [4.0, np.nan, np.nan]]])
    denominator = objectives.loss_denominator(mask, aggregate=aggregate, max_completion_length=8)
    got = objectives.aggregate_tokens(values, mask, aggregate=aggregate, denominator=denominator)
    np.testing.assert_allclose(got, expected, rtol=1e-6)  # a few float32 roundings


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"surrogate": "clipp"}, "surrogate.*clipp"),
        ({"ratio": "word"}, "ratio.*word"),
        ({"aggregate": "median"}, "aggregate.*median"),
        ({"kl_estimator": "k9", "beta": 0.1}, "k9"),
        ({"aggregate": "constant", "max_completion_length": None}, "max_completion_length"),
    ],
)
def test_unknown_names_are_refused(options, named) -> None:
    with pytest.raises(ValueError, match=named):
        loss_of(on_device(random_batch(0, dtype=np.float32)), **options)


def test_terms_without_their_arrays_are_refused() -> None:
    batch = on_device(random_batch(0, dtype=np.float32))
    with pytest.raises(ValueError, match="beta.*ref_logps_PGT"):
        loss_of(batch._replace(ref=None), beta=0.1)
    with pytest.raises(ValueError, match="entropy_coef.*entropy_PGT"):
        loss_of(batch._replace(entropy=None), entropy_coef=0.1)
