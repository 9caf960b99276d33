"""Log-probabilities and entropy of tokens, without ever holding all logits.

Shapes: N tokens, D model width, V vocabulary. The sampler and the trainer share :func:`scaled_logits`, so that
temperature and vocabulary are treated alike on both sides.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from grpo_jax.types import Array


def scaled_logits(hidden_ND: Array, head_VD: Array, *, temperature: float, vocab_size: int) -> Array:
    """Logits over the sampling temperature, accumulated and returned in float32 at least.

    Ids at and beyond ``vocab_size`` (rows that only pad the output matrix) get -inf.

    Args:
        hidden_ND: hidden states; any number of leading axes.
        head_VD: the output matrix.
        temperature: sampling temperature, above 0.
        vocab_size: ids that the tokenizer knows.
    """
    dtype = jnp.promote_types(hidden_ND.dtype, jnp.float32)
    logits_NV = jnp.einsum("...d,vd->...v", hidden_ND, head_VD, preferred_element_type=dtype)
    logits_NV = logits_NV / jnp.asarray(temperature, dtype)
    if vocab_size == head_VD.shape[0]:
        return logits_NV
    known_V = jnp.arange(head_VD.shape[0]) < vocab_size
    return jnp.where(jnp.broadcast_to(known_V, logits_NV.shape), logits_NV, -jnp.inf)


def logps_and_entropy(logits_NV: Array, targets_N: Array) -> tuple[Array, Array]:
    """Log-probability of each target, and the exact entropy (nats) of each distribution."""
    logps_NV = jax.nn.log_softmax(logits_NV, axis=-1)
    logps_N = jnp.take_along_axis(logps_NV, targets_N[..., None], axis=-1)[..., 0]
    # The inner where keeps 0 * -inf out of the value and out of the gradient.
    finite_NV = jnp.where(jnp.isneginf(logps_NV), 0.0, logps_NV)
    entropy_N = -jnp.sum(jnp.exp(logps_NV) * finite_NV, axis=-1)
    return logps_N, entropy_N


def token_logps(
    hidden_ND: Array,
    head_VD: Array,
    targets_N: Array,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk_size: int = 2048,
) -> tuple[Array, Array]:
    """Log-probability of each target token and entropy of its distribution, a chunk of tokens at a time.

    The logits of a chunk are computed, used and dropped, and computed once more in the backward pass: the
    peak memory is ``chunk_size * V`` whatever the number of tokens. Chunks are cut along the last token axis
    only, so that leading axes (prompts, group) may be split over devices.

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
    vocab_size = head_VD.shape[0] if vocab_size is None else vocab_size
    chunk = min(max(chunk_size // math.prod(leading), 1), num_tokens)
    num_chunks = -(-num_tokens // chunk)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one_chunk(hidden_CD: Array, targets_C: Array) -> tuple[Array, Array]:
        logits_CV = scaled_logits(hidden_CD, head_VD, temperature=temperature, vocab_size=vocab_size)
        return logps_and_entropy(logits_CV, targets_C)

    def split(x: Array) -> Array:
        """Cut the token axis into chunks, padded, and put the chunks first."""
        axis = len(leading)
        x = jnp.pad(x, [(0, num_chunks * chunk - num_tokens if i == axis else 0) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*leading, num_chunks, chunk, *x.shape[axis + 1 :]), axis, 0)

    if num_chunks == 1:
        return one_chunk(hidden_ND, targets_N)
    _, chunks = jax.lax.scan(
        lambda carry, chunk: (carry, one_chunk(*chunk)), None, (split(hidden_ND), split(targets_N))
    )
    logps_N, entropy_N = (
        jnp.moveaxis(x, 0, -2).reshape(*leading, num_chunks * chunk)[..., :num_tokens] for x in chunks
    )
    return logps_N, entropy_N
