"""The tokenizer that a GGUF file carries in its metadata, rebuilt for the package ``tokenizers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from grpo_jax.tokenizer import HFTokenizer

# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split_words(numbers: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(
        tokenizers.Regex(_SPLIT_PATTERN.format(numbers=numbers)), behavior="isolated", invert=False
    )
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2_words(*first: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


_PRE_TOKENIZERS = {
    "gpt-2": lambda: _gpt2_words(),
    "smollm": lambda: _gpt2_words(pre_tokenizers.Digits(individual_digits=True)),
    "qwen2": lambda: _split_words(r"\p{N}"),
    "llama-bpe": lambda: _split_words(r"\p{N}{1,3}"),
}
"""How text is cut before merging, by the name in tokenizer.ggml.pre."""


def build_tokenizer(metadata: Mapping[str, Any], *, source: str) -> HFTokenizer:
    """Build the byte-level BPE tokenizer that ``tokenizer.ggml.*`` describes.

    Control tokens become special, so that one written out in a chat prompt is one id. Unused ids at the end
    (a vocabulary padded to a round size) stay unknown, so that they are never sampled.

    Args:
        metadata: the file's metadata by key.
        source: names the file in error messages.

    Raises:
        ValueError: the kind of vocabulary or its pre-tokenizer is not supported, or the vocabulary is broken.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"{source}: tokenizer.ggml.model must be 'gpt2' (byte-level BPE), got {kind!r}: "
            "use the model's Hugging Face checkpoint folder"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{source}: tokenizer.ggml.pre must be one of {sorted(_PRE_TOKENIZERS)}, got {pre!r}: "
            "use the model's Hugging Face checkpoint folder"
        )
    tokens, types = _vocabulary(metadata, source)
    try:
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        vocab = {token: i for i, token in enumerate(tokens)}
        # Llama 3 takes a word that is in the vocabulary whole, whatever its merges say.
        backend = tokenizers.Tokenizer(
            models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")  # type: ignore[arg-type]
        )
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{source}: tokenizer.ggml.merges do not fit the tokens: {error}") from error
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.add_special_tokens(_added(tokens, types, kind=_CONTROL))
    backend.add_tokens(_added(tokens, types, kind=_USER_DEFINED))

    named = {
        role: tokens[i]
        for role, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"))
        if 0 <= (i := metadata.get(f"tokenizer.ggml.{key}_token_id", -1)) < len(tokens)
    }
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos_token" in named:
        bos = named["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocab[bos])]
        )
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return HFTokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend, chat_template=metadata.get("tokenizer.chat_template"), **named
        ),
        eos_ids=[i for i in ends if i is not None],
        source=source,
    )


def _vocabulary(metadata: Mapping[str, Any], source: str) -> tuple[list[str], list[int]]:
    """Tokens and their types, without the unused ones at the end."""
    tokens = list(metadata.get("tokenizer.ggml.tokens", ()))
    types = list(metadata.get("tokenizer.ggml.token_type", [1] * len(tokens)))
    if not tokens or len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ValueError(
            f"{source}: tokenizer.ggml.tokens must hold distinct tokens, with one tokenizer.ggml.token_type "
            f"each; got {len(tokens)} tokens, {len(set(tokens))} of them distinct, and {len(types)} types"
        )
    while types[-1] == _UNUSED and len(types) > 1:
        tokens.pop()
        types.pop()
    return tokens, types


def _added(tokens: Sequence[str], types: Sequence[int], *, kind: int) -> list[tokenizers.AddedToken]:
    special = kind == _CONTROL
    return [
        tokenizers.AddedToken(token, special=special, normalized=False)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type == kind
    ]
