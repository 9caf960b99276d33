"""Logits of the decoder in the form in which PyTorch's models give them."""

from __future__ import annotations

import numpy as np

from grpo_jax.models.decoder import Decoder
from grpo_jax.types import Params


def decoder_logits(model: Decoder, params: Params, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Logits ``[rows, 6, V]`` at the last six tokens: one at the end of a prompt, five behind its prefix."""
    prefix = model.prefill(params, tokens[:, :-5], mask[:, :-5])
    hidden_PGTD, _ = model.extend(params, tokens[:, None, -5:], prefix)
    hidden = np.concatenate([np.asarray(prefix.hidden_PD)[:, None], np.asarray(hidden_PGTD)[:, 0]], axis=1)
    return hidden @ np.asarray(model.head(params)).T
