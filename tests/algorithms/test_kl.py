from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.algorithms import kl as package
from grpo_jax.algorithms.kl import kl_penalty
from tests.algorithms import reference
from tests.algorithms.batches import GOLDEN, golden_batch

ESTIMATOR_NAMES = sorted(reference.KL)


def test_every_estimator_has_a_reference() -> None:
    assert set(package.ESTIMATORS) == set(reference.KL)


@pytest.mark.parametrize("estimator", ESTIMATOR_NAMES)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_golden_token_mean(x64, estimator, jit) -> None:
    batch = golden_batch(advantages_name="center")

    def mean(new: jax.Array) -> jax.Array:
        return jnp.mean(kl_penalty(new, jnp.asarray(batch.ref), estimator=estimator)[batch.mask])

    got = (jax.jit(mean) if jit else mean)(jnp.asarray(batch.new))
    np.testing.assert_allclose(got, GOLDEN["kl_token_mean"][estimator], rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATOR_NAMES)
@given(new=st.floats(-15, 0), ref=st.floats(-15, 0))
def test_value_and_gradient_equal_reference(x64, estimator, new, ref) -> None:
    value, gradient = jax.value_and_grad(lambda x: kl_penalty(x, jnp.float64(ref), estimator=estimator))(
        jnp.float64(new)
    )
    # exp(15) is 3e6, so 1e-12 relative is a few float64 roundings of the largest term.
    np.testing.assert_allclose(value, reference.KL[estimator](new, ref), rtol=1e-12, atol=1e-12)
    d = new - ref
    expected = {"k1": 1.0, "k2": d, "k3": 1 - np.exp(-d)}[estimator]
    np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATOR_NAMES)
@pytest.mark.parametrize("reference_of_new", [-1000.0, -89.0, -20.0, 0.0, 20.0, 89.0, 1000.0])
def test_finite_at_any_log_ratio_in_float32(estimator, reference_of_new) -> None:
    f = jax.value_and_grad(lambda x: kl_penalty(x, jnp.float32(reference_of_new), estimator=estimator))
    value, gradient = f(jnp.float32(0.0))
    assert value.dtype == jnp.float32
    assert np.isfinite(value) and np.isfinite(gradient)


@given(st.floats(-1000, 1000))
def test_k2_and_k3_are_never_negative(log_ratio) -> None:
    for estimator in ("k2", "k3"):
        # A log-ratio near 0 makes k3 a difference of nearly equal numbers of order 1: float32 noise.
        assert kl_penalty(jnp.float32(log_ratio), jnp.float32(0), estimator=estimator) >= -2e-7


def test_expected_gradient_on_three_tokens(x64) -> None:
    """Samples from the policy: k2 has the gradient of KL(policy || reference), k3 that of
    KL(reference || policy), and k1 has none at all."""
    logits = jnp.array([0.3, -1.0, 0.5])
    ref = jax.nn.log_softmax(jnp.array([1.0, 0.0, -0.5]))
    p = jax.nn.softmax(logits)

    def expected(estimator: str) -> jax.Array:
        f = lambda z: jnp.sum(p * kl_penalty(jax.nn.log_softmax(z), ref, estimator=estimator))  # noqa: E731
        return jax.grad(f)(logits)

    def divergence(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(jnp.exp(a) * (a - b))

    reverse = jax.grad(lambda z: divergence(jax.nn.log_softmax(z), ref))(logits)
    forward = jax.grad(lambda z: divergence(ref, jax.nn.log_softmax(z)))(logits)
    np.testing.assert_allclose(expected("k1"), 0, atol=1e-14)
    np.testing.assert_allclose(expected("k2"), reverse, rtol=1e-12)
    np.testing.assert_allclose(expected("k3"), forward, rtol=1e-12)
    assert np.abs(reverse - forward).max() > 0.01


def test_expected_value_on_three_tokens(x64) -> None:
    """Under the policy, k1 and k3 average to KL(policy || reference); k2 doesn't."""
    new = jax.nn.log_softmax(jnp.array([0.3, -1.0, 0.5]))
    ref = jax.nn.log_softmax(jnp.array([1.0, 0.0, -0.5]))
    exact = jnp.sum(jnp.exp(new) * (new - ref))
    mean = {name: jnp.sum(jnp.exp(new) * kl_penalty(new, ref, estimator=name)) for name in ESTIMATOR_NAMES}
    np.testing.assert_allclose(mean["k1"], exact, rtol=1e-12)
    np.testing.assert_allclose(mean["k3"], exact, rtol=1e-12)
    assert abs(mean["k2"] - exact) > 1e-3


def test_unknown_estimator_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="k4"):
        kl_penalty(jnp.zeros(3), jnp.zeros(3), estimator="k4")
