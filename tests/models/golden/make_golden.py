"""Make the small checkpoints in this folder and the logits that PyTorch computes from them.

Needs torch and transformers:

    python -m tests.models.golden.make_golden
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

HERE = Path(__file__).parent
SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# Wavelengths of a head of 16 at base 50: 6.3 to 192. These limits keep the short ones, stretch the long ones
# and blend those between 8 and 32.
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make_model(name: str) -> PreTrainedModel:
    """A model of random weights in which no weight is 0 or 1, so that each has a say in the logits."""
    if name == "llama":
        # Heads wider than hidden_size / num_attention_heads, as in many releases.
        model = LlamaForCausalLM(LlamaConfig(**SMALL, head_dim=16, rope_parameters=LLAMA3, rms_norm_eps=1e-5))
    elif name == "llama_tied":
        model = LlamaForCausalLM(
            LlamaConfig(**SMALL | {"num_key_value_heads": 4}, tie_word_embeddings=True, rms_norm_eps=1e-6)
        )
    elif name == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True))
    elif name == "qwen2_untied":
        model = Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=False))
    else:
        assert name == "mistral", name
        model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None))
    random = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            parameter.copy_(1 + 0.3 * noise if "norm" in _name(model, parameter) else 0.3 * noise)
    return model.eval()


def _name(model: PreTrainedModel, parameter: torch.Tensor) -> str:
    return next(name for name, other in model.named_parameters() if other is parameter)


def make_inputs() -> tuple[np.ndarray, np.ndarray]:
    """Three rows of 12 tokens, padded on the left by 0, 2 and 5."""
    tokens = np.random.RandomState(0).randint(0, SMALL["vocab_size"], (3, 12)).astype(np.int32)
    mask = np.arange(12)[None] >= np.array([0, 2, 5])[:, None]
    return tokens, mask


def torch_logits(model: PreTrainedModel, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Logits at every token; positions count the real ones."""
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(tokens, dtype=torch.long),
            attention_mask=torch.tensor(mask, dtype=torch.long),
            position_ids=torch.tensor(np.maximum(mask.cumsum(1) - 1, 0)),
        ).logits.numpy()


def main() -> None:
    """Write one folder a model: a float32 file, and bfloat16 shards with an index."""
    tokens, mask = make_inputs()
    for name, dtype, shard_size in (("llama", torch.float32, "1GB"), ("qwen2", torch.bfloat16, "15KB")):
        model = make_model(name)
        # The logits are those of the weights as they are stored, computed in float32.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))
        logits = torch_logits(model, tokens, mask)
        shutil.rmtree(HERE / name, ignore_errors=True)
        model.to(dtype).save_pretrained(HERE / name, max_shard_size=shard_size)
        np.savez_compressed(HERE / name / "expected.npz", tokens=tokens, mask=mask, logits=logits)


if __name__ == "__main__":
    main()
