"""Several reward functions: their sum, or the sum of what is normalised one by one."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_jax.algorithms import advantages as package
from grpo_jax.algorithms.advantages import combine_rewards, weighted_sum
from tests.algorithms import reference
from tests.algorithms.batches import random_rewards

NAN = math.nan
METHODS = sorted(reference.METHODS)
LENGTHS = np.array([[1, 7, 20, 3], [5, 5, 5, 5], [100, 1, 2, 60]], np.int32)
# Rewards of order 1 over spreads of at least 0.04, twice.
EXACT = {"rtol": 0.0, "atol": 1e-11}


CHOICES = [("normalize_then_sum", "group"), *(("sum_then_normalize", name) for name in reference.ADVANTAGES)]


@functools.partial(jax.jit, static_argnames="ddof")
def every_choice(rewards: Any, weights: Any, lengths: Any, eps: Any, *, ddof: int) -> dict[tuple[str, str], Any]:
    """All of them in one program: compiling is most of what these tests cost."""
    return {
        (method, estimator): combine_rewards(
            rewards, weights, method=method, estimator=estimator, eps=eps, ddof=ddof, lengths_PG=lengths
        )
        for method, estimator in CHOICES
    }


def combined(
    rewards: np.ndarray,
    weights: np.ndarray,
    *,
    method: str,
    estimator: str = "group",
    eps: float = 1e-4,
    ddof: int = 1,
) -> np.ndarray:
    return np.asarray(every_choice(rewards, weights, LENGTHS, eps, ddof=ddof)[method, estimator])


seeds = st.integers(0, 2**32 - 1)
rewards_PGK = seeds.map(lambda seed: random_rewards(seed, 3, 4, 3))
weights_K = seeds.map(lambda seed: np.random.default_rng(seed).choice([0.0, 0.25, 1.0, 2.0, -0.5], 3))


def test_every_method_has_a_reference() -> None:
    assert set(package.METHODS) == set(reference.METHODS)


@pytest.mark.parametrize("estimator", sorted(reference.ADVANTAGES))
@given(rewards=rewards_PGK, weights=weights_K)
# A group whose weighted sums cancel but for a rounding.
@example(rewards=random_rewards(20480, 3, 4, 3), weights=np.array([1, -0.5, -0.5]))
def test_sum_then_normalize_equals_reference(x64, estimator, rewards, weights) -> None:
    got = combined(rewards, weights, method="sum_then_normalize", estimator=estimator)
    expected = reference.combine_rewards(rewards, weights, estimator=estimator, lengths_PG=LENGTHS)
    # Sums that are equal on paper may differ by a rounding of 1e-16, which the least eps (1e-4) makes 1e-12.
    np.testing.assert_allclose(got, expected, **EXACT)


@pytest.mark.parametrize("ddof", [0, 1])
@given(rewards=rewards_PGK, weights=weights_K, eps=st.sampled_from([1e-6, 1e-4, 0.1]))
def test_normalize_then_sum_equals_reference(x64, ddof, rewards, weights, eps) -> None:
    options = {"method": "normalize_then_sum", "ddof": ddof, "eps": eps}
    got, expected = combined(rewards, weights, **options), reference.combine_rewards(rewards, weights, **options)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)  # a rounding of 1e-16 over an eps of 1e-6


@given(rewards=rewards_PGK, weights=weights_K)
def test_the_weighted_sum_is_of_those_present(x64, rewards, weights) -> None:
    got = np.asarray(weighted_sum(jnp.asarray(rewards), jnp.asarray(weights)))
    np.testing.assert_allclose(got, reference.weighted_sum(rewards, weights), **EXACT)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(rewards).all(axis=-1))


@pytest.mark.parametrize("method", METHODS)
@given(rewards=rewards_PGK, weights=weights_K, seed=seeds)
def test_order_changes_nothing(x64, method, rewards, weights, seed) -> None:
    """Of prompts, completions and reward functions."""
    rng = np.random.default_rng(seed)
    p, g, k = rng.permutation(3)[:, None], np.argsort(rng.random((3, 4)), axis=1), rng.permutation(3)
    straight = combined(rewards, weights, method=method)
    np.testing.assert_allclose(
        combined(rewards[p, g][..., k], weights[k], method=method), straight[p, g], rtol=0, atol=1e-11
    )


@pytest.mark.parametrize("method", METHODS)
@given(rewards=rewards_PGK)
def test_one_function_is_its_group_advantage(x64, method, rewards) -> None:
    """The others weigh nothing; whitening a batch of normalised rewards only scales them."""
    got = combined(rewards, np.array([1.0, 0.0, 0.0]), method=method)
    present = ~np.isnan(rewards[..., 0])
    alone = reference.advantages(rewards[..., 0])
    if method == "sum_then_normalize":
        # A sample that only the weightless functions scored counts as scored, with 0.
        rows = (present | np.isnan(rewards).all(axis=-1)).all(axis=1)
        np.testing.assert_allclose(got[rows], alone[rows], **EXACT)
    elif (alone != 0).any():
        ratio = got[alone != 0] / alone[alone != 0]
        assert (ratio > 0).all()
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-9)
        assert (got[alone == 0] == 0).all()


@given(rewards=rewards_PGK, weights=weights_K, scale=st.sampled_from([0.01, 7.0]))
def test_normalize_then_sum_ignores_the_scale_of_a_function(x64, rewards, weights, scale) -> None:
    plain = combined(rewards, weights, method="normalize_then_sum", eps=1e-12)
    scaled = combined(rewards * np.array([scale, 1.0, 1.0]), weights, method="normalize_then_sum", eps=1e-12)
    # Weighted sums that cancel leave roundings of 1e-16, which are divided by their spread: compare before that.
    parts = [w * reference.advantages(rewards[..., k], eps=0.0) for k, w in enumerate(weights)]
    if np.std(np.sum(parts, axis=0)) > 1e-6:
        np.testing.assert_allclose(scaled, plain, rtol=0, atol=1e-8)


@given(rewards=rewards_PGK)
def test_normalize_then_sum_has_mean_0_and_spread_1(x64, rewards) -> None:
    got = combined(rewards, np.ones(3), method="normalize_then_sum", eps=1e-12)
    scored = ~np.isnan(rewards).all(axis=-1)
    np.testing.assert_allclose(got[scored].sum(), 0, atol=1e-9)
    if np.abs(got).max() > 1e-3:
        np.testing.assert_allclose(got[scored].std(ddof=1), 1, rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rewards", [(0.7, 0.1, -1 / 3), (0.1, 1e6 + 0.1, 0.0), (0.7, NAN, 0.3)])
def test_equal_rewards_give_exactly_zero(method, rewards) -> None:
    """A group of them among others, in float32: whitening the batch must not wake it."""
    array = np.random.default_rng(0).random((3, 4, 3)).astype(np.float32)
    array[1] = np.array(rewards)
    got = combined(array, np.array([1.0, 0.5, 0.3], np.float32), method=method)
    assert (got[1] == 0).all()
    assert (got[[0, 2]] != 0).all()
    array[:] = np.array(rewards)
    assert (combined(array, np.array([1.0, 0.5, 0.3], np.float32), method=method) == 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_sample_without_any_reward_has_no_advantage_and_no_part(x64, method) -> None:
    rewards = np.random.default_rng(1).random((3, 4, 3))
    rewards[0, 3] = NAN
    got = combined(rewards, np.ones(3), method=method)
    assert got[0, 3] == 0
    np.testing.assert_allclose(got[0].sum(), 0, atol=1e-12)
    assert (combined(np.full((3, 4, 3), NAN), np.ones(3), method=method) == 0).all()


@pytest.mark.parametrize(
    ("options", "shape", "named"),
    [
        ({"method": "median"}, (2, 4, 2), "method.*normalize_then_sum.*median"),
        (
            {"method": "normalize_then_sum", "estimator": "center"},
            (2, 4, 2),
            "estimator.*group.*normalize.*center",
        ),
        ({"method": "normalize_then_sum"}, (2, 1, 2), "group_size.*1"),
        ({"estimator": "mean"}, (2, 4, 2), "estimator.*mean"),
        ({"estimator": "opo"}, (2, 4, 2), "lengths_PG.*None"),
        ({"ddof": 3}, (2, 4, 2), "ddof.*3"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, shape, named) -> None:
    with pytest.raises(ValueError, match=named):
        combine_rewards(jnp.zeros(shape), jnp.ones(2), **options)
