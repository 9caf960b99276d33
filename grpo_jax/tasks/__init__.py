"""Tasks by name. One file a task; a file with ``get_task(config)`` can bring another (task "custom")."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Sequence

from grpo_jax.config import Config, TaskConfig
from grpo_jax.tasks.addition import addition
from grpo_jax.tasks.base import Example, Task
from grpo_jax.tasks.gsm8k import gsm8k
from grpo_jax.tasks.jsonl import jsonl
from grpo_jax.tasks.sort import sort_digits

TASKS: dict[str, Callable[[TaskConfig, int], Task]] = {
    "sort": sort_digits,
    "addition": addition,
    "addition1": functools.partial(addition, digits=1),
    "gsm8k": gsm8k,
    "jsonl": jsonl,
}


def make_task(config: Config) -> Task:
    """The task that ``config.task`` names, with its limits and reward weights applied.

    Raises:
        ValueError: the name is unknown, or a setting does not fit the task.
        FileNotFoundError: the task's data is missing.
    """
    name = config.task.name
    if name == "custom":
        raise ValueError("task.name='custom' needs an experiment file that defines get_task(config)")
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"task.name must be one of {sorted(TASKS)}, got {name!r}; {hint}".removesuffix("; "))
    return limited(TASKS[name](config.task, config.seed), config.task)


def limited(task: Task, config: TaskConfig) -> Task:
    """The task with the first ``num_train`` and ``num_heldout`` examples alone, and other reward weights.

    Raises:
        ValueError: the task has fewer examples, or another number of reward functions.
    """
    rewards = task.rewards
    if config.reward_weights is not None:
        if len(config.reward_weights) != len(rewards):
            raise ValueError(
                f"task.reward_weights must hold {len(rewards)} weights, one for each of "
                f"{[reward.name for reward in rewards]}, "
                f"got {len(config.reward_weights)}: {config.reward_weights}"
            )
        pairs = zip(rewards, config.reward_weights, strict=True)
        rewards = tuple(dataclasses.replace(reward, weight=weight) for reward, weight in pairs)
    return dataclasses.replace(
        task,
        train=_first(task.train, config.num_train, "task.num_train", task.name),
        heldout=_first(task.heldout, config.num_heldout, "task.num_heldout", task.name),
        rewards=rewards,
    )


def _first(examples: Sequence[Example], count: int | None, name: str, task: str) -> Sequence[Example]:
    if count is None:
        return examples
    if not 1 <= count <= len(examples):
        raise ValueError(f"{name} must be between 1 and the {len(examples)} that task {task!r} has, got {count}")
    return examples[:count]
