"""Tokenizers behind one small protocol: one id a character, and those of Hugging Face checkpoints.

Nothing here reaches the network: a tokenizer comes from memory or from a local folder.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from transformers import PreTrainedTokenizerFast

_CHAR_FILE = "char_tokenizer.json"
_GENERATION_FILE = "generation_config.json"


class Tokenizer(Protocol):
    """What the rest of the package needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids 0 to vocab_size-1 are known to it."""
        ...

    @property
    def pad_id(self) -> int:
        """Fills what is masked; may equal an EOS id, since masks come from lengths."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a completion; never empty."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`chat` works."""
        ...

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """The ids of raw text, after the BOS id where the model family puts one there (``bos``)."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens (EOS, pad) left out."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that the token adds to the text; empty for special tokens."""
        ...

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The ids of a conversation and the header of the answer to come (the chat template's).

        Raises:
            ValueError: there is no chat template, or it refuses the messages.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write what :func:`load_tokenizer` needs into ``folder``."""
        ...


@dataclass(frozen=True)
class CharTokenizer:
    """One id a character of ``alphabet``, after 0 for padding and 1 for the end of a sequence.

    Raises:
        ValueError: the alphabet is empty, repeats a character or holds half of a surrogate pair.
    """

    alphabet: str

    def __post_init__(self) -> None:
        if not self.alphabet:
            raise ValueError("alphabet must hold at least one character, got ''")
        repeated = sorted({c for c in self.alphabet if self.alphabet.count(c) > 1})
        if repeated:
            raise ValueError(f"alphabet must hold each character once, got {repeated} more than once")
        halves = [c for c in self.alphabet if "\ud800" <= c <= "\udfff"]
        if halves:
            raise ValueError(f"alphabet must hold whole characters, got the surrogates {halves}")

    @property
    def vocab_size(self) -> int:
        """Padding, EOS and the alphabet."""
        return 2 + len(self.alphabet)

    @property
    def pad_id(self) -> int:
        """Always 0."""
        return 0

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Always ``(1,)``."""
        return (1,)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {character: 2 + index for index, character in enumerate(self.alphabet)}

    @property
    def has_chat_template(self) -> bool:
        """Never."""
        return False

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """One id a character.

        Raises:
            ValueError: a character is not in the alphabet.
        """
        unknown = sorted(set(text) - self._ids.keys())
        if unknown:
            raise ValueError(
                f"text must hold characters of the alphabet {self.alphabet!r} only, got {unknown} in {text!r}"
            )
        return [self._ids[character] for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The characters of ``ids``; padding and EOS are left out."""
        return "".join(self.alphabet[i - 2] for i in ids if i >= 2)

    def token_bytes(self, token_id: int) -> bytes:
        """The character in UTF-8; empty for padding and EOS."""
        return self.decode([token_id]).encode()

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Always refused.

        Raises:
            ValueError: characters have no chat template.
        """
        raise ValueError(
            "messages need a tokenizer with a chat template and CharTokenizer has none: "
            "make the task's prompts strings"
        )

    def save(self, folder: Path) -> None:
        """Write the alphabet as a small JSON file."""
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / _CHAR_FILE, {"alphabet": self.alphabet})


class HFTokenizer:
    """A fast tokenizer of transformers.

    Args:
        tokenizer: byte-level, or with sentencepiece's ``▁`` and ``<0xNN>``.
        eos_ids: ids that end a completion, beside the tokenizer's own EOS.
        source: where it comes from, for error messages.

    Raises:
        ValueError: no EOS id is known, or the bytes of tokens cannot be told.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, eos_ids: Sequence[int] = (), source: str = "tokenizer"
    ) -> None:
        self._hf = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # A tokenizer.json may carry the truncation and padding of its training; ids are never cut in silence.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._source = source
        self.vocab_size: int = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        known = [tokenizer.eos_token_id, *eos_ids]
        self.eos_ids: tuple[int, ...] = tuple(
            dict.fromkeys(i for i in known if i is not None and 0 <= i < self.vocab_size)
        )
        if not self.eos_ids:
            raise ValueError(
                f"{source}: no id that ends a completion is known to the tokenizer: "
                f'set "eos_token_id" in its {_GENERATION_FILE} (a number or a list)'
            )
        pad = tokenizer.pad_token_id
        self.pad_id: int = self.eos_ids[0] if pad is None else pad
        self._added = self._backend.get_added_tokens_decoder()
        self._special = {i for i, token in self._added.items() if token.special}
        self._special |= {*tokenizer.all_special_ids, *self.eos_ids, self.pad_id}
        self._bytes_of = _byte_scheme(self._backend, source)
        # The id that the post-processor puts in front of raw text; an EOS that it appends is left off.
        with_special = self._backend.encode("").ids
        bos = tokenizer.bos_token_id
        self._prefix = [bos] if bos is not None and with_special[:1] == [bos] else []
        self.has_chat_template = tokenizer.chat_template is not None

    @classmethod
    def from_folder(cls, folder: Path) -> HFTokenizer:
        """Read a checkpoint folder, exactly as its ``tokenizer.json`` says.

        The EOS ids are those of ``generation_config.json``, of ``config.json`` and of the tokenizer together.

        Raises:
            ValueError: the folder or its ``tokenizer.json`` is missing or unreadable, or no EOS is known.
        """
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(
                f"{folder} must hold a tokenizer.json; for a checkpoint without one, load it with "
                "transformers.AutoTokenizer and save_pretrained() it there"
            )
        eos_ids: list[int] = []
        for name in (_GENERATION_FILE, "config.json"):
            found = _read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
            eos_ids += found if isinstance(found, list) else [] if found is None else [found]
        try:
            # Not AutoTokenizer: the classes of some families rebuild the pre-tokenizer without what the
            # file says (SmolLM2 would lose its split of digits).
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"{folder}: the tokenizer cannot be read: {error}") from error
        return cls(tokenizer, eos_ids=eos_ids, source=str(folder))

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """The ids of ``text``, after BOS where the tokenizer's post-processor puts one, and ``bos`` is true.

        Special tokens written out in the text become their ids.
        """
        return self._prefix * bos + self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special tokens; incomplete UTF-8 becomes U+FFFD."""
        return self._backend.decode([int(i) for i in ids if i not in self._special])

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that the token adds; empty for special tokens and for unused ids."""
        if token_id in self._special:
            return b""
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._bytes_of(token)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Apply the chat template, with the header of the answer to come.

        Raises:
            ValueError: there is no chat template, or it refuses the messages.
        """
        if not self.has_chat_template:
            raise ValueError(
                f"{self._source}: the tokenizer has no chat template: make the task's prompts strings, "
                "or put a chat_template.jinja beside the tokenizer"
            )
        import jinja2  # only chat templates need it

        try:
            text = self._hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except jinja2.TemplateError as error:
            raise ValueError(
                f"{self._source}: the chat template refuses the messages {messages!r}: {error}"
            ) from error
        return self._backend.encode(str(text), add_special_tokens=False).ids

    def save(self, folder: Path) -> None:
        """Write the files of a Hugging Face checkpoint, and the EOS ids into its generation config."""
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tokenizer-") as beside:
            self._hf.save_pretrained(beside)
            for path in list(Path(beside).iterdir()):
                os.replace(path, folder / path.name)
        path = folder / _GENERATION_FILE
        generation = _read_json(path) if path.is_file() else {}
        _write_json(path, {**generation, "eos_token_id": list(self.eos_ids)})


def load_tokenizer(folder: Path) -> CharTokenizer | HFTokenizer:
    """The tokenizer that was saved in ``folder``.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    path = Path(folder) / _CHAR_FILE
    if not path.is_file():
        return HFTokenizer.from_folder(folder)
    alphabet = _read_json(path).get("alphabet")
    if not isinstance(alphabet, str):
        raise ValueError(f'{path} must hold {{"alphabet": "..."}}, got {alphabet!r} as alphabet')
    return CharTokenizer(alphabet)


def token_byte_table(tokenizer: Tokenizer) -> list[bytes]:
    """:meth:`Tokenizer.token_bytes` of every id, for automata that run over token ids."""
    return [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]


def _byte_scheme(backend: tokenizers.Tokenizer, source: str) -> Callable[[str], bytes]:
    """How a token's name spells bytes: a function of the name, told from the tokenizer's decoder."""
    decoder = backend.decoder
    description = "" if decoder is None else decoder.__getstate__().decode()
    kinds = set(re.findall(r'"type":"(\w+)"', description))
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    if kinds & {"ByteFallback", "Metaspace"} or "▁" in description:
        return _sentencepiece_bytes
    raise ValueError(
        f"{source}: the tokenizer must be byte-level or of sentencepiece's kind for the bytes of its tokens "
        f"to be known, got the decoder {description or None}"
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's names of the 256 bytes: printable ones name themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {chr(byte): byte for byte in printable}
    return names | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Write beside, then rename: the file is whole or not there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path)
