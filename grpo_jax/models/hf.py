"""Hugging Face checkpoint folders: read into the decoder's parameters, and written back.

Shapes: D model width, F feed-forward width, K key-value heads, Q query heads of one key-value head, H head width,
N = K * Q query heads, L layers, V vocabulary. Hugging Face stores a projection as ``[out, in]``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from grpo_jax.models.config import DecoderConfig
from grpo_jax.tokenizer import Tokenizer
from grpo_jax.types import Params

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

# Buffers that some exporters store and that are computed here.
_IGNORED = re.compile(r".*rotary_emb\.inv_freq")


def load_hf(folder: Path) -> tuple[DecoderConfig, Params]:
    """Read a checkpoint folder (``config.json`` and one or more ``.safetensors`` files).

    Returns:
        The decoder's configuration, and its parameters as float32 NumPy arrays.

    Raises:
        FileNotFoundError: the folder, its configuration or one of its weight files is missing.
        ValueError: a file is broken, the architecture is not supported, or the tensors don't fit it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"model.path: there is no folder {folder}")
    config = DecoderConfig.from_hf(_read_json(folder / _CONFIG))
    tensors: dict[str, np.ndarray] = {}
    for file in _weight_files(folder):
        tensors |= _read_tensors(file)
    # Some releases store the tied output matrix a second time.
    if config.tie_embeddings:
        tensors.pop("lm_head.weight", None)
    try:
        return config, params_from_hf(config, tensors)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def save_hf(folder: Path, config: DecoderConfig, params: Params, tokenizer: Tokenizer | None = None) -> None:
    """Write a checkpoint folder that transformers can load; written beside and then renamed.

    Raises:
        ValueError: ``folder`` exists.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists: name a folder that does not")
    beside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    generation: dict[str, Any] = {}
    if tokenizer is not None:
        generation = {"eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.pad_id}
        tokenizer.save(beside)
    (beside / _CONFIG).write_text(json.dumps(config.to_hf() | generation, indent=1) + "\n")
    save_file(params_to_hf(config, params), beside / _SINGLE, metadata={"format": "pt"})
    beside.rename(folder)


def params_from_hf(config: DecoderConfig, tensors: Mapping[str, np.ndarray]) -> Params:
    """Stack and fuse tensors of Hugging Face's names and layout into the decoder's parameters.

    Raises:
        ValueError: a tensor is missing, has another shape, or has no place in the decoder.
    """
    left = {name: value for name, value in tensors.items() if not _IGNORED.fullmatch(name)}

    def take(name: str, *shape: int) -> np.ndarray:
        if name not in left:
            raise ValueError(f"the tensor {name} is missing")
        value = left.pop(name)
        if value.shape != shape:
            raise ValueError(f"the tensor {name} must have shape {shape} for its configuration, got {value.shape}")
        return np.asarray(value, np.float32)

    V, D, F = config.vocab_size, config.width, config.ffn_width
    K, Q, H = config.num_kv_heads, config.queries_per_kv, config.head_width

    def fused(prefix: str, kind: str, *inputs: int) -> np.ndarray:
        """Queries, keys and values as ``[K, Q + 2, H, *inputs]``: each key-value head with its own queries."""
        q = take(f"{prefix}.q_proj.{kind}", K * Q * H, *inputs).reshape(K, Q, H, *inputs)
        k, v = (take(f"{prefix}.{name}_proj.{kind}", K * H, *inputs).reshape(K, 1, H, *inputs) for name in "kv")
        return np.concatenate([q, k, v], axis=1)

    def layer(index: int) -> dict[str, np.ndarray]:
        base = f"model.layers.{index}"
        attention, mlp = f"{base}.self_attn", f"{base}.mlp"
        gate, up = (take(f"{mlp}.{name}_proj.weight", F, D) for name in ("gate", "up"))
        params = {
            "attn_norm": take(f"{base}.input_layernorm.weight", D),
            "qkv": np.moveaxis(fused(attention, "weight", D), -1, 0),
            "out": take(f"{attention}.o_proj.weight", D, K * Q * H).T.reshape(K, Q, H, D),
            "mlp_norm": take(f"{base}.post_attention_layernorm.weight", D),
            "gate": gate.T,
            "up": up.T,
            "down": take(f"{mlp}.down_proj.weight", D, F).T,
        }
        if config.qkv_bias:
            params["qkv_bias"] = fused(attention, "bias")
        return params

    layers = [layer(index) for index in range(config.num_layers)]
    params: dict[str, Any] = {
        "embed": take("model.embed_tokens.weight", V, D),
        "layers": {name: np.stack([one[name] for one in layers]) for name in layers[0]},
        "norm": take("model.norm.weight", D),
    }
    if not config.tie_embeddings:
        params["head"] = take("lm_head.weight", V, D)
    if left:
        raise ValueError(
            f"{len(left)} tensors have no place in a decoder of {config.num_layers} layers, among them "
            f"{', '.join(sorted(left)[:3])}"
        )
    return params


def params_to_hf(config: DecoderConfig, params: Params) -> dict[str, np.ndarray]:
    """The decoder's parameters under Hugging Face's names and in its layout, float32."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    D, Q = config.width, config.queries_per_kv
    tensors = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = params["head"]
    parts = {"q": slice(0, Q), "k": slice(Q, Q + 1), "v": slice(Q + 1, Q + 2)}
    for index in range(config.num_layers):
        layer = {name: value[index] for name, value in params["layers"].items()}
        base = f"model.layers.{index}"
        qkv = np.moveaxis(layer["qkv"], 0, -1)
        for name, heads in parts.items():
            tensors[f"{base}.self_attn.{name}_proj.weight"] = qkv[:, heads].reshape(-1, D)
            if config.qkv_bias:
                tensors[f"{base}.self_attn.{name}_proj.bias"] = layer["qkv_bias"][:, heads].reshape(-1)
        tensors |= {
            f"{base}.input_layernorm.weight": layer["attn_norm"],
            f"{base}.self_attn.o_proj.weight": layer["out"].reshape(-1, D).T,
            f"{base}.post_attention_layernorm.weight": layer["mlp_norm"],
            f"{base}.mlp.gate_proj.weight": layer["gate"].T,
            f"{base}.mlp.up_proj.weight": layer["up"].T,
            f"{base}.mlp.down_proj.weight": layer["down"].T,
        }
    return {name: np.ascontiguousarray(value) for name, value in tensors.items()}


def _weight_files(folder: Path) -> Iterator[Path]:
    """The folder's weight files, each checked to be there."""
    if (folder / _INDEX).is_file():
        names = sorted(set(_read_json(folder / _INDEX).get("weight_map", {}).values()))
        if not names:
            raise ValueError(f"{folder / _INDEX} names no files: it must hold a 'weight_map'")
    else:
        names = [_SINGLE]
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} lacks the weight file {name}: download the whole checkpoint (.safetensors files)"
            )
        yield folder / name


def _read_tensors(file: Path) -> dict[str, np.ndarray]:
    try:
        # Through JAX's framework name: it reads bfloat16, which plain NumPy does not know.
        with safe_open(file, framework="flax") as tensors:
            return {name: np.asarray(tensors.get_tensor(name), np.float32) for name in tensors.keys()}
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file, download it again: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"{file.parent} lacks {file.name}: is it a Hugging Face checkpoint folder?")
    try:
        values: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    return values
