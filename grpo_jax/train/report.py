"""What a step measured: waited for, named, and written to the log and the console."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax
import numpy as np

from grpo_jax.config import Config
from grpo_jax.console import Console
from grpo_jax.evaluate import EvalReport
from grpo_jax.metrics import RunLog
from grpo_jax.rollout.sampler import prompt_text
from grpo_jax.train.sample import Sample

# The compiled step's metrics -> their public names (grpo_jax.metrics.METRICS explains them).
STEP_METRICS = {
    "loss": "Training/Loss",
    "policy_loss": "Training/PolicyLoss",
    "kl_loss": "Training/KLLoss",
    "entropy_loss": "Training/EntropyLoss",
    "kl": "Policy/KL",
    "entropy": "Policy/Entropy",
    "ratio_max": "Policy/RatioMax",
    "ratio_min": "Policy/RatioMin",
    "clip_low_fraction": "Policy/ClipLow",
    "clip_high_fraction": "Policy/ClipHigh",
    "sampler_gap": "Policy/SamplerGapMean",
    "sampler_gap_max": "Policy/SamplerGapMax",
    "importance": "Policy/ImportanceMean",
    "importance_clipped": "Policy/ImportanceClipped",
    "importance_dropped": "Policy/ImportanceDropped",
    "grad_norm": "Training/GradNorm",
    "update_norm": "Training/UpdateNorm",
    "nonfinite_total": "Training/NonFiniteSkipped",
}


STAGES = ("Rollout", "Reward", "Score", "Update")
"""What a step's seconds are given to, each to one."""


class StageClock:
    """Gives every second of the loop to one stage: a lap ends where the next one begins."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        return seconds


@dataclass
class StepReport:
    """One step: arrays that may still be computed, and what the host knows already."""

    step: int
    sample: Sample
    reward_failures: dict[str, int]
    """Of all hosts, by reward function."""
    rewards_PG: np.ndarray
    advantages_PG: np.ndarray
    reward_names: list[str]
    batch_metrics: dict[str, jax.Array | int]
    step_metrics: dict[str, jax.Array]
    learning_rate: Callable[[int, int], float]
    """Of a step and the number of updates skipped so far."""
    epoch: float
    seconds: dict[str, float]
    """Of each of :data:`STAGES`, and parts of them that were waiting."""

    def wait(self, clock: StageClock, max_nonfinite: int) -> None:
        """Wait for the update.

        Raises:
            FloatingPointError: more updates in a row than allowed were skipped for a NaN or Inf gradient.
        """
        jax.block_until_ready(self.step_metrics)
        self.seconds["Update"] += clock.lap()
        in_a_row = int(self.step_metrics["nonfinite_in_a_row"])
        if in_a_row > max_nonfinite:
            loss = float(self.step_metrics["loss"])
            raise FloatingPointError(
                f"step {self.step}: the gradient was NaN or infinite in {in_a_row} updates in a row (loss "
                f"{loss}, gradient norm {float(self.step_metrics['grad_norm'])}); these updates were skipped and "
                "the last checkpoint is intact: lower optimizer.learning_rate or optimizer.clip_norm"
            )

    def metrics(self, num_completions: int, compiled_programs: int) -> dict[str, float]:
        """All metrics of the step, under their public names; ``num_completions`` is P * G of all hosts."""
        step = {STEP_METRICS[k]: float(v) for k, v in self.step_metrics.items() if k in STEP_METRICS}
        metrics = step | {name: float(value) for name, value in self.batch_metrics.items()}
        metrics["Policy/ClipFraction"] = metrics["Policy/ClipLow"] + metrics["Policy/ClipHigh"]
        for name, failures in self.reward_failures.items():
            metrics[f"Training/RewardFailures/{name}"] = failures
        skipped = int(self.step_metrics["nonfinite_total"])
        metrics["Training/LearningRate"] = self.learning_rate(self.step, skipped)
        metrics["Training/Epoch"] = self.epoch
        total = sum(self.seconds[stage] for stage in STAGES)
        metrics |= {f"Performance/{name}Seconds": seconds for name, seconds in self.seconds.items()}
        metrics["Performance/StepSeconds"] = total
        tokens = metrics["Performance/CompletionLength"] * num_completions
        metrics["Performance/TokensPerSecond"] = tokens / total
        metrics["Performance/CompiledPrograms"] = compiled_programs
        return metrics

    def write(
        self,
        log: RunLog,
        console: Console,
        config: Config,
        compiled_programs: int,
        heldout: EvalReport | None,
    ) -> None:
        """Write the step to the log and show it."""
        metrics = self.metrics(config.rollout.num_prompts * config.rollout.group_size, compiled_programs)
        if heldout is not None:
            metrics["Performance/HeldOut/SuccessRate"] = heldout.success_rate.value
            metrics["Performance/HeldOut/GreedyAccuracy"] = heldout.greedy_accuracy.value
        log.scalars(self.step, metrics)
        log.histogram(self.step, "Training/Rewards", self.rewards_PG)
        log.completions(self.step, self._records(config.log.completions_per_step))
        console.advance(metrics)
        every = config.log.table_every
        if every > 0 and (self.step % every == 0 or self.step == 1):
            console.completions_table(self.step, self._rows(config.log.table_prompts))

    def _records(self, count: int) -> list[dict[str, Any]]:
        """The first completions of the first prompts, as many of each as come to ``count``."""
        examples, completions = self.sample.examples, self.sample.completions
        rewards_PGK = self.sample.rewards.rewards_PGK
        group = len(completions.texts[0])
        pairs = [(p, g) for p in range(len(examples)) for g in range(group)][:count]
        return [
            {
                "prompt": prompt_text(examples[p]),
                "answer": examples[p].answer,
                "completion": completions.texts[p][g],
                "rewards": dict(zip(self.reward_names, rewards_PGK[p, g].tolist(), strict=True)),
                "reward": float(self.rewards_PG[p, g]),
                "advantage": float(self.advantages_PG[p, g]),
                "length": int(completions.lengths_PG[p, g]),
                "finished": bool(completions.finished_PG[p, g]),
            }
            for p, g in pairs
        ]

    def _rows(self, num_prompts: int) -> list[tuple[str, list[tuple[str, float, float]]]]:
        """A few prompts, each with its best, middle and worst completion."""
        rows = []
        for p, example in enumerate(self.sample.examples[:num_prompts]):
            order = np.argsort(-self.advantages_PG[p], kind="stable")
            texts = self.sample.completions.texts[p]
            completions = [
                (texts[g], float(self.rewards_PG[p, g]), float(self.advantages_PG[p, g]))
                for g in (order[0], order[len(order) // 2], order[-1])
            ]
            rows.append((prompt_text(example), completions))
        return rows


class CompileCounter:
    """Counts the programs that JAX compiles, from its own monitoring events."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> CompileCounter:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == self.EVENT
