"""The Optax chain: global-norm clip, preconditioner, decoupled weight decay, learning-rate schedule.

Non-finite gradients are skipped and counted: such an update leaves the parameters and every moment as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from grpo_jax.config import OptimizerConfig
from grpo_jax.types import Array, Params


def make_optimizer(config: OptimizerConfig, total_updates: int) -> optax.GradientTransformation:
    """The transformation that ``config`` describes, for a run of ``total_updates`` optimizer updates."""
    stages = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    stages.append(PRECONDITIONERS[config.name](config))
    if config.weight_decay > 0:
        stages.append(optax.add_decayed_weights(config.weight_decay, DECAY_MASKS[config.decay]))
    stages.append(optax.scale_by_learning_rate(learning_rate_schedule(config, total_updates)))
    # Never give up inside the compiled step: the loop reads the count and stops the run with a message.
    return optax.apply_if_finite(optax.chain(*stages), max_consecutive_errors=2**31 - 1)


def learning_rate_schedule(config: OptimizerConfig, total_updates: int) -> optax.Schedule:
    """Linear warm-up from 0, then constant, linear or cosine down to ``final_fraction`` of the peak."""
    peak, warmup = config.learning_rate, config.warmup_steps
    rest = max(total_updates - warmup, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, peak * config.final_fraction, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction),
    }[config.schedule]
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def opt_state_shardings(
    optimizer: optax.GradientTransformation, params: Params, param_shardings: Any, whole: Any
) -> Any:
    """Where the optimizer's state lies: arrays of a parameter's shape as the parameter, all else ``whole``.

    Args:
        optimizer: the transformation.
        params: the parameters, or their shapes.
        param_shardings: their shardings, in the same structure.
        whole: the sharding that splits nothing.
    """
    return optax.tree.map_params(
        optimizer,
        lambda moment, param, sharding: sharding if moment.shape == param.shape else whole,
        jax.eval_shape(optimizer.init, params),
        params,
        param_shardings,
        transform_non_params=lambda _: whole,
    )


def nonfinite_counts(opt_state: Any) -> tuple[Array, Array]:
    """Updates skipped for a NaN or Inf gradient: ``(in a row, in all)``."""
    return opt_state.notfinite_count, opt_state.total_notfinite


def _decay_matrices(params: Params) -> Any:
    """True on matrices; not on embeddings, biases and vectors. Below "layers" there is a stacked axis more."""

    def decays(path: tuple[Any, ...], x: Array) -> bool:
        names = [str(key.key) for key in path]
        stacked = "layers" in names
        return x.ndim - stacked >= 2 and "embed" not in names and not names[-1].endswith("bias")

    return jax.tree.map_with_path(decays, params)


DECAY_MASKS: dict[str, Callable[[Params], Any] | None] = {"matrices": _decay_matrices, "all": None}

PRECONDITIONERS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {
    "adamw": lambda c: optax.scale_by_adam(b1=c.b1, b2=c.b2, eps=c.eps),
    "lion": lambda c: optax.scale_by_lion(b1=c.b1, b2=c.b2),
    "adafactor": lambda c: optax.chain(optax.scale_by_factored_rms(decay_rate=0.8), optax.clip_by_block_rms(1.0)),
    "sgd": lambda c: optax.trace(decay=c.b1) if c.b1 else optax.identity(),
}
