"""GSM8K with any checkpoint folder of the Llama or Qwen2 family.

    grpo-jax train experiments/gsm8k.py --model.path Qwen2.5-0.5B-Instruct --task.path data/gsm8k

The data folder holds ``train.jsonl`` and ``test.jsonl`` as published (github.com/openai/grade-school-math).
The values are where a person with one GPU of 24 to 80 GB would start: bfloat16 compute, whole layers
recomputed in the backward pass, 16 prompts in 8 micro-batches. On 80 GB raise ``--rollout.num-prompts`` to
64 and keep two prompts a micro-batch. Nothing here has been tuned on a GPU.

That the path works on real prompts was checked with SmolLM2-135M-Instruct on 2 CPU cores (Python 3.12, seed 0,
2026-12-01; three updates of 2 prompts x 4 completions of up to 128 tokens, about 70 s a step on a busy machine;
one completion of the 24 was right, held-out accuracy stayed 0 %)::

    grpo-jax train experiments/gsm8k.py --model.path SmolLM2-135M-Instruct.Q4_1.gguf --task.path data/gsm8k
        --model.compute-dtype float32 --rollout.num-prompts 2 --rollout.group-size 4
        --rollout.max-completion-length 128 --train.prompt-micro-batches 2 --train.steps 3
        --eval.num-problems 2 --eval.batch-size 2
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


def get_config() -> Config:
    """The run; name the checkpoint with ``--model.path``."""
    return Config(
        experiment="gsm8k",
        model=ModelConfig(compute_dtype="bfloat16", remat="full"),
        task=TaskConfig(name="gsm8k", long_prompts="drop"),
        rollout=RolloutConfig(num_prompts=16, group_size=16, max_prompt_length=320, max_completion_length=512),
        objective=ObjectiveConfig(advantage="group", aggregate="token_mean", clip_high=0.28, beta=0.0),
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10, b2=0.99),
        train=TrainConfig(steps=500, prompt_micro_batches=8, logps_chunk=2048),
        eval=EvalConfig(every=50, num_problems=256, samples=1, batch_size=32),
        checkpoint=CheckpointConfig(every=50, keep=2),
        log=LogConfig(table_every=10, table_prompts=2),
    )
