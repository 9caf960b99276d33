"""Log-probabilities and entropy of tokens, holding the logits of a bounded number of them.

Shapes: N tokens, C chunks of tokens, D model width, V vocabulary, cut into K blocks of B ids. The sampler and the
trainer share :func:`scaled_logits`, so that temperature and vocabulary are treated alike on both sides.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.types import Array

_MAX_BLOCKS = 32
"""Into how many blocks the vocabulary is cut at most: narrower products would be slow."""
_BLOCK_MULTIPLE = 8
"""Ids of a block are a multiple of it, so that blocks split evenly over the devices that split the matrix."""
_LOWEST = -1000.0
"""Log-probabilities below it are raised to it: 0 as probabilities (also in float64), and no 0 * inf."""


class _Plan(NamedTuple):
    """What the logits mean, and how they are cut up."""

    temperature: float
    vocab_size: int
    num_blocks: int
    num_kept: int
    """The last blocks of each chunk, whose logits stay from the forward to the backward pass."""


class _Sums(NamedTuple):
    """What is kept of a token's logits of a block."""

    top_N: Array
    """The largest logit."""
    total_N: Array
    """Sum of ``exp(logit - top)``."""
    weighted_N: Array
    """Sum of ``exp(logit - top) * (logit - top)``."""
    target_N: Array
    """The target's logit; 0 if the target is in another block."""


class _Residuals(NamedTuple):
    """What the backward pass needs of a chunk of tokens."""

    hidden_ND: Array
    targets_N: Array
    log_normalizer_N: Array
    entropy_N: Array
    logits_KNB: Array | None
    """Of the kept blocks; None if there are none."""


def scaled_logits(
    hidden_ND: Array, head_VD: Array, *, temperature: float, vocab_size: int, ids_V: Array | None = None
) -> Array:
    """Logits over the sampling temperature, accumulated and returned in float32 at least.

    Ids at and beyond ``vocab_size`` (rows that only pad the output matrix) get -inf.

    Args:
        hidden_ND: hidden states; any number of leading axes.
        head_VD: the output matrix, or some rows of it.
        temperature: sampling temperature, above 0.
        vocab_size: ids that the tokenizer knows.
        ids_V: ids of the rows, some of which may be unknown; None for all ids in order.
    """
    dtype = jnp.promote_types(hidden_ND.dtype, jnp.float32)
    logits_NV = jnp.einsum("...d,vd->...v", hidden_ND, head_VD, preferred_element_type=dtype)
    logits_NV = logits_NV / jnp.asarray(temperature, dtype)
    if ids_V is None:
        if vocab_size == head_VD.shape[0]:
            return logits_NV
        ids_V = jnp.arange(head_VD.shape[0])
    return jnp.where(jnp.broadcast_to(ids_V < vocab_size, logits_NV.shape), logits_NV, -jnp.inf)


