"""All that a run is made of, built from its configuration: mesh, task, model, sampler, compiled functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.allocator import keep_freed_memory
from grpo_jax.config import Config
from grpo_jax.data import host_stream
from grpo_jax.mesh import (
    GROUP_AXES,
    check_batch_fits,
    make_mesh,
    place_params,
    shardings,
    sum_over_hosts,
    to_host,
    to_mesh,
)
from grpo_jax.models import load_model
from grpo_jax.models.decoder import Decoder, logical_axes
from grpo_jax.models.kernels import check_attention
from grpo_jax.optim.chain import learning_rate_schedule, make_optimizer, opt_state_shardings
from grpo_jax.rewards import RewardResult, RewardRunner
from grpo_jax.rollout.sampler import HostRollout, Sampler, encode_prompt, prompt_text
from grpo_jax.rollout.sampling import SamplingParams
from grpo_jax.tasks import limited, make_task
from grpo_jax.tasks.base import Completion, Example, Task, reward_columns, verdict
from grpo_jax.tokenizer import Tokenizer
from grpo_jax.train.batch import Metrics, join_rollouts, make_batch, take_groups
from grpo_jax.train.step import TrainStep
from grpo_jax.types import Array, Params, Rollout, TrainBatch, TrainState


@dataclass(frozen=True)
class Policy:
    """A model with the task that it is trained or judged on."""

    config: Config
    task: Task
    tokenizer: Tokenizer
    model: Decoder
    mesh: Mesh
    sampler: Sampler
    params: Params
    """On the mesh."""
    dropped_prompts: int
    """Prompts left out because they are longer than the limit."""

    def generate(
        self,
        examples: Sequence[Example],
        *,
        num_samples: int,
        temperature: float,
        seed: int,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
    ) -> list[list[Completion]]:
        """Sample completions of some examples; temperature 0 is greedy."""
        return self.sampler.generate(
            self.params,
            examples,
            num_samples=num_samples,
            seed=seed,
            sampling=SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p),
            batch_size=self.config.eval.batch_size,
        )


def build_policy(config: Config, task: Task | None = None, *, jit: Callable[..., Any] = jax.jit) -> Policy:
    """Load or initialise the model of a config, with all that sampling from it takes.

    The process's allocator keeps what is freed from here on: see :func:`grpo_jax.allocator.keep_freed_memory`.

    Args:
        config: the run's configuration.
        task: replaces the task that the configuration names.
        jit: compiles functions; a dry run has one that does not run them.

    Raises:
        ValueError: what the config asks for does not fit the devices, the model or the task.
        FileNotFoundError: a checkpoint or data file is missing.
    """
    keep_freed_memory()
    mesh = make_mesh(config.mesh)
    check_batch_fits(config, mesh)
    task = make_task(config) if task is None else limited(task, config.task)
    model, params, tokenizer = load_model(config.model, task.tokenizer, seed=config.seed)
    task, dropped = _with_fitting_prompts(task, tokenizer, config)
    sampler = Sampler(
        model,
        tokenizer,
        mesh,
        max_prompt_length=config.rollout.max_prompt_length,
        max_completion_length=config.rollout.max_completion_length,
        stop=task.stop,
        jit=jit,
    )
    return Policy(
        config=config,
        task=task,
        tokenizer=tokenizer,
        model=model,
        mesh=mesh,
        sampler=sampler,
        params=place_params(params, logical_axes(model.config), mesh),
        dropped_prompts=dropped,
    )


def _with_fitting_prompts(task: Task, tokenizer: Tokenizer, config: Config) -> tuple[Task, int]:
    """The task without the prompts that are too long, and how many there were.

    Raises:
        ValueError: there are such prompts and task.long_prompts is "error", or no other prompts.
    """
    limit = config.rollout.max_prompt_length
    dropped = 0
    kept: dict[str, list[Example]] = {}
    for split, examples in (("train", task.train), ("heldout", task.heldout)):
        lengths = np.array([len(encode_prompt(tokenizer, example)) for example in examples])
        fits = lengths <= limit
        if not fits.all() and config.task.long_prompts == "error":
            raise ValueError(
                f"{(~fits).sum()} of {len(examples)} {split} prompts of task {task.name!r} are longer than "
                f"rollout.max_prompt_length ({limit}), the longest has {lengths.max()} tokens: raise the limit, "
                "or leave them out with task.long_prompts=drop"
            )
        if not fits.any():
            raise ValueError(
                f"task {task.name!r} has no {split} prompt of at most rollout.max_prompt_length ({limit}) tokens"
            )
        dropped += int((~fits).sum())
        kept[split] = [example for example, fit in zip(examples, fits, strict=True) if fit]
    return dataclasses.replace(task, train=kept["train"], heldout=kept["heldout"]), dropped


class Session:
    """A policy in training: its optimizer, compiled functions, prompts and state.

    Args:
        policy: model and task.
        jit: compiles functions; a dry run has one that does not run them.

    Raises:
        ValueError: the attention kernel that the config names cannot run here.
    """

    def __init__(self, policy: Policy, *, jit: Callable[..., Any] = jax.jit) -> None:
        config = policy.config
        check_attention(policy.model.config, config.rollout.max_completion_length)
        self.policy = policy
        self.config = config
        self.mesh = policy.mesh
        self.sampling = SamplingParams(
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            min_p=config.rollout.min_p,
        )
        total_updates = config.train.steps * config.train.updates_per_batch
        self.optimizer = make_optimizer(config.optimizer, total_updates)
        self.step = TrainStep(policy.model, self.optimizer, config, policy.tokenizer.vocab_size)
        whole = NamedSharding(self.mesh, PartitionSpec())
        self.state_shardings = self._state_shardings()
        self._update = jit(self.step.train_step, donate_argnums=0, out_shardings=(self.state_shardings, whole))
        self._score = jit(lambda params, rollout: self.step.score(params, rollout)[0])
        self.reward_names = [reward.name for reward in policy.task.rewards]
        self.reward_weights = [reward.weight for reward in policy.task.rewards]
        self._make_batch = jit(
            functools.partial(
                make_batch, config=config, reward_names=self.reward_names, reward_weights=self.reward_weights
            )
        )
        self.take_groups = jit(take_groups)
        self.join_rollouts = jit(join_rollouts)
        self._reward = RewardRunner(policy.task.rewards)
        self._schedule = learning_rate_schedule(config.optimizer, total_updates)
        self.prompts = host_stream(
            policy.task.train, num_prompts=config.rollout.num_prompts, seed=config.seed, mesh=self.mesh
        )

    def _state_shardings(self) -> Any:
        """Policy, reference and moments lie as the model's axes say; the rest lies whole on every device."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        params = shardings(logical_axes(self.policy.model.config), self.mesh)
        opt_state = opt_state_shardings(self.optimizer, self.policy.params, params, whole)
        has_reference = self.config.objective.beta > 0
        return TrainState(
            params=params,
            ref_params=params if has_reference else None,
            opt_state=opt_state,
            step=whole,  # type: ignore[arg-type]  # shardings in the place of arrays
        )

    def initial_state(self, params: Params) -> TrainState:
        """The state before the first step: fresh moments, a reference like the policy; ``params`` are donated."""

        def build(params: Params) -> TrainState:
            return TrainState(
                params=params,
                # A copy: the policy's own arrays are donated to the first update.
                ref_params=jax.tree.map(jnp.copy, params) if self.config.objective.beta > 0 else None,
                opt_state=self.optimizer.init(params),
                step=jnp.int32(0),
            )

        return jax.jit(build, out_shardings=self.state_shardings, donate_argnums=0)(params)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, to restore a checkpoint into."""
        shapes: Any = jax.eval_shape(self.initial_state, self.policy.params)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            self.state_shardings,
        )

    def roll_out(self, params: Params, examples: Sequence[Example], key: Array, *, part: int = 0) -> Rollout:
        """Sample a group of completions of each of this host's examples.

        Args:
            params: the policy's.
            examples: this host's of the batch, or of one of its ``rollout.num_parts`` parts.
            key: the batch's random key.
            part: which part: of N the i-th holds the prompts i, i + N, ... of the batch.
        """
        policy, rollout = self.policy, self.config.rollout
        num_parts = rollout.num_parts
        return policy.sampler.rollout(
            params,
            [encode_prompt(policy.tokenizer, example) for example in examples],
            key,
            group_size=rollout.group_size,
            sampling=self.sampling,
            num_slots=rollout.num_slots,
            prompt_number_P=(
                None if num_parts == 1 else np.arange(part, rollout.num_prompts, num_parts, dtype=np.int32)
            ),
        )

    def reward(self, examples: Sequence[Example], completions: HostRollout) -> RewardResult:
        """Run the reward functions on this host's completions; in any thread, as it talks to no other host."""
        return self._reward(
            prompts=[prompt_text(example) for example in examples],
            completions=completions.texts,
            completion_ids=completions.token_ids,
            columns=reward_columns(examples),
        )

    def count_failures(self, rewards: RewardResult) -> dict[str, int]:
        """Failures of each reward function, over all hosts; in the main thread, as all collectives are."""
        local = [rewards.rewards_PGK[..., 0].size, *rewards.failures.values()]
        seen, *failures = sum_over_hosts(np.array(local, np.int32)).tolist()
        # Hosts that split weights alone hold the same completions.
        copies = seen // (self.config.rollout.num_prompts * self.config.rollout.group_size)
        return {name: failed // copies for name, failed in zip(rewards.failures, failures, strict=True)}

    def judge(self, examples: Sequence[Example], completions: HostRollout) -> np.ndarray:
        """Whether each completion is right, ``[P, G]``."""
        return np.array(
            [
                [verdict(self.policy.task, text, example) for text in group]
                for example, group in zip(examples, completions.texts, strict=True)
            ]
        )

    def score(self, rollout: Rollout, state: TrainState) -> tuple[Array | None, Array | None]:
        """Log-probabilities of the policy (where the sampler's won't do) and of the reference (if any)."""
        needs_old = self.config.train.updates_per_batch > 1 or (
            self.config.objective.kl_in == "reward" and self.config.rollout.off_policy
        )
        with jax.set_mesh(self.mesh):
            old = self._score(state.params, rollout) if needs_old else None
            ref = None if state.ref_params is None else self._score(state.ref_params, rollout)
        return jax.block_until_ready((old, ref))

    def make_batch(
        self,
        rollout: Rollout,
        rewards: RewardResult,
        correct_PG: np.ndarray,
        old_logps_PGT: Array | None,
        ref_logps_PGT: Array | None,
        key: Array,
    ) -> tuple[TrainBatch, Array, Metrics]:
        """The batch to train on, the combined rewards, and the metrics of both."""
        with jax.set_mesh(self.mesh):
            return self._make_batch(
                rollout,
                to_mesh(rewards.rewards_PGK.astype(np.float32), GROUP_AXES, self.mesh),
                to_mesh(correct_PG, GROUP_AXES, self.mesh),
                old_logps_PGT,
                ref_logps_PGT,
                key,
            )

    def update(self, state: TrainState, batch: TrainBatch) -> tuple[TrainState, Metrics]:
        """All updates of a batch; ``state`` is donated."""
        with jax.set_mesh(self.mesh):
            return self._update(state, batch)

    def learning_rate(self, step: int, skipped: int) -> float:
        """The learning rate of the last update of a step (counted from 1); skipped updates don't advance it."""
        return float(self._schedule(max(step * self.config.train.updates_per_batch - 1 - skipped, 0)))

    def to_host(self, x_PG: Array) -> np.ndarray:
        """This host's rows of an array of the batch."""
        return to_host(x_PG, GROUP_AXES, self.mesh)
