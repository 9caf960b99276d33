from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.algorithms.advantages import ESTIMATORS, group_advantages, zero_spread
from tests.algorithms import reference
from tests.algorithms.batches import GOLDEN

ESTIMATOR_NAMES = sorted(reference.ADVANTAGES)

# The worked numbers, as they are named in the file -> keyword arguments.
GOLDEN_NAMES = {
    "group (eps 1e-4, ddof 1)": {"estimator": "group", "eps": 1e-4, "ddof": 1},
    "group (eps 1e-6, ddof 1)": {"estimator": "group", "eps": 1e-6, "ddof": 1},
    "group (eps 1e-4, ddof 0)": {"estimator": "group", "eps": 1e-4, "ddof": 0},
    "center": {"estimator": "center"},
    "leave_one_out": {"estimator": "leave_one_out"},
}
GOLDEN_ROWS = [
    (rewards, options, GOLDEN[section][name])
    for section, rewards in (
        ("advantages", GOLDEN["inputs"]["rewards_PG"]),
        ("advantages_1000", GOLDEN["advantages_1000"]["rewards_PG"]),
        ("advantages_missing", GOLDEN["advantages_missing"]["rewards_PG"]),
    )
    for name, options in GOLDEN_NAMES.items()
    if name in GOLDEN[section]
]


def with_nan(rewards: list[list[float | None]]) -> np.ndarray:
    return np.array([[math.nan if r is None else r for r in row] for row in rewards])


def rewards_PG(*, missing: bool = True, max_group: int = 4) -> st.SearchStrategy[np.ndarray]:
    """Groups of few distinct values (so equal ones are common), any number of them missing."""
    values = [0.0, 0.1, 0.7, 1.0, -2.0, 3.25] + ([math.nan] * 2 if missing else [])
    row = st.lists(st.sampled_from(values), min_size=4, max_size=max_group)
    return st.lists(row, min_size=3, max_size=3).map(np.array)


def test_every_estimator_has_a_reference() -> None:
    assert set(ESTIMATORS) == set(reference.ADVANTAGES)


def test_golden_rows_are_all_there() -> None:
    assert len(GOLDEN_ROWS) == 5 + 4 + 1


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("rewards", "options", "expected"), GOLDEN_ROWS)
def test_golden(x64, jit, rewards, options, expected) -> None:
    f = jax.jit(lambda r: group_advantages(r, **options)) if jit else lambda r: group_advantages(r, **options)
    got = f(jnp.asarray(with_nan(rewards)))
    assert got.dtype == jnp.float64
    # The file's numbers are exact to float64; 1e-12 leaves room for another order of sums.
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(reference.advantages(with_nan(rewards), **options), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATOR_NAMES)
@pytest.mark.parametrize("ddof", [0, 1])
@given(rewards=rewards_PG())
def test_equals_reference(x64, estimator, ddof, rewards) -> None:
    got = group_advantages(jnp.asarray(rewards), estimator=estimator, ddof=ddof)
    # Rewards are of order 1, divided by a spread of at least 0.1: rounding stays below 1e-13.
    np.testing.assert_allclose(
        got, reference.advantages(rewards, estimator=estimator, ddof=ddof), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("estimator", ESTIMATOR_NAMES)
@given(rewards=rewards_PG())
def test_float32_is_as_good_as_float32(estimator, rewards) -> None:
    got = group_advantages(jnp.asarray(rewards, jnp.float32), estimator=estimator)
    assert got.dtype == jnp.float32
    # 1e-6: a few float32 roundings (6e-8) of rewards up to 3.25, over a spread of at least about 0.04.
    expected = reference.advantages(rewards.astype(np.float32), estimator=estimator)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("estimator", ESTIMATOR_NAMES)
@given(rewards=rewards_PG(), seed=st.integers(0, 1000))
def test_permuting_completions_and_prompts_permutes_advantages(x64, estimator, rewards, seed) -> None:
    rng = np.random.default_rng(seed)
    prompts, completions = rng.permutation(rewards.shape[0]), rng.permutation(rewards.shape[1])
    straight = np.asarray(group_advantages(jnp.asarray(rewards), estimator=estimator))
    permuted = group_advantages(jnp.asarray(rewards[prompts][:, completions]), estimator=estimator)
    np.testing.assert_allclose(permuted, straight[prompts][:, completions], rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATOR_NAMES)
@given(rewards=rewards_PG())
def test_missing_rewards_take_no_part(x64, estimator, rewards) -> None:
    got = np.asarray(group_advantages(jnp.asarray(rewards), estimator=estimator))
    for row, advantages in zip(rewards, got, strict=True):
        present = ~np.isnan(row)
        assert (advantages[~present] == 0).all()
        if present.sum() >= 2:
            alone = group_advantages(jnp.asarray(row[present][None]), estimator=estimator)[0]
            np.testing.assert_allclose(advantages[present], alone, rtol=0, atol=1e-12)
        else:
            assert (advantages == 0).all()


@pytest.mark.parametrize("estimator", ESTIMATOR_NAMES)
@pytest.mark.parametrize("size", [2, 3, 7, 64])
def test_equal_rewards_give_exactly_zero(estimator, size) -> None:
    values = jnp.array([0.7, 0.1, -1 / 3, 1e6 + 0.1, 0.0], jnp.float32)
    rewards = jnp.broadcast_to(values[:, None], (5, size))
    assert (np.asarray(group_advantages(rewards, estimator=estimator)) == 0).all()
    assert np.asarray(zero_spread(rewards)).all()


@pytest.mark.parametrize("estimator", ESTIMATOR_NAMES)
def test_no_eps_is_allowed(estimator) -> None:
    rewards = jnp.array([[1.0, 1.0], [1.0, 0.0]])
    got = np.asarray(group_advantages(rewards, estimator=estimator, eps=0.0))
    assert np.isfinite(got).all()
    assert (got[0] == 0).all()
    assert got[1, 0] > 0 > got[1, 1]


def test_zero_spread_looks_at_present_rewards_only() -> None:
    nan = math.nan
    rewards = jnp.array(
        [[1.0, 1.0, nan], [nan, 1.0, 0.0], [nan, nan, 0.5], [nan, nan, nan], [0.0, 0.0, 1e-7]], jnp.float32
    )
    np.testing.assert_array_equal(zero_spread(rewards), [True, False, True, True, False])


@given(rewards=rewards_PG())
def test_zero_spread_is_where_all_advantages_vanish(rewards) -> None:
    zero = np.asarray(zero_spread(jnp.asarray(rewards, jnp.float32)))
    for estimator in ESTIMATOR_NAMES:
        advantages = np.asarray(group_advantages(jnp.asarray(rewards, jnp.float32), estimator=estimator))
        np.testing.assert_array_equal(zero, (advantages == 0).all(axis=1))


@pytest.mark.parametrize(
    ("options", "shape", "named"),
    [
        ({"estimator": "median"}, (2, 4), "median"),
        ({"estimator": "group", "ddof": 2}, (2, 4), "ddof.*2"),
        ({"estimator": "group"}, (2, 1), "group_size.*1"),
        ({"estimator": "leave_one_out"}, (2, 1), "group_size.*1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, shape, named) -> None:
    with pytest.raises(ValueError, match=named):
        group_advantages(jnp.zeros(shape), **options)
