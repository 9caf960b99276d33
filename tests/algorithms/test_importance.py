from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.algorithms import importance as package
from grpo_jax.algorithms.importance import importance_weights
from tests.algorithms import reference
from tests.algorithms.batches import Batch, batches, random_batch

CHOICES = [(level, outside) for level in reference.LEVELS for outside in reference.OUTSIDE]
# A band that a good share of the weights of a spread of 0.3 leaves on either side.
BAND = {"low": 0.8, "cap": 1.25}

over_choices = pytest.mark.parametrize(("level", "outside"), CHOICES)


@jax.jit
def every_choice(old: Any, sampler: Any, mask: Any) -> dict[tuple[str, str], Any]:
    return {
        (level, outside): importance_weights(old, sampler, mask, level=level, outside=outside, **BAND)
        for level, outside in CHOICES
    }


def weights_of(batch: Batch, level: str, outside: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """With the batch's new log-probabilities as the trainer's, and its old ones as the sampler's."""
    return jax.tree.map(np.asarray, every_choice(batch.new, batch.old, batch.mask)[level, outside])


def test_every_choice_has_a_reference() -> None:
    assert tuple(package.LEVELS) == reference.LEVELS
    assert set(package.OUTSIDE) == set(reference.OUTSIDE)


@over_choices
@given(batch=batches())
def test_weights_and_metrics_equal_reference(x64, level, outside, batch) -> None:
    got, metrics = weights_of(batch, level, outside)
    options = {"level": level, "outside": outside, **BAND}
    expected = reference.importance_weights(batch.new, batch.old, batch.mask, **options)
    np.testing.assert_allclose(got[batch.mask], expected[batch.mask], rtol=1e-12, atol=1e-13)
    raw = np.array(list(reference.raw_importance(batch.new, batch.old, batch.mask, level=level).values()))
    left = (raw > BAND["cap"]) | ((raw < BAND["low"]) & (outside == "drop"))
    shares = {
        "importance_clipped": left * (outside == "truncate"),
        "importance_dropped": left * (outside == "drop"),
    }
    np.testing.assert_allclose(metrics.pop("importance"), expected[batch.mask].mean(), rtol=1e-12)
    for name, share in shares.items():
        np.testing.assert_allclose(metrics.pop(name), share.mean(), rtol=1e-12, err_msg=name)
    assert not metrics


@over_choices
def test_some_weights_are_kept_and_some_are_not(x64, level, outside) -> None:
    _, metrics = weights_of(random_batch(0), level, outside)
    assert 0 < metrics["importance_dropped" if outside == "drop" else "importance_clipped"] < 1


@over_choices
@given(batch=batches(), junk=st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_masked_positions_may_hold_anything(x64, level, outside, batch, junk) -> None:
    clean, clean_metrics = weights_of(batch, level, outside)
    for field in ("new", "old"):
        dirty = batch._replace(**{field: np.where(batch.mask, getattr(batch, field), junk)})
        got, metrics = weights_of(dirty, level, outside)
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got[batch.mask], clean[batch.mask])
        assert metrics == clean_metrics


@over_choices
@pytest.mark.parametrize("log_ratio", [-1000.0, -89.0, 0.0, 89.0, 1000.0])
def test_finite_at_any_log_ratio_in_float32(level, outside, log_ratio) -> None:
    batch = random_batch(1, dtype=np.float32)
    got, metrics = weights_of(batch._replace(old=batch.new - np.float32(log_ratio)), level, outside)
    assert got.dtype == np.float32
    expected = {-1: 0.0, 0: 1.0, 1: 0.0 if outside == "drop" else BAND["cap"]}[int(np.sign(log_ratio))]
    np.testing.assert_allclose(got[batch.mask], expected, rtol=0, atol=1e-6)
    assert all(np.isfinite(value) for value in metrics.values())


@over_choices
def test_a_sampler_that_is_the_policy_weighs_exactly_one(level, outside) -> None:
    batch = random_batch(2, dtype=np.float32)
    got, metrics = weights_of(batch._replace(old=batch.new), level, outside)
    assert (got[batch.mask] == 1).all()
    np.testing.assert_allclose(metrics["importance"], 1, rtol=1e-6)
    assert metrics["importance_clipped"] == metrics["importance_dropped"] == 0


@pytest.mark.parametrize("outside", sorted(reference.OUTSIDE))
@given(batch=batches())
def test_a_completion_of_one_token_has_the_same_weight_at_both_levels(x64, outside, batch) -> None:
    single = batch._replace(mask=batch.mask & (np.arange(5) == 0))
    token, sequence = (weights_of(single, level, outside)[0] for level in ("token", "sequence"))
    np.testing.assert_allclose(sequence[single.mask], token[single.mask], rtol=1e-12)


@pytest.mark.parametrize("outside", sorted(reference.OUTSIDE))
@given(batch=batches())
def test_a_sequence_weight_is_the_same_on_all_its_tokens(x64, outside, batch) -> None:
    got, _ = weights_of(batch, "sequence", outside)
    for weights, mask in zip(got.reshape(-1, 5), batch.mask.reshape(-1, 5), strict=True):
        assert len(set(weights[mask])) <= 1


@over_choices
@given(batch=batches(), parts=st.lists(st.booleans(), min_size=8, max_size=8))
def test_weights_do_not_depend_on_the_rest_of_the_batch(x64, level, outside, batch, parts) -> None:
    whole, _ = weights_of(batch, level, outside)
    part = batch._replace(mask=batch.mask & np.array(parts).reshape(2, 4, 1))
    got, _ = weights_of(part, level, outside)
    np.testing.assert_array_equal(got[part.mask], whole[part.mask])


def test_weights_are_constants(x64) -> None:
    batch = random_batch(3)

    @jax.jit
    def gradients(old: Any, sampler: Any) -> Any:
        def total(old: Any, sampler: Any) -> Any:
            every = [importance_weights(old, sampler, batch.mask, level=a, outside=b) for a, b in CHOICES]
            return sum(weights.sum() + metrics["importance"] for weights, metrics in every)

        return jax.grad(total, argnums=(0, 1))(old, sampler)

    for gradient in gradients(batch.new, batch.old):
        assert (np.asarray(gradient) == 0).all()


@pytest.mark.parametrize(
    ("options", "named"),
    [({"level": "word"}, "level.*sequence.*word"), ({"outside": "mask"}, "outside.*truncate.*mask")],
)
def test_unknown_names_are_refused(options, named) -> None:
    with pytest.raises(ValueError, match=named):
        importance_weights(jnp.zeros((1, 2, 3)), jnp.zeros((1, 2, 3)), jnp.ones((1, 2, 3), bool), **options)
