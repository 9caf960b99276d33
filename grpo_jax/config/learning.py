"""By which optimizer, from which start, and against which reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_jax.config.checks import require


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """How the reference policy moves (without effect when objective.beta is 0)."""

    update: Literal["fixed", "sync", "polyak"] = "fixed"
    """Never; a copy of the policy each sync_every steps; or a moving average of it."""
    sync_every: int = 100
    """Steps between copies (update "sync")."""
    polyak_rate: float = 0.005
    """ref <- (1 - rate) * ref + rate * policy after each step (update "polyak")."""

    def __post_init__(self) -> None:
        require(self.sync_every >= 1, "reference.sync_every", self.sync_every, "at least 1")
        require(0 < self.polyak_rate <= 1, "reference.polyak_rate", self.polyak_rate, "in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The Optax chain: clip, precondition, decay, schedule."""

    name: Literal["adamw", "lion", "adafactor", "sgd"] = "adamw"
    """The preconditioner."""
    learning_rate: float = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises linearly from 0."""
    final_fraction: float = 0.0
    """The learning rate ends at this fraction of its peak (schedules "linear" and "cosine")."""
    b1: float = 0.9
    """Decay of the first moment (momentum for "sgd")."""
    b2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay, scaled by the learning rate."""
    decay: Literal["matrices", "all"] = "matrices"
    """What decays: matrices other than embeddings, or every parameter."""
    clip_norm: float | None = 1.0
    """Largest global norm of the gradient; None for no clipping."""
    max_nonfinite: int = 5
    """Updates in a row with a NaN or Inf gradient that are skipped before the run stops."""

    def __post_init__(self) -> None:
        require(self.learning_rate >= 0, "optimizer.learning_rate", self.learning_rate, "at least 0")
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "at least 0")
        require(0 <= self.final_fraction <= 1, "optimizer.final_fraction", self.final_fraction, "in [0, 1]")
        require(0 <= self.b1 < 1, "optimizer.b1", self.b1, "at least 0 and below 1")
        require(0 <= self.b2 < 1, "optimizer.b2", self.b2, "at least 0 and below 1")
        require(self.eps >= 0, "optimizer.eps", self.eps, "at least 0")
        require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "at least 0")
        require(
            self.clip_norm is None or self.clip_norm > 0,
            "optimizer.clip_norm",
            self.clip_norm,
            "above 0, or None",
        )
        require(self.max_nonfinite >= 0, "optimizer.max_nonfinite", self.max_nonfinite, "at least 0")


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """A supervised start on the task's demonstrations, before GRPO."""

    steps: int = 0
    """Updates; 0 for none."""
    batch_size: int = 128
    """Demonstrations an update."""
    learning_rate: float = 1e-3
    """Peak learning rate of the warm start (linear warm-up over a tenth, then cosine to 0)."""

    def __post_init__(self) -> None:
        require(self.steps >= 0, "warm_start.steps", self.steps, "at least 0")
        require(self.batch_size >= 1, "warm_start.batch_size", self.batch_size, "at least 1")
        require(self.learning_rate > 0, "warm_start.learning_rate", self.learning_rate, "above 0")
