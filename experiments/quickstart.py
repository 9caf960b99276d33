"""Sort six digits: imitation has learnt a habit, the reward unlearns it.

    grpo-jax train experiments/quickstart.py

Three in four demonstrations of the supervised start sort the wrong way round, and the model imitates them; GRPO
rewards the right answer alone. Measured on 2026-12-03 on 2 cores of an AMD EPYC with Python 3.12 and JAX 0.12.0,
beside other work, which made the whole command take 4.0 minutes with seed 0 (alone, on Python 3.11 with JAX
0.10.2, it took 3.2). Held-out problems, 512 of them, no permutation of a training problem:

| run | options | samples right at temperature 1 | right greedy |
|---|---|---|---|
| seed0 |  | 23.7 % -> 96.8 % | 1.4 % -> 99.8 % |
| seed1 | `--seed 1` | 21.5 % -> 96.5 % | 1.2 % -> 99.8 % |
| seed2 | `--seed 2` | 21.3 % -> 97.7 % | 0.8 % -> 100.0 % |
| shuffled | `--train.shuffle-rewards` | 23.7 % -> 0.0 % | 1.4 % -> 0.0 % |
| lr0 | `--optimizer.learning-rate 0` | 23.7 % -> 23.7 % | 1.4 % -> 1.4 % |

Success on the training samples, means of ten steps each::

    seed0     0.58 0.72 0.80 0.90 0.92 0.94 0.95 0.96 0.97 0.97
    seed1     0.60 0.78 0.81 0.88 0.92 0.92 0.94 0.95 0.96 0.96
    seed2     0.63 0.82 0.90 0.92 0.93 0.93 0.96 0.97 0.97 0.97
    shuffled  0.13 0.00 0.00 0.00 0.00 0.00 0.00 0.00 0.00 0.00
    lr0       0.24 0.23 0.23 0.23 0.23 0.21 0.23 0.23 0.22 0.22

On Python 3.11 seed 0 went from 23.8 % to 97.4 % of samples, and from 1.8 % to 100.0 % greedy.
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
