"""Arithmetic and memory traffic that rollouts and updates need, counted from their sizes.

What is counted is what any implementation must do, so that a share of a machine's speed is honest: matrix products
alone, a multiply-add as two operations; each prompt once for its group; attention of a token to itself and to the
tokens before it; no padding, and nothing that is computed again to save memory. Prompts have S and completions T
tokens, as if all were of full length.

P prompts, G completions of a prompt, S prompt tokens, T completion tokens, D width, F feed-forward width, N query
heads, K key-value heads, H head width, L layers, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from grpo_jax.models.config import DecoderConfig

GRADIENT = 3
"""A forward and a backward pass over a forward pass: each product has two gradients, as large as itself."""


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Sizes of a rollout or of a batch to train on."""

    prompts: int
    """P."""
    group: int
    """G."""
    prompt: int
    """S, tokens of every prompt."""
    completion: int
    """T, tokens of every completion."""

    @property
    def tokens(self) -> int:
        """Completion tokens."""
        return self.prompts * self.group * self.completion


def token_flops(config: DecoderConfig) -> int:
    """Products of one token with the weights of all layers: ``2 L (D (N + 2K) H + N H D + 3 D F)``.

    That is queries, keys and values; the attention's output; and gate, up and down. Attention itself and the
    output matrix come apart.
    """
    return 2 * config.num_layers * _layer_weights(config)


def pair_flops(config: DecoderConfig) -> int:
    """One query token and one key token in all layers and heads: ``4 L N H``, score and weighted value."""
    return 4 * config.num_layers * config.num_heads * config.head_width


def logits_flops(config: DecoderConfig, tokens: int) -> int:
    """Products with the output matrix: ``2 D V`` a token."""
    return 2 * config.width * config.vocab_size * tokens


def prefill_flops(config: DecoderConfig, *, prompts: int, prompt: int) -> int:
    """A forward pass of P prompts of S tokens, S (S + 1) / 2 pairs each, without logits."""
    return prompts * (prompt * token_flops(config) + prompt * (prompt + 1) // 2 * pair_flops(config))


def extend_flops(config: DecoderConfig, *, completions: int, prompt: int, completion: int) -> int:
    """A forward pass of T tokens after a prompt of S tokens, T S + T (T + 1) / 2 pairs each, without logits.

    The same whether they come all at once or one at a time.
    """
    pairs = completion * prompt + completion * (completion + 1) // 2
    return completions * (completion * token_flops(config) + pairs * pair_flops(config))


def forward_flops(config: DecoderConfig, sizes: BatchSizes) -> int:
    """All log-probabilities of a batch's completions, whether they are sampled (a rollout) or known (scoring).

    The prompts, T - 1 tokens of each completion (nothing follows the last one), and logits for all T; those of the
    first token, which a group has in common, are counted for each completion.
    """
    completions = sizes.prompts * sizes.group
    return (
        prefill_flops(config, prompts=sizes.prompts, prompt=sizes.prompt)
        + extend_flops(config, completions=completions, prompt=sizes.prompt, completion=sizes.completion - 1)
        + logits_flops(config, sizes.tokens)
    )


def update_flops(config: DecoderConfig, sizes: BatchSizes) -> int:
    """The gradient of one update. The optimizer has no products, and rematerialization is not needed."""
    return GRADIENT * forward_flops(config, sizes)


def decode_bytes(config: DecoderConfig, sizes: BatchSizes, *, held: int) -> int:
    """What one decoding step must read: all weights, and each key and value that a token attends to.

    Those of a prompt are read once for its group. Everything is in the compute dtype.

    Args:
        config: the decoder.
        sizes: of the rollout.
        held: tokens that each completion has in its cache.
    """
    tokens = sizes.prompts * (sizes.prompt + sizes.group * held)
    keys_and_values = 2 * config.num_layers * config.num_kv_heads * config.head_width
    return _itemsize(config) * (_weights(config) + tokens * keys_and_values)


def rollout_bytes(config: DecoderConfig, sizes: BatchSizes) -> int:
    """What a rollout must read: the weights once for the prompts, then T - 1 decoding steps."""
    steps = (decode_bytes(config, sizes, held=held) for held in range(sizes.completion - 1))
    return _itemsize(config) * _weights(config) + sum(steps)


def _layer_weights(config: DecoderConfig) -> int:
    D, H = config.width, config.head_width
    N, K = config.num_heads, config.num_kv_heads
    return D * (N + 2 * K) * H + N * H * D + 3 * D * config.ffn_width


def _weights(config: DecoderConfig) -> int:
    """Those of the layers' matrices and of the output matrix; of the input embedding only a few rows are read."""
    return config.num_layers * _layer_weights(config) + config.width * config.vocab_size


def _itemsize(config: DecoderConfig) -> int:
    return jnp.dtype(config.compute_dtype).itemsize
