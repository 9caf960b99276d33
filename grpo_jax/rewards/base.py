"""What a reward function is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

RewardFn = Callable[..., "list[float | None]"]
"""``f(*, prompts, completions, completion_ids, **columns)`` gives one reward a completion.

All arguments are lists of equal length, the completions of one prompt side by side: ``prompts`` and
``completions`` hold texts, ``completion_ids`` the sampled token ids, and each column of the examples
(``answer`` and what else a task has) comes under its own name. A reward is a finite number; None or NaN says
that there is none, which is not the same as 0.
"""


@dataclass(frozen=True)
class Reward:
    """A reward function with the name it is logged under and its weight in the sum."""

    name: str
    fn: RewardFn
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"the weight of reward function {self.name!r} must be finite, got {self.weight}")
