"""Parts of a batch: cut it, sum gradients over it, put it together again.

Shapes: P prompts, G completions of a prompt, M micro-batches of prompts, N parts of each group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from grpo_jax.mesh import GROUP_AXES, PROMPT_AXES, constrain
from grpo_jax.types import PROMPT_FIELDS, Array, Params, Rollout, TrainBatch

Metrics = dict[str, Array]
Batch = TypeVar("Batch", bound=Rollout | TrainBatch)


def accumulate_gradients(
    loss_fn: Callable[[Params, TrainBatch], tuple[Array, Metrics]],
    params: Params,
    batch: TrainBatch,
    prompt_parts: int,
    group_parts: int,
) -> tuple[Params, Metrics]:
    """Sum the gradients over the parts of a batch, holding one part's activations at a time."""
    gradient = jax.grad(loss_fn, has_aux=True)

    def add(total: Params, part: TrainBatch) -> tuple[Params, tuple[Metrics, Array]]:
        grads, metrics = gradient(params, part)
        return jax.tree.map(jnp.add, total, grads), (metrics, part.loss_mask_PGT.sum())

    if prompt_parts == group_parts == 1:
        return gradient(params, batch)
    zeros = jax.tree.map(jnp.zeros_like, params)
    parts = split_batch(batch, prompt_parts, group_parts)
    grads, (metrics, tokens_MN) = jax.lax.scan(lambda total, part: jax.lax.scan(add, total, part), zeros, parts)
    return grads, _over_parts(metrics, tokens_MN)


def split_batch(batch: Batch, prompt_parts: int, group_parts: int) -> Batch:
    """Cut a batch into ``[M, N, P/M, G/N, ...]`` parts.

    Each device keeps its own prompts and completions: a part takes every M-th prompt and every N-th completion.
    """
    M, N = prompt_parts, group_parts

    def split_prompts(x: Array) -> Array:
        parts = jnp.moveaxis(x.reshape(x.shape[0] // M, M, *x.shape[1:]), 1, 0)
        return constrain(parts, (None, *PROMPT_AXES, *(None,) * (x.ndim - 1)))

    def split_groups(x: Array) -> Array:
        x = split_prompts(x)
        parts = jnp.moveaxis(x.reshape(*x.shape[:2], x.shape[2] // N, N, *x.shape[3:]), 3, 1)
        return constrain(parts, (None, None, *GROUP_AXES, *(None,) * (x.ndim - 3)))

    fields: dict[str, Any] = {}
    for name, value in vars(batch).items():
        if value is None:
            fields[name] = None
        elif name in PROMPT_FIELDS:
            # Every part of a group needs its prompt.
            fields[name] = jnp.repeat(split_prompts(value)[:, None], N, axis=1)
        else:
            fields[name] = split_groups(value)
    return dataclasses.replace(batch, **fields)


def join_groups(x_MNPG: Array) -> Array:
    """Undo the split of :func:`split_batch` on an array ``[M, N, P/M, G/N, ...]``."""
    M, N, p, g, *rest = x_MNPG.shape
    return jnp.moveaxis(x_MNPG, (0, 1), (1, 3)).reshape(p * M, g * N, *rest)


def _over_parts(metrics: Metrics, tokens_MN: Array) -> Metrics:
    """Metrics of the parts into metrics of the batch: losses sum, extremes are extreme, means are by token."""
    weights_MN = tokens_MN / jnp.maximum(tokens_MN.sum(), 1)

    def combine(name: str, x_MN: Array) -> Array:
        if name.endswith("loss"):
            return x_MN.sum()
        if name.endswith("_max"):
            return x_MN.max()
        if name.endswith("_min"):
            return x_MN.min()
        return (x_MN * weights_MN).sum()

    return {name: combine(name, x_MN) for name, x_MN in metrics.items()}