def token_logps(
    hidden_ND: Array,
    head_VD: Array,
    targets_N: Array,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk_size: int = 2048,
) -> tuple[Array, Array]:
    """Log-probability of each target token and entropy of its distribution, a block of logits at a time.

    A block holds the logits of a chunk of tokens for a part of the ids. It is computed, used and dropped, and
    computed once more in the backward pass, except for as many blocks as ``chunk_size`` lets stay. So the peak
    memory is about ``chunk_size * V`` whatever the number of tokens, and up to ``chunk_size`` tokens nothing is
    computed twice. Tokens are cut along their last axis only, so that leading axes (prompts, group) may be split
    over devices; a block takes every K-th id, so that the ids may be too.

    Args:
        hidden_ND: hidden states that predict the targets, ``[..., N, D]``.
        head_VD: the output matrix.
        targets_N: sampled ids, ``[..., N]``.
        temperature: the temperature that the tokens were sampled at.
        vocab_size: ids that the tokenizer knows; None for all V.
        chunk_size: tokens, over all axes, whose logits are held at a time (at least one a leading index).

    Returns:
        ``(logps_N, entropy_N)``, float32 at least.
    """
    *leading, num_tokens = targets_N.shape
    V, axis = head_VD.shape[0], len(leading)
    num_blocks = max((k for k in range(1, _MAX_BLOCKS + 1) if V % (k * _BLOCK_MULTIPLE) == 0), default=1)
    # A block is an eighth of what may be held: while it is used, its exponentials and gradients are there too.
    chunk = max(chunk_size * num_blocks // (8 * math.prod(leading)), 1)
    num_chunks = -(-num_tokens // chunk)
    chunk = -(-num_tokens // num_chunks)
    plan = _Plan(
        temperature=temperature,
        vocab_size=V if vocab_size is None else vocab_size,
        num_blocks=num_blocks,
        num_kept=min(num_blocks * chunk_size // targets_N.size, num_blocks),
    )

    def split(x: Array) -> Array:
        """Cut the token axis into chunks, padded, and put the chunks first."""
        x = jnp.pad(x, [(0, num_chunks * chunk - num_tokens if i == axis else 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*leading, num_chunks, chunk, *x.shape[axis + 1 :]), axis, 0)

    outputs = _compiled_logps_of_chunks(plan, split(hidden_ND), head_VD, split(targets_N))
    logps_N, entropy_N = (
        jnp.moveaxis(x, 0, -2).reshape(*leading, num_chunks * chunk)[..., :num_tokens] for x in outputs
    )
    return logps_N, entropy_N


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logps_of_chunks(plan: _Plan, hidden_CND: Array, head_VD: Array, targets_CN: Array) -> tuple[Array, Array]:
    """Log-probabilities and entropies ``[C, ..., N]``."""
    outputs, _ = _forward(plan._replace(num_kept=0), hidden_CND, head_VD, targets_CN)
    return outputs


def _forward(
    plan: _Plan, hidden_CND: Array, head_VD: Array, targets_CN: Array
) -> tuple[tuple[Array, Array], tuple[Array, _Residuals]]:
    """The outputs, from sums over the blocks, and what the backward pass needs (chunks first)."""
    head_BKD = head_VD.reshape(-1, plan.num_blocks, head_VD.shape[1])

    def one_chunk(_: None, chunk: tuple[Array, Array]) -> tuple[None, tuple[Array, _Residuals]]:
        hidden_ND, targets_N = chunk

        def one_block(block: Array) -> tuple[_Sums, Array]:
            logits_NB = _block_logits(plan, hidden_ND, _block_of(head_BKD, block), block)
            return _sums_of_block(logits_NB, targets_N, block, plan.num_blocks), logits_NB

        dropped, kept = _dropped_and_kept(plan)
        parts, logits_KNB = [], None
        # A loop of no rounds would be compiled too.
        if dropped.size:
            parts.append(jax.lax.map(lambda block: one_block(block)[0], dropped))
        if kept.size:
            kept_sums, logits_KNB = jax.lax.map(one_block, kept)
            parts.append(kept_sums)
        sums = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        logps_N, entropy_N, log_normalizer_N = _join_blocks(sums)
        return None, (logps_N, _Residuals(hidden_ND, targets_N, log_normalizer_N, entropy_N, logits_KNB))

    _, (logps_CN, residuals) = jax.lax.scan(one_chunk, None, (hidden_CND, targets_CN))
    return (logps_CN, residuals.entropy_N), (head_VD, residuals)


def _backward(
    plan: _Plan, saved: tuple[Array, _Residuals], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    """Gradients of the hidden states and of the output matrix, both summed over blocks in float32 at least."""
    head_VD, residuals = saved
    head_BKD = head_VD.reshape(-1, plan.num_blocks, head_VD.shape[1])
    dtype = residuals.entropy_N.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=dtype)

    def one_chunk(d_head_BKD: Array, chunk: tuple[_Residuals, Array, Array]) -> tuple[Array, Array]:
        rest, d_logps_N, d_entropy_N = chunk
        hidden_ND = rest.hidden_ND

        def one_block(
            sums: tuple[Array, Array], block_and_logits: tuple[Array, Array | None]
        ) -> tuple[tuple[Array, Array], None]:
            (d_hidden_ND, d_head_BKD), (block, logits_NB) = sums, block_and_logits
            head_BD = _block_of(head_BKD, block)
            if logits_NB is None:
                logits_NB = _block_logits(plan, hidden_ND, head_BD, block)
            d_logits_NB = _logits_gradient(plan, logits_NB, rest, d_logps_N, d_entropy_N, block)
            # In the inputs' precision, which sets the speed of a product; its sums are rounded to it anyway.
            d_logits_NB = d_logits_NB.astype(jnp.result_type(hidden_ND, head_BD))
            d_hidden_ND += product("...b,bd->...d", d_logits_NB, head_BD)
            d_head_BD = _block_of(d_head_BKD, block) + product("...b,...d->bd", d_logits_NB, hidden_ND)
            return (d_hidden_ND, jax.lax.dynamic_update_index_in_dim(d_head_BKD, d_head_BD, block, 1)), None

        dropped, kept = _dropped_and_kept(plan)
        sums = (jnp.zeros(hidden_ND.shape, dtype), d_head_BKD)
        # The kept blocks first: their memory is free for the others then.
        if kept.size:
            sums, _ = jax.lax.scan(one_block, sums, (kept, rest.logits_KNB))
        if dropped.size:
            sums, _ = jax.lax.scan(one_block, sums, (dropped, None))
        d_hidden_ND, d_head_BKD = sums
        return d_head_BKD, d_hidden_ND.astype(hidden_ND.dtype)

    d_head_BKD, d_hidden_CND = jax.lax.scan(one_chunk, jnp.zeros(head_BKD.shape, dtype), (residuals, *cotangents))
    return d_hidden_CND, d_head_BKD.reshape(head_VD.shape).astype(head_VD.dtype), None


_logps_of_chunks.defvjp(_forward, _backward)
# Where the caller is not compiled, a second call would otherwise compile the loops again.
_compiled_logps_of_chunks = jax.jit(_logps_of_chunks, static_argnums=0)


def _dropped_and_kept(plan: _Plan) -> tuple[Array, Array]:
    """Numbers of the blocks whose logits are computed twice, and of the others."""
    num_dropped = plan.num_blocks - plan.num_kept
    return jnp.arange(num_dropped), jnp.arange(num_dropped, plan.num_blocks)


def _block_of(x_BKD: Array, block: Array) -> Array:
    """Rows of a block: every K-th id."""
    return jax.lax.dynamic_index_in_dim(x_BKD, block, axis=1, keepdims=False)


def _block_logits(plan: _Plan, hidden_ND: Array, head_BD: Array, block: Array) -> Array:
    """Logits of the block's ids."""
    num_ids = head_BD.shape[0]
    ids_B = None if plan.vocab_size == plan.num_blocks * num_ids else jnp.arange(num_ids) * plan.num_blocks + block
    return scaled_logits(
        hidden_ND,
        head_BD,
        temperature=plan.temperature,
        vocab_size=num_ids if ids_B is None else plan.vocab_size,
        ids_V=ids_B,
    )


def _sums_of_block(logits_NB: Array, targets_N: Array, block: Array, num_blocks: int) -> _Sums:
    """The sums over a block's ids; a block of unknown ids has a total of 0."""
    # Half the lowest number, so that no difference to it overflows.
    top_N = jnp.maximum(logits_NB.max(axis=-1), jnp.finfo(logits_NB.dtype).min / 2)
    shifted_NB = jnp.maximum(logits_NB - top_N[..., None], _LOWEST)
    weights_NB = jnp.exp(shifted_NB)
    target_N = jnp.take_along_axis(logits_NB, targets_N[..., None] // num_blocks, axis=-1)[..., 0]
    return _Sums(
        top_N=top_N,
        total_N=weights_NB.sum(axis=-1),
        weighted_N=(weights_NB * shifted_NB).sum(axis=-1),
        target_N=jnp.where(targets_N % num_blocks == block, target_N, 0.0),
    )


def _join_blocks(sums_KN: _Sums) -> tuple[Array, Array, Array]:
    """Log-probability of the target, entropy, and log-normalizer, from the sums over each block."""
    top_N = sums_KN.top_N.max(axis=0)
    largest_N = jnp.argmax(sums_KN.top_N, axis=0)
    largest_KN = jax.lax.broadcasted_iota(largest_N.dtype, sums_KN.top_N.shape, 0) == largest_N[None]

    def total(x_KN: Array) -> Array:
        """The sum; the largest block comes last, or the small ones would be rounded away in it one by one."""
        return jnp.where(largest_KN, 0.0, x_KN).sum(axis=0) + jnp.where(largest_KN, x_KN, 0.0).sum(axis=0)

    shift_KN = jnp.maximum(sums_KN.top_N - top_N[None], _LOWEST)
    total_N = total(jnp.exp(shift_KN) * sums_KN.total_N)
    weighted_N = total(jnp.exp(shift_KN) * (sums_KN.weighted_N + sums_KN.total_N * shift_KN))
    log_total_N = jnp.log(total_N)
    logps_N = sums_KN.target_N.sum(axis=0) - top_N - log_total_N
    return logps_N, log_total_N - weighted_N / total_N, top_N + log_total_N


def _logits_gradient(
    plan: _Plan, logits_NB: Array, rest: _Residuals, d_logps_N: Array, d_entropy_N: Array, block: Array
) -> Array:
    """Gradient of the products ``hidden @ head``.

    With p the probabilities and H the entropy: d log p_y / dz = 1_y - p and dH / dz = -p (log p + H).
    """
    logps_NB = jnp.maximum(logits_NB - rest.log_normalizer_N[..., None], _LOWEST)
    d_logps_N1, d_entropy_N1 = d_logps_N[..., None], d_entropy_N[..., None]
    pull_NB = d_logps_N1 + d_entropy_N1 * (logps_NB + rest.entropy_N[..., None])
    # An id that the tokenizer does not know has no gradient, also as a target.
    targets_N = jnp.where(rest.targets_N < plan.vocab_size, rest.targets_N, -1)
    row_NB = jax.lax.broadcasted_iota(targets_N.dtype, logits_NB.shape, logits_NB.ndim - 1)
    one_hot_NB = (row_NB * plan.num_blocks + block == targets_N[..., None]).astype(logits_NB.dtype)
    d_scaled_NB = one_hot_NB * d_logps_N1 - jnp.exp(logps_NB) * pull_NB
    return d_scaled_NB / jnp.asarray(plan.temperature, logits_NB.dtype)
