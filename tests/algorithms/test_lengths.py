from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.algorithms.lengths import soft_overlong
from tests.algorithms import reference

LENGTHS = np.arange(0, 160)


@given(max_length=st.integers(1, 150), data=st.data())
def test_equals_reference(x64, max_length, data) -> None:
    options = {"max_length": max_length, "cache": data.draw(st.integers(1, max_length))}
    got = soft_overlong(jnp.asarray(LENGTHS), **options)
    expected = [reference.soft_overlong(int(n), **options) for n in LENGTHS]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-15)
    assert (np.diff(np.asarray(got)) <= 0).all()


def test_integer_lengths_give_floats() -> None:
    got = soft_overlong(jnp.array([[80, 85], [100, 7]], jnp.int32), max_length=100, cache=20)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, [[0, -0.25], [-1, 0]], rtol=1e-6)  # float32 rounding


@pytest.mark.parametrize("cache", [0, -1, 101])
def test_a_cache_that_does_not_fit_is_refused(cache) -> None:
    with pytest.raises(ValueError, match=f"cache.*max_length.*100.*{cache}"):
        soft_overlong(jnp.array([1]), max_length=100, cache=cache)
