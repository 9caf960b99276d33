from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.algorithms import advantages as package
from grpo_jax.algorithms.advantages import group_advantages, zero_spread
from tests.algorithms import reference
from tests.algorithms.batches import random_rewards

NAN = math.nan
ESTIMATORS = sorted(reference.ADVANTAGES)
# Those whose every statistic is the group's own, and those that look at the whole batch.
OF_THE_GROUP = ["center", "group", "leave_one_out", "maxrl", "opo"]
OF_THE_BATCH = ["batch", "batch_baseline", "batch_std"]
# Those that compare within a group, whatever they divide by.
WITHIN_GROUPS = [name for name in ESTIMATORS if name != "batch"]
# Rewards are of order 1; spreads and means, where there are any, at least 0.02: rounding stays below 1e-12.
EXACT = {"rtol": 1e-12, "atol": 1e-12}

# Each estimator draws its own: a hundred examples a property over all of them.
few = settings(max_examples=12)
over_estimators = pytest.mark.parametrize("estimator", ESTIMATORS)


@functools.partial(jax.jit, static_argnames="ddof")
def every_estimator(rewards: Any, lengths: Any, eps: Any, *, ddof: int) -> dict[str, Any]:
    """All of them in one program: compiling is most of what these tests cost."""
    return {
        name: group_advantages(rewards, estimator=name, eps=eps, ddof=ddof, lengths_PG=lengths)
        for name in ESTIMATORS
    }


def advantages_of(
    rewards: np.ndarray,
    lengths: np.ndarray | None = None,
    *,
    estimator: str,
    eps: float = 1e-4,
    ddof: int = 1,
) -> np.ndarray:
    """The package's, with lengths that differ unless others are given."""
    lengths = LENGTHS[: rewards.shape[0], : rewards.shape[1]] if lengths is None else lengths
    return np.asarray(every_estimator(rewards, lengths, eps, ddof=ddof)[estimator])


LENGTHS = np.array([[1, 7, 20, 3, 8, 2], [5, 5, 5, 5, 1, 9], [100, 1, 2, 60, 31, 3]], np.int32)


seeds = st.integers(0, 2**32 - 1)
rewards_PG = seeds.map(lambda seed: random_rewards(seed, 3, 4))
lengths_PG = seeds.map(lambda seed: np.random.default_rng(seed).integers(1, 100, (3, 4)))


def test_every_estimator_has_a_reference() -> None:
    assert set(package.ESTIMATORS) == set(reference.ADVANTAGES) == {*OF_THE_GROUP, *OF_THE_BATCH}


@over_estimators
@pytest.mark.parametrize("ddof", [0, 1])
@few
@given(rewards=rewards_PG, lengths=lengths_PG, eps=st.sampled_from([0.0, 1e-6, 1e-4, 0.1]))
def test_equals_reference(x64, estimator, ddof, rewards, lengths, eps) -> None:
    got = advantages_of(rewards, lengths, estimator=estimator, eps=eps, ddof=ddof)
    expected = reference.advantages(rewards, estimator=estimator, eps=eps, ddof=ddof, lengths_PG=lengths)
    np.testing.assert_allclose(got, expected, **EXACT)


@over_estimators
@few
@given(rewards=rewards_PG)
def test_float32_is_as_good_as_float32(estimator, rewards) -> None:
    got = advantages_of(rewards.astype(np.float32), estimator=estimator)
    assert got.dtype == np.float32
    # A few float32 roundings (6e-8) of rewards up to 3.25, over a spread or a mean of at least about 0.02.
    expected = reference.advantages(rewards.astype(np.float32), estimator=estimator, lengths_PG=LENGTHS)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=3e-6)


@over_estimators
@few
@given(rewards=rewards_PG, seed=seeds)
def test_permuting_completions_and_prompts_permutes_advantages(x64, estimator, rewards, seed) -> None:
    rng = np.random.default_rng(seed)
    p, g = rng.permutation(3)[:, None], np.argsort(rng.random((3, 4)), axis=1)
    straight = advantages_of(rewards, estimator=estimator)
    permuted = advantages_of(rewards[p, g], LENGTHS[p, g], estimator=estimator)
    np.testing.assert_allclose(permuted, straight[p, g], **EXACT)


