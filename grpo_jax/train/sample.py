"""A batch of judged completions, and dynamic sampling: groups that teach nothing are replaced by others."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.algorithms.advantages import weighted_sum, zero_spread
from grpo_jax.mesh import PROMPT_AXES, host_rows, sum_over_hosts, to_mesh
from grpo_jax.rewards import RewardResult
from grpo_jax.rollout.sampler import HostRollout
from grpo_jax.tasks.base import Example
from grpo_jax.train.session import Session
from grpo_jax.types import Array, Rollout


@dataclass(frozen=True)
class Sample:
    """A rollout and what was made of it; but for ``rollout`` this host's rows alone."""

    examples: list[Example]
    rollout: Rollout
    completions: HostRollout
    rewards: RewardResult
    correct_PG: np.ndarray
    """bool; the task's verdict."""
    judged_in: float
    """Seconds that the reward functions and the verdict took."""


def judge_rollout(session: Session, examples: list[Example], rollout: Rollout, completions: HostRollout) -> Sample:
    """Run the reward functions and the task's verdict; in any thread."""
    start = time.perf_counter()
    rewards = session.reward(examples, completions)
    correct_PG = session.judge(examples, completions)
    return Sample(examples, rollout, completions, rewards, correct_PG, judged_in=time.perf_counter() - start)


def join_samples(session: Session, parts: Sequence[Sample]) -> Sample:
    """One sample of N parts, the i-th of which holds its prompts i, i + N, ..."""
    if len(parts) == 1:
        return parts[0]
    with jax.set_mesh(session.mesh):
        rollout = session.join_rollouts([part.rollout for part in parts])

    def rows(arrays: list[np.ndarray]) -> np.ndarray:
        return np.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:])

    def items(lists: list[list]) -> list:  # type: ignore[type-arg]
        return [item for row in zip(*lists, strict=True) for item in row]

    completions = [part.completions for part in parts]
    failures = [part.rewards.failures for part in parts]
    return Sample(
        examples=items([part.examples for part in parts]),
        rollout=rollout,
        completions=HostRollout(
            token_ids=items([c.token_ids for c in completions]),
            texts=items([c.texts for c in completions]),
            lengths_PG=rows([c.lengths_PG for c in completions]),
            finished_PG=rows([c.finished_PG for c in completions]),
        ),
        rewards=RewardResult(
            rewards_PGK=rows([part.rewards.rewards_PGK for part in parts]),
            failures={name: sum(counts[name] for counts in failures) for name in failures[0]},
        ),
        correct_PG=rows([part.correct_PG for part in parts]),
        judged_in=sum(part.judged_in for part in parts),
    )


def replace_groups(
    session: Session, sample: Sample, draw: Callable[[Array], Sample], key: Array
) -> tuple[Sample, int]:
    """Put groups with spread in the place of those without, from at most ``rollout.extra_rollouts`` new batches.

    "DAPO" (arXiv 2503.14476) samples until the batch is full; here the number of extra rollouts is bounded, and
    what is left without spread then stays. Each host replaces among its own prompts, and all go on while any
    needs to.

    Args:
        session: the run's.
        sample: the batch.
        draw: samples and judges a whole batch with a random key.
        key: the batch's random key.

    Returns:
        The sample, and the number of extra rollouts.
    """
    rows = host_rows(session.config.rollout.num_prompts, session.mesh)
    extra = 0
    while extra < session.config.rollout.extra_rollouts:
        without = np.flatnonzero(_without_spread(session, sample))
        if sum_over_hosts(np.array([len(without)], np.int32))[0] == 0:
            break
        extra += 1
        # Beyond the indices of samples, and of the key that shuffles rewards.
        other = draw(jax.random.fold_in(key, 2**31 + extra))
        new = np.flatnonzero(~_without_spread(session, other))
        source_P = np.full(len(sample.examples), -1, np.int32)
        source_P[without[: len(new)]] = new[: len(without)]
        sample = _merge(session, sample, other, source_P, rows.start)
    return sample, extra


def _without_spread(session: Session, sample: Sample) -> np.ndarray:
    """Which of this host's groups have completions that are all alike; see ``rollout.spread_of``."""
    if session.config.rollout.spread_of == "correct":
        values_PG = jnp.asarray(sample.correct_PG, jnp.float32)
    else:
        values_PG = weighted_sum(jnp.asarray(sample.rewards.rewards_PGK), jnp.asarray(session.reward_weights))
    return np.asarray(zero_spread(values_PG))


def _merge(session: Session, sample: Sample, other: Sample, source_P: np.ndarray, first_row: int) -> Sample:
    """``sample`` with groups of ``other`` where ``source_P`` names one, by its row on this host (-1: none)."""
    index_P = np.where(source_P < 0, source_P, source_P + first_row)
    with jax.set_mesh(session.mesh):
        rollout = session.take_groups(sample.rollout, other.rollout, to_mesh(index_P, PROMPT_AXES, session.mesh))

    def rows(mine: np.ndarray, others: np.ndarray) -> np.ndarray:
        taken = others[np.maximum(source_P, 0)]
        return np.where((source_P >= 0).reshape(-1, *(1,) * (mine.ndim - 1)), taken, mine)

    def items(mine: list, others: list) -> list:  # type: ignore[type-arg]
        return [others[s] if s >= 0 else own for s, own in zip(source_P, mine, strict=True)]

    a, b = sample.completions, other.completions
    failures = {name: n + other.rewards.failures[name] for name, n in sample.rewards.failures.items()}
    rewards_PGK = rows(sample.rewards.rewards_PGK, other.rewards.rewards_PGK)
    return Sample(
        examples=items(sample.examples, other.examples),
        rollout=rollout,
        completions=HostRollout(
            token_ids=items(a.token_ids, b.token_ids),
            texts=items(a.texts, b.texts),
            lengths_PG=rows(a.lengths_PG, b.lengths_PG),
            finished_PG=rows(a.finished_PG, b.finished_PG),
        ),
        rewards=dataclasses.replace(sample.rewards, rewards_PGK=rewards_PGK, failures=failures),
        correct_PG=rows(sample.correct_PG, other.correct_PG),
        judged_in=sample.judged_in + other.judged_in,
    )
