"""Tokens picked out of the whole optimizer batch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grpo_jax.algorithms.objectives import policy_loss
from grpo_jax.algorithms.selection import covariance_tokens, top_entropy_tokens
from tests.algorithms import reference
from tests.algorithms.batches import Batch, batches, random_batch

# Traced, so that one program serves all shares and bands.
compiled_entropy = jax.jit(top_entropy_tokens)


@functools.partial(jax.jit, static_argnames="surrogate")
def compiled_covariance(logps: Any, advantages: Any, mask: Any, key: Any, **options: Any) -> Any:
    return covariance_tokens(logps, advantages, mask, key=key, **options)


shares = st.sampled_from([0.01, 0.07, 0.2, 0.5, 0.6, 1.0])


def by_entropy(batch: Batch, share: float) -> np.ndarray:
    return np.asarray(compiled_entropy(batch.entropy, batch.mask, share=share))


def by_covariance(batch: Batch, surrogate: str, *, key: Any = None, **options: Any) -> np.ndarray:
    key = jax.random.key(0) if key is None else key
    options = {"share": 0.2, "low": 0.1, "high": 1.0} | options
    return np.asarray(
        compiled_covariance(batch.new, batch.advantages_PG, batch.mask, key, surrogate=surrogate, **options)
    )


# ----------------------------------------------------------------------------------------- how many


@jax.jit
def counts_of(sizes: Any, share: Any) -> tuple[Any, Any]:
    """How many tokens of equal entropy and covariance are picked from each number of tokens."""
    ties, zero = jnp.zeros((1, 1, 512)), jnp.zeros((1, 1))

    def counts(size: Any) -> tuple[Any, Any]:
        mask = (jnp.arange(512) < size)[None, None]
        kl_cov = covariance_tokens(ties, zero, mask, surrogate="kl_cov", share=share)
        return top_entropy_tokens(ties, mask, share=share).sum(), kl_cov.sum()

    return jax.vmap(counts)(sizes)


@pytest.mark.parametrize("share", [0.07, 0.1, 0.2, 0.3, 0.35, 0.6, 0.7, 0.9, 1.0])
def test_a_share_of_any_number_of_tokens_is_rounded_as_it_is_written(share) -> None:
    """Up to 512 tokens in float32, where 0.6 of 105 is 63.000004: neither that nor a tie adds a token."""
    sizes = jnp.arange(1, 513)
    top, kl_cov = counts_of(sizes, share)
    np.testing.assert_array_equal(top, [reference.top_entropy_count(int(n), share=share) for n in sizes])
    np.testing.assert_array_equal(kl_cov, [reference.covariance_count(int(n), share=share) for n in sizes])


def test_the_covariance_share_is_at_least_one_token() -> None:
    batch = random_batch(0, dtype=np.float32)
    assert by_covariance(batch, "kl_cov", share=2e-4).sum() == 1
    assert by_covariance(batch, "clip_cov", share=2e-4, low=-1e9, high=1e9).sum() == 1


# -------------------------------------------------------------------------------------- top entropy


@given(batch=batches(), share=shares)
def test_top_entropy_equals_reference(x64, batch, share) -> None:
    expected = reference.top_entropy_tokens(batch.entropy, batch.mask, share=share)
    np.testing.assert_array_equal(by_entropy(batch, share), expected)


@given(batch=batches(), share=shares, junk=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_masked_tokens_are_never_picked(x64, batch, share, junk) -> None:
    dirty = batch._replace(
        entropy=np.where(batch.mask, batch.entropy, junk), new=np.where(batch.mask, batch.new, junk)
    )
    np.testing.assert_array_equal(by_entropy(dirty, share), by_entropy(batch, share))
    for surrogate in ("clip_cov", "kl_cov"):
        got = by_covariance(dirty, surrogate, share=share)
        np.testing.assert_array_equal(got, by_covariance(batch, surrogate, share=share))
        assert not (got & ~batch.mask).any()


@given(batch=batches())
def test_the_whole_share_is_every_token(x64, batch) -> None:
    np.testing.assert_array_equal(by_entropy(batch, 1.0), batch.mask)


@given(batch=batches(), share=shares, seed=st.integers(0, 2**32 - 1))
def test_order_changes_nothing(x64, batch, share, seed) -> None:
    rng = np.random.default_rng(seed)
    p, g = rng.permutation(2)[:, None], np.argsort(rng.random((2, 4)), axis=1)
    shuffled = batch.map(lambda x: x[p, g])
    np.testing.assert_array_equal(by_entropy(shuffled, share), by_entropy(batch, share)[p, g])
    got = by_covariance(shuffled, "kl_cov", share=share)
    np.testing.assert_array_equal(got, by_covariance(batch, "kl_cov", share=share)[p, g])


def test_nothing_is_picked_from_nothing() -> None:
    batch = random_batch(1, dtype=np.float32)
    nothing = batch._replace(mask=np.zeros_like(batch.mask))
    assert not by_entropy(nothing, 0.5).any()
    for surrogate in ("clip_cov", "kl_cov"):
        assert not by_covariance(nothing, surrogate).any()


@pytest.mark.parametrize("grid", [(2, 1), (2, 4)], ids=["2", "8"])
def test_devices_pick_what_one_picks(grid) -> None:
    batch = random_batch(2, dtype=np.float32)
    devices = np.array(jax.devices()[: grid[0] * grid[1]]).reshape(grid)
    mesh = Mesh(devices, ("data", "group"), axis_types=(AxisType.Auto,) * 2)
    split = batch.map(lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "group"))))
    np.testing.assert_array_equal(by_entropy(split, 0.3), by_entropy(batch, 0.3))
    for surrogate in ("clip_cov", "kl_cov"):
        np.testing.assert_array_equal(by_covariance(split, surrogate), by_covariance(batch, surrogate))


# --------------------------------------------------------------------------------------- covariance


@given(batch=batches(), share=shares)
def test_kl_cov_takes_the_largest(x64, batch, share) -> None:
    expected = reference.kl_cov_tokens(batch.new, batch.advantages_PG, batch.mask, share=share)
    np.testing.assert_array_equal(by_covariance(batch, "kl_cov", share=share), expected)


@given(batch=batches(), share=shares, seed=st.integers(0, 1000))
def test_clip_cov_takes_the_share_among_the_candidates_or_all_of_them(x64, batch, share, seed) -> None:
    got = by_covariance(batch, "clip_cov", share=share, key=jax.random.key(seed))
    candidates = reference.clip_cov_candidates(batch.new, batch.advantages_PG, batch.mask, low=0.1, high=1.0)
    assert not (got & ~candidates).any()
    count = reference.covariance_count(int(batch.mask.sum()), share=share)
    assert got.sum() == min(count, candidates.sum())


def test_clip_cov_draws_each_candidate_equally_often() -> None:
    batch = random_batch(3, dtype=np.float32)
    candidates = reference.clip_cov_candidates(batch.new, batch.advantages_PG, batch.mask, low=0.1, high=1.0)
    draws = 600
    picked = jax.jit(
        jax.vmap(
            lambda key: covariance_tokens(
                *map(jnp.asarray, (batch.new, batch.advantages_PG, batch.mask)),
                surrogate="clip_cov",
                share=2e-4,
                low=0.1,
                high=1.0,
                key=key,
            )
        )
    )(jax.random.split(jax.random.key(5), draws))
    counts, n = np.asarray(picked).sum(axis=0)[candidates], candidates.sum()
    assert n >= 4 and counts.sum() == draws
    # Five standard deviations of a binomial count.
    assert np.abs(counts - draws / n).max() < 5 * np.sqrt(draws / n * (1 - 1 / n))


@pytest.mark.parametrize("surrogate", ["clip_cov", "kl_cov"])
def test_the_loss_selects_for_itself_what_it_is_not_given(x64, surrogate) -> None:
    """Of its own arrays, with the same numbers; the choice itself has no gradient."""
    batch = random_batch(4)
    arrays = [jnp.asarray(x) for x in (batch.new, batch.old, batch.advantages_PG, batch.mask)]
    options = {"cov_share": 0.2, "cov_low": 0.1, "cov_high": 1.0}

    @functools.partial(jax.jit, static_argnames="own")
    def value_and_gradient(new: Any, key: Any, selected: Any, *, own: bool) -> Any:
        terms = {**options, "key": key} if own else {"selected": selected}
        return jax.value_and_grad(lambda x: policy_loss(x, *arrays[1:], surrogate=surrogate, **terms)[0])(new)

    for seed in (0, 1):
        key = jax.random.key(seed)
        selected = by_covariance(batch, surrogate, key=key)
        own = value_and_gradient(arrays[0], key, selected, own=True)
        given_ = value_and_gradient(arrays[0], key, selected, own=False)
        without = value_and_gradient(arrays[0], key, np.zeros_like(selected), own=False)
        np.testing.assert_array_equal(own[0], given_[0])
        np.testing.assert_array_equal(own[1], given_[1])
        assert own[0] != without[0]
