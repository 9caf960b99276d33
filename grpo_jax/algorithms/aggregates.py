"""From a loss a token to one number.

Shapes: P prompts, G completions of a prompt, T completion tokens. Denominators are arguments: computed over the
whole optimizer batch and handed to each micro-batch, they make the sum over micro-batches equal to the loss of the
whole, however the batch is split.
"""

from __future__ import annotations

import jax.numpy as jnp

from grpo_jax.types import Array

AGGREGATES = ("sequence_mean", "token_mean", "constant", "sequence_sum")


def loss_denominator(mask_PGT: Array, *, aggregate: str, max_completion_length: int | None = None) -> Array:
    """What the sum over tokens is divided by; compute it over the whole optimizer batch.

    - ``sequence_mean``: the number of completions; each token is first divided by its completion's length.
      The original GRPO (arXiv 2402.03300).
    - ``token_mean``: the number of tokens. DAPO (arXiv 2503.14476).
    - ``constant``: completions times ``max_completion_length``. Dr. GRPO (arXiv 2503.20783).
    - ``sequence_sum``: the number of completions.

    A completion without any masked-in token is no completion here: masked out of the numerator, it is out of
    the denominator too.

    Raises:
        ValueError: an unknown aggregate, or ``constant`` without ``max_completion_length``.
    """
    if aggregate not in AGGREGATES:
        raise ValueError(f"aggregate must be one of {list(AGGREGATES)}, got {aggregate!r}")
    mask_PGT = mask_PGT.astype(bool)
    if aggregate == "token_mean":
        return jnp.maximum(mask_PGT.sum(), 1)
    count = jnp.maximum(mask_PGT.any(axis=-1).sum(), 1)
    if aggregate != "constant":
        return count
    if max_completion_length is None:
        raise ValueError("max_completion_length must be given for aggregate='constant', got None")
    return count * max_completion_length


def aggregate_tokens(values_PGT: Array, mask_PGT: Array, *, aggregate: str, denominator: Array) -> Array:
    """Sum the masked-in values, each over its completion's length for ``sequence_mean``, over ``denominator``."""
    mask_PGT = mask_PGT.astype(bool)
    values_PGT = jnp.where(mask_PGT, values_PGT, 0.0)
    if aggregate == "sequence_mean":
        values_PGT = values_PGT / jnp.maximum(mask_PGT.sum(axis=-1, keepdims=True), 1)
    return values_PGT.sum() / denominator


def masked_mean(values: Array, mask: Array) -> Array:
    """Mean of the values where the mask is true, whatever stands elsewhere; 0 where it never is."""
    mask = mask.astype(bool)
    return jnp.where(mask, values, 0.0).sum() / jnp.maximum(mask.sum(), 1)
