"""The peer benchmark's process of Tunix: its GRPO learner with the vanilla rollout, fed one batch a command.

It runs in Tunix's environment. The learner asks for a batch when a step begins, and for the next when it has
ended.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.models.llama3.model import DecoderLayer, Llama3, ModelConfig, RematConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from experiments.bench.peer_child import Channel, Problem, count_sevens, decode, encode, prompt_texts

NEVER = 10**9
"""Steps."""


class DecimalTokenizer:
    """Ids as decimal words."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return encode(text)

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
        return decode(ids)

    def bos_id(self) -> None:
        """There is none."""

    def eos_id(self) -> int:
        """Never sampled."""
        return self._problem.eos_id

    def pad_id(self) -> int:
        """Never sampled."""
        return self._problem.pad_id


class TimedLearner(GRPOLearner):
    """Notes how long it takes to generate and score a batch, and the tokens of it."""

    rollout_seconds = 0.0
    completion_tokens = 0

    def _generate_and_compute_advantage(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        example = jax.block_until_ready(super()._generate_and_compute_advantage(*args, **kwargs))
        self.completion_tokens = int(example.completion_mask.sum())
        self.rollout_seconds = time.perf_counter() - start
        return example


class TrainingRematLayer(DecoderLayer):
    """Recomputes itself in the backward pass; in the sampler, where that gains nothing, Flax refuses it."""

    def __call__(self, x: Any, segment_pos: Any, cache: Any, attn_mask: Any) -> Any:
        """The layer, in training or in the sampler."""
        run = super().__call__ if cache is None else self.block
        return run(x, segment_pos, cache, attn_mask)


def build_model(problem: Problem) -> Llama3:
    """Random weights; Tunix's own initial ones are 0 in places."""
    config = ModelConfig(
        num_layers=problem.num_layers,
        vocab_size=problem.vocab_size,
        embed_dim=problem.width,
        hidden_dim=problem.ffn_width,
        num_heads=problem.num_heads,
        head_dim=problem.width // problem.num_heads,
        num_kv_heads=problem.num_kv_heads,
        rope_theta=problem.rope_theta,
        norm_eps=problem.norm_eps,
        weight_tying=True,
        remat_config=RematConfig.DECODER if problem.remat else RematConfig.NONE,
    )
    model = Llama3(config, rngs=nnx.Rngs(problem.seed))
    for layer in model.layers:
        layer.__class__ = TrainingRematLayer
    keys = map(jax.random.key, itertools.count(problem.seed))
    state = nnx.state(model)
    nnx.update(
        model,
        jax.tree.map(lambda x: 0.02 * jax.random.normal(next(keys), x.shape) if x.ndim > 1 else x, state),
    )
    return model


def build_learner(problem: Problem) -> TimedLearner:
    """Sampling and training on the same devices; nothing is logged, evaluated or saved."""
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 1), ("fsdp", "tp"))
    training = RLTrainingConfig(
        actor_optimizer=optax.chain(
            optax.clip_by_global_norm(problem.clip_norm), optax.adamw(problem.learning_rate, weight_decay=0.0)
        ),
        mini_batch_size=problem.prompts,
        train_micro_batch_size=problem.prompts // problem.micro_batches,
        rollout_micro_batch_size=problem.prompts,
        eval_every_n_steps=NEVER,
        max_steps=NEVER,
    )
    rollout = RolloutConfig(
        max_prompt_length=problem.prompt,
        max_tokens_to_generate=problem.completion,
        kv_cache_size=problem.prompt + problem.completion,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
    )
    cluster = RLCluster(
        actor=build_model(problem),
        tokenizer=DecimalTokenizer(problem),
        cluster_config=ClusterConfig(
            role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: mesh},
            rollout_engine="vanilla",
            training_config=training,
            rollout_config=rollout,
        ),
    )
    return TimedLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=problem.group, num_iterations=1, beta=0.0, epsilon=0.2),
        reward_fns=lambda prompts, completions, **_: count_sevens(completions),
    )


def batches(channel: Channel, learner: TimedLearner) -> Iterator[dict[str, np.ndarray]]:
    """A batch a command, and the answer when the learner comes back for the next."""
    texts = itertools.cycle(prompt_texts(channel.problem))
    while True:
        channel.wait()
        start = time.perf_counter()
        yield {"prompts": np.array(list(itertools.islice(texts, channel.problem.prompts)))}
        jax.block_until_ready(nnx.state(learner.rl_cluster.actor_trainer.model))
        channel.answer(
            rollout=learner.rollout_seconds,
            step=time.perf_counter() - start,
            tokens=learner.completion_tokens,
        )


def main() -> None:
    channel = Channel()
    learner = build_learner(channel.problem)
    channel.ready(
        parameters=sum(x.size for x in jax.tree.leaves(nnx.state(learner.rl_cluster.actor_trainer.model))),
        versions={name: version(name) for name in ("google-tunix", "jax", "flax")},
    )
    learner.train(batches(channel, learner))


if __name__ == "__main__":
    main()
