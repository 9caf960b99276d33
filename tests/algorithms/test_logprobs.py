from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grpo_jax.algorithms.logprobs import token_logps
from tests.algorithms import reference
from tests.algorithms.batches import GOLDEN

N, D, V, KNOWN = 23, 6, 17, 13
BLOCKS = 64
"""A vocabulary that is cut into blocks (8 of 8 ids); V is not."""


def inputs(seed: int, dtype: Any = np.float64, *, vocabulary: int = V) -> tuple[Any, ...]:
    """Hidden states, output matrix, targets, and weights of both outputs in a scalar loss."""
    rng = np.random.default_rng(seed)
    return (
        rng.normal(0, 1, (N, D)).astype(dtype),
        rng.normal(0, 1, (vocabulary, D)).astype(dtype),
        rng.integers(0, KNOWN, N),
        rng.normal(0, 1, N).astype(dtype),
        rng.normal(0, 1, N).astype(dtype),
    )


@functools.partial(jax.jit, static_argnames=("temperature", "vocab_size", "chunk_size"))
def outputs_and_gradients(hidden: Any, head: Any, targets: Any, w: Any, u: Any, **options: Any) -> Any:
    """``(logps, entropy), (d hidden, d head)`` of the loss ``sum(w * logps + u * entropy)``."""

    def loss(hidden: Any, head: Any) -> Any:
        logps, entropy = token_logps(hidden, head, targets, **options)
        return jnp.sum(w * logps + u * entropy), (logps, entropy)

    gradients, outputs = jax.grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)
    return outputs, gradients


@pytest.mark.parametrize(("vocabulary", "vocab_size"), [(V, V), (V, KNOWN), (BLOCKS, BLOCKS), (BLOCKS, 50)])
@pytest.mark.parametrize("chunk_size", [1, 5, 12, 1000])
def test_value_and_gradient_equal_the_full_computation(x64, vocabulary, vocab_size, chunk_size) -> None:
    """With no block kept for the backward pass, with some, and with all."""
    arrays = inputs(0, vocabulary=vocabulary)
    options = {"temperature": 0.7, "vocab_size": vocab_size}
    got, got_gradients = outputs_and_gradients(*arrays, chunk_size=chunk_size, **options)
    expected = reference.token_logps(*arrays[:3], **options)
    expected_gradients = reference.token_logps_gradient(*arrays, **options)
    for x, y in zip((*got, *got_gradients), (*expected, *expected_gradients), strict=True):
        assert x.dtype == jnp.float64
        # Sums of at most 23 float64 terms of order 10.
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("vocabulary", [V, BLOCKS])
@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_float32_in_float32_out(vocabulary, chunk_size) -> None:
    arrays = inputs(1, np.float32, vocabulary=vocabulary)
    options = {"temperature": 0.7, "vocab_size": vocabulary}
    got, gradients = outputs_and_gradients(*arrays, chunk_size=chunk_size, **options)
    expected = reference.token_logps(*arrays[:3], **options)
    expected_gradients = reference.token_logps_gradient(*arrays, **options)
    for x, y in zip((*got, *gradients), (*expected, *expected_gradients), strict=True):
        assert x.dtype == jnp.float32
        # Logits up to about 15, so float32 (6e-8) leaves about 1e-6 of absolute error a term.
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1000.0, 1e30]),
    vocabulary=st.sampled_from([V, BLOCKS]),
)
def test_finite_for_logits_of_any_size(seed, scale, vocabulary) -> None:
    hidden, head, *rest = inputs(seed, np.float32, vocabulary=vocabulary)
    got, gradients = outputs_and_gradients(
        hidden * np.float32(scale), head, *rest, temperature=1.0, vocab_size=KNOWN, chunk_size=5
    )
    assert all(np.isfinite(x).all() for x in (*got, *gradients))
    logps, entropy = got
    assert (np.asarray(logps) <= 0).all()
    # Uniform over the known ids is the largest entropy; 1e-5 for float32 rounding on either side.
    assert (np.asarray(entropy) >= -1e-5).all()
    assert (np.asarray(entropy) <= np.log(KNOWN) + 1e-5).all()


@pytest.mark.parametrize("case", GOLDEN["temperature"], ids=lambda c: f"T{c['temperature']}")
def test_golden_temperature(x64, case) -> None:
    head, temperature = jnp.array(case["logits"])[:, None], case["temperature"]
    logps, entropy = token_logps(
        jnp.ones((3, 1)), head, jnp.arange(3), temperature=temperature, vocab_size=3, chunk_size=2
    )
    np.testing.assert_allclose(logps, case["logps"], rtol=0, atol=1e-12)
    expected = -np.sum(np.exp(case["logps"]) * np.array(case["logps"]))
    np.testing.assert_allclose(entropy, [expected] * 3, rtol=0, atol=1e-12)


def test_temperature_scales_the_gradient_too(x64) -> None:
    hidden, head, targets, w, _ = inputs(2)
    options = {"vocab_size": V, "chunk_size": 5}
    _, cold = outputs_and_gradients(hidden, head, targets, w, 0 * w, temperature=0.5, **options)
    _, scaled = outputs_and_gradients(hidden, 2 * head, targets, w, 0 * w, temperature=1.0, **options)
    np.testing.assert_allclose(cold[0], scaled[0], rtol=1e-12)
    np.testing.assert_allclose(cold[1], 2 * scaled[1], rtol=1e-12, atol=1e-14)


