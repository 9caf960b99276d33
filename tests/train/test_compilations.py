"""What is compiled is compiled in the first steps, whatever the lengths of prompts and completions."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_jax.metrics import read_metrics
from tests.train.conftest import command

EXPERIMENT = """
from grpo_jax.config import Config, EvalConfig, LogConfig, ModelConfig, RolloutConfig, TrainConfig
from grpo_jax.rewards import Reward
from grpo_jax.tasks.base import Example, Task
from grpo_jax.tokenizer import CharTokenizer


def length(*, completions, **columns):
    return [-len(text) / 128 for text in completions]


def get_task(config):
    examples = [Example(prompt="1" * (1 + n % 30), answer="") for n in range(64)]
    return Task(
        name="ones",
        train=examples,
        heldout=examples[:8],
        rewards=(Reward("length", length),),
        extract=lambda text: text,
        correct=lambda text, example: text == "",
        tokenizer=CharTokenizer("0123456789abcdefghijklmnopqrstuvwxyz"),
    )


def get_config():
    return Config(
        experiment="ones",
        model=ModelConfig(num_layers=1, width=16, ffn_width=16, num_heads=2, num_kv_heads=2),
        rollout=RolloutConfig(num_prompts=8, group_size=4, max_prompt_length=30, max_completion_length=128),
        train=TrainConfig(steps=50),
        eval=EvalConfig(num_problems=8, samples=4, batch_size=8),
        log=LogConfig(completions_per_step=0),
    )
"""


@pytest.mark.slow
def test_fifty_steps_compile_nothing_after_the_second(compile_once: None, tmp_path: Path) -> None:
    experiment = tmp_path / "ones.py"
    experiment.write_text(EXPERIMENT)
    ended = command("train", experiment, "--workdir", tmp_path / "run")
    assert ended.status == 0, ended
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == 50
    assert len({record["Performance/CompiledPrograms"] for record in records[1:]}) == 1
    longest = {record["Performance/CompletionLengthMax"] for record in records}
    assert len(longest) > 10 and max(longest) == 128, longest
    # And a dry run lists the lengths that there are programs for.
    listed = command("train", experiment, "--dry-run").out
    assert listed.count("cache 64, 128") == 2 and "rows 1, 2, 4" in listed
