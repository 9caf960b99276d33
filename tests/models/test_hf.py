"""Checkpoint folders: logits that PyTorch computed, the way there and back, and what is refused.

``golden/make_golden.py`` made the checkpoints and the logits.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_jax.config import ModelConfig
from grpo_jax.models import load_model
from grpo_jax.models.config import DecoderConfig, RopeScaling
from grpo_jax.models.decoder import Decoder, init_params
from grpo_jax.models.hf import load_hf, save_hf
from grpo_jax.tokenizer import CharTokenizer
from tests.models.parity import decoder_logits

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_logits_are_those_of_pytorch(name: str) -> None:
    """float32 weights in one file, and bfloat16 ones in three shards; rows padded by 0, 2 and 5."""
    config, params = load_hf(GOLDEN / name)
    expected = np.load(GOLDEN / name / "expected.npz")
    logits = decoder_logits(Decoder(config), params, expected["tokens"], expected["mask"])
    real = expected["mask"][:, -logits.shape[1] :]
    # Logits of up to 20, in float32 on both sides.
    assert np.abs(logits - expected["logits"][:, -logits.shape[1] :])[real].max() < 1e-4
    assert np.abs(expected["logits"]).max() > 5


def test_golden_configurations() -> None:
    llama, _ = load_hf(GOLDEN / "llama")
    assert llama == DecoderConfig(
        vocab_size=48,
        num_layers=2,
        width=32,
        ffn_width=40,
        num_heads=4,
        num_kv_heads=2,
        head_width=16,
        rope_theta=50.0,
        norm_eps=1e-5,
        qkv_bias=False,
        tie_embeddings=False,
        rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32),
        max_position=64,
    )
    qwen2, params = load_hf(GOLDEN / "qwen2")
    assert (qwen2.qkv_bias, qwen2.tie_embeddings, qwen2.head_width) == (True, True, 8)
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float32")}


def test_older_and_newer_names_of_the_rope_fields() -> None:
    new = json.loads((GOLDEN / "llama/config.json").read_text())
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    scaling = {k: v for k, v in new["rope_parameters"].items() if k not in ("rope_theta", "rope_type")}
    for kind in ("type", "rope_type"):
        old |= {"rope_theta": 50.0, "rope_scaling": {**scaling, kind: "llama3"}}
        assert DecoderConfig.from_hf(old) == DecoderConfig.from_hf(new)


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_there_and_back(tmp_path: Path, qkv_bias: bool, tie_embeddings: bool) -> None:
    config, _ = load_hf(GOLDEN / "llama")
    config = dataclasses.replace(config, qkv_bias=qkv_bias, tie_embeddings=tie_embeddings)
    params = init_params(config, jax.random.key(0))
    # Each leaf its own values: norms and biases of a new model are all alike.
    params = jax.tree.map(lambda x: np.asarray(x) + np.arange(x.size, dtype=np.float32).reshape(x.shape), params)
    save_hf(tmp_path / "new" / "model", config, params)
    loaded_config, loaded = load_hf(tmp_path / "new" / "model")
    assert loaded_config == config
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    # Nothing else is left behind.
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]


def test_save_does_not_overwrite(tmp_path: Path) -> None:
    config, params = load_hf(GOLDEN / "llama")
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ValueError, match=str(tmp_path)):
        save_hf(tmp_path, config, params)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_save_that_fails_leaves_no_checkpoint(tmp_path: Path) -> None:
    config, params = load_hf(GOLDEN / "llama")
    del params["layers"]["down"]
    with pytest.raises(KeyError):
        save_hf(tmp_path / "model", config, params)
    assert not (tmp_path / "model").exists()


def copy(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / name, tmp_path / name))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_hf(tmp_path / "nowhere")


def test_missing_config(tmp_path: Path) -> None:
    (copy("llama", tmp_path) / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"llama.*config\.json"):
        load_hf(tmp_path / "llama")


def test_broken_config(tmp_path: Path) -> None:
    path = copy("llama", tmp_path) / "config.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(ValueError, match=r"config\.json"):
        load_hf(tmp_path / "llama")


def test_missing_weights(tmp_path: Path) -> None:
    (copy("llama", tmp_path) / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"llama.*model\.safetensors"):
        load_hf(tmp_path / "llama")


def test_missing_shard(tmp_path: Path) -> None:
    (copy("qwen2", tmp_path) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00003\.safetensors"):
        load_hf(tmp_path / "qwen2")


@pytest.mark.parametrize("keep", [0, 4, 100, -1000])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = copy("llama", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file.*download"):
        load_hf(tmp_path / "llama")


def test_missing_tensor(tmp_path: Path) -> None:
    edit_tensors(copy("llama", tmp_path), lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"llama: .*model\.layers\.1\.mlp\.up_proj\.weight.* missing"):
        load_hf(tmp_path / "llama")


def test_wrong_shape(tmp_path: Path) -> None:
    edit_tensors(
        copy("llama", tmp_path), lambda tensors: tensors.update({"model.norm.weight": np.ones(31, np.float32)})
    )
    with pytest.raises(ValueError, match=r"llama: .*model\.norm\.weight.*\(32,\).*\(31,\)"):
        load_hf(tmp_path / "llama")


def test_tensors_without_a_place(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    edit_tensors(copy("llama", tmp_path), lambda tensors: tensors.update({name: np.ones(16, np.float32)}))
    with pytest.raises(ValueError, match=name):
        load_hf(tmp_path / "llama")


def test_harmless_extra_tensors(tmp_path: Path) -> None:
    """Tables of frequencies, and a tied output matrix that is stored once more."""
    folder = copy("llama", tmp_path)
    edit_config(folder, tie_word_embeddings=True)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda tensors: tensors.update({name: np.ones(8, np.float32)}))
    _, params = load_hf(folder)
    assert "head" not in params


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3", None])
def test_unsupported_model_type(tmp_path: Path, model_type: str | None) -> None:
    edit_config(copy("llama", tmp_path), model_type=model_type)
    with pytest.raises(ValueError, match=f"{model_type}.* supported: llama, mistral, qwen2"):
        load_hf(tmp_path / "llama")


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "hidden_act", "gelu"),
        ("llama", "quantization_config", {"quant_method": "gptq"}),
        ("llama", "partial_rotary_factor", 0.5),
        ("qwen2", "use_sliding_window", True),
        ("qwen2", "layer_types", ["full_attention", "sliding_attention"]),
        ("llama", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
        ("llama", "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ],
)
def test_unsupported_features(tmp_path: Path, name: str, field: str, value: Any) -> None:
    edit_config(copy(name, tmp_path), **{field: value})
    named = {"rope_parameters": "rope_scaling type 'yarn'|partial_rotary_factor=0.5"}.get(field, field)
    with pytest.raises(ValueError, match=f"({named}).* not supported"):
        load_hf(tmp_path / name)


def test_mistral_is_a_llama_unless_its_window_slides(tmp_path: Path) -> None:
    edit_config(copy("llama", tmp_path), model_type="mistral", sliding_window=None)
    llama, _ = load_hf(GOLDEN / "llama")
    assert load_hf(tmp_path / "llama")[0] == llama
    edit_config(tmp_path / "llama", sliding_window=4096)
    with pytest.raises(ValueError, match="sliding_window=4096 is not supported"):
        load_hf(tmp_path / "llama")


@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_missing_field(tmp_path: Path, field: str) -> None:
    edit_config(copy("llama", tmp_path), **{field: None})
    with pytest.raises(ValueError, match=f"'{field}' is missing"):
        load_hf(tmp_path / "llama")


def test_llama3_scaling_without_its_numbers(tmp_path: Path) -> None:
    edit_config(copy("llama", tmp_path), rope_parameters={"rope_type": "llama3", "factor": 8.0})
    with pytest.raises(ValueError, match="'llama3' lacks 'low_freq_factor'"):
        load_hf(tmp_path / "llama")


def test_load_model_of_random_weights() -> None:
    tokenizer = CharTokenizer("abc")
    shape = ModelConfig(num_layers=1, width=16, ffn_width=16, num_heads=2, num_kv_heads=1)
    model, params, same = load_model(shape, tokenizer, seed=3)
    assert model.vocab_size == tokenizer.vocab_size == 5
    assert same is tokenizer
    jax.tree.map(np.testing.assert_array_equal, params, load_model(shape, tokenizer, seed=3)[1])
    assert jnp.abs(params["embed"] - load_model(shape, tokenizer, seed=4)[1]["embed"]).max() > 0.01


def test_random_weights_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match=r"model\.path .*got None"):
        load_model(ModelConfig(), None, seed=0)


def test_load_model_of_a_saved_one(tmp_path: Path) -> None:
    """A model made here comes back with the tokenizer that it was saved with, in the precision asked for."""
    tokenizer = CharTokenizer("abc")
    shape = ModelConfig(num_layers=1, width=16, ffn_width=16, num_heads=2, num_kv_heads=1)
    model, params, _ = load_model(shape, tokenizer, seed=3)
    save_hf(tmp_path / "model", model.config, params, tokenizer)
    path = str(tmp_path / "model")
    loaded, loaded_params, loaded_tokenizer = load_model(
        ModelConfig(path=path, compute_dtype="bfloat16", remat="full"), None, seed=0
    )
    assert loaded.config == dataclasses.replace(model.config, compute_dtype="bfloat16", remat="full")
    jax.tree.map(np.testing.assert_array_equal, loaded_params, params)
    assert loaded_tokenizer == tokenizer
    assert json.loads((tmp_path / "model/config.json").read_text())["eos_token_id"] == [1]


def test_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    CharTokenizer("".join(map(chr, range(100, 160)))).save(folder)
    with pytest.raises(ValueError, match="62 .* 48"):
        load_model(ModelConfig(path=str(folder)), None, seed=0)
