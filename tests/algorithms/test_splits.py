"""Every surrogate with every ratio and every aggregate, cut into pieces: micro-batches and devices add up."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests.algorithms.batches import (
    AGGREGATE_NAMES,
    EXACT,
    PAIRS,
    Outcome,
    denominators_of,
    outcome,
    outcome_of,
    pair_options,
    random_batch,
    reference_gradients,
    reference_losses,
)

# Every pair by itself, and one with the terms that aren't a pair's own.
PROGRAMS = [*((pair, True) for pair in PAIRS), (("clip", "token"), False)]
seeds = st.integers(0, 2**32 - 1)
over_programs = pytest.mark.parametrize(
    ("pair", "bare"), PROGRAMS, ids=["-".join(pair) + "-all_terms" * (not bare) for pair, bare in PROGRAMS]
)

# One batch's gradient is compared with finite differences of the reference, whose noise is about 1e-10.
SEED = 21
NOISY = {"rtol": 1e-7, "atol": 2e-9}


@functools.cache
def expected_gradients(pair: tuple[str, str], bare: bool) -> np.ndarray:
    return reference_gradients(random_batch(SEED), **pair_options(pair, bare=bare))


def in_micro_batches(seed: int, pair: tuple[str, str], bare: bool) -> Outcome:
    """Four parts of one prompt and half of its completions; denominators and selected tokens are the whole's."""
    batch = random_batch(seed)
    denominators = denominators_of(batch.mask)
    parts = [
        [
            outcome_of(
                batch.map(lambda x, p=p, g=g: x[p : p + 1, g : g + 2]),
                pair,
                bare=bare,
                denominators=denominators,
            )
            for g in (0, 2)
        ]
        for p in (0, 1)
    ]
    loss = sum(part.loss for row in parts for part in row)
    rows = [np.concatenate([part.gradient for part in row], axis=2) for row in parts]
    return Outcome(loss, np.concatenate(rows, axis=1))


def on_devices(seed: int, pair: tuple[str, str], bare: bool, grid: tuple[int, int]) -> Outcome:
    """Prompts over one axis of a mesh, completions over the other."""
    batch = random_batch(seed)
    devices = np.array(jax.devices()[: grid[0] * grid[1]]).reshape(grid)
    mesh = Mesh(devices, ("data", "group"), axis_types=(AxisType.Auto,) * 2)
    split = batch.map(lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "group"))))
    got = outcome(split, denominators_of(split.mask), pair=pair, bare=bare)
    assert len(got.gradient.sharding.device_set) == devices.size
    return jax.tree.map(np.asarray, got)


@over_programs
@settings(max_examples=5)
@given(seed=seeds)
def test_losses_of_micro_batches_add_up(x64, pair, bare, seed) -> None:
    expected = reference_losses(random_batch(seed), **pair_options(pair, bare=bare))
    np.testing.assert_allclose(in_micro_batches(seed, pair, bare).loss, expected, **EXACT)


@over_programs
def test_gradients_of_micro_batches_are_the_wholes(x64, pair, bare) -> None:
    got, expected = in_micro_batches(SEED, pair, bare).gradient, expected_gradients(pair, bare)
    for i, name in enumerate(AGGREGATE_NAMES):
        np.testing.assert_allclose(got[i], expected[i], **NOISY, err_msg=name)


@over_programs
@settings(max_examples=3)
@given(seed=seeds)
def test_two_and_eight_devices_agree(x64, pair, bare, seed) -> None:
    """With the reference in value, and in gradient to the last bits."""
    two, eight = (on_devices(seed, pair, bare, grid) for grid in ((2, 1), (2, 4)))
    expected = reference_losses(random_batch(seed), **pair_options(pair, bare=bare))
    for i, name in enumerate(AGGREGATE_NAMES):
        np.testing.assert_allclose(two.loss[i], expected[i], **EXACT, err_msg=name)
        np.testing.assert_allclose(eight.loss[i], expected[i], **EXACT, err_msg=name)
        np.testing.assert_allclose(eight.gradient[i], two.gradient[i], **EXACT, err_msg=name)


@over_programs
@pytest.mark.parametrize("grid", [(2, 1), (2, 4)], ids=["2", "8"])
def test_gradients_on_devices_are_the_wholes(x64, pair, bare, grid) -> None:
    got, expected = on_devices(SEED, pair, bare, grid).gradient, expected_gradients(pair, bare)
    for i, name in enumerate(AGGREGATE_NAMES):
        np.testing.assert_allclose(got[i], expected[i], **NOISY, err_msg=name)
