"""Rewards for an answer that must be right to the letter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_jax.rewards.base import Reward


def whole_text(completion: str) -> str | None:
    """The completion without white space around it; None if nothing is left."""
    return completion.strip() or None


def first_line(completion: str) -> str | None:
    """The completion's first line without white space around it; None if nothing is left."""
    return completion.split("\n", 1)[0].strip() or None


def exact_match(
    extract: Callable[[str], str | None] = whole_text, *, name: str = "exact", weight: float = 1.0
) -> Reward:
    """1 where the extracted answer equals the column ``answer`` (without white space around it), else 0.

    Args:
        extract: the answer in a completion; None, where there is none, is wrong.
        name: the reward's name.
        weight: its weight.
    """

    def score(*, completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
        pairs = zip(completions, answer, strict=True)
        return [float(extract(completion) == gold.strip()) for completion, gold in pairs]

    return Reward(name, score, weight)