# --------------------------------------------------------------------------------- shift, scale, mean


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "maxrl"])
@few
@given(rewards=rewards_PG, shift=st.sampled_from([-5.0, -0.3, 0.6, 4.0]))
def test_a_shift_of_all_rewards_changes_nothing(x64, estimator, rewards, shift) -> None:
    """But for ``maxrl``, whose rewards are rates of success and have a zero."""
    np.testing.assert_allclose(
        advantages_of(rewards + shift, estimator=estimator), advantages_of(rewards, estimator=estimator), **EXACT
    )


@pytest.mark.parametrize("estimator", ["batch_baseline", "center", "group", "leave_one_out", "opo"])
@few
@given(rewards=rewards_PG, shifts=st.lists(st.sampled_from([-5.0, 0.0, 0.6]), min_size=3, max_size=3))
def test_a_shift_of_one_groups_rewards_changes_nothing(x64, estimator, rewards, shifts) -> None:
    shifted = rewards + np.array(shifts)[:, None]
    np.testing.assert_allclose(
        advantages_of(shifted, estimator=estimator), advantages_of(rewards, estimator=estimator), **EXACT
    )


@over_estimators
@few
@given(rewards=rewards_PG, scale=st.sampled_from([0.01, 0.5, 3.0]))
def test_a_scale_of_all_rewards_is_divided_out_or_handed_on(x64, estimator, rewards, scale) -> None:
    plain = advantages_of(rewards, estimator=estimator, eps=0.0)
    scaled = advantages_of(scale * rewards, estimator=estimator, eps=0.0)
    factor = scale if estimator in ("center", "leave_one_out", "opo") else 1.0
    np.testing.assert_allclose(scaled, factor * plain, rtol=1e-10, atol=1e-12)


@over_estimators
@few
@given(rewards=rewards_PG)
def test_advantages_average_to_zero(x64, estimator, rewards) -> None:
    """In each group; over the batch for ``batch``; weighted by length for ``opo``."""
    got = advantages_of(rewards, estimator=estimator)
    weights = LENGTHS[:, :4] if estimator == "opo" else np.ones((3, 4))
    np.testing.assert_allclose((weights * got).sum(axis=None if estimator == "batch" else 1), 0, atol=1e-10)


@over_estimators
@few
@given(rewards=rewards_PG)
def test_a_larger_reward_never_has_a_smaller_advantage(x64, estimator, rewards) -> None:
    got = advantages_of(rewards, estimator=estimator)
    for row, advantages in zip(rewards, got, strict=True):
        present = ~np.isnan(row)
        order = np.argsort(row[present], kind="stable")
        assert (np.diff(advantages[present][order]) >= -1e-12).all()


# ---------------------------------------------------------------------------- group and batch, missing


@pytest.mark.parametrize("estimator", OF_THE_GROUP)
@few
@given(rewards=rewards_PG, others=rewards_PG)
def test_a_group_is_compared_with_itself_alone(x64, estimator, rewards, others) -> None:
    mixed = np.concatenate([rewards[:1], others[1:]])
    np.testing.assert_allclose(
        advantages_of(mixed, estimator=estimator)[0], advantages_of(rewards, estimator=estimator)[0], **EXACT
    )


@pytest.mark.parametrize("estimator", OF_THE_BATCH)
def test_a_batch_estimator_sees_the_other_groups(x64, estimator) -> None:
    rewards = np.array([[1.0, 0.0, 0.5, 0.0]] * 3)
    others = rewards + np.array([0.0, 0.0, 3.0])[:, None] * np.arange(4)
    a, b = (advantages_of(x, estimator=estimator)[0] for x in (rewards, others))
    assert np.abs(a - b).max() > 0.1


@pytest.mark.parametrize("estimator", OF_THE_BATCH)
@few
@given(rewards=rewards_PG)
def test_a_batch_of_one_group_is_that_group(x64, estimator, rewards) -> None:
    rewards[1:] = NAN
    np.testing.assert_allclose(
        advantages_of(rewards, estimator=estimator), advantages_of(rewards, estimator="group"), **EXACT
    )


