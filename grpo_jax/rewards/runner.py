"""Calling reward functions on a batch of groups: what raises is missing and counted, the run goes on.

P prompts, G completions a prompt, K reward functions.
"""

from __future__ import annotations

import logging
import math
import numbers
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_jax.rewards.base import Reward

_log = logging.getLogger(__name__)

_LARGEST = float(np.finfo(np.float32).max)
_OWN_ARGUMENTS = ("prompts", "completions", "completion_ids")


@dataclass
class RewardResult:
    """The rewards of a batch."""

    rewards_PGK: np.ndarray
    """float32; NaN where a function gave none."""
    failures: dict[str, int]
    """Samples that a function raised on, or gave an infinite reward, by the function's name."""


class RewardRunner:
    """Calls each reward function on whole batches; safe to call from any thread.

    A function that raises on a batch is called again sample by sample, so that only the samples that it
    raises on are missing. The traceback of the first failure of each function is logged.

    Raises:
        ValueError: there is no reward function, or two of one name.
    """

    def __init__(self, rewards: Sequence[Reward]) -> None:
        names = [reward.name for reward in rewards]
        if not names:
            raise ValueError("rewards must hold at least one reward function, got none")
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"rewards must have different names, got {repeated} more than once")
        self.rewards = tuple(rewards)
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def __call__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[Sequence[str]],
        completion_ids: Sequence[Sequence[Sequence[int]]],
        columns: dict[str, list[Any]],
    ) -> RewardResult:
        """Rewards of P groups of G completions.

        Args:
            prompts: P texts.
            completions: ``[P][G]`` texts.
            completion_ids: ``[P][G]`` lists of token ids.
            columns: lists of P values, handed to the functions by name.

        Raises:
            ValueError: the arguments do not fit each other, or a function returned a list of the wrong
                length or of something else than numbers and None.
        """
        num_prompts, group_size = len(prompts), len(completions[0]) if completions else 0
        _check_batch(num_prompts, group_size, completions, completion_ids, columns)
        batch: dict[str, list[Any]] = {
            name: [value for value in values for _ in range(group_size)]
            for name, values in {**columns, "prompts": list(prompts)}.items()
        }
        batch["completions"] = [text for group in completions for text in group]
        batch["completion_ids"] = [list(ids) for group in completion_ids for ids in group]
        rewards_PGK = np.full((num_prompts, group_size, len(self.rewards)), np.nan, np.float32)
        failures = {}
        for column, reward in enumerate(self.rewards):
            values, failures[reward.name] = self._score(reward, batch)
            rewards_PGK[..., column] = np.array(values, np.float32).reshape(num_prompts, group_size)
        return RewardResult(rewards_PGK=rewards_PGK, failures=failures)

    def _score(self, reward: Reward, batch: dict[str, list[Any]]) -> tuple[list[float], int]:
        """One reward a sample, NaN where missing, and how many are missing because of a failure."""
        size = len(batch["completions"])
        values = self._call(reward, batch, size)
        if values is None:
            values = []
            for row in range(size):
                one = self._call(reward, {name: column[row : row + 1] for name, column in batch.items()}, 1)
                # Infinity stands for a failure until it is counted below.
                values += [math.inf] if one is None else one
        failed = sum(math.isinf(value) for value in values)
        if failed:
            self._log_once(reward, f"{failed} of {size} samples have an infinite reward or none", error=False)
        return [math.nan if math.isinf(value) else value for value in values], failed

    def _call(self, reward: Reward, batch: dict[str, list[Any]], size: int) -> list[float] | None:
        """The function's checked result, or None if it raised."""
        try:
            result = reward.fn(**batch)
        except Exception:
            self._log_once(reward, "raised; the samples that it raises on get no reward from it", error=True)
            return None
        return _checked(reward.name, result, size)

    def _log_once(self, reward: Reward, what: str, *, error: bool) -> None:
        with self._lock:
            if reward.name in self._logged:
                return
            self._logged.add(reward.name)
        _log.warning("reward function %r %s (said once)", reward.name, what, exc_info=error)


def _checked(name: str, result: Any, size: int) -> list[float]:
    """A function's result as floats: NaN for None, infinity for what float32 cannot hold."""
    if not isinstance(result, (list, tuple, np.ndarray)):
        raise ValueError(f"reward function {name!r} must return a list, got {type(result).__name__}")
    if len(result) != size:
        raise ValueError(
            f"reward function {name!r} must return one reward a completion: expected {size}, got {len(result)}"
        )
    for row, value in enumerate(result):
        # np.bool_ is no numbers.Real, and a comparison of arrays gives it.
        if value is not None and not isinstance(value, (numbers.Real, np.bool_)):
            raise ValueError(
                f"reward function {name!r} must return numbers and None, got {value!r} for completion {row}"
            )
    return [_as_float(value) for value in result]


def _as_float(value: Any) -> float:
    if value is None:
        return math.nan
    return math.inf if abs(value) > _LARGEST else float(value)


def _check_batch(
    num_prompts: int,
    group_size: int,
    completions: Sequence[Sequence[str]],
    completion_ids: Sequence[Sequence[Sequence[int]]],
    columns: dict[str, list[Any]],
) -> None:
    for name, groups in (("completions", completions), ("completion_ids", completion_ids)):
        sizes = {len(group) for group in groups}
        if len(groups) != num_prompts or sizes - {group_size}:
            raise ValueError(
                f"{name} must hold {num_prompts} groups of {group_size}, "
                f"got {len(groups)} of sizes {sorted(sizes)}"
            )
    for name, values in columns.items():
        if name in _OWN_ARGUMENTS:
            raise ValueError(f"a column must not be named {name!r}: rename it, reward functions have that already")
        if len(values) != num_prompts:
            raise ValueError(f"column {name!r} must hold {num_prompts} values, one a prompt, got {len(values)}")
