"""What never changes the loss: how a batch is split, padded or ordered, and what stands behind its mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grpo_jax.algorithms import objectives
from tests.algorithms import reference
from tests.algorithms.batches import (
    EXACT,
    EXTRAS,
    MAX_COMPLETION_LENGTH,
    Batch,
    jitted_loss_and_gradient,
    on_device,
    random_batch,
)

AGGREGATE_NAMES = sorted(reference.AGGREGATES)


@pytest.mark.parametrize("aggregate", AGGREGATE_NAMES)
@pytest.mark.parametrize(("prompts", "group"), [(1, 4), (4, 1), (2, 2)])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_micro_batches_add_up_to_the_whole(x64, aggregate, prompts, group, seed) -> None:
    batch = on_device(random_batch(seed))
    denominator = objectives.loss_denominator(
        batch.mask, aggregate=aggregate, max_completion_length=MAX_COMPLETION_LENGTH
    )
    whole_loss, whole_gradient, _ = jitted_loss_and_gradient(batch, aggregate=aggregate, **EXTRAS)
    loss, rows = 0.0, []
    for p in range(prompts):
        parts = []
        for g in range(group):
            part = Batch(*(jnp.split(jnp.split(x, prompts)[p], group, axis=1)[g] for x in batch))
            part_loss, gradient, _ = jitted_loss_and_gradient(
                part, aggregate=aggregate, denominator=denominator, **EXTRAS
            )
            loss += part_loss
            parts.append(gradient)
        rows.append(jnp.concatenate(parts, axis=1))
    np.testing.assert_allclose(loss, whole_loss, **EXACT)
    np.testing.assert_allclose(jnp.concatenate(rows), whole_gradient, **EXACT)


@pytest.mark.parametrize("aggregate", AGGREGATE_NAMES)
@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (2, 4), (8, 1)])
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1))
def test_devices_add_up_to_the_whole(x64, aggregate, grid, seed) -> None:
    batch = random_batch(seed, P=8)
    whole_loss, whole_gradient, _ = jitted_loss_and_gradient(on_device(batch), aggregate=aggregate, **EXTRAS)
    devices = np.array(jax.devices()[: grid[0] * grid[1]]).reshape(grid)
    mesh = Mesh(devices, ("data", "group"), axis_types=(AxisType.Auto,) * 2)
    split = Batch(*(jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "group"))) for x in batch))
    loss, gradient, _ = jitted_loss_and_gradient(split, aggregate=aggregate, **EXTRAS)
    assert len(gradient.sharding.device_set) == devices.size
    np.testing.assert_allclose(loss, whole_loss, **EXACT)
    np.testing.assert_allclose(gradient, whole_gradient, **EXACT)


@pytest.mark.parametrize("aggregate", AGGREGATE_NAMES)
@given(seed=st.integers(0, 2**32 - 1), junk=st.sampled_from([0.0, -50.0, 1e30, np.inf, -np.inf, np.nan]))
def test_padding_changes_nothing(x64, aggregate, seed, junk) -> None:
    batch = random_batch(seed)
    padded = Batch(
        *(np.pad(x, ((0, 0), (0, 0), (0, 3)), constant_values=junk) for x in batch[:5]),
        mask=np.pad(batch.mask, ((0, 0), (0, 0), (0, 3))),
        advantages_PG=batch.advantages_PG,
    )
    options = {"aggregate": aggregate, **EXTRAS}
    loss, gradient, metrics = jitted_loss_and_gradient(on_device(batch), **options)
    got, got_gradient, got_metrics = jitted_loss_and_gradient(on_device(padded), **options)
    np.testing.assert_allclose(got, loss, **EXACT)
    np.testing.assert_allclose(got_gradient[..., :-3], gradient, **EXACT)
    assert (np.asarray(got_gradient[..., -3:]) == 0).all()
    for name, value in metrics.items():
        np.testing.assert_allclose(got_metrics[name], value, **EXACT)


@pytest.mark.parametrize("kl_estimator", sorted(reference.KL))
@pytest.mark.parametrize("field", ["new", "old", "ref", "entropy", "weights"])
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_masked_positions_may_hold_anything(kl_estimator, field, junk) -> None:
    batch = random_batch(5, dtype=np.float32)
    dirty = batch._replace(**{field: np.where(batch.mask, getattr(batch, field), np.float32(junk))})
    clean = jitted_loss_and_gradient(on_device(batch), kl_estimator=kl_estimator, **EXTRAS)
    got = jitted_loss_and_gradient(on_device(dirty), kl_estimator=kl_estimator, **EXTRAS)
    jax.tree.map(np.testing.assert_array_equal, got, clean)


@pytest.mark.parametrize("aggregate", AGGREGATE_NAMES)
@given(seed=st.integers(0, 2**32 - 1))
def test_order_of_prompts_and_completions_changes_nothing(x64, aggregate, seed) -> None:
    batch = random_batch(seed)
    rng = np.random.default_rng(seed)
    prompts, completions = rng.permutation(4), rng.permutation(4)
    shuffled = Batch(*(x[prompts][:, completions] for x in batch))
    loss, gradient, _ = jitted_loss_and_gradient(on_device(batch), aggregate=aggregate, **EXTRAS)
    got, got_gradient, _ = jitted_loss_and_gradient(on_device(shuffled), aggregate=aggregate, **EXTRAS)
    np.testing.assert_allclose(got, loss, **EXACT)
    np.testing.assert_allclose(got_gradient, np.asarray(gradient)[prompts][:, completions], **EXACT)


@pytest.mark.parametrize("aggregate", AGGREGATE_NAMES)
def test_a_completion_that_is_all_masked_out_might_as_well_not_be_there(x64, aggregate) -> None:
    batch = random_batch(6)
    batch = batch._replace(mask=batch.mask & (np.arange(4) > 0)[:, None, None])
    without = Batch(*(x[1:] for x in batch))
    options = {"aggregate": aggregate, **EXTRAS}
    loss, gradient, _ = jitted_loss_and_gradient(on_device(batch), **options)
    expected, expected_gradient, _ = jitted_loss_and_gradient(on_device(without), **options)
    np.testing.assert_allclose(loss, expected, **EXACT)
    np.testing.assert_allclose(gradient[1:], expected_gradient, **EXACT)
    assert (np.asarray(gradient[0]) == 0).all()


@pytest.mark.parametrize("aggregate", AGGREGATE_NAMES)
def test_nothing_to_train_on_is_zero_and_finite(aggregate) -> None:
    batch = random_batch(7, dtype=np.float32)
    batch = batch._replace(mask=np.zeros_like(batch.mask))
    loss, gradient, _ = jitted_loss_and_gradient(on_device(batch), aggregate=aggregate, **EXTRAS)
    assert loss == 0
    assert (np.asarray(gradient) == 0).all()
