"""The loop, evaluation, devices, and what is saved and shown."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_jax.config.checks import require


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop."""

    steps: int = 100
    """Batches of rollouts to train on."""
    updates_per_batch: int = 1
    """mu: optimizer updates on each batch of rollouts."""
    prompt_micro_batches: int = 1
    """Parts into which the batch's prompts are split; their gradients are summed."""
    group_micro_batches: int = 1
    """Parts into which each group is split too (each recomputes the prompt)."""
    logps_chunk: int = 2048
    """Tokens whose logits are held at a time."""
    packing: bool = True
    """Completions of 128 tokens and more are laid one after the other in all, half or a quarter of a group's rows,
    whichever holds those of each prompt; not where groups are split (group_micro_batches, mesh.group)."""
    skip_zero_advantages: bool = False
    """With packing: completions of advantage 0 pass through no model, and count in no metric of the policy."""
    shuffle_rewards: bool = False
    """A control: rewards are shuffled within the batch, so that there is nothing to learn."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "updates_per_batch",
            "prompt_micro_batches",
            "group_micro_batches",
            "logps_chunk",
        ):
            value = getattr(self, name)
            require(value >= 1, f"train.{name}", value, "at least 1")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out problems, before, during and after training."""

    every: int = 0
    """Steps between evaluations; 0: only before and after."""
    num_problems: int = 256
    """Held-out problems used while training."""
    samples: int = 4
    """Samples a problem at temperature; success rate, pass@k and maj@k are estimated from them."""
    temperature: float = 1.0
    """Sampling temperature of these samples."""
    batch_size: int = 64
    """Problems generated at a time."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "eval.every", self.every, "at least 0")
        for name in ("num_problems", "samples", "batch_size"):
            value = getattr(self, name)
            require(value >= 1, f"eval.{name}", value, "at least 1")
        require(self.temperature > 0, "eval.temperature", self.temperature, "above 0")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each mesh axis takes; one may be -1: all that are left."""

    data: int = -1
    """Prompts are split over it; weights are whole on each."""
    fsdp: int = 1
    """Prompts and weights are split over it."""
    group: int = 1
    """Completions of a group are split over it."""
    tensor: int = 1
    """Heads, feed-forward width and vocabulary are split over it."""

    def __post_init__(self) -> None:
        sizes = (self.data, self.fsdp, self.group, self.tensor)
        for name, size in zip(("data", "fsdp", "group", "tensor"), sizes, strict=True):
            require(size >= 1 or size == -1, f"mesh.{name}", size, "at least 1, or -1 for the rest")
        require(sizes.count(-1) <= 1, "mesh", sizes, "given at most one -1")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved, and how often."""

    every: int = 50
    """Steps between checkpoints; one is always written at the end and on Ctrl-C."""
    keep: int = 2
    """Newest checkpoints kept."""
    keep_best: int = 1
    """Checkpoints of the best held-out success rate kept beside them."""

    def __post_init__(self) -> None:
        require(self.every >= 1, "checkpoint.every", self.every, "at least 1")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")
        require(self.keep_best >= 0, "checkpoint.keep_best", self.keep_best, "at least 0")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is shown and written while a run goes on."""

    every: int = 1
    """Steps between lines of the console's log when it is piped into a file."""
    table_every: int = 20
    """Steps between tables of prompts with completions, rewards and advantages; 0 for none."""
    table_prompts: int = 3
    """Prompts in such a table."""
    completions_per_step: int = 8
    """Completions written to completions.jsonl a step."""

    def __post_init__(self) -> None:
        require(self.every >= 1, "log.every", self.every, "at least 1")
        require(self.table_every >= 0, "log.table_every", self.table_every, "at least 0")
        require(
            self.completions_per_step >= 0, "log.completions_per_step", self.completions_per_step, "at least 0"
        )
        require(self.table_prompts >= 1, "log.table_prompts", self.table_prompts, "at least 1")
