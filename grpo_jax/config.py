"""The configuration of a run: frozen dataclasses that refuse a bad value before any work is done.

Every field can be overridden on the command line (``--rollout.group-size 16``). What can be judged from
the values alone is judged here; what needs the devices or the tokenizer is judged when the run is set up.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal


def _require(ok: bool, name: str, value: object, remedy: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {remedy}, got {value!r}")


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
    """What the backward pass recomputes: nothing, all but matrix products, or whole layers."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "ffn_width", "num_heads", "num_kv_heads"):
            value = getattr(self, name)
            _require(value >= 1, f"model.{name}", value, "at least 1")
        if self.width % self.num_heads or (self.width // self.num_heads) % 2:
            raise ValueError(
                f"model.width ({self.width}) must be an even multiple of model.num_heads ({self.num_heads})"
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

    def __post_init__(self) -> None:
        for name in ("num_prompts", "group_size", "max_prompt_length", "max_completion_length"):
            value = getattr(self, name)
            _require(value >= 1, f"rollout.{name}", value, "at least 1")
        if not self.temperature > 0:
            raise ValueError(
                f"rollout.temperature must be above 0 in training, got {self.temperature}: greedy samples "
                "of a group are all equal and teach nothing (evaluation has a greedy mode)"
            )
        _require(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "in (0, 1]")
        _require(self.top_k >= 0, "rollout.top_k", self.top_k, "at least 0 (0 keeps all)")
        _require(0 <= self.min_p < 1, "rollout.min_p", self.min_p, "in [0, 1)")
        if self.num_slots is not None:
            slots, group = self.num_slots, self.group_size
            fits = 1 <= slots <= self.num_prompts * group and (
                slots % group == 0 if slots >= group else group % slots == 0
            )
            if not fits:
                raise ValueError(
                    f"rollout.num_slots ({slots}) must be a multiple or a divisor of rollout.group_size "
                    f"({group}) and at most num_prompts * group_size ({self.num_prompts * group})"
                )

    @property
    def truncates_distribution(self) -> bool:
        """Whether samples come from less than the full distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The loss: independent choices that are composed (definitions: grpo_jax.algorithms)."""

    advantage: Literal["group", "center", "leave_one_out"] = "group"
    """How rewards become advantages within a group."""
    advantage_eps: float = 1e-4
    """Added to the group's standard deviation (advantage "group")."""
    advantage_ddof: Literal[0, 1] = 1
    """Degrees of freedom taken off in the group's standard deviation."""
    surrogate: Literal["clip"] = "clip"
    """The surrogate a token."""
    ratio: Literal["token"] = "token"
    """The importance ratio."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high."""
    aggregate: Literal["sequence_mean", "token_mean", "constant"] = "token_mean"
    """How token losses become one number."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence to the reference."""
    beta: float = 0.0
    """Weight of the KL term; 0 loads no reference model."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    importance: Literal["auto", "none", "token"] = "auto"
    """Weights that correct for a sampler that differs from the policy: min(exp(old - sampler), cap) a
    token. "auto": on where top-p, top-k or min-p truncate the distribution."""
    importance_cap: float = 2.0
    """Largest importance weight."""
    truncated: Literal["keep", "mask"] = "keep"
    """Completions cut off at the length limit: train on them, or mask them out of the whole loss."""
    zero_spread: Literal["keep", "mask"] = "keep"
    """Groups of equal rewards, whose advantages are 0: keep their KL term, or mask them out."""

    def __post_init__(self) -> None:
        _require(self.advantage_eps >= 0, "objective.advantage_eps", self.advantage_eps, "at least 0")
        _require(0 <= self.clip_low <= 1, "objective.clip_low", self.clip_low, "in [0, 1]")
        _require(self.clip_high >= 0, "objective.clip_high", self.clip_high, "at least 0")
        _require(self.beta >= 0, "objective.beta", self.beta, "at least 0")
        _require(self.importance_cap > 0, "objective.importance_cap", self.importance_cap, "above 0")


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
        _require(self.sync_every >= 1, "reference.sync_every", self.sync_every, "at least 1")
        _require(0 < self.polyak_rate <= 1, "reference.polyak_rate", self.polyak_rate, "in (0, 1]")


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
        _require(self.learning_rate >= 0, "optimizer.learning_rate", self.learning_rate, "at least 0")
        _require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "at least 0")
        _require(0 <= self.final_fraction <= 1, "optimizer.final_fraction", self.final_fraction, "in [0, 1]")
        _require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "at least 0")
        _require(
            self.clip_norm is None or self.clip_norm > 0,
            "optimizer.clip_norm",
            self.clip_norm,
            "above 0, or None",
        )
        _require(self.max_nonfinite >= 0, "optimizer.max_nonfinite", self.max_nonfinite, "at least 0")


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
        _require(self.steps >= 0, "warm_start.steps", self.steps, "at least 0")
        _require(self.batch_size >= 1, "warm_start.batch_size", self.batch_size, "at least 1")


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
            _require(value >= 1, f"train.{name}", value, "at least 1")


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
        _require(self.every >= 0, "eval.every", self.every, "at least 0")
        for name in ("num_problems", "samples", "batch_size"):
            value = getattr(self, name)
            _require(value >= 1, f"eval.{name}", value, "at least 1")
        _require(self.temperature > 0, "eval.temperature", self.temperature, "above 0")


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
            _require(size >= 1 or size == -1, f"mesh.{name}", size, "at least 1, or -1 for the rest")
        _require(sizes.count(-1) <= 1, "mesh", sizes, "given at most one -1")


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
        _require(self.every >= 1, "checkpoint.every", self.every, "at least 1")
        _require(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")
        _require(self.keep_best >= 0, "checkpoint.keep_best", self.keep_best, "at least 0")


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
        _require(self.every >= 1, "log.every", self.every, "at least 1")
        _require(self.table_every >= 0, "log.table_every", self.table_every, "at least 0")
        _require(self.table_prompts >= 1, "log.table_prompts", self.table_prompts, "at least 1")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run. An experiment file returns one from get_config()."""

    experiment: str = "custom"
    """Name of the experiment; the run's folder is named after it."""
    seed: int = 0
    """Seed of weights, data order and samples."""
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        group_size = self.rollout.group_size
        if group_size < 2:
            raise ValueError(
                f"rollout.group_size must be at least 2 for objective.advantage="
                f"{self.objective.advantage!r}, got {group_size}: a group of one has no mean to differ from"
            )
        _require_divides(
            "train.prompt_micro_batches",
            self.train.prompt_micro_batches,
            "rollout.num_prompts",
            self.rollout.num_prompts,
        )
        _require_divides(
            "train.group_micro_batches",
            self.train.group_micro_batches,
            "rollout.group_size",
            group_size,
        )
        if self.objective.beta == 0 and self.reference.update != "fixed":
            warnings.warn(
                f"reference.update={self.reference.update!r} has no effect: objective.beta is 0, "
                "so there is no reference",
                stacklevel=2,
            )


def _require_divides(part: str, parts: int, whole: str, size: int) -> None:
    """Refuse a split that leaves a rest, and name the nearest ones that don't."""
    if size % parts:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        below = max((d for d in divisors if d < parts), default=1)
        above = min((d for d in divisors if d > parts), default=size)
        raise ValueError(
            f"{part} ({parts}) must divide {whole} ({size}); the nearest that do are {below} and {above}"
        )


def config_to_dict(config: Config) -> dict[str, Any]:
    """The config as nested dictionaries of JSON values."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return values


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """The config that :func:`config_to_dict` wrote.

    Raises:
        ValueError: an unknown field, or a value that the config refuses.
    """
    sections = {f.name: f.default_factory for f in fields(Config) if f.default_factory is not MISSING}
    parts: dict[str, Any] = {}
    for name, value in values.items():
        section = sections.get(name)
        if section is None:
            parts[name] = value
            continue
        known = {f.name for f in fields(section)}  # type: ignore[arg-type]
        for field_name in value:
            _require(field_name in known, f"{name}.{field_name}", value[field_name], "a field of the config")
        # JSON has lists where the config has tuples.
        parts[name] = section(**{k: tuple(v) if isinstance(v, list) else v for k, v in value.items()})
    for name in parts:
        _require(name in {f.name for f in fields(Config)}, name, parts[name], "a field of the config")
    return Config(**parts)