@over_estimators
@few
@given(rewards=rewards_PG)
def test_missing_rewards_take_no_part(x64, estimator, rewards) -> None:
    """Their advantage is 0, and more of them, in every group or as a whole group, change nothing."""
    got = advantages_of(rewards, estimator=estimator)
    assert (got[np.isnan(rewards)] == 0).all()
    lonely = (~np.isnan(rewards)).sum(axis=1) < 2
    if estimator != "batch":
        assert (got[lonely] == 0).all()
    elif np.isfinite(rewards).sum() < 2:
        assert (got == 0).all()
    wider = advantages_of(np.pad(rewards, ((0, 0), (0, 2)), constant_values=NAN), estimator=estimator)
    np.testing.assert_allclose(wider, np.pad(got, ((0, 0), (0, 2))), **EXACT)
    taller = np.concatenate([rewards[:2], np.full((1, 4), NAN)])
    np.testing.assert_allclose(
        advantages_of(taller, estimator=estimator)[:2], advantages_of(rewards[:2], estimator=estimator), **EXACT
    )


def test_a_batch_of_single_completions_is_a_group_for_batch() -> None:
    rewards = np.array([[1.0], [0.0], [NAN], [0.5]], np.float32)
    batch = jax.jit(functools.partial(group_advantages, estimator="batch"))
    np.testing.assert_allclose(batch(rewards)[:, 0], reference.advantages(rewards.T)[0], rtol=1e-6)  # float32
    rewards[1:] = NAN
    np.testing.assert_array_equal(batch(rewards), 0)


# ---------------------------------------------------------------------------------------- no spread


@over_estimators
@pytest.mark.parametrize("size", [2, 7])
def test_equal_rewards_give_exactly_zero(estimator, size) -> None:
    """Seven times 0.7 has a float32 standard deviation of 6e-8."""
    for value in (0.7, 0.1, -1 / 3, 1e6 + 0.1, 0.0):
        rewards = np.full((3, size), value, np.float32)
        rewards[2, 1:] = NAN
        lengths = np.arange(1, 3 * size + 1).reshape(3, size)
        assert (advantages_of(rewards, lengths, estimator=estimator) == 0).all()
        assert np.asarray(zero_spread(jnp.asarray(rewards))).all()


@pytest.mark.parametrize("estimator", WITHIN_GROUPS)
@few
@given(rewards=rewards_PG)
def test_zero_spread_is_where_all_advantages_vanish(estimator, rewards) -> None:
    """Also among groups that have a spread."""
    rewards = rewards.astype(np.float32)
    zero = np.asarray(zero_spread(rewards))
    vanish = (advantages_of(rewards, estimator=estimator) == 0).all(axis=1)
    if estimator == "maxrl":
        hopeless = np.array([np.nansum(row) <= 0 for row in rewards.astype(np.float64)])
        np.testing.assert_array_equal(zero | hopeless, vanish)
    else:
        np.testing.assert_array_equal(zero, vanish)


@over_estimators
def test_no_eps_is_allowed(estimator) -> None:
    rewards = np.array([[1.0, 1.0], [1.0, 0.0], [NAN, NAN]], np.float32)
    got = advantages_of(rewards, estimator=estimator, eps=0.0)
    assert np.isfinite(got).all()
    assert got[1, 0] > 0 > got[1, 1]
    if estimator != "batch":
        assert (got[0] == 0).all()


@over_estimators
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e15])
def test_rewards_of_any_size_are_finite(estimator, size) -> None:
    rewards = np.array([[size, 0, -size, NAN], [0, 0, size, size], [0, 0, 0, size]], np.float32)
    assert np.isfinite(advantages_of(rewards, estimator=estimator)).all()


def test_zero_spread_looks_at_present_rewards_only() -> None:
    rewards = jnp.array([[1, 1, NAN], [NAN, 1, 0], [NAN, NAN, 0.5], [NAN, NAN, NAN], [0, 0, 1e-7]], jnp.float32)
    np.testing.assert_array_equal(zero_spread(rewards), [True, False, True, True, False])


@pytest.mark.parametrize(
    ("options", "shape", "named"),
    [
        ({"estimator": "median"}, (2, 4), "estimator.*leave_one_out.*median"),
        ({"estimator": "group", "ddof": 2}, (2, 4), "ddof.*2"),
        *(({"estimator": name}, (2, 1), f"group_size.*{name}.*1") for name in WITHIN_GROUPS),
        ({"estimator": "opo"}, (2, 4), "lengths_PG.*opo.*None"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, shape, named) -> None:
    with pytest.raises(ValueError, match=named):
        group_advantages(jnp.zeros(shape), **options)
