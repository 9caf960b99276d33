from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.algorithms import kl as package
from grpo_jax.algorithms.kl import kl_penalty
from grpo_jax.algorithms.objectives import grpo_loss
from tests.algorithms import reference

ESTIMATORS = sorted(reference.KL)


@jax.jit
def values_and_gradients(new: Any, ref: Any) -> dict[str, Any]:
    """Of every estimator at one token."""
    return {
        name: jax.value_and_grad(lambda x, name=name: kl_penalty(x, ref, estimator=name))(new)
        for name in ESTIMATORS
    }


def test_every_estimator_has_a_reference() -> None:
    assert set(package.ESTIMATORS) == set(reference.KL)


@given(new=st.floats(-15, 0), ref=st.floats(-15, 0))
def test_value_and_gradient_equal_reference(x64, new, ref) -> None:
    got = values_and_gradients(new, ref)
    gradients = {"k1": 1.0, "k2": new - ref, "k3": 1 - math.exp(ref - new), "k3_straight_through": new - ref}
    for name in ESTIMATORS:
        # exp(15) is 3e6, so 1e-12 relative is a few float64 roundings of the largest term.
        value, gradient = got[name]
        np.testing.assert_allclose(value, reference.KL[name](new, ref, new), rtol=1e-12, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(gradient, gradients[name], rtol=1e-12, atol=1e-12, err_msg=name)
        moved = (
            reference.KL[name](new + 1e-6, ref, new) - reference.KL[name](new - 1e-6, ref, new)
        ) / 2e-6  # central differences: noise of 1e-16 * exp(15) / 1e-6
        np.testing.assert_allclose(gradient, moved, rtol=1e-6, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("log_ratio", [-1000.0, -104.0, -89.0, -20.0, 0.0, 20.0, 89.0, 104.0, 1000.0])
def test_finite_at_any_log_ratio_in_float32(log_ratio) -> None:
    for name, (value, gradient) in values_and_gradients(jnp.float32(0), jnp.float32(log_ratio)).items():
        assert value.dtype == jnp.float32, name
        assert np.isfinite(value) and np.isfinite(gradient), name
        np.testing.assert_allclose(value, reference.KL[name](0.0, log_ratio, 0.0), rtol=1e-6, err_msg=name)


@given(st.floats(-1000, 1000, width=32))
def test_all_but_k1_are_never_negative(log_ratio) -> None:
    got = values_and_gradients(jnp.float32(log_ratio), jnp.float32(0))
    for name in ("k2", "k3", "k3_straight_through"):
        # A log-ratio near 0 makes k3 a difference of nearly equal numbers of order 1: float32 noise.
        assert got[name][0] >= -2e-7


def test_k3_straight_through_has_the_value_of_k3_and_the_gradient_of_k2(x64) -> None:
    for ref in (-3.0, -0.2, 0.0, 1.7):
        got = values_and_gradients(-0.5, ref)
        np.testing.assert_allclose(got["k3_straight_through"][0], got["k3"][0], rtol=1e-14)
        assert got["k3_straight_through"][1] == got["k2"][1] == -0.5 - ref


# ------------------------------------------------------------------- what they are on average, three tokens

LOGITS = np.array([0.3, -1.0, 0.5])
REFERENCE = np.log(np.array([0.6, 0.2, 0.2]))


def divergence(a: Any, b: Any) -> Any:
    return jnp.sum(jnp.exp(a) * (a - b))


def test_expected_gradient_on_three_tokens(x64) -> None:
    """Samples from the policy: k2 has the gradient of KL(policy || reference), k3 that of
    KL(reference || policy), and k1 has none at all."""
    ref, p = jnp.asarray(REFERENCE), jax.nn.softmax(LOGITS)

    @jax.jit
    def expected(logits: Any) -> dict[str, Any]:
        def mean(logits: Any, name: str) -> Any:
            return jnp.sum(p * kl_penalty(jax.nn.log_softmax(logits), ref, estimator=name))

        return {name: jax.grad(mean)(logits, name) for name in ESTIMATORS} | {
            "reverse": jax.grad(lambda z: divergence(jax.nn.log_softmax(z), ref))(logits),
            "forward": jax.grad(lambda z: divergence(ref, jax.nn.log_softmax(z)))(logits),
        }

    got = expected(jnp.asarray(LOGITS))
    np.testing.assert_allclose(got["k1"], 0, atol=1e-14)
    np.testing.assert_allclose(got["k2"], got["reverse"], rtol=1e-12)
    np.testing.assert_allclose(got["k3"], got["forward"], rtol=1e-12)
    np.testing.assert_allclose(got["k3_straight_through"], got["reverse"], rtol=1e-12)
    assert np.abs(got["reverse"] - got["forward"]).max() > 0.01


def test_expected_value_on_three_tokens(x64) -> None:
    """Under the policy, k1 and k3 average to KL(policy || reference); k2 doesn't."""
    new, ref = jax.nn.log_softmax(LOGITS), jnp.asarray(REFERENCE)
    mean = {name: jnp.sum(jnp.exp(new) * kl_penalty(new, ref, estimator=name)) for name in ESTIMATORS}
    exact = divergence(new, ref)
    for name in ("k1", "k3", "k3_straight_through"):
        np.testing.assert_allclose(mean[name], exact, rtol=1e-12)
    assert abs(mean["k2"] - exact) > 1e-3


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_ratio_makes_value_and_gradient_exact_off_policy(x64, estimator) -> None:
    """Ten samples in the proportions 5:3:2 of an old policy; the policy has moved on."""
    old = jnp.log(jnp.array([0.5, 0.3, 0.2]))
    tokens = jnp.repeat(jnp.arange(3), jnp.array([5, 3, 2]), total_repeat_length=10)[None, :, None]
    options = {"beta": 1.0, "kl_estimator": estimator, "kl_unbiased": True}

    def loss(logits: Any) -> Any:
        logps, ref = jax.nn.log_softmax(logits)[tokens], jnp.asarray(REFERENCE)[tokens]
        terms = {"old_logps_PGT": old[tokens], "ref_logps_PGT": ref, **options}
        return grpo_loss(logps, jnp.zeros((1, 10)), jnp.ones((1, 10, 1), bool), **terms)[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.asarray(LOGITS))
    exact, exact_gradient = jax.value_and_grad(
        lambda z: divergence(jax.nn.log_softmax(z), jnp.asarray(REFERENCE))
    )(jnp.asarray(LOGITS))
    np.testing.assert_allclose(value, exact, rtol=1e-12)
    np.testing.assert_allclose(gradient, exact_gradient, rtol=1e-12)


def test_unknown_estimator_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="estimator.*k3_straight_through.*k4"):
        kl_penalty(jnp.zeros(3), jnp.zeros(3), estimator="k4")
