"""Completions in fewer rows: where they lie, and that a step cannot tell."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.config import Config, MeshConfig, ObjectiveConfig, OptimizerConfig, RolloutConfig, TrainConfig
from grpo_jax.mesh import GROUP_AXES, PROMPT_AXES, make_mesh, partition_spec, place_params
from grpo_jax.models.decoder import logical_axes
from grpo_jax.optim.chain import make_optimizer
from grpo_jax.train.logps import completion_logps
from grpo_jax.train.packing import pack, row_counts, rows_needed
from grpo_jax.train.step import TrainStep
from grpo_jax.types import TrainBatch, TrainState
from tests.train.test_step import DECODER, MODEL, VOCAB, assert_trees_close, params

P, G, S, T = 4, 4, 5, 128
PARAMS = params()
# Gradients are sums over hundreds of tokens: single ones differ by 3e-5 when they are added in another order.
UPDATE = {"atol": 1e-4}
LENGTHS = {
    1: [[30, 31, 32, 33], [5, 100, 0, 1], [128, 0, 1, 0], [1, 1, 1, 1]],
    2: [[128, 40, 40, 40], [64, 64, 64, 64], [2, 3, 4, 5], [0, 0, 0, 0]],
    4: [[128, 128, 2, 2], [3, 3, 3, 3], [128, 128, 128, 128], [9, 9, 9, 9]],
}


def mask_of(lengths: Any, length: int = T) -> jax.Array:
    return jnp.arange(length)[None, None] < jnp.asarray(lengths)[..., None]


def first_fit_decreasing(sizes: list[int], width: int) -> int:
    """Rows that the textbook's algorithm fills."""
    rows: list[int] = []
    for size in sorted(sizes, reverse=True):
        for i, held in enumerate(rows):
            if held + size <= width:
                rows[i] += size
                break
        else:
            rows.append(size)
    return sum(held > 0 for held in rows)


