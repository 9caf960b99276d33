from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from grpo_jax.config import (
    CheckpointConfig,
    Config,
    EvalConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ReferenceConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
    WarmStartConfig,
    config_from_dict,
    config_to_dict,
)

OTHER = Config(
    experiment="other",
    seed=3,
    model=ModelConfig(path="somewhere", remat="dots"),
    task=TaskConfig(reward_weights=(1.0, 0.5), num_train=7),
    rollout=RolloutConfig(num_slots=64, top_p=0.9),
    objective=ObjectiveConfig(beta=0.04, advantage_ddof=0),
    optimizer=OptimizerConfig(clip_norm=None, learning_rate=3e-4),
    mesh=MeshConfig(data=2, tensor=-1),
)


@pytest.mark.parametrize("config", [Config(), OTHER])
def test_round_trip_through_json(config: Config) -> None:
    values = json.loads(json.dumps(config_to_dict(config)))
    restored = config_from_dict(values)
    assert restored == config and hash(restored) == hash(config)
    assert config_to_dict(restored) == values


def test_fields_that_are_left_out_have_their_defaults() -> None:
    config = config_from_dict({"seed": 5, "rollout": {"group_size": 8}})
    assert config == Config(seed=5, rollout=RolloutConfig(group_size=8))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sead": 1}, "sead must be a field of the config, got 1"),
        ({"rollout": {"groupsize": 8}}, "rollout.groupsize must be a field of the config, got 8"),
        ({"rolout": {"group_size": 8}}, "rolout must be a field of the config, got {'group_size': 8}"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size must be at least 2"),
    ],
)
def test_saved_config_with_unknown_or_bad_fields(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config_from_dict(values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (lambda name=name: ModelConfig(**{name: 0}), f"model.{name} must be at least 1, got 0")
            for name in ("num_layers", "width", "ffn_width", "num_heads", "num_kv_heads")
        ),
        (
            lambda: ModelConfig(width=100, num_heads=6),
            "model.width (100) must be an even multiple of model.num_heads (6)",
        ),
        (lambda: ModelConfig(width=18, num_heads=6), "model.width (18) must be an even multiple"),
        (lambda: ModelConfig(num_kv_heads=4), "model.num_heads (6) must be a multiple of model.num_kv_heads (4)"),
        *(
            (lambda name=name: RolloutConfig(**{name: 0}), f"rollout.{name} must be at least 1, got 0")
            for name in ("num_prompts", "group_size", "max_prompt_length", "max_completion_length")
        ),
        (lambda: RolloutConfig(temperature=0.0), "rollout.temperature must be above 0 in training, got 0.0"),
        (lambda: RolloutConfig(temperature=math.nan), "rollout.temperature must be above 0 in training, got nan"),
        (lambda: RolloutConfig(top_p=0.0), "rollout.top_p must be in (0, 1], got 0.0"),
        (lambda: RolloutConfig(top_p=1.1), "rollout.top_p must be in (0, 1], got 1.1"),
        (lambda: RolloutConfig(top_k=-1), "rollout.top_k must be at least 0 (0 keeps all), got -1"),
        (lambda: RolloutConfig(min_p=1.0), "rollout.min_p must be in [0, 1), got 1.0"),
        *(
            (
                lambda slots=slots: RolloutConfig(num_prompts=4, group_size=6, num_slots=slots),
                f"rollout.num_slots must be at least 1 and at most num_prompts * group_size (24), got {slots}",
            )
            for slots in (0, 25)
        ),
        (lambda: RolloutConfig(overlap_parts=1), "rollout.overlap_parts must be at least 2, got 1"),
        (lambda: RolloutConfig(steps_ahead=2), "rollout.steps_ahead must be 0 or 1, got 2"),
        (
            lambda: RolloutConfig(overlap=True, steps_ahead=1),
            "rollout.steps_ahead must be 0 with rollout.overlap: with 1 the rewards run beside the next batch's "
            "sampling already, got 1",
        ),
        (
            lambda: RolloutConfig(num_prompts=6, overlap=True),
            "rollout.overlap_parts (4) must divide rollout.num_prompts (6); the nearest that do: 3 and 6",
        ),
        (
            lambda: RolloutConfig(num_prompts=8, group_size=4, overlap=True, num_slots=16),
            "rollout.num_slots (16) must be at most num_prompts * group_size / overlap_parts (8) with "
            "rollout.overlap, which samples a part at a time: lower it, or rollout.overlap_parts",
        ),
        (lambda: ReferenceConfig(sync_every=0), "reference.sync_every must be at least 1, got 0"),
        (lambda: ReferenceConfig(polyak_rate=0.0), "reference.polyak_rate must be in (0, 1], got 0.0"),
        (lambda: OptimizerConfig(learning_rate=-1.0), "optimizer.learning_rate must be at least 0, got -1.0"),
        (lambda: OptimizerConfig(warmup_steps=-1), "optimizer.warmup_steps must be at least 0, got -1"),
        (lambda: OptimizerConfig(final_fraction=2.0), "optimizer.final_fraction must be in [0, 1], got 2.0"),
        (lambda: OptimizerConfig(weight_decay=-1.0), "optimizer.weight_decay must be at least 0, got -1.0"),
        (lambda: OptimizerConfig(clip_norm=0.0), "optimizer.clip_norm must be above 0, or None, got 0.0"),
        (lambda: OptimizerConfig(max_nonfinite=-1), "optimizer.max_nonfinite must be at least 0, got -1"),
        (lambda: WarmStartConfig(steps=-1), "warm_start.steps must be at least 0, got -1"),
        (lambda: WarmStartConfig(batch_size=0), "warm_start.batch_size must be at least 1, got 0"),
        *(
            (lambda name=name: TrainConfig(**{name: 0}), f"train.{name} must be at least 1, got 0")
            for name in (
                "steps",
                "updates_per_batch",
                "prompt_micro_batches",
                "group_micro_batches",
                "logps_chunk",
            )
        ),
        (lambda: EvalConfig(every=-1), "eval.every must be at least 0, got -1"),
        *(
            (lambda name=name: EvalConfig(**{name: 0}), f"eval.{name} must be at least 1, got 0")
            for name in ("num_problems", "samples", "batch_size")
        ),
        (lambda: EvalConfig(temperature=0.0), "eval.temperature must be above 0, got 0.0"),
        (lambda: MeshConfig(group=0), "mesh.group must be at least 1, or -1 for the rest, got 0"),
        (lambda: MeshConfig(data=-1, fsdp=-1), "mesh must be given at most one -1, got (-1, -1, 1, 1)"),
        (lambda: CheckpointConfig(every=0), "checkpoint.every must be at least 1, got 0"),
        (lambda: CheckpointConfig(keep=0), "checkpoint.keep must be at least 1, got 0"),
        (lambda: CheckpointConfig(keep_best=-1), "checkpoint.keep_best must be at least 0, got -1"),
        (lambda: LogConfig(every=0), "log.every must be at least 1, got 0"),
        (lambda: LogConfig(table_every=-1), "log.table_every must be at least 0, got -1"),
        (lambda: LogConfig(table_prompts=0), "log.table_prompts must be at least 1, got 0"),
        (
            lambda: RolloutConfig(num_prompts=1, overlap=True),
            "rollout.num_prompts must be at least 2 with rollout.overlap, got 1",
        ),
        (
            lambda: Config(
                rollout=RolloutConfig(num_prompts=1, group_size=1), objective=ObjectiveConfig(advantage="batch")
            ),
            "rollout.num_prompts * rollout.group_size must be at least 2, got 1 * 1",
        ),
        (lambda: ModelConfig(rope_theta=0.0), "model.rope_theta must be above 0, got 0.0"),
        (lambda: ModelConfig(norm_eps=-1.0), "model.norm_eps must be at least 0, got -1.0"),
        (
            lambda: Config(optimizer=OptimizerConfig(learning_rate=math.inf)),
            "optimizer.learning_rate must be finite, got inf",
        ),
        (
            lambda: Config(task=TaskConfig(reward_weights=(1.0, math.nan))),
            "task.reward_weights must be finite, got (1.0, nan)",
        ),
        (
            lambda: Config(rollout=RolloutConfig(max_completion_length=10**12)),
            "rollout.max_completion_length must be below 2**31, got 1000000000000",
        ),
        (
            lambda: Config(rollout=RolloutConfig(group_size=1)),
            "rollout.group_size must be at least 2 for objective.advantage='group', got 1",
        ),
        (
            lambda: Config(rollout=RolloutConfig(num_prompts=12), train=TrainConfig(prompt_micro_batches=5)),
            "train.prompt_micro_batches (5) must divide rollout.num_prompts (12); the nearest that do: 4 and 6",
        ),
        (
            lambda: Config(train=TrainConfig(group_micro_batches=32)),
            "train.group_micro_batches (32) must divide rollout.group_size (16); the nearest that do: 16",
        ),
    ],
)
def test_bad_values_are_named_with_the_remedy(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_a_reference_without_a_kl_term_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="reference.update='sync' has no effect: objective.beta is 0"):
        Config(reference=ReferenceConfig(update="sync"))
    Config(reference=ReferenceConfig(update="sync"), objective=ObjectiveConfig(beta=0.1))


def test_layers_that_are_not_recomputed_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="model.remat_every=2 has no effect: model.remat is 'none'"):
        Config(model=ModelConfig(remat_every=2))
    Config(model=ModelConfig(remat="full", remat_every=2))


@pytest.mark.parametrize(
    ("changes", "expected"), [({}, False), ({"top_p": 0.9}, True), ({"top_k": 5}, True), ({"min_p": 0.1}, True)]
)
def test_what_truncates_the_distribution(changes: dict[str, Any], expected: bool) -> None:
    assert RolloutConfig(**changes).truncates_distribution is expected


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 1  # type: ignore[misc]
