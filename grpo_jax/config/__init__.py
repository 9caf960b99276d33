"""The configuration of a run: frozen dataclasses that refuse a bad value before any work is done.

Every field can be overridden on the command line (``--rollout.group-size 16``). What can be judged from
the values alone is judged here; what needs the devices or the tokenizer is judged when the run is set up.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any

from grpo_jax.config.checks import require, require_divides, require_representable
from grpo_jax.config.combinations import COVARIANCE_SURROGATES
from grpo_jax.config.learning import OptimizerConfig, ReferenceConfig, WarmStartConfig
from grpo_jax.config.objective import ObjectiveConfig
from grpo_jax.config.policy import ModelConfig, RolloutConfig, TaskConfig
from grpo_jax.config.run import CheckpointConfig, EvalConfig, LogConfig, MeshConfig, TrainConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "EvalConfig",
    "LogConfig",
    "MeshConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ReferenceConfig",
    "RolloutConfig",
    "TaskConfig",
    "TrainConfig",
    "WarmStartConfig",
    "config_from_dict",
    "config_to_dict",
]


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
        require(0 <= self.seed < 2**32, "seed", self.seed, "at least 0 and below 2**32")
        for part in fields(self):
            if is_dataclass(section := getattr(self, part.name)):
                require_representable(part.name, section)
        group_size = self.rollout.group_size
        if self.objective.needs_group and group_size < 2:
            raise ValueError(
                f"rollout.group_size must be at least 2 for objective.advantage="
                f"{self.objective.advantage!r}, got {group_size}: a group of one has no mean to differ from"
            )
        if self.rollout.num_prompts * group_size < 2:
            raise ValueError(
                f"rollout.num_prompts * rollout.group_size must be at least 2, got {self.rollout.num_prompts} * "
                f"{group_size}: one completion has no other to be better than"
            )
        require_divides(
            "train.prompt_micro_batches",
            self.train.prompt_micro_batches,
            "rollout.num_prompts",
            self.rollout.num_prompts,
        )
        require_divides(
            "train.group_micro_batches",
            self.train.group_micro_batches,
            "rollout.group_size",
            group_size,
        )
        self._check_skipping()
        for message in self._without_effect():
            # At the caller of the dataclass's generated __init__.
            warnings.warn(message, stacklevel=3)

    def _check_skipping(self) -> None:
        """An advantage of 0 must mean a gradient of 0."""
        objective = self.objective
        reasons = {
            f"objective.beta={objective.beta}": objective.loss_beta > 0,
            f"objective.entropy_coef={objective.entropy_coef}": objective.entropy_coef != 0,
            f"objective.top_entropy={objective.top_entropy}": objective.top_entropy < 1,
            f"objective.surrogate={objective.surrogate!r}": objective.surrogate in COVARIANCE_SURROGATES,
        }
        for setting, uses in reasons.items():
            if self.train.skip_zero_advantages and uses:
                raise ValueError(
                    f"train.skip_zero_advantages=True does not go with {setting}, which needs completions of "
                    "advantage 0 too: change one of the two"
                )

    def _without_effect(self) -> list[str]:
        """A sentence for each setting that was changed and does nothing, seen over several sections."""
        objective, length = self.objective, self.rollout.max_completion_length
        idle = []
        if objective.beta == 0 and self.reference.update != "fixed":
            idle.append(
                f"reference.update={self.reference.update!r} has no effect: objective.beta is 0, "
                "so there is no reference"
            )
        if self.rollout.extra_rollouts == 0 and self.rollout.spread_of != "correct":
            idle.append(f"rollout.spread_of={self.rollout.spread_of!r} has no effect: rollout.extra_rollouts is 0")
        if not self.rollout.overlap and self.rollout.overlap_parts != 4:
            idle.append(
                f"rollout.overlap_parts={self.rollout.overlap_parts} has no effect: rollout.overlap is False"
            )
        if self.model.remat == "none" and self.model.remat_every != 1:
            idle.append(f"model.remat_every={self.model.remat_every} has no effect: model.remat is 'none'")
        if self.train.skip_zero_advantages and not self.train.packing:
            idle.append("train.skip_zero_advantages=True saves nothing: train.packing is False")
        elif self.train.skip_zero_advantages and self.train.group_micro_batches > 1:
            idle.append(
                "train.skip_zero_advantages=True saves nothing: train.group_micro_batches is "
                f"{self.train.group_micro_batches}, and parts of groups are not packed"
            )
        unpunished = (objective.overlong_length or length) - objective.overlong_cache
        if objective.overlong_cache > 0 and unpunished >= length:
            idle.append(
                f"objective.overlong_cache={objective.overlong_cache} has no effect: lengths up to {unpunished} "
                f"(overlong_length - overlong_cache) are free, and rollout.max_completion_length is {length}"
            )
        return idle


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
            require(field_name in known, f"{name}.{field_name}", value[field_name], "a field of the config")
        # JSON has lists where the config has tuples.
        parts[name] = section(**{k: tuple(v) if isinstance(v, list) else v for k, v in value.items()})
    for name in parts:
        require(name in {f.name for f in fields(Config)}, name, parts[name], "a field of the config")
    return Config(**parts)
