"""Softmax attention of a group to its shared prompt, to its caches and to itself.

Shapes: P prompts, G completions of a prompt, T tokens, S keys of a segment, K key-value heads, Q query heads of
one key-value head, H head width. Inside of a block: B pairs of a prompt and a key-value head, N = T * Q rows.

Heads stand before completions: the ``G * T * Q`` queries of one prompt and key-value head are the rows of one
matrix product with the prompt's keys. Scores are held for a few pairs at a time, and computed again in the
backward pass from the kept log-normalisers ("FlashAttention", arXiv 2205.14135, without its tiling of keys).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from grpo_jax.mesh import partition_spec
from grpo_jax.models.kernels import accelerated
from grpo_jax.models.kv import KV, Context
from grpo_jax.types import Array

# Scores held at a time on a device, about: what stays in the caches of a CPU, and little beside a GPU's memory.
_BLOCK_SCORES = 3 << 19
# Queries of a completion that meet the same keys: those after a block of queries are not even multiplied.
_BLOCK_QUERIES = 128
_MAX_BLOCKS = 4
# Finite, and far below any score.
_MASKED = -1e30


def attend(
    q_PKGTQH: Array,
    own: KV,
    document_PGT: Array | None = None,
    context: tuple[Context, ...] = (),
    *,
    batch_axes: tuple[str | None, str | None] = ("prompts", "group"),
    kernel: str = "plain",
) -> Array:
    """Attention of each token to the context, and to its completion up to itself.

    Args:
        q_PKGTQH: queries, rotated.
        own: keys and values of the same tokens, ``[P, K, G, T, H]``.
        document_PGT: int; a token sees only tokens of its own row that carry its number. None: all before it.
        context: what every token of a prompt or of a completion sees beside.
        batch_axes: logical names of P and G.
        kernel: "plain", or what :func:`grpo_jax.models.kernels.accelerated` may put in the place of this file's
            computation: "auto", "cudnn", "splash".

    Returns:
        Attended values ``[P, K, G, T, Q, H]``.

    Raises:
        ValueError: the kernel cannot run here.
    """
    on_device = accelerated(kernel, q_PKGTQH, context) or _attend
    if jax.sharding.get_abstract_mesh().empty:
        return on_device(q_PKGTQH, own, document_PGT, context)
    prompts, group = batch_axes

    def spec(x: Array, *names: str | None) -> Any:
        """Whole where the devices don't divide it: greedy decoding has groups of one."""
        parts = [partition_spec((name,))[0] for name in names]
        split = [
            part if size % _num_devices(part) == 0 else None
            for part, size in zip(parts, x.shape[: len(parts)], strict=True)
        ]
        return PartitionSpec(*split)

    def kv_spec(x: Array) -> Any:
        return spec(x, prompts, "kv_heads", *((group,) if x.ndim == 5 else ()))

    specs = (
        spec(q_PKGTQH, prompts, "kv_heads", group),
        jax.tree.map(kv_spec, own),
        None if document_PGT is None else spec(document_PGT, prompts, group),
        tuple(
            Context(jax.tree.map(kv_spec, kv), spec(mask, prompts, *((group,) if mask.ndim == 3 else ())))
            for kv, mask in context
        ),
    )
    # Attention mixes nothing across prompts, heads or completions: each device works on what it holds. Only the
    # gradients of keys that a group shares are summed over the devices that the group is split over.
    local = jax.shard_map(on_device, in_specs=specs, out_specs=specs[0], check_vma=False)
    return local(q_PKGTQH, own, document_PGT, context)


def _num_devices(mesh_axes: str | tuple[str, ...] | None) -> int:
    """Devices along some axes of the current mesh."""
    names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ()
    return math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in names)


def _attend(q_PKGTQH: Array, own: KV, document_PGT: Array | None, context: tuple[Context, ...]) -> Array:
    """On one device: the pairs of prompts and key-value heads, a block at a time."""
    P, K, G, T, Q, H = q_PKGTQH.shape
    if 0 in q_PKGTQH.shape:
        return q_PKGTQH

    def pairs(x: Array) -> Array:
        return x.reshape(P * K, *x.shape[2:])

    def repeated(mask: Array) -> Array:
        return jnp.repeat(mask, K, axis=0)

    blocks = (
        pairs(q_PKGTQH).reshape(P * K, G, T * Q, H),
        jax.tree.map(pairs, own),
        None if document_PGT is None else repeated(document_PGT),
        tuple(Context(jax.tree.map(pairs, kv), repeated(mask)) for kv, mask in context),
    )
    num_keys = T + sum(mask.shape[-1] for _, mask in context)
    num_blocks = _num_blocks(P * K, G * T * Q * num_keys) if T > 1 else 1
    return _softmax_attention(*blocks, num_blocks).reshape(q_PKGTQH.shape)


