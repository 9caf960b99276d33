"""Every surrogate with every ratio and every aggregate: against the reference, and what must never change it.

The properties are told by data at one shape, since compiling is most of what the tests cost: a micro-batch is
the batch with the other completions masked out, padding is a masked column of garbage.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.algorithms import aggregates, ratios
from grpo_jax.config import combinations
from tests.algorithms import reference
from tests.algorithms.batches import (
    AGGREGATE_NAMES,
    COMBINATIONS,
    MAX_COMPLETION_LENGTH,
    PAIRS,
    Batch,
    Outcome,
    batches,
    denominators_of,
    outcome_of,
    pair_options,
    random_batch,
    reference_gradients,
    reference_losses,
    reference_tokens,
)

over_pairs = pytest.mark.parametrize("pair", PAIRS, ids="-".join)
# Each pair draws its own: two hundred examples a property over all of them.
few = settings(max_examples=12)
over_combinations = pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)


def scale_of(batch: Batch, pair: tuple[str, str]) -> float:
    """The largest loss of a token: what the rounding of their sum is measured with."""
    return max(1.0, float(np.abs(reference_tokens(batch, **pair_options(pair))).max()))


def assert_same(got: Outcome, expected: Outcome, *, scale: float = 1.0) -> None:
    """Equal but for the order of float64 sums, under every aggregate."""
    for i, name in enumerate(AGGREGATE_NAMES):
        np.testing.assert_allclose(got.loss[i], expected.loss[i], rtol=1e-12, atol=1e-13 * scale, err_msg=name)
        largest = max(1.0, float(np.abs(expected.gradient[i]).max()))
        np.testing.assert_allclose(
            got.gradient[i], expected.gradient[i], rtol=1e-12, atol=1e-13 * largest, err_msg=name
        )


def test_the_allowed_combinations_are_the_references() -> None:
    assert combinations.ALLOWED_RATIOS == reference.ALLOWED_RATIOS
    assert set(combinations.RATIOS) == set(ratios.RATIOS) == set(reference.RATIOS)
    assert set(aggregates.AGGREGATES) == set(reference.AGGREGATES)
    assert set(reference.ALLOWED_RATIOS) == set(reference.SURROGATES)
    assert len(COMBINATIONS) == len(set(COMBINATIONS)) == 68


# ------------------------------------------------------------------------------------ value and gradient


@over_pairs
@few
@given(batch=batches())
def test_loss_equals_reference(x64, pair, batch) -> None:
    got = outcome_of(batch, pair).loss
    expected = reference_losses(batch, **pair_options(pair))
    atol = 1e-13 * scale_of(batch, pair)
    for i, name in enumerate(AGGREGATE_NAMES):
        np.testing.assert_allclose(got[i], expected[i], rtol=1e-12, atol=atol, err_msg=name)


@functools.cache
def gradients(pair: tuple[str, str], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The package's and the finite differences' of one batch, ``[aggregate, P, G, T]``."""
    batch = random_batch(seed)
    return outcome_of(batch, pair).gradient, reference_gradients(batch, **pair_options(pair))


@over_combinations
def test_gradient_equals_finite_differences(x64, combination) -> None:
    """What is a constant (old policy, stopped gradients, weights) held fixed."""
    surrogate, ratio, aggregate = combination
    for seed in (11, 12):
        got, expected = (x[AGGREGATE_NAMES.index(aggregate)] for x in gradients((surrogate, ratio), seed))
        # Central differences of step 1e-6: noise of 1e-16 * value / step, about 1e-10.
        np.testing.assert_allclose(got, expected, rtol=1e-7, atol=2e-9)
        assert np.abs(expected).max() > 1e-3


# --------------------------------------------------------------------------- splitting, padding, ordering


