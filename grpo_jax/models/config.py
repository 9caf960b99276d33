"""The shape of a decoder, and how Hugging Face configurations map to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_jax.config import ModelConfig
from grpo_jax.config.checks import require_divides

SUPPORTED_TYPES = ("llama", "mistral", "qwen2")
"""The ``model_type`` values of Hugging Face configurations that are understood."""

# Rotary positions are computed, not looked up, so a model made here has no length of its own.
_MAX_POSITION = 131_072


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies."""

    factor: float
    """What the low frequencies are divided by."""
    low_freq_factor: float
    """Wavelengths above original_max_position / this are fully stretched."""
    high_freq_factor: float
    """Wavelengths below original_max_position / this stay as they are."""
    original_max_position: int
    """The context length before stretching."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and precision of a decoder of the Llama and Qwen2 families."""

    vocab_size: int
    """Rows of the embedding; may exceed the tokenizer's size."""
    num_layers: int
    width: int
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    rope_theta: float
    norm_eps: float
    qkv_bias: bool
    tie_embeddings: bool
    rope_scaling: RopeScaling | None = None
    max_position: int = _MAX_POSITION
    """The longest sequence that the weights were trained for."""
    compute_dtype: str = "float32"
    """Precision of activations and caches: "float32" or "bfloat16"."""
    remat: str = "none"
    """What the backward pass recomputes: "none", "dots" (all but matrix products and attention) or "full"."""
    remat_every: int = 1
    """Layers whose activations are recomputed together: only what enters the first of them is kept."""
    attention: str = "auto"
    """What computes attention in full passes: "auto", "plain", "cudnn" (GPUs) or "splash" (TPUs)."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "num_layers",
            "width",
            "ffn_width",
            "num_kv_heads",
            "head_width",
            "remat_every",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a positive multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_width % 2:
            raise ValueError(f"head_width must be even for rotary positions, got {self.head_width}")
        if self.remat != "none" and self.num_layers % self.remat_every:
            require_divides("model.remat_every", self.remat_every, "the number of layers", self.num_layers)
        for name, known in (
            ("compute_dtype", ("float32", "bfloat16")),
            ("remat", ("none", "dots", "full")),
            ("attention", ("auto", "plain", "cudnn", "splash")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_model_config(cls, model: ModelConfig, vocab_size: int) -> DecoderConfig:
        """The decoder that the shape fields of ``model`` describe, for a tokenizer of ``vocab_size`` ids."""
        return cls(
            vocab_size=vocab_size,
            num_layers=model.num_layers,
            width=model.width,
            ffn_width=model.ffn_width,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_width=model.width // model.num_heads,
            rope_theta=model.rope_theta,
            norm_eps=model.norm_eps,
            qkv_bias=False,
            tie_embeddings=model.tie_embeddings,
            compute_dtype=model.compute_dtype,
            remat=model.remat,
            remat_every=model.remat_every,
            attention=model.attention,
        )

    @classmethod
    def from_hf(cls, config_json: Mapping[str, Any]) -> DecoderConfig:
        """Read the contents of a ``config.json``.

        Raises:
            ValueError: the model type is unknown, a field is missing, or the configuration asks for
                something that the decoder does not compute.
        """
        model_type = config_json.get("model_type")
        if model_type not in SUPPORTED_TYPES:
            raise ValueError(
                f"model_type {model_type!r} is not supported; supported: {', '.join(SUPPORTED_TYPES)}"
            )
        _refuse_unsupported(config_json, model_type)
        theta, scaling = _read_rope(config_json)
        width = _field(config_json, "hidden_size")
        num_heads = _field(config_json, "num_attention_heads")
        return cls(
            vocab_size=_field(config_json, "vocab_size"),
            num_layers=_field(config_json, "num_hidden_layers"),
            width=width,
            ffn_width=_field(config_json, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=config_json.get("num_key_value_heads") or num_heads,
            head_width=config_json.get("head_dim") or width // num_heads,
            rope_theta=theta,
            norm_eps=config_json.get("rms_norm_eps", 1e-6),
            qkv_bias=model_type == "qwen2",
            tie_embeddings=config_json.get("tie_word_embeddings", False),
            rope_scaling=scaling,
            max_position=config_json.get("max_position_embeddings", _MAX_POSITION),
        )

    def to_hf(self) -> dict[str, Any]:
        """The contents of a ``config.json`` for this decoder: qwen2 if it has biases, else llama."""
        model_type = "qwen2" if self.qkv_bias else "llama"
        rope: dict[str, Any] = {"rope_type": "default"}
        if self.rope_scaling is not None:
            rope = {
                "rope_type": "llama3",
                "factor": self.rope_scaling.factor,
                "low_freq_factor": self.rope_scaling.low_freq_factor,
                "high_freq_factor": self.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": self.rope_scaling.original_max_position,
            }
        return {
            "architectures": ["Qwen2ForCausalLM" if self.qkv_bias else "LlamaForCausalLM"],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.width,
            "intermediate_size": self.ffn_width,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_width,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_position,
            # Readers of either generation find what they look for.
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else rope,
            "rope_parameters": {"rope_theta": self.rope_theta, **rope},
            "dtype": "float32",
            "torch_dtype": "float32",
        }


def _field(config_json: Mapping[str, Any], name: str) -> Any:
    if config_json.get(name) is None:
        raise ValueError(f"field {name!r} is missing; take config.json from the model's own release")
    return config_json[name]


def _refuse_unsupported(config_json: Mapping[str, Any], model_type: str) -> None:
    """Raise for each field that would change the computation in a way that is not implemented."""
    layer_types = config_json.get("layer_types") or []
    active = {
        "attention_bias": bool(config_json.get("attention_bias", False)),
        "mlp_bias": bool(config_json.get("mlp_bias", False)),
        "hidden_act": config_json.get("hidden_act", "silu") not in ("silu", "swish"),
        "use_sliding_window": model_type == "qwen2" and bool(config_json.get("use_sliding_window", False)),
        "sliding_window": model_type == "mistral" and config_json.get("sliding_window", 4096) is not None,
        "layer_types": any(kind != "full_attention" for kind in layer_types),
        "quantization_config": config_json.get("quantization_config") is not None,
        "partial_rotary_factor": config_json.get("partial_rotary_factor", 1.0) != 1.0,
    }
    # Qwen2 has its biases built in and ignores the field.
    if model_type == "qwen2":
        active["attention_bias"] = False
    for name, is_active in active.items():
        if is_active:
            value = config_json.get(name, "the family's default")
            raise ValueError(
                f"{name}={value!r} is not supported for model_type {model_type!r}; "
                "use a checkpoint without it (plain full attention, SiLU, unquantized weights)"
            )


def _read_rope(config_json: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base frequency and scaling, from the older fields or from ``rope_parameters``."""
    rope = config_json.get("rope_parameters") or config_json.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config_json.get("rope_theta", 10_000.0))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported; "
            "use a checkpoint that rotates whole heads"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope_scaling type {kind!r} is not supported; supported: default, llama3")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    for name in names:
        if name not in rope:
            raise ValueError(f"rope_scaling of type 'llama3' lacks {name!r}")
    return theta, RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position=rope["original_max_position_embeddings"],
    )


def rope_frequencies(config: DecoderConfig) -> list[float]:
    """Angle per position of each pair of a head's components, ``head_width / 2`` of them."""
    half = config.head_width // 2
    frequencies = [config.rope_theta ** (-i / half) for i in range(half)]
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    low_wavelength = scaling.original_max_position / scaling.low_freq_factor
    high_wavelength = scaling.original_max_position / scaling.high_freq_factor

    def stretch(frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength < high_wavelength:
            return frequency
        if wavelength > low_wavelength:
            return frequency / scaling.factor
        smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        return (1 - smooth) * frequency / scaling.factor + smooth * frequency

    return [stretch(frequency) for frequency in frequencies]
