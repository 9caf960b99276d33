"""Rewards for the form of a completion, whatever its answer."""

from __future__ import annotations

import re
from typing import Any

from grpo_jax.rewards.base import Reward


def format_match(pattern: str, *, name: str = "format", weight: float = 1.0) -> Reward:
    r"""1 where the whole completion, without white space around it, matches a regular expression, else 0.

    Args:
        pattern: for Python's ``re``; a dot matches newlines too.
        name: the reward's name.
        weight: its weight.

    Raises:
        ValueError: the pattern is no regular expression.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern must be a regular expression, got {pattern!r}: {error}") from error

    def score(*, completions: list[str], **_: Any) -> list[float | None]:
        return [float(compiled.fullmatch(completion.strip()) is not None) for completion in completions]

    return Reward(name, score, weight)
