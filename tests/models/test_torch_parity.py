"""The decoder against transformers' PyTorch models, where PyTorch can be imported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from grpo_jax.models.decoder import Decoder
from grpo_jax.models.hf import load_hf, save_hf
from tests.models.parity import decoder_logits

torch = pytest.importorskip("torch")
make_golden = pytest.importorskip("tests.models.golden.make_golden")


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "qwen2_untied", "mistral"])
def test_logits_both_ways(tmp_path: Path, name: str) -> None:
    """PyTorch's folder gives its logits here, and the folder written here gives them in PyTorch."""
    from transformers import AutoModelForCausalLM

    torch_model = make_golden.make_model(name)
    tokens, mask = make_golden.make_inputs()
    expected = make_golden.torch_logits(torch_model, tokens, mask)
    torch_model.save_pretrained(tmp_path / "theirs")

    config, params = load_hf(tmp_path / "theirs")
    logits = decoder_logits(Decoder(config), params, tokens, mask)
    # Logits of up to 20, in float32 on both sides; the shortest prompt has two tokens.
    assert np.abs(logits - expected[:, -6:]).max() < 1e-4

    save_hf(tmp_path / "ours", config, params)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    # Other constants that mean the same may round differently.
    np.testing.assert_allclose(make_golden.torch_logits(again, tokens, mask)[mask], expected[mask], atol=1e-5)
    for (key, ours), (_, theirs) in zip(
        sorted(again.state_dict().items()), sorted(torch_model.state_dict().items()), strict=True
    ):
        assert torch.equal(ours, theirs), key
