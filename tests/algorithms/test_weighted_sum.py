"""Several reward functions' rewards become one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.algorithms.advantages import weighted_sum


def test_weighted_sum_sums_what_is_present() -> None:
    nan = np.nan
    rewards = np.array([[[1, 2], [1, nan]], [[nan, 2], [nan, nan]]], np.float32)
    # 0.5*1 + 10*2 = 20.5; the missing ones take no part: 0.5, 20; all missing: missing.
    np.testing.assert_array_equal(weighted_sum(rewards, np.array([0.5, 10.0])), [[20.5, 0.5], [20, nan]])
    assert weighted_sum(rewards, np.array([0.5, 10.0])).dtype == np.float32
    with pytest.raises(ValueError, match="got 1 for 2 functions"):
        weighted_sum(rewards, np.array([1.0]))


@given(
    st.lists(st.lists(st.none() | st.floats(-10, 10, width=32), min_size=2, max_size=2), min_size=1, max_size=5)
)
def test_weighted_sum_agrees_with_plain_python(samples) -> None:
    weights = (0.7, -1.3)
    rewards = np.array([[[np.nan if r is None else r for r in sample] for sample in samples]], np.float32)
    for got, sample in zip(weighted_sum(rewards, weights)[0], samples, strict=True):
        present = [w * r for w, r in zip(weights, sample, strict=True) if r is not None]
        if not present:
            assert math.isnan(got)
        else:
            # float32 holds 24 bits: 20 * 2**-24 is the rounding of a sum of at most 20.
            assert got == pytest.approx(sum(present), abs=2e-6)
