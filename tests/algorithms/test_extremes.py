"""Every surrogate with every ratio and every aggregate in float32: no input that is finite gives a NaN."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.batches import (
    PAIRS,
    Batch,
    outcome_of,
    pair_options,
    random_batch,
    reference_losses,
    reference_tokens,
)

# Every pair by itself, and one with the terms that aren't a pair's own.
PROGRAMS = [*((pair, True) for pair in PAIRS), (("clip", "token"), False)]
over_programs = pytest.mark.parametrize(
    ("pair", "bare"), PROGRAMS, ids=["-".join(pair) + "-all_terms" * (not bare) for pair, bare in PROGRAMS]
)

# Where float32's exp over- and underflows (88.7, -103.97), where log-ratios are clamped, and far beyond.
LOG_RATIOS = [0.0, 1e-6, -1e-6, 0.4, -0.4, 20.0, -20.0, 88.0, -88.0, 89.0, -89.0, 104.0, -104.0, 1000.0, -1000.0]
ADVANTAGES = [0.0, 1.0, -1.0, 1e-30, -1e-30, 1e4, -1e4]


def extreme_batch(seed: int, *, one_log_ratio: float | None) -> Batch:
    """Log-ratios and advantages drawn from the lists, or one log-ratio everywhere; NaN where masked out."""
    rng = np.random.default_rng(seed)
    batch = random_batch(seed)
    new = rng.choice([-1e-7, -0.5, -30.0, -1000.0], batch.new.shape)
    log_ratio = rng.choice(LOG_RATIOS, new.shape) if one_log_ratio is None else one_log_ratio
    batch = batch._replace(
        new=new,
        old=new - log_ratio,
        ref=new - rng.choice(LOG_RATIOS, new.shape),
        advantages_PG=rng.choice(ADVANTAGES, batch.advantages_PG.shape),
    )
    dirty = {name: np.where(batch.mask, getattr(batch, name), np.nan) for name in ("new", "old", "ref", "weights")}
    return batch._replace(**dirty).map(lambda x: x if x.dtype == bool else x.astype(np.float32))


@over_programs
@given(seed=st.integers(0, 2**32 - 1), one_log_ratio=st.sampled_from([None, None, *LOG_RATIOS]))
def test_loss_and_gradient_are_finite(pair, bare, seed, one_log_ratio) -> None:
    got = outcome_of(extreme_batch(seed, one_log_ratio=one_log_ratio), pair, bare=bare)
    assert got.loss.dtype == got.gradient.dtype == np.float32
    assert np.isfinite(got.loss).all()
    assert np.isfinite(got.gradient).all()


@over_programs
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.01, 0.3, 3.0]))
def test_float32_is_as_good_as_float32(pair, bare, seed, spread) -> None:
    batch = random_batch(seed, spread=spread, dtype=np.float32)
    got = outcome_of(batch, pair, bare=bare).loss
    exact = batch.map(lambda x: x if x.dtype == bool else x.astype(np.float64))
    expected = reference_losses(exact, **pair_options(pair, bare=bare))
    # Log-probabilities of up to 10 are rounded by 1e-6, and exp() hands that on to each of the forty tokens.
    scale = np.abs(reference_tokens(exact, **pair_options(pair, bare=bare))).max()
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * scale)
