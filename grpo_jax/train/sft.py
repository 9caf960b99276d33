"""The supervised start: maximum likelihood on the task's demonstrations, before GRPO."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.algorithms.aggregates import masked_mean
from grpo_jax.config import Config, OptimizerConfig
from grpo_jax.data import host_stream
from grpo_jax.mesh import PROMPT_AXES, to_mesh
from grpo_jax.optim.chain import make_optimizer, opt_state_shardings
from grpo_jax.rollout.sampler import encode_prompt, pad_left
from grpo_jax.tasks.base import Example
from grpo_jax.tokenizer import Tokenizer
from grpo_jax.train.logps import completion_logps
from grpo_jax.types import Array, Model, Params


def warm_start(
    model: Model,
    params: Params,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    config: Config,
    mesh: Mesh,
    on_step: Callable[[int, float], None],
) -> Params:
    """Train ``config.warm_start.steps`` updates on the examples' demonstrations; returns the parameters.

    Args:
        model: the policy's functions.
        params: its parameters; donated.
        tokenizer: turns prompts and demonstrations into ids.
        examples: those without a demonstration are left out.
        config: the run's configuration.
        mesh: the device mesh.
        on_step: called with the number of updates done and the last one's loss.

    Raises:
        ValueError: too few examples have a demonstration, or one is longer than the completion limit.
    """
    demonstrated = [example for example in examples if example.demonstration is not None]
    if not demonstrated:
        raise ValueError(
            f"warm_start.steps is {config.warm_start.steps}, but task {config.task.name!r} has no "
            "demonstrations: set warm_start.steps to 0"
        )
    settings = config.warm_start
    if settings.batch_size > len(demonstrated):
        raise ValueError(
            f"warm_start.batch_size ({settings.batch_size}) must be at most the number of demonstrations that "
            f"task {config.task.name!r} has ({len(demonstrated)})"
        )
    for example in demonstrated:  # before the first update, not when its turn comes
        demonstration_ids(example, tokenizer, config.rollout.max_completion_length)
    optimizer = make_optimizer(
        OptimizerConfig(
            learning_rate=settings.learning_rate, schedule="cosine", warmup_steps=settings.steps // 10
        ),
        settings.steps,
    )

    def loss_fn(params: Params, prompt_PS: Array, prompt_mask_PS: Array, ids_PT: Array, mask_PT: Array) -> Array:
        logps_P1T, _ = completion_logps(
            model,
            params,
            prompt_PS,
            prompt_mask_PS,
            ids_PT[:, None],
            temperature=1.0,
            vocab_size=tokenizer.vocab_size,
            chunk_size=config.train.logps_chunk,
        )
        return -masked_mean(logps_P1T, mask_PT[:, None])

    def update(params: Params, opt_state: Any, *batch: Array) -> tuple[Params, Any, Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    whole = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda x: x.sharding, params)
    moments = opt_state_shardings(optimizer, params, placed, whole)
    compiled = jax.jit(update, donate_argnums=(0, 1), out_shardings=(placed, moments, whole))
    stream = host_stream(demonstrated, num_prompts=settings.batch_size, seed=config.seed, mesh=mesh)
    with jax.set_mesh(mesh):
        opt_state = jax.jit(optimizer.init, out_shardings=moments)(params)
        for step in range(settings.steps):
            arrays = demonstration_arrays(next(stream), tokenizer, config)
            batch = [to_mesh(x, PROMPT_AXES, mesh) for x in arrays]
            params, opt_state, loss = compiled(params, opt_state, *batch)
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"supervised start, update {step + 1}: the loss is {float(loss)}; lower "
                    f"warm_start.learning_rate ({settings.learning_rate})"
                )
            on_step(step + 1, float(loss))
    return params


def demonstration_arrays(
    examples: Sequence[Example], tokenizer: Tokenizer, config: Config
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """``(prompt_PS, prompt_mask_PS, ids_PT, mask_PT)`` of a batch."""
    limit = config.rollout.max_completion_length
    prompts = [encode_prompt(tokenizer, example) for example in examples]
    ids_PT = np.full((len(examples), limit), tokenizer.pad_id, np.int32)
    mask_PT = np.zeros((len(examples), limit), bool)
    for row, example in enumerate(examples):
        ids = demonstration_ids(example, tokenizer, limit)
        ids_PT[row, : len(ids)] = ids
        mask_PT[row, : len(ids)] = True
    prompt_PS, prompt_mask_PS = pad_left(prompts, config.rollout.max_prompt_length, tokenizer.pad_id)
    return prompt_PS, prompt_mask_PS, ids_PT, mask_PT


def demonstration_ids(example: Example, tokenizer: Tokenizer, limit: int) -> list[int]:
    """Token ids of an example's demonstration, the EOS id at the end.

    Raises:
        ValueError: there are more than ``limit``.
    """
    assert example.demonstration is not None, "filtered by the caller"
    ids = [*tokenizer.encode(example.demonstration, bos=False), tokenizer.eos_ids[0]]
    if len(ids) > limit:
        raise ValueError(
            f"a demonstration has {len(ids)} tokens, more than rollout.max_completion_length ({limit}): "
            f"{example.demonstration[:80]!r}"
        )
    return ids
