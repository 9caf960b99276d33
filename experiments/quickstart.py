"""Sort six digits: imitation has learnt a habit, the reward unlearns it.

grpo-jax train experiments/quickstart.py
"""

from __future__ import annotations

from grpo_jax.config import (
    CheckpointConfig,
    Config,
    EvalConfig,
    LogConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
    WarmStartConfig,
)


def get_config() -> Config:
    """The run that the README starts with."""
    return Config(
        experiment="quickstart",
        model=ModelConfig(num_layers=3, width=192, ffn_width=512, num_heads=6, num_kv_heads=2),
        task=TaskConfig(name="sort"),
        warm_start=WarmStartConfig(steps=200, batch_size=128, learning_rate=1e-3),
        rollout=RolloutConfig(num_prompts=64, group_size=16, max_prompt_length=7, max_completion_length=7),
        objective=ObjectiveConfig(advantage="group", aggregate="token_mean", beta=0.001),
        optimizer=OptimizerConfig(learning_rate=3e-4, schedule="cosine", final_fraction=0.1, warmup_steps=3),
        train=TrainConfig(steps=100),
        eval=EvalConfig(num_problems=512, samples=4, batch_size=128),
        checkpoint=CheckpointConfig(every=50),
        log=LogConfig(table_every=20),
    )
