"""Drawing and truncation against NumPy, and stop strings against Python's own search."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.rollout.sampling import SamplingParams, draw, truncate
from grpo_jax.rollout.stop import stop_table


@pytest.mark.parametrize("vocab_size", [3, 256, 700])
def test_draws_follow_the_distribution(vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=vocab_size) * 2
    logits[rng.random(vocab_size) < 0.3] = -np.inf
    logits[0] = 1.0
    num_draws = 40_000
    uniforms = jax.random.uniform(jax.random.key(0), (num_draws, 2))
    tokens, logps = jax.jit(draw)(uniforms, jnp.tile(jnp.asarray(logits, jnp.float32), (num_draws, 1)))
    probs = np.exp(logits - np.logaddexp.reduce(logits))
    counts = np.bincount(np.asarray(tokens), minlength=vocab_size)
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0] * num_draws
    chi2 = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    freedom = (probs > 0).sum() - 1
    # Mean `freedom`, variance twice that: five standard deviations.
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom)
    np.testing.assert_allclose(logps, np.log(probs[np.asarray(tokens)]), atol=5e-6)


@settings(max_examples=40)
@given(st.integers(0, 2**31 - 1), st.integers(1, 12), st.floats(0.05, 0.99), st.floats(0.01, 0.9))
def test_truncation_keeps_what_a_sort_keeps(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    logits = np.random.default_rng(seed).normal(size=(3, 17)).astype(np.float32) * 3
    kept_k = np.isfinite(np.asarray(truncate(jnp.asarray(logits), top_k=top_k)))
    assert np.array_equal(kept_k, logits >= np.sort(logits, axis=-1)[:, [-top_k]])

    probs = np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float64)
    probs /= probs.sum(-1, keepdims=True)
    order = np.argsort(-probs, axis=-1)
    before = np.cumsum(np.take_along_axis(probs, order, -1), axis=-1) - np.take_along_axis(probs, order, -1)
    if np.abs(before - top_p).min() > 1e-5:  # float32 may decide a tie with top_p either way
        kept_p = np.isfinite(np.asarray(truncate(jnp.asarray(logits), top_p=top_p)))
        assert np.array_equal(np.take_along_axis(kept_p, order, -1), before < top_p)

    if np.abs(probs / probs.max(-1, keepdims=True) - min_p).min() > 1e-5:
        kept_m = np.isfinite(np.asarray(truncate(jnp.asarray(logits), min_p=min_p)))
        assert np.array_equal(kept_m, probs >= min_p * probs.max(-1, keepdims=True))


def test_truncation_keeps_all_tokens_that_tie() -> None:
    kept = np.isfinite(np.asarray(truncate(jnp.asarray([[1.0, 0.0, 1.0, 1.0]]), top_k=2)))
    assert kept.tolist() == [[True, False, True, True]]


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1), ("min_p", 1.0)]
)
def test_bad_sampling_parameters_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{field}.*{value}"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


alphabet = st.sampled_from(["a", "b", "é", "</a>", "ab", "\n"])
texts = st.lists(alphabet, min_size=1, max_size=4).map("".join)


@given(st.lists(texts, min_size=1, max_size=3), st.lists(texts, min_size=1, max_size=8), st.data())
def test_stop_table_finds_what_python_finds(stop: list[str], tokens: list[str], data: st.DataObject) -> None:
    token_bytes = [b"", *(token.encode() for token in tokens)]
    table = stop_table(token_bytes, stop)
    assert table is not None
    ids = data.draw(st.lists(st.integers(0, len(tokens)), max_size=12))
    state, text = 0, b""
    for token in ids:
        state = int(table[state, token])
        text += token_bytes[token]
        assert (state == len(table) - 1) == any(s.encode() in text for s in stop)


def test_an_empty_stop_string_is_refused() -> None:
    assert stop_table([b"a"], ()) is None
    with pytest.raises(ValueError, match="empty string"):
        stop_table([b"a"], ("",))
