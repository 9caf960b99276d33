"""Decoders, and the checkpoints they are read from and written to."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax

from grpo_jax.config import ModelConfig
from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.decoder import Decoder, init_params
from grpo_jax.models.gguf import load_gguf
from grpo_jax.models.hf import load_hf
from grpo_jax.tokenizer import Tokenizer, load_tokenizer
from grpo_jax.types import Params


def load_model(model: ModelConfig, tokenizer: Tokenizer | None, *, seed: int) -> tuple[Decoder, Params, Tokenizer]:
    """A model from a checkpoint, or of random weights where ``model.path`` is None.

    Args:
        model: which, and in which precision.
        tokenizer: the task's own, for a model of random weights.
        seed: of random weights.

    Returns:
        The decoder, its float32 parameters on the host or the default device, and the tokenizer.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: the checkpoint is broken or not supported, or random weights have no tokenizer.
    """
    if model.path is None:
        if tokenizer is None:
            raise ValueError(
                "model.path must name a checkpoint: the task brings no tokenizer of its own, got None"
            )
        config = DecoderConfig.from_model_config(model, tokenizer.vocab_size)
        return Decoder(config), init_params(config, jax.random.key(seed)), tokenizer
    path = Path(model.path)
    if path.suffix == ".gguf":
        config, params, tokenizer = load_gguf(path)
    else:
        config, params = load_hf(path)
        tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{path}: the tokenizer knows {tokenizer.vocab_size} ids, but the model has only "
            f"{config.vocab_size}: the two don't belong together"
        )
    config = dataclasses.replace(
        config,
        compute_dtype=model.compute_dtype,
        remat=model.remat,
        remat_every=model.remat_every,
        attention=model.attention,
    )
    return Decoder(config), params, tokenizer
