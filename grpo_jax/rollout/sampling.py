"""Drawing a token: truncation of the distribution, and inversion of its cumulative sum.

Shapes: N independent draws, V vocabulary. Nothing is sorted. A draw takes two uniform numbers of its own, so it
depends on no other draw, whatever is sampled beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from grpo_jax.types import Array

# Width of the blocks of the two-stage inversion: about the root of today's vocabularies.
_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a distribution is drawn from; hashable, hence a static argument of a compiled rollout."""

    temperature: float = 1.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    """Keep the most probable tokens that hold this much probability; 1 keeps all."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as probable as the best one; 0 keeps all."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0 keeps all), got {self.top_k}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p must be in [0, 1), got {self.min_p}")


def truncate(logits_NV: Array, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Array:
    """Set the logits that top-k, then top-p, then min-p leave out to -inf.

    Top-p keeps the smallest set of most probable tokens whose probability reaches ``top_p`` (arXiv 1904.09751);
    min-p is arXiv 2407.01082. Tokens that tie with the last one kept are kept too.
    """
    if 0 < top_k < logits_NV.shape[-1]:
        ones_NV = jnp.ones_like(logits_NV)
        logits_NV = _keep_top(logits_NV, ones_NV, jnp.asarray(top_k, logits_NV.dtype))
    if top_p < 1:
        logits_NV = _keep_top(logits_NV, jax.nn.softmax(logits_NV, axis=-1), jnp.asarray(top_p))
    if min_p > 0:
        best_N1 = logits_NV.max(axis=-1, keepdims=True)
        logits_NV = jnp.where(logits_NV >= best_N1 + jnp.log(min_p), logits_NV, -jnp.inf)
    return logits_NV


def _keep_top(logits_NV: Array, weights_NV: Array, target: Array) -> Array:
    """Keep the largest logits whose weights sum to at least ``target``; the rest becomes -inf.

    The threshold is found bit by bit: float32 numbers, mapped to unsigned integers of the same order, have 32
    bits, so 32 masked sums find it exactly where a sort would cost several times as much.
    """
    bits = jax.lax.bitcast_convert_type(logits_NV.astype(jnp.float32), jnp.int32)
    ordered = jax.lax.bitcast_convert_type(bits ^ ((bits >> 31) & 0x7FFFFFFF), jnp.uint32)
    ordered_NV = ordered ^ jnp.uint32(0x80000000)

    def try_bit(i: Array, threshold_N1: Array) -> Array:
        candidate_N1 = threshold_N1 | (jnp.uint32(0x80000000) >> i.astype(jnp.uint32))
        kept_N1 = jnp.sum(weights_NV, axis=-1, keepdims=True, where=ordered_NV >= candidate_N1)
        return jnp.where(kept_N1 >= target, candidate_N1, threshold_N1)

    start_N1 = jnp.zeros((*logits_NV.shape[:-1], 1), jnp.uint32)
    threshold_N1 = jax.lax.fori_loop(0, 32, try_bit, start_N1)
    return jnp.where(ordered_NV >= threshold_N1, logits_NV, -jnp.inf)


def draw(uniforms_N2: Array, logits_NV: Array) -> tuple[Array, Array]:
    """Draw a token from each softmax with two numbers in [0, 1); returns ``(tokens_N, logps_N)``.

    Inversion in two stages: a block of the vocabulary by its total probability, then a token within it. Against
    Gumbel noise it needs 2 random numbers a draw instead of V.
    """
    vocab_size = logits_NV.shape[-1]
    best_N1 = logits_NV.max(axis=-1, keepdims=True)
    weights_NV = jnp.exp(logits_NV - best_N1)
    padding = -vocab_size % _BLOCK
    weights_NXB = jnp.pad(weights_NV, ((0, 0), (0, padding))).reshape(len(weights_NV), -1, _BLOCK)
    block_N, total_N = _invert(weights_NXB.sum(axis=-1), uniforms_N2[:, 0])
    weights_NB = jnp.take_along_axis(weights_NXB, block_N[:, None, None], axis=1)[:, 0]
    offset_N, _ = _invert(weights_NB, uniforms_N2[:, 1])
    tokens_N = block_N * _BLOCK + offset_N
    logits_N = jnp.take_along_axis(logits_NV, tokens_N[:, None], axis=-1)[:, 0]
    return tokens_N, logits_N - best_N1[:, 0] - jnp.log(total_N)


def _invert(weights_NX: Array, uniforms_N: Array) -> tuple[Array, Array]:
    """The first index whose cumulative weight exceeds ``u * total``; one of weight 0 is never it."""
    cumulative_NX = jnp.cumsum(weights_NX, axis=-1)
    total_N = cumulative_NX[:, -1]
    # u <= 1 - 2^-23, so that u * total < total even after rounding. A device may sum as a tree, whose rounding
    # can rise at a weight of 0: hence the second condition.
    above_NX = (cumulative_NX > (uniforms_N * total_N)[:, None]) & (weights_NX > 0)
    return jnp.argmax(above_NX, axis=-1).astype(jnp.int32), total_N
