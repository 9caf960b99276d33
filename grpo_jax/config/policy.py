"""What is trained, on what, and how it is sampled from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_jax.config.checks import require, require_divides


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network is trained, and in which precision."""

    path: str | None = None
    """A Hugging Face checkpoint folder or a .gguf file. None: random weights of the shape below."""
    num_layers: int = 4
    """Decoder layers (this and the other shape fields count only where path is None)."""
    width: int = 192
    """Model width."""
    ffn_width: int = 512
    """Width of the feed-forward layer."""
    num_heads: int = 6
    """Query heads; the head width is width / num_heads."""
    num_kv_heads: int = 2
    """Key-value heads; divides num_heads."""
    rope_theta: float = 10_000.0
    """Base of the rotary position frequencies."""
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    tie_embeddings: bool = True
    """Use the input embedding as the output matrix."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of activations and caches; the master weights are float32 in either case."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes: nothing, all but matrix products and attention, or whole layers."""
    remat_every: int = 1
    """Layers that are recomputed together (remat "dots" and "full"); divides the model's layers. Of each such
    block only the input is kept, and one block's activations are held at a time."""
    attention: Literal["auto", "plain", "cudnn", "splash"] = "auto"
    """What computes the attention of scoring and of the update: cuDNN's kernel (NVIDIA GPUs, bfloat16), the Pallas
    splash kernel (TPUs), or plain JAX; auto: the kernel of the device where one fits. Sampling is plain always."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "ffn_width", "num_heads", "num_kv_heads", "remat_every"):
            value = getattr(self, name)
            require(value >= 1, f"model.{name}", value, "at least 1")
        require(self.rope_theta > 0, "model.rope_theta", self.rope_theta, "above 0")
        require(self.norm_eps >= 0, "model.norm_eps", self.norm_eps, "at least 0")
        if self.width % self.num_heads or (self.width // self.num_heads) % 2:
            raise ValueError(
                f"model.width ({self.width}) must be an even multiple of model.num_heads ({self.num_heads})"
            )
        if self.attention == "cudnn" and self.compute_dtype == "float32":
            raise ValueError(
                "model.attention='cudnn' has no float32: use model.compute_dtype='bfloat16', or "
                "model.attention='plain', got model.compute_dtype='float32'"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads ({self.num_heads}) must be a multiple of "
                f"model.num_kv_heads ({self.num_kv_heads})"
            )


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Where prompts and rewards come from."""

    name: str = "sort"
    """A task of grpo_jax.tasks.TASKS, or "custom" where the experiment file defines get_task(config)."""
    path: str | None = None
    """The task's data file or folder, for tasks that read one."""
    heldout_path: str | None = None
    """A data file of held-out problems. None: the task's own split."""
    num_train: int | None = None
    """Use only so many training prompts. None: all."""
    num_heldout: int | None = None
    """Use only so many held-out prompts. None: all."""
    reward_weights: tuple[float, ...] | None = None
    """One weight a reward function, in the task's order. None: the task's own."""
    long_prompts: Literal["error", "drop"] = "error"
    """Prompts over rollout.max_prompt_length: refuse to start, or leave them out and say how many."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How completions are sampled."""

    num_prompts: int = 64
    """P, prompts a step, over all hosts."""
    group_size: int = 16
    """G, completions a prompt."""
    max_prompt_length: int = 64
    """S, tokens; shorter prompts are padded on the left."""
    max_completion_length: int = 64
    """T, tokens; a completion that has not ended by then is truncated."""
    temperature: float = 1.0
    """Sampling temperature; the trainer's log-probabilities use it too."""
    top_p: float = 1.0
    """Keep the most probable tokens that hold this much probability; 1 keeps all."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as probable as the best one; 0 keeps all."""
    num_slots: int | None = None
    """Completions decoded at a time; finished ones make room for pending ones. None: all P * G."""
    extra_rollouts: int = 0
    """Dynamic sampling: rollouts a step, at most, that replace groups without spread by others of new prompts.
    Groups that are still without spread then stay (objective.zero_spread says what becomes of them)."""
    spread_of: Literal["correct", "rewards"] = "correct"
    """Spread of what: the task's verdict on each completion, or its combined reward before any shaping."""
    overlap: bool = False
    """Sample a batch in parts, and run the rewards of each in a thread beside the sampling of the next. The
    draws, and the order of rollouts and updates, stay the same; reward functions see a part at a time."""
    overlap_parts: int = 4
    """Parts of the batch's prompts (rollout.overlap)."""
    steps_ahead: Literal[0, 1] = 0
    """1: sample the next batch beside this one's rewards, with the policy from before this one's update: samples
    are off-policy by one update, which objective.importance corrects."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "group_size", "max_prompt_length", "max_completion_length"):
            value = getattr(self, name)
            require(value >= 1, f"rollout.{name}", value, "at least 1")
        if not self.temperature > 0:
            raise ValueError(
                f"rollout.temperature must be above 0 in training, got {self.temperature}: greedy samples "
                "of a group are all equal and teach nothing (evaluation has a greedy mode)"
            )
        require(self.extra_rollouts >= 0, "rollout.extra_rollouts", self.extra_rollouts, "at least 0")
        require(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "in (0, 1]")
        require(self.top_k >= 0, "rollout.top_k", self.top_k, "at least 0 (0 keeps all)")
        require(0 <= self.min_p < 1, "rollout.min_p", self.min_p, "in [0, 1)")
        self._check_overlap()
        if self.num_slots is not None:
            slots, group = self.num_slots, self.group_size
            most = self.num_prompts * group
            why = f"at least 1 and at most num_prompts * group_size ({most})"
            require(1 <= slots <= most, "rollout.num_slots", slots, why)
            part = self.num_prompts // self.num_parts * group
            if slots > part:
                raise ValueError(
                    f"rollout.num_slots ({slots}) must be at most num_prompts * group_size / overlap_parts "
                    f"({part}) with rollout.overlap, which samples a part at a time: lower it, or "
                    "rollout.overlap_parts, or leave it None"
                )

    def _check_overlap(self) -> None:
        name, ahead = "rollout.steps_ahead", self.steps_ahead
        require(ahead in (0, 1), name, ahead, "0 or 1")
        require(self.overlap_parts >= 2, "rollout.overlap_parts", self.overlap_parts, "at least 2")
        if self.overlap:
            require(
                self.num_prompts >= 2, "rollout.num_prompts", self.num_prompts, "at least 2 with rollout.overlap"
            )
            why = "0 with rollout.overlap: with 1 the rewards run beside the next batch's sampling already"
            require(ahead == 0, name, ahead, why)
            require_divides("rollout.overlap_parts", self.overlap_parts, "rollout.num_prompts", self.num_prompts)

    @property
    def num_parts(self) -> int:
        """Parts of its prompts that a batch is sampled in."""
        return self.overlap_parts if self.overlap else 1

    @property
    def truncates_distribution(self) -> bool:
        """Whether samples come from less than the full distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def off_policy(self) -> bool:
        """Whether samples come from another distribution than that of the policy that learns from them."""
        return self.truncates_distribution or self.steps_ahead > 0