@over_pairs
@few
@given(batch=batches(), parts=st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_micro_batches_add_up_to_the_whole(x64, pair, batch, parts) -> None:
    """Any assignment of the completions to up to four parts, some of them perhaps empty."""
    denominators = denominators_of(batch.mask)
    total = None
    for part in range(4):
        mine = np.array(parts).reshape(2, 4) == part
        of_part = batch._replace(mask=batch.mask & mine[..., None])
        got = outcome_of(of_part, pair, denominators=denominators)
        assert (got.gradient[:, ~mine] == 0).all()
        total = got if total is None else Outcome(total.loss + got.loss, total.gradient + got.gradient)
    assert total is not None
    assert_same(total, outcome_of(batch, pair), scale=scale_of(batch, pair))


@over_pairs
@few
@given(
    batch=batches(), junk=st.sampled_from([0.0, 1e30, -50.0, np.inf, -np.inf, np.nan]), columns=st.integers(0, 3)
)
def test_masked_positions_may_hold_anything(x64, pair, batch, junk, columns) -> None:
    """Columns of padding among them: the reference never sees those."""
    batch = batch._replace(mask=batch.mask & (np.arange(5) < 5 - columns))
    dirty = batch._replace(
        **{
            name: np.where(batch.mask, getattr(batch, name), junk)
            for name in ("new", "old", "ref", "entropy", "weights")
        },
        policy_mask=batch.policy_mask | ~batch.mask,
        selected=batch.selected | ~batch.mask,
    )
    got, clean = (outcome_of(x, pair) for x in (dirty, batch))
    np.testing.assert_array_equal(got.loss, clean.loss)
    np.testing.assert_array_equal(got.gradient, clean.gradient)
    assert (got.gradient[:, ~batch.mask] == 0).all()
    for name, value in clean.metrics.items():
        np.testing.assert_array_equal(got.metrics[name], value, err_msg=name)
    cut = Batch(*(x[..., : 5 - columns] for x in dirty[:-1]), batch.advantages_PG)
    expected = reference_losses(cut, **pair_options(pair))
    np.testing.assert_allclose(got.loss, expected, rtol=1e-12, atol=1e-13 * scale_of(batch, pair))


@over_pairs
@few
@given(batch=batches(), seed=st.integers(0, 2**32 - 1))
def test_order_changes_nothing(x64, pair, batch, seed) -> None:
    """Prompts, the completions of each prompt, and the tokens of each completion in any order."""
    rng = np.random.default_rng(seed)
    p = rng.permutation(2)[:, None, None]
    g = np.argsort(rng.random((2, 4)), axis=1)[..., None]
    t = np.argsort(rng.random((2, 4, 5)), axis=2)
    shuffled = Batch(*(x[p, g, t] for x in batch[:-1]), batch.advantages_PG[p[..., 0], g[..., 0]])
    got, straight = (outcome_of(x, pair) for x in (shuffled, batch))
    expected = Outcome(straight.loss, np.stack([x[p, g, t] for x in straight.gradient]))
    scale = scale_of(batch, pair)
    assert_same(got, expected, scale=scale)
    for name, value in straight.metrics.items():
        np.testing.assert_allclose(got.metrics[name], value, rtol=1e-12, atol=1e-13 * scale, err_msg=name)


@over_pairs
def test_a_completion_that_is_all_masked_out_might_as_well_not_be_there(x64, pair) -> None:
    batch = random_batch(6)
    emptied = batch._replace(mask=batch.mask & (np.arange(4) > 0)[:, None])
    got = outcome_of(emptied, pair)
    rest = emptied.map(lambda x: x[:, 1:])
    np.testing.assert_allclose(got.loss, reference_losses(rest, **pair_options(pair)), rtol=1e-12, atol=1e-13)
    assert (got.gradient[:, :, 0] == 0).all()


@over_pairs
def test_nothing_to_train_on_is_zero_and_finite(x64, pair) -> None:
    batch = random_batch(7)
    got = outcome_of(batch._replace(mask=np.zeros_like(batch.mask)), pair)
    assert (got.loss == 0).all()
    assert (got.gradient == 0).all()


# ------------------------------------------------------------------------------ known gradients


@over_pairs
@few
@given(batch=batches())
def test_no_advantage_no_gradient(x64, pair, batch) -> None:
    """Groups of equal rewards: exactly 0, however far the ratios are. (At the reference, so that the KL has none.)

    ``kl_cov`` is the exception off-policy: its penalty on a selected token knows no advantage.
    """
    still = batch._replace(advantages_PG=np.zeros((2, 4)), ref=batch.new)
    if pair[0] == "kl_cov":
        still = still._replace(selected=np.zeros_like(batch.selected))
    assert (outcome_of(still, pair).gradient == 0).all()


@pytest.mark.parametrize("ratio", reference.ALLOWED_RATIOS["kl_cov"])
def test_kl_cov_penalises_only_selected_tokens_that_have_moved(x64, ratio) -> None:
    batch = random_batch(4)
    batch = batch._replace(advantages_PG=np.zeros((2, 4)), ref=batch.new)
    moved = batch.mask & batch.selected & batch.policy_mask
    for gradient in outcome_of(batch, ("kl_cov", ratio)).gradient:
        np.testing.assert_array_equal(np.sign(gradient), np.sign(batch.new - batch.old) * moved)
    on_policy = batch._replace(old=batch.new)
    assert (outcome_of(on_policy, ("kl_cov", ratio)).gradient == 0).all()


def token_weights(mask: np.ndarray) -> np.ndarray:
    """What each token's loss is multiplied by in each aggregate, ``[aggregate, P, G, T]``."""
    n = mask.sum(axis=-1, keepdims=True)
    completions = (n > 0).sum()
    by_aggregate = {
        "sequence_mean": mask / np.maximum(n, 1) / completions,
        "token_mean": mask / mask.sum(),
        "constant": mask / (completions * MAX_COMPLETION_LENGTH),
        "sequence_sum": mask / completions,
    }
    return np.stack([by_aggregate[name] for name in AGGREGATE_NAMES])


@over_pairs
@few
@given(batch=batches())
def test_on_policy_the_ratio_is_one_and_the_gradient_is_known(x64, pair, batch) -> None:
    """REINFORCE's, ``-A`` times the token's weight in the aggregate, for all but two.

    The product of a completion's ratios repeats each token's gradient on all n tokens of the completion, so
    ``trajectory`` multiplies it by n (but for ``cispo``, which takes no gradient through the ratio). The tokens
    that ``clip_cov`` selects have none; the penalty of ``kl_cov`` is at its minimum.
    """
    surrogate, ratio = pair
    ones = np.ones_like(batch.new)
    batch = batch._replace(old=batch.new, ref=batch.new, weights=ones, policy_mask=ones.astype(bool))
    got = outcome_of(batch, pair)
    assert (got.metrics["ratio_max"] == 1).all() and (got.metrics["ratio_min"] == 1).all()
    assert (got.metrics["clip_low_fraction"] == 0).all() and (got.metrics["clip_high_fraction"] == 0).all()
    expected = -batch.advantages_PG[..., None] * token_weights(batch.mask)
    if ratio == "trajectory" and surrogate != "cispo":
        expected = expected * batch.mask.sum(axis=-1, keepdims=True)
    if surrogate == "clip_cov":
        expected = np.where(batch.selected, 0.0, expected)
    np.testing.assert_allclose(got.gradient, expected, rtol=1e-12, atol=1e-14)


@over_pairs
def test_on_policy_the_loss_is_known(x64, pair) -> None:
    """``-A`` a token where the ratio is the value; ``sapo``'s gate is at 2/tau; log-probabilities elsewhere."""
    batch = random_batch(8)
    ones = np.ones_like(batch.new)
    batch = batch._replace(
        old=batch.new, ref=batch.new, weights=ones, policy_mask=ones.astype(bool), entropy=0 * ones
    )
    A: Any = batch.advantages_PG[..., None]
    token = {
        "cispo": -A * batch.new,
        "reinforce": -A * batch.new,
        "sapo": -A * 2 / np.where(A > 0, 1.5, 0.7),
        "clip_cov": np.where(batch.selected, 0.0, -A),
    }.get(pair[0], -A * ones)
    expected = (token * token_weights(batch.mask)).sum(axis=(1, 2, 3))
    np.testing.assert_allclose(outcome_of(batch, pair).loss, expected, rtol=1e-12, atol=1e-13)
