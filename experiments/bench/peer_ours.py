"""The peer benchmark's process of this project: a session as a run builds it, and the stages of the loop.

Of the loop's work a step leaves out metrics, logs, evaluation and checkpoints.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import jax

from experiments.bench.peer_child import Channel, Problem, count_sevens, decode, encode, prompt_texts
from grpo_jax.algorithms.presets import PRESETS
from grpo_jax.config import Config, ModelConfig, OptimizerConfig, RolloutConfig, TaskConfig, TrainConfig
from grpo_jax.rewards import Reward
from grpo_jax.tasks.base import Example, Message, Task
from grpo_jax.train.sample import judge_rollout
from grpo_jax.train.session import Session, build_policy


@dataclass(frozen=True)
class DecimalTokenizer:
    """Ids as decimal words."""

    vocab_size: int
    pad_id: int
    eos_ids: tuple[int, ...]
    has_chat_template: bool = False

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Ids of a text."""
        return encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return decode(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that an id adds."""
        return f"{token_id} ".encode()

    def chat(self, messages: list[Message]) -> list[int]:
        """Refused."""
        raise ValueError("there is no chat template")

    def save(self, folder: Path) -> None:
        """Refused."""
        raise NotImplementedError("nothing here is saved")


def build_session(problem: Problem) -> Session:
    """A run's parts, with the objective that is TRL's default."""
    config = Config(
        model=ModelConfig(
            num_layers=problem.num_layers,
            width=problem.width,
            ffn_width=problem.ffn_width,
            num_heads=problem.num_heads,
            num_kv_heads=problem.num_kv_heads,
            rope_theta=problem.rope_theta,
            norm_eps=problem.norm_eps,
            remat="full" if problem.remat else "none",
        ),
        task=TaskConfig(name="custom"),
        rollout=RolloutConfig(
            num_prompts=problem.prompts,
            group_size=problem.group,
            max_prompt_length=problem.prompt,
            max_completion_length=problem.completion,
        ),
        objective=PRESETS["trl"].objective,
        optimizer=OptimizerConfig(learning_rate=problem.learning_rate, clip_norm=problem.clip_norm),
        train=TrainConfig(prompt_micro_batches=problem.micro_batches),
        seed=problem.seed,
    )
    examples = [Example(prompt=text, answer="") for text in prompt_texts(problem)]
    task = Task(
        name="decimals",
        train=examples,
        heldout=examples[:1],
        rewards=(Reward("sevens", count_sevens),),
        extract=lambda text: None,
        correct=lambda text, example: "7" in text,
        tokenizer=DecimalTokenizer(problem.vocab_size, pad_id=0, eos_ids=(problem.eos_id,)),
    )
    return Session(build_policy(config, task))


def main() -> None:
    channel = Channel()
    session = build_session(channel.problem)
    state = session.initial_state(session.policy.params)
    key = jax.random.key(channel.problem.seed)
    channel.ready(
        parameters=sum(x.size for x in jax.tree.leaves(state.params)),
        versions={name: version(name) for name in ("grpo-jax", "jax", "flax")},
    )
    for step in itertools.count(1):
        channel.wait()
        start = time.perf_counter()
        examples = next(session.prompts)
        step_key = jax.random.fold_in(key, step)
        rollout = session.roll_out(state.params, examples, step_key)
        completions = session.policy.sampler.to_host(rollout)
        sample = judge_rollout(session, examples, rollout, completions)
        old_PGT, ref_PGT = session.score(sample.rollout, state)
        batch, *_ = session.make_batch(
            sample.rollout, sample.rewards, sample.correct_PG, old_PGT, ref_PGT, step_key
        )
        jax.block_until_ready(batch)
        sampled = time.perf_counter()
        state, metrics = jax.block_until_ready(session.update(state, batch))
        channel.answer(
            rollout=sampled - start, step=time.perf_counter() - start, tokens=int(batch.loss_mask_PGT.sum())
        )


if __name__ == "__main__":
    main()
