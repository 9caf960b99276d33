"""The compiled training step: log-probabilities, loss, gradient, update.

Shapes: P prompts, G completions of a prompt, S prompt tokens, T completion tokens, D width, M micro-batches of
prompts, N parts of each group, U updates of a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax.algorithms.logprobs import token_logps
from grpo_jax.algorithms.objectives import grpo_loss, loss_denominator, masked_mean
from grpo_jax.config import Config, ReferenceConfig
from grpo_jax.mesh import GROUP_AXES, PROMPT_AXES, constrain
from grpo_jax.optim.chain import nonfinite_counts
from grpo_jax.types import Array, Model, Params, TrainBatch, TrainState

Metrics = dict[str, Array]
PROMPT_FIELDS = ("prompt_PS", "prompt_mask_PS")


@dataclass(frozen=True)
class TrainStep:
    """What the compiled step is made of; hashable, and without arrays."""

    model: Model
    optimizer: optax.GradientTransformation
    config: Config
    vocab_size: int
    """Ids that the tokenizer knows."""

    def train_step(self, state: TrainState, batch: TrainBatch) -> tuple[TrainState, Metrics]:
        """All optimizer updates of one batch, then the reference's own; to be compiled, ``state`` donated."""
        objective, train = self.config.objective, self.config.train
        # The denominators of the whole batch: micro-batches only sum.
        denominator = loss_denominator(
            batch.loss_mask_PGT,
            aggregate=objective.aggregate,
            max_completion_length=self.config.rollout.max_completion_length,
        )

        loss_fn = functools.partial(self.loss_fn, denominator=denominator)

        def update(carry: tuple[Params, Any], _: None) -> tuple[tuple[Params, Any], Metrics]:
            params, opt_state = carry
            grads, metrics = accumulate_gradients(
                loss_fn, params, batch, train.prompt_micro_batches, train.group_micro_batches
            )
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
            metrics["grad_norm"] = optax.tree.norm(grads)
            metrics["update_norm"] = optax.tree.norm(updates)
            return (optax.apply_updates(params, updates), opt_state), metrics

        (params, opt_state), metrics = jax.lax.scan(
            update, (state.params, state.opt_state), None, length=train.updates_per_batch
        )
        metrics = _over_updates(metrics)
        metrics["nonfinite_in_a_row"], metrics["nonfinite_total"] = nonfinite_counts(opt_state)
        step = state.step + 1
        ref_params = None
        if state.ref_params is not None:
            ref_params = move_reference(state.ref_params, params, step, self.config.reference)
        return TrainState(params=params, ref_params=ref_params, opt_state=opt_state, step=step), metrics

    def loss_fn(self, params: Params, part: TrainBatch, *, denominator: Array) -> tuple[Array, Metrics]:
        """The objective on a part of a batch, whose parts' losses and gradients sum to the whole's."""
        objective = self.config.objective
        logps_PGT, entropy_PGT = self.logps(params, part)
        mask_PGT, sampler_PGT = part.loss_mask_PGT, part.sampler_logps_PGT
        old_logps_PGT = part.old_logps_PGT
        weights_PGT = None
        if self.corrects_sampler:
            old_PGT = jax.lax.stop_gradient(logps_PGT if old_logps_PGT is None else old_logps_PGT)
            weights_PGT = jnp.exp(
                jnp.minimum(jnp.where(mask_PGT, old_PGT - sampler_PGT, 0.0), jnp.log(objective.importance_cap))
            )
        loss, metrics = grpo_loss(
            logps_PGT,
            part.advantages_PG,
            mask_PGT,
            old_logps_PGT=old_logps_PGT,
            ref_logps_PGT=part.ref_logps_PGT,
            entropy_PGT=entropy_PGT,
            beta=objective.beta,
            kl_estimator=objective.kl_estimator,
            entropy_coef=objective.entropy_coef,
            surrogate=objective.surrogate,
            ratio=objective.ratio,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
            aggregate=objective.aggregate,
            denominator=denominator,
            importance_weights_PGT=weights_PGT,
        )
        gap_PGT = jnp.abs(jnp.where(mask_PGT, logps_PGT - sampler_PGT, 0.0))
        metrics |= {
            "loss": loss,
            "sampler_gap": masked_mean(gap_PGT, mask_PGT),
            "sampler_gap_max": gap_PGT.max(),
        }
        if weights_PGT is not None:
            metrics["importance"] = masked_mean(weights_PGT, mask_PGT)
            metrics["importance_clipped"] = masked_mean(weights_PGT >= objective.importance_cap, mask_PGT)
        return loss, metrics

    def logps(self, params: Params, part: TrainBatch) -> tuple[Array, Array]:
        """Log-probabilities and entropies ``[P, G, T]`` of a part's completions."""
        return completion_logps(
            self.model,
            params,
            part.prompt_PS,
            part.prompt_mask_PS,
            part.completion_PGT,
            temperature=self.config.rollout.temperature,
            vocab_size=self.vocab_size,
            chunk_size=self.config.train.logps_chunk,
        )

    def score(self, params: Params, batch: TrainBatch) -> Array:
        """Log-probabilities ``[P, G, T]`` of a whole batch under fixed parameters; to be compiled."""
        train = self.config.train
        parts = split_batch(batch, train.prompt_micro_batches, train.group_micro_batches)
        logps_MNPGT = jax.lax.map(lambda part: jax.lax.map(lambda p: self.logps(params, p)[0], part), parts)
        return _join_groups(logps_MNPGT)

    @property
    def corrects_sampler(self) -> bool:
        """Whether importance weights correct for what the sampler left out."""
        importance = self.config.objective.importance
        return importance == "token" or (importance == "auto" and self.config.rollout.truncates_distribution)


