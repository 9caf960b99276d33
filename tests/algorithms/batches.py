"""Inputs of the objective's tests: random batches and the worked numbers of ``golden/``."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.algorithms import objectives
from tests.algorithms import reference

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "objectives.json").read_text())

MAX_COMPLETION_LENGTH = 8

LOSS_OPTIONS = (
    "beta",
    "kl_estimator",
    "entropy_coef",
    "surrogate",
    "ratio",
    "clip_low",
    "clip_high",
    "aggregate",
    "max_completion_length",
)

# Every combination of names that the objective has, as keyword arguments of grpo_loss.
COMBINATIONS = [
    {"surrogate": surrogate, "ratio": ratio, "aggregate": aggregate, "kl_estimator": kl}
    for surrogate in reference.SURROGATES
    for ratio in reference.RATIOS
    for aggregate in reference.AGGREGATES
    for kl in reference.KL
]

# Every term of the loss at once, and a clip range that isn't symmetric.
EXTRAS = {"beta": 0.07, "entropy_coef": 0.03, "clip_low": 0.1, "clip_high": 0.3}
# Sums of a few hundred float64 terms of order 1, in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-13}


class Batch(NamedTuple):
    """Arrays of one optimizer batch; ``[P, G, T]`` unless the name says otherwise."""

    new: Any
    old: Any
    ref: Any
    entropy: Any
    weights: Any
    mask: Any
    advantages_PG: Any


def random_batch(seed: int, *, P: int = 4, G: int = 4, T: int = 5, dtype: Any = np.float64) -> Batch:
    """Ratios on both sides of the clip range, completions of all lengths, one of them all masked out."""
    rng = np.random.default_rng(seed)
    new = -rng.exponential(1.0, (P, G, T))
    lengths = rng.integers(1, T + 1, (P, G))
    lengths.flat[rng.integers(P * G)] = 0
    batch = Batch(
        new=new,
        old=new + rng.normal(0, 0.3, new.shape),
        ref=new + rng.normal(0, 0.5, new.shape),
        entropy=rng.exponential(1.0, new.shape),
        weights=rng.uniform(0.2, 2.0, new.shape),
        mask=np.arange(T) < lengths[..., None],
        advantages_PG=rng.normal(0, 1, (P, G)),
    )
    return Batch(*(x if x.dtype == bool else x.astype(dtype) for x in batch))


def golden_batch(*, advantages_name: str) -> Batch:
    """The batch of the worked numbers, ``[2, 2, 4]``."""
    inputs = GOLDEN["inputs"]
    shaped = {name: np.array(inputs[name]).reshape(2, 2, 4) for name in ("new", "old", "ref", "mask")}
    return Batch(
        **{name: shaped[name] for name in ("new", "old", "ref")},
        entropy=np.zeros((2, 2, 4)),
        weights=np.ones((2, 2, 4)),
        mask=shaped["mask"].astype(bool),
        advantages_PG=np.array(GOLDEN["advantages"][advantages_name]),
    )


def loss_of(batch: Batch, *, denominator: Any = None, **options: Any) -> tuple[jax.Array, dict[str, Any]]:
    """``grpo_loss`` of a batch with everything it holds, the options as keywords."""
    return objectives.grpo_loss(
        batch.new,
        batch.advantages_PG,
        batch.mask,
        old_logps_PGT=batch.old,
        ref_logps_PGT=batch.ref,
        entropy_PGT=batch.entropy,
        importance_weights_PGT=batch.weights,
        denominator=denominator,
        **{"max_completion_length": MAX_COMPLETION_LENGTH} | options,
    )


def loss_and_gradient(
    batch: Batch, *, denominator: Any = None, **options: Any
) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """Loss, its gradient for the new log-probabilities, and the metrics."""

    def of_new(new: Any) -> tuple[jax.Array, dict[str, Any]]:
        return loss_of(batch._replace(new=new), denominator=denominator, **options)

    (loss, metrics), gradient = jax.value_and_grad(of_new, has_aux=True)(batch.new)
    return loss, gradient, metrics


jitted_loss_and_gradient = functools.partial(jax.jit, static_argnames=LOSS_OPTIONS)(loss_and_gradient)


def on_device(batch: Batch) -> Batch:
    """The batch as JAX arrays."""
    return Batch(*(None if x is None else jnp.asarray(x) for x in batch))


def reference_loss(batch: Batch, *, kl_estimator: str = "k3", **options: Any) -> float:
    """The independent implementation's loss of a batch."""
    return reference.loss(
        batch.new,
        batch.old,
        batch.advantages_PG,
        batch.mask,
        ref_PGT=batch.ref,
        entropy_PGT=batch.entropy,
        weights_PGT=batch.weights,
        kl=kl_estimator,
        **{"max_completion_length": MAX_COMPLETION_LENGTH} | options,
    )
