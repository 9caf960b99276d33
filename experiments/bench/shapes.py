"""The models and batches that the benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.flops import BatchSizes

ModelName = Literal["tiny", "smollm2", "qwen2.5-0.5b", "qwen2.5-1.5b"]
"""A key of ``MODELS`` and ``BATCHES``."""


def require_at_least(least: int, options: Any, *names: str) -> None:
    """Refuse options (numbers, or tuples of them) that are too small to measure anything.

    Raises:
        ValueError: one is.
    """
    for name in names:
        value = getattr(options, name)
        if any(number < least for number in (value if isinstance(value, tuple) else (value,))):
            raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True, kw_only=True)
class Batch(BatchSizes):
    """Sizes of a step's arrays."""

    prompts: int = 8
    group: int = 8
    prompt: int = 66
    completion: int = 64


def _model(
    vocab_size: int, num_layers: int, width: int, ffn_width: int, heads: int, kv_heads: int, qkv_bias: bool = False
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size,
        num_layers=num_layers,
        width=width,
        ffn_width=ffn_width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_width=width // heads,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        qkv_bias=qkv_bias,
        tie_embeddings=True,
    )


MODELS = {
    "tiny": _model(512, 4, 256, 768, 8, 4),
    # The shapes of SmolLM2-135M, Qwen2.5-0.5B and Qwen2.5-1.5B, with random weights.
    "smollm2": replace(_model(49_152, 30, 576, 1536, 9, 3), remat="full"),
    "qwen2.5-0.5b": replace(_model(151_936, 24, 896, 4864, 14, 2, True), compute_dtype="bfloat16", remat="full"),
    "qwen2.5-1.5b": replace(_model(151_936, 28, 1536, 8960, 12, 2, True), compute_dtype="bfloat16", remat="full"),
}

BATCHES = {
    "tiny": Batch(),
    "smollm2": Batch(prompts=4),
    # For accelerators.
    "qwen2.5-0.5b": Batch(prompts=32, group=16, prompt=512, completion=1024),
    "qwen2.5-1.5b": Batch(prompts=32, group=16, prompt=512, completion=1024),
}