@given(st.integers(0, 2**32 - 1))
def test_rows_are_those_of_first_fit_decreasing_and_nothing_overlaps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    length, group = 12, 6
    lengths = np.minimum(rng.geometric(rng.uniform(0.05, 0.9), (3, group)) - 1, length)
    mask = mask_of(lengths, length)
    rows = int(rows_needed(mask))
    assert rows == max(first_fit_decreasing([max(n - 1, 0) for n in group], length - 1) for group in lengths)
    packing = pack(mask, max(rows, 1))
    for p in range(3):
        places = [np.asarray(packing.place_PGW[p, g, : max(n - 1, 0)]) for g, n in enumerate(lengths[p].tolist())]
        for place in places:  # one after the other, in one row
            assert (np.diff(place) == 1).all() and len(set(place // (length - 1))) <= 1
        taken = np.concatenate(places)
        assert len(set(taken.tolist())) == len(taken) and (taken < packing.num_rows * (length - 1)).all()
    values = jnp.asarray(rng.normal(size=(3, group, length)))
    rows_PN = jnp.concatenate([values[..., 0], packing.lay(values[..., 1:]).reshape(3, -1)], axis=1)
    np.testing.assert_array_equal(packing.unlay(rows_PN), jnp.where(mask, values, 0))


def test_short_completions_are_one_row_each() -> None:
    assert row_counts(16, 127) == (16,)
    assert row_counts(16, 128) == (4, 8, 16)
    assert row_counts(2, 512) == (1, 2)


def batch(lengths: Any) -> TrainBatch:
    rng = np.random.default_rng(0)
    prompt_mask = np.arange(S)[::-1][None] < rng.integers(1, S + 1, P)[:, None]
    advantages = rng.normal(size=(P, G)).astype(np.float32)
    advantages[1] = 0
    return TrainBatch(
        prompt_PS=jnp.asarray(rng.integers(0, VOCAB, (P, S), np.int32)),
        prompt_mask_PS=jnp.asarray(prompt_mask),
        completion_PGT=jnp.asarray(rng.integers(0, VOCAB, (P, G, T), np.int32)),
        loss_mask_PGT=mask_of(lengths),
        sampler_logps_PGT=jnp.full((P, G, T), -np.log(VOCAB), jnp.float32),
        advantages_PG=jnp.asarray(advantages),
        old_logps_PGT=None,
        ref_logps_PGT=jnp.full((P, G, T), -np.log(VOCAB), jnp.float32),
    )


def make_step(beta: float = 0.1, **train: Any) -> TrainStep:
    config = Config(
        rollout=RolloutConfig(num_prompts=P, group_size=G, max_prompt_length=S, max_completion_length=T),
        objective=ObjectiveConfig(beta=beta),
        # Plain gradient descent: an update is the gradient.
        optimizer=OptimizerConfig(name="sgd", b1=0.0, learning_rate=1.0, clip_norm=None),
        train=TrainConfig(logps_chunk=64, **train),
    )
    return TrainStep(MODEL, make_optimizer(config.optimizer, 100), config, VOCAB)


def state(step: TrainStep, params: Any = PARAMS) -> TrainState:
    return TrainState(params=params, ref_params=None, opt_state=step.optimizer.init(params), step=jnp.int32(0))


@pytest.mark.parametrize("rows", LENGTHS)
def test_log_probabilities_are_those_of_one_row_each(rows: int) -> None:
    part = batch(LENGTHS[rows])
    assert int(rows_needed(part.loss_mask_PGT)) == rows

    def logps(packing: Any) -> Any:
        arrays = part.prompt_PS, part.prompt_mask_PS, part.completion_PGT
        return completion_logps(
            MODEL, PARAMS, *arrays, temperature=0.7, vocab_size=VOCAB, chunk_size=64, packing=packing
        )

    packed = jax.jit(lambda: logps(pack(part.loss_mask_PGT, rows)))()
    for got, expected in zip(packed, jax.jit(lambda: logps(None))(), strict=True):
        np.testing.assert_allclose(got, jnp.where(part.loss_mask_PGT, expected, 0), rtol=1e-5, atol=1e-5)


def test_packing_leaves_the_update_unchanged_and_is_compiled_once() -> None:
    plain, packed = make_step(packing=False), make_step(prompt_micro_batches=2)
    update, packed_update = jax.jit(plain.train_step), jax.jit(packed.train_step)
    for lengths in LENGTHS.values():
        expected, metrics = update(state(plain), batch(lengths))
        got, packed_metrics = packed_update(state(packed), batch(lengths))
        assert_trees_close(got.params, expected.params, **UPDATE)
        assert metrics.keys() == packed_metrics.keys()
        for name, value in metrics.items():
            np.testing.assert_allclose(packed_metrics[name], value, rtol=2e-5, atol=2e-5, err_msg=name)
    assert packed_update._cache_size() == 1


@pytest.mark.slow
def test_devices_leave_the_packed_update_unchanged() -> None:
    plain, step = make_step(packing=False), make_step()
    expected, _ = jax.jit(plain.train_step)(state(plain), batch(LENGTHS[2]))
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, group=1, tensor=2))

    def place(path: Any, x: jax.Array) -> jax.Array:
        axes = PROMPT_AXES if path[0].name.startswith("prompt") else GROUP_AXES
        return jax.device_put(x, jax.NamedSharding(mesh, partition_spec(axes)))

    placed = jax.tree.map_with_path(place, batch(LENGTHS[2]))
    with jax.set_mesh(mesh):
        params = place_params(PARAMS, logical_axes(DECODER), mesh)
        got, _ = jax.jit(step.train_step)(state(step, params), placed)
    assert_trees_close(got.params, expected.params, **UPDATE)


def test_completions_without_advantage_pass_through_no_model_and_change_nothing() -> None:
    lengths = [[30, 31, 32, 33], [128, 128, 128, 128], [5, 6, 7, 8], [1, 1, 1, 1]]  # the second prompt's are 0
    plain, skipping = make_step(beta=0.0, packing=False), make_step(beta=0.0, skip_zero_advantages=True)
    part = dataclasses.replace(batch(lengths), ref_logps_PGT=None)
    expected, metrics = jax.jit(plain.train_step)(state(plain), part)
    # Whatever they hold would show if it were looked at.
    got, skipping_metrics = jax.jit(skipping.train_step)(
        state(skipping),
        dataclasses.replace(part, sampler_logps_PGT=part.sampler_logps_PGT.at[1].set(jnp.nan)),
    )
    assert_trees_close(got.params, expected.params, **UPDATE)
    np.testing.assert_allclose(skipping_metrics["loss"], metrics["loss"], rtol=1e-4, atol=1e-6)
    assert np.isfinite(skipping_metrics["sampler_gap_max"])


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        ({"beta": 0.1}, "objective.beta=0.1"),
        ({"beta": 0.0, "entropy_coef": 0.01}, "objective.entropy_coef=0.01"),
        ({"beta": 0.0, "top_entropy": 0.2}, "objective.top_entropy=0.2"),
        ({"beta": 0.0, "surrogate": "kl_cov"}, "objective.surrogate='kl_cov'"),
    ],
)
def test_skipping_is_refused_where_it_would_change_the_gradient(objective: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match="skip_zero_advantages=True does not go with " + name):
        Config(objective=ObjectiveConfig(**objective), train=TrainConfig(skip_zero_advantages=True))