def test_padded_ids_have_probability_zero_and_no_gradient(x64) -> None:
    """However large the logits of the rows that only pad the output matrix."""
    hidden, head, targets, w, u = inputs(3)
    options = {"temperature": 1.0, "vocab_size": KNOWN, "chunk_size": 5}
    loud = head.copy()
    loud[KNOWN:] *= 1e3
    got, gradients = outputs_and_gradients(hidden, loud, targets, w, u, **options)
    short, short_gradients = outputs_and_gradients(
        hidden, head[:KNOWN], targets, w, u, **options | {"vocab_size": KNOWN}
    )
    np.testing.assert_allclose(got[0], short[0], rtol=1e-12)
    np.testing.assert_allclose(got[1], short[1], rtol=1e-12)
    np.testing.assert_allclose(gradients[0], short_gradients[0], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(gradients[1][:KNOWN], short_gradients[1], rtol=1e-12, atol=1e-13)
    assert (np.asarray(gradients[1][KNOWN:]) == 0).all()
    padded = jnp.arange(KNOWN, V)
    logps, _ = token_logps(jnp.asarray(hidden[: V - KNOWN]), jnp.asarray(loud), padded, **options)
    assert (np.asarray(logps) == -np.inf).all()


def test_known_ids_share_all_of_the_probability(x64) -> None:
    hidden, head, *_ = inputs(4)
    every_id = jnp.arange(KNOWN)
    same_state = jnp.broadcast_to(hidden[:1], (KNOWN, D))
    logps, entropy = token_logps(same_state, head, every_id, temperature=0.8, vocab_size=KNOWN, chunk_size=4)
    np.testing.assert_allclose(np.exp(logps).sum(), 1.0, rtol=1e-12)
    np.testing.assert_allclose(entropy, -np.sum(np.exp(logps) * logps), rtol=1e-12)


def test_bfloat16_inputs_give_float32_log_probabilities() -> None:
    """Equal to those of the same (rounded) numbers in float64: nothing is rounded to bfloat16 on the way."""
    hidden, head, targets, *_ = inputs(5, np.float32)
    small_hidden, small_head = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(3 * head, jnp.bfloat16)
    options = {"temperature": 0.9, "vocab_size": V}
    logps, entropy = token_logps(small_hidden, small_head, jnp.asarray(targets), chunk_size=5, **options)
    assert logps.dtype == entropy.dtype == jnp.float32
    assert (np.asarray(logps) <= 0).all()
    expected = reference.token_logps(
        np.asarray(small_hidden, np.float64), np.asarray(small_head, np.float64), targets, **options
    )
    np.testing.assert_allclose(logps, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 1000])
def test_bfloat16_gradients_are_summed_in_float32(chunk_size) -> None:
    """However many chunks and blocks they are summed over: they are rounded before the products and at the end."""
    arrays = inputs(8, np.float32, vocabulary=BLOCKS)
    small = [jnp.asarray(x, jnp.bfloat16) for x in arrays[:2]]
    options = {"temperature": 0.9, "vocab_size": BLOCKS}
    _, gradients = outputs_and_gradients(*small, *arrays[2:], chunk_size=chunk_size, **options)
    expected = reference.token_logps_gradient(*(np.asarray(x, np.float64) for x in small), *arrays[2:], **options)
    for x, y in zip(gradients, expected, strict=True):
        assert x.dtype == jnp.bfloat16
        # Two roundings to 8 bits, 2**-9 each of a term or of the sum.
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=0, atol=2**-8 * np.abs(y).max())


@pytest.mark.parametrize("vocabulary", [V, BLOCKS])
def test_a_target_beyond_the_known_ids_has_no_nan_in_its_gradient(x64, vocabulary) -> None:
    """Its own row gets no gradient; the known ids get that of their common normalizer."""
    hidden, head, targets, w, u = inputs(9, vocabulary=vocabulary)
    beyond = targets.copy()
    beyond[3] = vocabulary - 1
    options = {"temperature": 0.7, "vocab_size": KNOWN}
    _, gradients = outputs_and_gradients(hidden, head, beyond, w, u, chunk_size=5, **options)
    p_NV = np.exp(hidden @ head[:KNOWN].T / 0.7)
    p_NV /= p_NV.sum(axis=1, keepdims=True)
    targets[3] = 0
    expected, _ = reference.token_logps_gradient(hidden, head, targets, w, u, **options)
    expected[3] -= w[3] * head[0] / 0.7
    np.testing.assert_allclose(gradients[0], expected, rtol=1e-11, atol=1e-12)
    assert (np.asarray(gradients[1][KNOWN:]) == 0).all()


def loss_of_groups(hidden: Any, head: Any, targets: Any, w: Any, u: Any, *, chunk_size: int) -> Any:
    logps, entropy = token_logps(hidden, head, targets, temperature=0.7, vocab_size=50, chunk_size=chunk_size)
    return jnp.sum(w * logps + u * entropy)


