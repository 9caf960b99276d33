"""Counts of arithmetic and traffic, against numbers worked out by hand and against XLA's own count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.algorithms.logprobs import scaled_logits
from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.decoder import Decoder, init_params
from grpo_jax.models.flops import (
    BatchSizes,
    decode_bytes,
    extend_flops,
    forward_flops,
    logits_flops,
    pair_flops,
    prefill_flops,
    rollout_bytes,
    token_flops,
    update_flops,
)

SMALL = DecoderConfig(
    vocab_size=11,
    num_layers=2,
    width=6,
    ffn_width=5,
    num_heads=4,
    num_kv_heads=2,
    head_width=2,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    qkv_bias=False,
    tie_embeddings=True,
)
SIZES = BatchSizes(prompts=3, group=2, prompt=4, completion=3)

# A layer: queries 6x8, keys 6x4, values 6x4, output 8x6, gate, up and down 6x5 each.
LAYER = 48 + 24 + 24 + 48 + 90


def test_counts_by_hand() -> None:
    assert token_flops(SMALL) == 2 * 2 * LAYER
    # 4 heads of width 2: 2 * 8 for the scores and 2 * 8 for the values, in 2 layers.
    assert pair_flops(SMALL) == 2 * (16 + 16)
    assert logits_flops(SMALL, 5) == 5 * 2 * 6 * 11
    # Tokens 1 to 4 of a prompt see 1, 2, 3 and 4 tokens.
    assert prefill_flops(SMALL, prompts=3, prompt=4) == 3 * (4 * 936 + 10 * 64)
    # Tokens 1 to 3 of a completion see the prompt's 4 and 1, 2 and 3 of their own.
    assert extend_flops(SMALL, completions=6, prompt=4, completion=3) == 6 * (3 * 936 + (5 + 6 + 7) * 64)
    forward = 3 * (4 * 936 + 10 * 64) + 6 * (2 * 936 + (5 + 6) * 64) + 3 * 2 * 3 * 132
    assert forward_flops(SMALL, SIZES) == forward
    assert update_flops(SMALL, SIZES) == 3 * forward
    assert SIZES.tokens == 18


def test_decoding_costs_what_running_whole_completions_does() -> None:
    one_by_one = [
        extend_flops(SMALL, completions=6, prompt=4 + held, completion=1) for held in range(SIZES.completion)
    ]
    assert sum(one_by_one) == extend_flops(SMALL, completions=6, prompt=4, completion=SIZES.completion)


def test_traffic_by_hand() -> None:
    weights = 2 * LAYER + 66
    # Keys and values of a token: 2 layers of 2 heads of width 2, twice.
    prefix, completions = 3 * 4 * 16, 6 * 16
    assert decode_bytes(SMALL, SIZES, held=0) == 4 * (weights + prefix)
    assert decode_bytes(SMALL, SIZES, held=1) == 4 * (weights + prefix + completions)
    assert rollout_bytes(SMALL, SIZES) == 4 * (3 * weights + 2 * prefix + completions)
    narrow = dataclasses.replace(SMALL, compute_dtype="bfloat16")
    assert rollout_bytes(narrow, SIZES) == rollout_bytes(SMALL, SIZES) // 2


def test_a_completion_of_one_token_needs_the_prompt_and_its_logits() -> None:
    sizes = dataclasses.replace(SIZES, completion=1)
    assert forward_flops(SMALL, sizes) == prefill_flops(SMALL, prompts=3, prompt=4) + logits_flops(SMALL, 6)


# XLA counts a scan's body once, so its programs here have one layer; and it counts operations that are no
# products, so that these have wide ones.


def wide(**changes: Any) -> DecoderConfig:
    return dataclasses.replace(
        SMALL, num_layers=1, **{"width": 128, "ffn_width": 256, "num_heads": 8, "head_width": 16, **changes}
    )


def xla_flops(function: Callable[..., Any], *arguments: Any) -> float:
    analysis = jax.jit(function).lower(*arguments).compile().cost_analysis()
    assert analysis is not None
    return analysis["flops"]


def abstract_params(config: DecoderConfig) -> Any:
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def prompts(P: int, S: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct((P, S), jnp.int32), jax.ShapeDtypeStruct((P, S), jnp.bool)


@pytest.mark.parametrize("changes", [{}, {"num_heads": 4}, {"ffn_width": 512}, {"num_kv_heads": 8}])
def test_token_flops_are_those_of_xla(changes: dict[str, int]) -> None:
    config = wide(**changes)
    counted = xla_flops(Decoder(config).prefill, abstract_params(config), *prompts(2, 4))
    # So few tokens that the pairs, of which XLA may count masked ones, hardly matter.
    assert counted == pytest.approx(prefill_flops(config, prompts=2, prompt=4), rel=0.03)


def test_pair_flops_are_those_of_xla() -> None:
    config = wide(width=32, ffn_width=32, num_heads=2, num_kv_heads=1, head_width=64)
    model, params = Decoder(config), abstract_params(config)
    prefix = jax.eval_shape(model.prefill, params, *prompts(2, 512))
    tokens = jax.ShapeDtypeStruct((2, 4, 1), jnp.int32)
    counted = xla_flops(model.extend, params, tokens, prefix)
    needed = extend_flops(config, completions=8, prompt=512, completion=1)
    assert needed > 5 * 8 * token_flops(config)
    assert counted == pytest.approx(needed, rel=0.05)


def test_logits_flops_are_those_of_xla() -> None:
    config = wide(vocab_size=300)

    def logits(hidden_ND: jax.Array, head_VD: jax.Array) -> jax.Array:
        return scaled_logits(hidden_ND, head_VD, temperature=1.0, vocab_size=300)

    shapes = (jax.ShapeDtypeStruct((7, 128), jnp.float32), jax.ShapeDtypeStruct((300, 128), jnp.float32))
    assert xla_flops(logits, *shapes) == pytest.approx(logits_flops(config, 7), rel=0.01)


def test_a_gradient_costs_three_forward_passes() -> None:
    config = wide()
    model = Decoder(config)

    def loss(params: Any, *prompt: Any) -> jax.Array:
        return model.prefill(params, *prompt).hidden_PD.sum()

    counted = xla_flops(jax.grad(loss), abstract_params(config), *prompts(2, 4))
    assert counted == pytest.approx(3 * prefill_flops(config, prompts=2, prompt=4), rel=0.05)
