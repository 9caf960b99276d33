from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from grpo_jax.tokenizer import CharTokenizer, HFTokenizer, load_tokenizer, token_byte_table

ALPHABET = "abc é∑0123"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a tokenizer reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def byte_level(**kwargs: object) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits: pad 0, <|start|> 1, <|end|> 2, bytes and merges after them."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|pad|>", "<|start|>", "<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["the sum of the two numbers is 12 + 34 = 46, été"] * 4, trainer)
    # Set after training, so that there are merges of digits that only this step keeps from being used.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{"eos_token": "<|end|>", **kwargs})


def sentencepiece() -> PreTrainedTokenizerFast:
    """A hand-made vocabulary in the manner of Llama 2: word starts are marked, bytes are spelled out."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "▁ab"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("▁a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


BYTE_LEVEL = HFTokenizer(byte_level(pad_token="<|pad|>"))


@given(st.text(alphabet=ALPHABET))
def test_char_round_trip(text: str) -> None:
    tokenizer = CharTokenizer(ALPHABET)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, 1, 0, 0]) == text


def test_char_ids_and_bytes() -> None:
    tokenizer = CharTokenizer("bé")
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_ids) == (4, 0, (1,))
    assert tokenizer.encode("éb") == [3, 2]
    assert token_byte_table(tokenizer) == [b"", b"", b"b", b"\xc3\xa9"]


@pytest.mark.parametrize(
    ("alphabet", "said"), [("", "at least one"), ("aba", r"\['a'\]"), ("a\ud800", "surrogates")]
)
def test_char_refuses_a_bad_alphabet(alphabet: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"alphabet.*{said}"):
        CharTokenizer(alphabet)


def test_char_refuses_unknown_characters_and_messages() -> None:
    with pytest.raises(ValueError, match=r"got \['x'\] in 'axb'"):
        CharTokenizer("ab").encode("axb")
    with pytest.raises(ValueError, match="chat template"):
        CharTokenizer("ab").chat([{"role": "user", "content": "a"}])


def test_char_save_and_load(tmp_path: Path) -> None:
    CharTokenizer(ALPHABET).save(tmp_path / "new")
    assert load_tokenizer(tmp_path / "new") == CharTokenizer(ALPHABET)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["char_tokenizer.json"]
    (tmp_path / "new" / "char_tokenizer.json").write_text('{"letters": "ab"}')
    with pytest.raises(ValueError, match="alphabet"):
        load_tokenizer(tmp_path / "new")


@given(st.text())
def test_byte_level_round_trip_and_bytes(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert BYTE_LEVEL.decode([*ids, 2, 0]) == text
    assert b"".join(map(BYTE_LEVEL.token_bytes, ids)) == text.encode()


def test_byte_level_table() -> None:
    table = token_byte_table(BYTE_LEVEL)
    assert len(table) == BYTE_LEVEL.vocab_size
    assert table[:3] == [b"", b"", b""]
    # The trainer was given all 256 bytes, and they follow the special tokens.
    assert sorted(table[3:259]) == [bytes([byte]) for byte in range(256)]
    assert b" the" in table
    # Half of a character: bytes are exact where the text is not.
    first_half = table.index(b"\xc3")
    assert BYTE_LEVEL.decode([first_half]) == "\ufffd"


def test_digits_stay_apart_after_saving_and_loading(tmp_path: Path) -> None:
    BYTE_LEVEL.save(tmp_path)
    # A class of transformers that would rebuild the pre-tokenizer without its digits.
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "GPT2Tokenizer"}))
    loaded = load_tokenizer(tmp_path)
    text = "12 + 34 = 46 the<|end|> été"
    assert loaded.encode(text) == BYTE_LEVEL.encode(text)
    assert b"12" in token_byte_table(loaded)
    assert [loaded.decode([i]) for i in loaded.encode("1234")] == list("1234")
    assert token_byte_table(loaded) == token_byte_table(BYTE_LEVEL)


def test_save_and_load_keep_eos_pad_and_template(tmp_path: Path) -> None:
    saved = HFTokenizer(byte_level(pad_token="<|pad|>", chat_template=CHAT_TEMPLATE), eos_ids=[1])
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    saved.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, HFTokenizer)
    assert loaded.eos_ids == saved.eos_ids == (2, 1)
    assert loaded.pad_id == saved.pad_id == 0
    messages = [{"role": "user", "content": "12"}]
    assert loaded.chat(messages) == saved.chat(messages)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"temperature": 0.6, "eos_token_id": [2, 1]}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_special_tokens_in_text_are_single_ids_and_decode_to_nothing() -> None:
    ids = BYTE_LEVEL.encode("a<|start|>b<|end|>")
    assert ids[1] == 1 and ids[3] == 2 and len(ids) == 4
    assert BYTE_LEVEL.decode(ids) == "ab"


def test_added_tokens_count_and_plain_ones_have_their_text_as_bytes() -> None:
    hf = byte_level()
    size = len(hf)
    hf.add_tokens(["<été>"])
    tokenizer = HFTokenizer(hf)
    assert tokenizer.vocab_size == size + 1
    assert tokenizer.encode("<été>") == [size]
    assert tokenizer.token_bytes(size) == "<été>".encode()


def test_sentencepiece_bytes_and_bos() -> None:
    tokenizer = HFTokenizer(sentencepiece())
    # BOS in front as the post-processor says, its EOS left off: a prompt goes on.
    assert tokenizer.encode("ab a") == [1, 263, 262]
    assert tokenizer.decode([1, 263, 262, 2]) == "ab a"
    assert tokenizer.encode("aé")[1:] == [262, 3 + 0xC3, 3 + 0xA9]
    assert [tokenizer.token_bytes(i) for i in (0, 1, 2, 3 + 0xC3, 259, 262)] == [
        b"", b"", b"", b"\xc3", b" ", b" a",
    ]  # fmt: skip


def test_chat_is_the_template_with_special_ids() -> None:
    tokenizer = HFTokenizer(byte_level(chat_template=CHAT_TEMPLATE))
    ids = tokenizer.chat([{"role": "user", "content": "12"}])
    assert ids == [
        1, *tokenizer.encode("user\n12"), 2, *tokenizer.encode("\n"), 1, *tokenizer.encode("assistant\n"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="refuses the messages.*no tools"):
        tokenizer.chat([{"role": "tool", "content": ""}])
    with pytest.raises(ValueError, match="no chat template"):
        BYTE_LEVEL.chat([{"role": "user", "content": "12"}])


def test_eos_ids_come_from_all_three_places(tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2, 100000]}')
    tokenizer = HFTokenizer.from_folder(tmp_path)
    # Its own first; 100000 is beyond the vocabulary, so nothing can sample it.
    assert tokenizer.eos_ids == (2, 7, 5)
    assert tokenizer.token_bytes(7) == b""


def test_pad_falls_back_to_eos() -> None:
    assert HFTokenizer(byte_level()).pad_id == 2


def test_no_eos_names_the_folder_and_the_remedy(tmp_path: Path) -> None:
    byte_level(eos_token=None).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}.*eos_token_id.*generation_config.json"):
        load_tokenizer(tmp_path)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    hf = byte_level()
    hf.backend_tokenizer.enable_truncation(max_length=3)
    hf.backend_tokenizer.enable_padding(length=40)
    hf.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    text = "12 + 34"
    assert load_tokenizer(tmp_path).encode(text) == BYTE_LEVEL.encode(text)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", None, "must hold a tokenizer.json"),
        ("tokenizer.json", "{", "cannot be read"),
        ("config.json", "{", "config.json must be JSON"),
        ("config.json", "[]", "config.json must hold a JSON object, got list"),
    ],
)
def test_broken_folders_are_named(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    byte_level().save_pretrained(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}.*{said}"):
        load_tokenizer(tmp_path)


def test_unknown_byte_scheme_is_refused() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    with pytest.raises(ValueError, match="decoder None"):
        HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
