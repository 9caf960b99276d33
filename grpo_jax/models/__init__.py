"""Decoders, and the checkpoints they are read from and written to."""

from __future__ import annotations

import jax

from grpo_jax.config import ModelConfig
from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.decoder import Decoder, init_params
from grpo_jax.tokenizer import Tokenizer
from grpo_jax.types import Params


def load_model(model: ModelConfig, tokenizer: Tokenizer | None, *, seed: int) -> tuple[Decoder, Params, Tokenizer]:
    assert model.path is None and tokenizer is not None
    config = DecoderConfig.from_model_config(model, tokenizer.vocab_size)
    return Decoder(config), init_params(config, jax.random.key(seed)), tokenizer
