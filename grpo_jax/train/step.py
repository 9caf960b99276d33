"""The compiled training step: log-probabilities, loss, gradient, update.

Shapes: P prompts, G completions of a prompt, S prompt tokens, T completion tokens, D width, M micro-batches of
prompts, N parts of each group, U updates of a batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from grpo_jax.algorithms.aggregates import loss_denominator, masked_mean
from grpo_jax.algorithms.importance import importance_weights
from grpo_jax.algorithms.objectives import SurrogateOptions, grpo_loss
from grpo_jax.algorithms.selection import covariance_tokens, top_entropy_tokens
from grpo_jax.config import Config, ObjectiveConfig, ReferenceConfig
from grpo_jax.config.combinations import COVARIANCE_SURROGATES
from grpo_jax.mesh import group_shards
from grpo_jax.optim.chain import nonfinite_counts
from grpo_jax.train.logps import completion_logps
from grpo_jax.train.micro_batches import accumulate_gradients, join_groups, split_batch
from grpo_jax.train.packing import pack, row_counts, rows_needed
from grpo_jax.types import Array, Model, Params, Rollout, TrainBatch, TrainState

Metrics = dict[str, Array]
Result = TypeVar("Result")


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

        if train.skip_zero_advantages:
            trained_PG1 = (batch.advantages_PG != 0)[..., None]
            batch = dataclasses.replace(batch, loss_mask_PGT=batch.loss_mask_PGT & trained_PG1)
        step_key = jax.random.fold_in(jax.random.key(self.config.seed), state.step)

        def update(carry: tuple[Params, Any], index: Array) -> tuple[tuple[Params, Any], Metrics]:
            params, opt_state = carry
            whole = batch
            if objective.selects_tokens:
                whole = self.select_tokens(params, batch, jax.random.fold_in(step_key, index))
            grads, metrics = self.in_fewest_rows(
                lambda num_rows: accumulate_gradients(
                    functools.partial(self.loss_fn, denominator=denominator, num_rows=num_rows),
                    params,
                    whole,
                    train.prompt_micro_batches,
                    train.group_micro_batches,
                ),
                batch.loss_mask_PGT,
            )
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
            metrics["grad_norm"] = optax.tree.norm(grads)
            metrics["update_norm"] = optax.tree.norm(updates)
            return (optax.apply_updates(params, updates), opt_state), metrics

        (params, opt_state), metrics = jax.lax.scan(
            update, (state.params, state.opt_state), jnp.arange(train.updates_per_batch)
        )
        metrics = _over_updates(metrics)
        metrics["nonfinite_in_a_row"], metrics["nonfinite_total"] = nonfinite_counts(opt_state)
        step = state.step + 1
        ref_params = None
        if state.ref_params is not None:
            ref_params = move_reference(state.ref_params, params, step, self.config.reference)
        return TrainState(params=params, ref_params=ref_params, opt_state=opt_state, step=step), metrics

    def loss_fn(
        self, params: Params, part: TrainBatch, *, denominator: Array, num_rows: int | None = None
    ) -> tuple[Array, Metrics]:
        """The objective on a part of a batch, whose parts' losses and gradients sum to the whole's."""
        objective = self.config.objective
        logps_PGT, entropy_PGT = self.logps(params, part, num_rows)
        mask_PGT, sampler_PGT = part.loss_mask_PGT, part.sampler_logps_PGT
        weights_PGT: Array | None = None
        weight_metrics: Metrics = {}
        if self.importance != "none":
            weights_PGT, weight_metrics = importance_weights(
                logps_PGT if part.old_logps_PGT is None else part.old_logps_PGT,
                sampler_PGT,
                mask_PGT,
                level=self.importance,
                outside=objective.importance_outside,
                low=objective.importance_low,
                cap=objective.importance_cap,
            )
        loss, metrics = grpo_loss(
            logps_PGT,
            part.advantages_PG,
            mask_PGT,
            old_logps_PGT=part.old_logps_PGT,
            ref_logps_PGT=part.ref_logps_PGT,
            entropy_PGT=entropy_PGT,
            policy_mask_PGT=part.policy_mask_PGT,
            importance_weights_PGT=weights_PGT,
            beta=objective.loss_beta,
            kl_estimator=objective.kl_estimator,
            kl_unbiased=objective.kl_unbiased,
            entropy_coef=objective.entropy_coef,
            aggregate=objective.aggregate,
            denominator=denominator,
            **surrogate_options(objective, selected=part.selected_PGT),
        )
        gap_PGT = jnp.abs(jnp.where(mask_PGT, logps_PGT - sampler_PGT, 0.0))
        metrics |= {
            "loss": loss,
            "sampler_gap": masked_mean(gap_PGT, mask_PGT),
            "sampler_gap_max": gap_PGT.max(),
            **weight_metrics,
        }
        return loss, metrics

    def select_tokens(self, params: Params, batch: TrainBatch, key: Array) -> TrainBatch:
        """The batch with the tokens that a rule picks out of the whole of it, at the cost of a forward pass."""
        objective, mask_PGT = self.config.objective, batch.loss_mask_PGT
        logps_PGT, entropy_PGT = self.score(params, batch)
        if objective.top_entropy < 1:
            high_PGT = top_entropy_tokens(entropy_PGT, mask_PGT, share=objective.top_entropy)
            batch = dataclasses.replace(batch, policy_mask_PGT=high_PGT)
        if objective.surrogate in COVARIANCE_SURROGATES:
            selected_PGT = covariance_tokens(
                logps_PGT,
                batch.advantages_PG,
                mask_PGT,
                surrogate=objective.surrogate,
                share=objective.cov_share,
                low=objective.cov_low,
                high=objective.cov_high,
                key=key,
            )
            batch = dataclasses.replace(batch, selected_PGT=selected_PGT)
        return batch

    def logps(
        self, params: Params, part: Rollout | TrainBatch, num_rows: int | None = None
    ) -> tuple[Array, Array]:
        """Log-probabilities and entropies ``[P, G, T]`` of a part's completions, in ``num_rows`` rows if given."""
        return completion_logps(
            self.model,
            params,
            part.prompt_PS,
            part.prompt_mask_PS,
            part.completion_PGT,
            temperature=self.config.rollout.temperature,
            vocab_size=self.vocab_size,
            chunk_size=self.config.train.logps_chunk,
            packing=None if num_rows is None else pack(_mask(part), num_rows),
        )

    def score(self, params: Params, batch: Rollout | TrainBatch) -> tuple[Array, Array]:
        """Log-probabilities and entropies ``[P, G, T]`` of a whole batch; to be compiled."""
        train = self.config.train
        parts = split_batch(batch, train.prompt_micro_batches, train.group_micro_batches)

        def all_parts(num_rows: int | None) -> tuple[Array, Array]:
            both_MNPGT = jax.lax.map(
                lambda part: jax.lax.map(lambda p: self.logps(params, p, num_rows), part), parts
            )
            logps_PGT, entropy_PGT = map(join_groups, both_MNPGT)
            return logps_PGT, entropy_PGT

        return self.in_fewest_rows(all_parts, _mask(batch))

    def in_fewest_rows(self, function: Callable[[int | None], Result], mask_PGT: Array) -> Result:
        """``function`` of the smallest number of rows that holds every prompt's completions; None: one each."""
        group_size = self.config.rollout.group_size
        branches = [functools.partial(function, n if n < group_size else None) for n in self.row_counts]
        if len(branches) == 1:
            return branches[0]()
        fits = jnp.asarray(self.row_counts) >= rows_needed(mask_PGT)
        return jax.lax.switch(jnp.argmax(fits), branches)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows of a group that the passes over a batch are compiled for, on the current mesh."""
        train, rollout = self.config.train, self.config.rollout
        if not train.packing or train.group_micro_batches > 1 or group_shards() > 1:
            return (rollout.group_size,)
        return row_counts(rollout.group_size, rollout.max_completion_length)

    @property
    def importance(self) -> str:
        """Level of the weights that correct for the sampler: ``none``, ``token`` or ``sequence``."""
        level = self.config.objective.importance
        if level == "auto":
            return "token" if self.config.rollout.off_policy else "none"
        return level


def surrogate_options(objective: ObjectiveConfig, *, selected: Array | None = None) -> SurrogateOptions:
    """What the policy loss takes as keywords; ``selected`` are the tokens of largest covariance, if any."""
    return SurrogateOptions(
        surrogate=objective.surrogate,
        ratio=objective.ratio,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        delta=objective.delta,
        dual_clip=objective.dual_clip,
        cispo_low=objective.cispo_low,
        cispo_high=objective.cispo_high,
        tau_pos=objective.tau_pos,
        tau_neg=objective.tau_neg,
        gmpo_range=objective.gmpo_range,
        kl_cov_coef=objective.kl_cov_coef,
        selected=selected,
    )


def _mask(batch: Rollout | TrainBatch) -> Array:
    """The completion tokens whose log-probabilities are wanted."""
    return batch.completion_mask_PGT if isinstance(batch, Rollout) else batch.loss_mask_PGT


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