def completion_logps(
    model: Model,
    params: Params,
    prompt_PS: Array,
    prompt_mask_PS: Array,
    completion_PGT: Array,
    *,
    temperature: float,
    vocab_size: int,
    chunk_size: int,
) -> tuple[Array, Array]:
    """Log-probability and entropy of each completion token, the prompt run once for its group.

    Returns:
        ``(logps_PGT, entropy_PGT)``, at the sampling temperature.
    """
    prefix = model.prefill(params, prompt_PS, prompt_mask_PS)
    hidden_PGTD, _ = model.extend(params, completion_PGT[:, :, :-1], prefix)
    # The prompt's last hidden state predicts the first token, each token's the next one.
    first_PG1D = jnp.broadcast_to(
        prefix.hidden_PD[:, None, None], (*completion_PGT.shape[:2], 1, prefix.hidden_PD.shape[-1])
    )
    hidden_PGTD = constrain(jnp.concatenate([first_PG1D, hidden_PGTD], axis=2), (*GROUP_AXES, None, None))
    return token_logps(
        hidden_PGTD,
        model.head(params),
        completion_PGT,
        temperature=temperature,
        vocab_size=vocab_size,
        chunk_size=chunk_size,
    )


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


def split_batch(batch: TrainBatch, prompt_parts: int, group_parts: int) -> TrainBatch:
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

    fields: dict[str, Array | None] = {}
    for name, value in vars(batch).items():
        if value is None:
            fields[name] = None
        elif name in PROMPT_FIELDS:
            # Every part of a group needs its prompt.
            fields[name] = jnp.repeat(split_prompts(value)[:, None], N, axis=1)
        else:
            fields[name] = split_groups(value)
    return TrainBatch(**fields)  # type: ignore[arg-type]


def _join_groups(x_MNPG: Array) -> Array:
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


def _over_updates(metrics: Metrics) -> Metrics:
    """Metrics of the updates of a batch into one each.

    The gap to the sampler means something only before the weights change, in the first update.
    """

    def combine(name: str, x_U: Array) -> Array:
        if name.startswith("sampler_gap"):
            return x_U[0]
        if name.endswith("_max"):
            return x_U.max()
        return x_U.min() if name.endswith("_min") else x_U.mean()

    return {name: combine(name, x_U) for name, x_U in metrics.items()}


def move_reference(ref_params: Params, params: Params, step: Array, config: ReferenceConfig) -> Params:
    """The reference after ``step`` batches: fixed, a copy each ``sync_every`` steps, or a moving average."""
    if config.update == "polyak":
        return jax.tree.map(lambda ref, new: ref + config.polyak_rate * (new - ref), ref_params, params)
    if config.update == "sync":
        due = step % config.sync_every == 0
        return jax.tree.map(lambda ref, new: jnp.where(due, new, ref), ref_params, params)
    return ref_params
