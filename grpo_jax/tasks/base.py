"""What a task is made of: examples, rewards, and the verdict on a completion."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_jax.rewards import Reward
from grpo_jax.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

Message = dict[str, str]
"""A turn of a conversation: its ``role`` and its ``content``."""


@dataclass(frozen=True)
class Example:
    """A problem.

    Raises:
        ValueError: an extra column is named ``answer``.
    """

    prompt: str | list[Message]
    """Text that the model continues, or a conversation that it answers."""
    answer: str
    """The reference answer; reward functions get it as the column ``answer``."""
    columns: dict[str, Any] = field(default_factory=dict)
    """What else reward functions get, by name."""
    demonstration: str | None = None
    """A completion to imitate in a supervised start."""

    def __post_init__(self) -> None:
        if "answer" in self.columns:
            raise ValueError("columns must not hold 'answer': that is a field of the example")


@dataclass(frozen=True)
class Completion:
    """What a model wrote after a prompt."""

    text: str
    """Decoded, without special tokens; a stop string is left in."""
    num_tokens: int
    """Sampled tokens, the end-of-sequence token included."""
    finished: bool
    """False: cut off at the length limit."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Problems, and how their completions are judged."""

    name: str
    train: Sequence[Example]
    heldout: Sequence[Example]
    rewards: tuple[Reward, ...]
    extract: Callable[[str], str | None]
    """The answer in a completion, in a form that can be compared, for majority votes; None: it gives none."""
    correct: Callable[[str, Example], bool]
    """Whether a completion solves the example. Any text may come."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    tokenizer: Tokenizer | None = None
    """The task's own, for models that start from random weights."""


def verdict(task: Task, text: str, example: Example) -> bool:
    """Whether a completion solves the example; False, with the traceback logged, where the task cannot tell."""
    try:
        return bool(task.correct(text, example))
    except Exception:
        _log.exception("task %r: correct() failed on %r, which counts as wrong", task.name, text[:200])
        return False


def plain_prompt(messages: Sequence[Message]) -> str:
    """A conversation as plain text that ends where the answer begins, for models without a chat template."""
    labels = {"user": "User: ", "assistant": "Assistant: ", "system": ""}
    turns = [labels.get(m["role"], f"{m['role'].capitalize()}: ") + m["content"] for m in messages]
    return "\n\n".join([*turns, "Assistant:"])


def reward_columns(examples: Sequence[Example]) -> dict[str, list[Any]]:
    """``answer`` and all extra columns as lists of one value an example; None where an example has none."""
    names = dict.fromkeys(name for example in examples for name in example.columns)
    columns: dict[str, list[Any]] = {"answer": [example.answer for example in examples]}
    columns |= {name: [example.columns.get(name) for example in examples] for name in names}
    return columns


def hash_share(text: str) -> float:
    """A number in [0, 1) that depends on ``text`` alone, uniform over texts: for splits that never move."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