def _num_blocks(num_pairs: int, scores: int) -> int:
    """The smallest divisor of ``num_pairs`` that leaves at most ``_BLOCK_SCORES`` a block, else ``num_pairs``."""
    fits = (n for n in range(1, num_pairs) if num_pairs % n == 0 and num_pairs // n * scores <= _BLOCK_SCORES)
    return next(fits, num_pairs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _softmax_attention(
    q_BGNH: Array, own: KV, document_BGT: Array | None, context: tuple[Context, ...], num_blocks: int
) -> Array:
    return _forward(q_BGNH, own, document_BGT, context, num_blocks)[0]


def _forward(
    q_BGNH: Array, own: KV, document_BGT: Array | None, context: tuple[Context, ...], num_blocks: int
) -> tuple[Array, Any]:
    inputs = (q_BGNH, own, document_BGT, context)
    out_BGNH, log_total_BGN = _over_blocks(_forward_block, inputs, num_blocks)
    out_BGNH = checkpoint_name(out_BGNH, "attended")
    log_total_BGN = checkpoint_name(log_total_BGN, "attended")
    return out_BGNH, (inputs, out_BGNH, log_total_BGN)


def _backward(num_blocks: int, kept: Any, d_out_BGNH: Array) -> tuple[Array, KV, None, Any]:
    inputs, out_BGNH, log_total_BGN = kept
    delta_BGN = jnp.sum(out_BGNH.astype(log_total_BGN.dtype) * d_out_BGNH, axis=-1)
    d_q, d_own, d_kv = _over_blocks(_backward_block, (*inputs, log_total_BGN, delta_BGN, d_out_BGNH), num_blocks)
    return d_q, d_own, None, tuple(Context(kv, None) for kv in d_kv)  # type: ignore[arg-type]


_softmax_attention.defvjp(_forward, _backward)


def _over_blocks(function: Any, inputs: Any, num_blocks: int) -> Any:
    """``function`` on the first axis of ``inputs``, a block after the other."""
    if num_blocks == 1:
        return function(*inputs)
    split = jax.tree.map(lambda x: x.reshape(num_blocks, -1, *x.shape[1:]), inputs)
    outputs = jax.lax.map(lambda block: function(*block), split)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)


class _Segment(NamedTuple):
    """Keys and values ``[B, g, S, H]``, mask ``[B, g, n, S]``; g is G, or 1 where the group shares them."""

    kv: KV
    mask: Array


def _segments(
    own: KV, document_BGT: Array | None, context: tuple[Context, ...], rows: slice, num_queries: int
) -> list[_Segment]:
    """What the queries ``rows`` of N see; own keys after the last of them are left out.

    Without documents one mask of own keys does for all, with B and G of 1.
    """
    Q = num_queries
    end = rows.stop // Q
    mask_BGNT = (jnp.arange(rows.start, rows.stop)[:, None] // Q >= jnp.arange(end)[None])[None, None]
    if document_BGT is not None:
        document_BGN = jnp.repeat(document_BGT[..., rows.start // Q : end], Q, axis=-1)
        mask_BGNT = mask_BGNT & (document_BGN[..., None] == document_BGT[:, :, None, :end])
    segments = [_Segment(KV(own.k[:, :, :end], own.v[:, :, :end]), mask_BGNT)]
    for kv, mask in context:
        if mask.ndim == 2:
            kv, mask = KV(kv.k[:, None], kv.v[:, None]), mask[:, None]
        segments.append(_Segment(kv, mask[:, :, None]))
    return segments


def _row_blocks(num_rows: int, num_tokens: int) -> list[slice]:
    """Blocks of rows (tokens times queries a token) of about equal size."""
    block = max(_BLOCK_QUERIES, -(-num_tokens // _MAX_BLOCKS)) * (num_rows // num_tokens)
    return [slice(start, min(start + block, num_rows)) for start in range(0, num_rows, block)]


def _as_rows(x_BGN: Array, segment: _Segment) -> Array:
    """``[B, G, N, ...]`` as rows of the segment's products: of the whole group where it shares the keys."""
    B, g = segment.kv.k.shape[:2]
    return x_BGN.reshape(B, g, -1, *x_BGN.shape[3:])


def _forward_block(
    q_BGNH: Array, own: KV, document_BGT: Array | None, context: tuple[Context, ...]
) -> tuple[Array, Array]:
    """Attended values ``[B, G, N, H]``, and the logarithm of each row's softmax denominator."""
    T, N = own.k.shape[2], q_BGNH.shape[2]
    dtype = jnp.promote_types(q_BGNH.dtype, jnp.float32)
    scale = 1 / math.sqrt(q_BGNH.shape[-1])
    outs, log_totals = [], []
    for rows in _row_blocks(N, T):
        q = q_BGNH[:, :, rows]
        segments = _segments(own, document_BGT, context, rows, N // T)
        scores = [
            jnp.where(
                s.mask,
                jnp.einsum("bgnh,bgsh->bgns", _as_rows(q, s), s.kv.k, preferred_element_type=dtype) * scale,
                _MASKED,
            )
            for s in segments
        ]
        peaks = [x.max(axis=-1).reshape(q.shape[:3]) for x in scores]
        peak_BGN = functools.reduce(jnp.maximum, peaks)
        total_BGN, out_BGNH = jnp.zeros_like(peak_BGN), jnp.zeros(q.shape, dtype)
        for s, x in zip(segments, scores, strict=True):
            weights = jnp.exp(x - _as_rows(peak_BGN, s)[..., None])
            total_BGN += weights.sum(axis=-1).reshape(q.shape[:3])
            out = jnp.einsum("bgns,bgsh->bgnh", weights.astype(q.dtype), s.kv.v, preferred_element_type=dtype)
            out_BGNH += out.reshape(q.shape)
        outs.append((out_BGNH / total_BGN[..., None]).astype(q.dtype))
        log_totals.append(peak_BGN + jnp.log(total_BGN))
    return jnp.concatenate(outs, axis=2), jnp.concatenate(log_totals, axis=2)


def _backward_block(
    q_BGNH: Array,
    own: KV,
    document_BGT: Array | None,
    context: tuple[Context, ...],
    log_total_BGN: Array,
    delta_BGN: Array,
    d_out_BGNH: Array,
) -> tuple[Array, KV, list[KV]]:
    """Gradients of the queries, of the own keys and values, and of those of each context.

    Scores stand with the keys first: four of the five products then read them as they lie in memory.
    """
    T, N = own.k.shape[2], q_BGNH.shape[2]
    dtype = log_total_BGN.dtype
    scale = 1 / math.sqrt(q_BGNH.shape[-1])
    product = functools.partial(jnp.einsum, preferred_element_type=dtype)
    totals = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), [own, *(kv for kv, _ in context)])
    d_qs = []
    for rows in _row_blocks(N, T):
        d_q = jnp.zeros(q_BGNH[:, :, rows].shape, dtype)
        for i, s in enumerate(_segments(own, document_BGT, context, rows, N // T)):
            q, d_out, log_total, delta = (
                _as_rows(x[:, :, rows], s) for x in (q_BGNH, d_out_BGNH, log_total_BGN, delta_BGN)
            )
            scores = product("bgsh,bgnh->bgsn", s.kv.k, q) * scale
            weights = jnp.where(jnp.swapaxes(s.mask, -1, -2), jnp.exp(scores - log_total[:, :, None]), 0.0)
            d_scores = product("bgsh,bgnh->bgsn", s.kv.v, d_out) - delta[:, :, None]
            d_scores = (weights * d_scores * scale).astype(q.dtype)
            d_kv = KV(
                k=product("bgsn,bgnh->bgsh", d_scores, q),
                v=product("bgsn,bgnh->bgsh", weights.astype(q.dtype), d_out),
            )
            # Own keys of later rows have none of this gradient.
            totals[i] = jax.tree.map(lambda total, x: _add_first(total, x), totals[i], d_kv)
            d_q += jnp.swapaxes(product("bgsh,bgsn->bghn", s.kv.k, d_scores), -1, -2).reshape(d_q.shape)
        d_qs.append(d_q.astype(q_BGNH.dtype))
    d_own, *d_context = jax.tree.map(lambda x: x.astype(q_BGNH.dtype), totals)
    return jnp.concatenate(d_qs, axis=2), d_own, d_context


def _add_first(total: Array, x_BgSH: Array) -> Array:
    """Add to the first keys of a total that may lack the axis of completions."""
    x = x_BgSH.reshape(*total.shape[:-2], *x_BgSH.shape[-2:])
    if x.shape == total.shape:
        return total + x
    return total.at[..., : x.shape[-2], :].add(x)