def groups(seed: int) -> tuple[Any, ...]:
    """Inputs of 8 prompts, 2 completions each, 5 tokens each."""
    rng = np.random.default_rng(seed)
    shape = (8, 2, 5)
    return (
        rng.normal(size=(*shape, D)),
        rng.normal(size=(BLOCKS, D)),
        rng.integers(0, 50, shape),
        rng.normal(size=shape),
        rng.normal(size=shape),
    )


@pytest.mark.parametrize("chunk_size", [1, 40, 1000])
def test_leading_axes_change_nothing(x64, chunk_size) -> None:
    hidden, head, *rest = groups(10)
    gradient = jax.jit(jax.grad(functools.partial(loss_of_groups, chunk_size=chunk_size), argnums=(0, 1)))
    got = gradient(hidden, head, *rest)
    flat = (x.reshape(80) for x in rest)
    expected = reference.token_logps_gradient(hidden.reshape(80, D), head, *flat, temperature=0.7, vocab_size=50)
    np.testing.assert_allclose(got[0].reshape(80, D), expected[0], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("way", ["eager", "scan", "checkpoint", "vmap"])
def test_within_other_transformations(x64, way) -> None:
    """Over prompts: the gradient of each prompt's hidden states, and the sum of those of the matrix."""
    hidden, head, *rest = groups(11)
    loss = functools.partial(loss_of_groups, chunk_size=4)

    def total(hidden: Any, head: Any) -> Any:
        arrays = (jnp.asarray(hidden), *map(jnp.asarray, rest))
        if way == "eager":
            return loss(hidden, head, *rest)
        if way == "vmap":
            return jax.vmap(lambda h, *x: loss(h, head, *x))(*arrays).sum()
        one = jax.checkpoint(loss) if way == "checkpoint" else loss
        return jax.lax.scan(lambda s, x: (s + one(x[0], head, *x[1:]), None), jnp.zeros(()), arrays)[0]

    gradient = jax.grad(total, argnums=(0, 1))
    got = gradient(hidden, head) if way == "eager" else jax.jit(gradient)(hidden, head)
    flat = (x.reshape(80) for x in rest)
    expected = reference.token_logps_gradient(hidden.reshape(80, D), head, *flat, temperature=0.7, vocab_size=50)
    np.testing.assert_allclose(got[0].reshape(80, D), expected[0], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-11, atol=1e-12)


def test_devices_that_split_prompts_and_vocabulary(x64) -> None:
    """The same gradients on 8 devices; neither hidden states nor logits of other devices' tokens are gathered."""
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    hidden, head, *rest = groups(12)
    places = [NamedSharding(mesh, PartitionSpec(axis)) for axis in ("data", "tensor", "data", "data", "data")]
    arrays = jax.device_put([hidden, head, *rest], places)
    gradient = jax.jit(jax.grad(functools.partial(loss_of_groups, chunk_size=40), argnums=(0, 1)))
    with jax.set_mesh(mesh):
        compiled = gradient.lower(*arrays).compile()
        got = compiled(*arrays)
    assert "all-gather" not in compiled.as_text()
    for x, y in zip(got, gradient(hidden, head, *rest), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12)


def test_a_nan_hidden_state_stays_in_its_row() -> None:
    hidden, head, targets, *_ = inputs(6, np.float32)
    dirty = hidden.copy()
    dirty[7] = np.nan
    options = {"temperature": 1.0, "vocab_size": V, "chunk_size": 5}
    clean = token_logps(jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(targets), **options)
    got = token_logps(jnp.asarray(dirty), jnp.asarray(head), jnp.asarray(targets), **options)
    for x, y in zip(got, clean, strict=True):
        np.testing.assert_array_equal(np.delete(x, 7), np.delete(y, 7))


def temporary_bytes(num_tokens: int, *, chunk_size: int, vocabulary: int = 2048, width: int = 8) -> int:
    """Memory that the compiled loss and gradient need beside their inputs and results."""
    shapes = (
        jax.ShapeDtypeStruct((num_tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((vocabulary, width), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
        jax.ShapeDtypeStruct((num_tokens,), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens,), jnp.float32),
    )
    compiled = outputs_and_gradients.lower(
        *shapes, temperature=1.0, vocab_size=vocabulary, chunk_size=chunk_size
    ).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_peak_memory_follows_the_chunk_and_not_the_number_of_tokens() -> None:
    chunk, vocabulary, width = 128, 2048, 8
    few, many = temporary_bytes(1024, chunk_size=chunk), temporary_bytes(8192, chunk_size=chunk)
    half = temporary_bytes(8192, chunk_size=chunk // 2)
    full = temporary_bytes(8192, chunk_size=8192)
    logits_of_a_chunk = chunk * vocabulary * 4
    assert full >= 8192 * vocabulary * 4
    assert many < 3 * logits_of_a_chunk
    # What grows is copies of the hidden states and a few numbers a token, far less than a row of logits.
    assert many - few <= (8192 - 1024) * 4 * (4 * width + 8)
    assert half < many
    assert many * 20 < full
