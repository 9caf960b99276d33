"""Inputs of the objective's tests: random batches, the worked numbers of ``golden/``, and what is compared."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from grpo_jax.algorithms import objectives
from tests.algorithms import reference

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "objectives.json").read_text())

MAX_COMPLETION_LENGTH = 8
AGGREGATE_NAMES = tuple(reference.AGGREGATES)

# Every surrogate with every ratio that it takes, and those with every aggregate.
PAIRS = [(surrogate, ratio) for surrogate, ratios in reference.ALLOWED_RATIOS.items() for ratio in ratios]
COMBINATIONS = [(*pair, aggregate) for pair in PAIRS for aggregate in AGGREGATE_NAMES]

# Bounds that a good share of the tokens reaches, none of them symmetric and none at its default.
OPTIONS: dict[str, dict[str, float]] = {
    "clip": {"clip_low": 0.1, "clip_high": 0.3},
    "cispo": {"cispo_low": 0.8, "cispo_high": 1.3},
    "sapo": {"tau_pos": 1.5, "tau_neg": 0.7},
    "reinforce": {},
    "gmpo": {"gmpo_range": 0.15},
    "clip_cov": {"clip_low": 0.1, "clip_high": 0.3},
    "kl_cov": {"kl_cov_coef": 0.7},
}
# The terms beside the surrogate.
TERMS: dict[str, Any] = {"beta": 0.07, "entropy_coef": 0.03, "kl_unbiased": True}


def pair_options(pair: tuple[str, str], *, bare: bool = False) -> dict[str, Any]:
    """The keywords of a surrogate with a ratio, for the objective and for the reference."""
    return {"surrogate": pair[0], "ratio": pair[1], **OPTIONS[pair[0]], **({} if bare else TERMS)}


# Sums of a hundred float64 terms of order 1, in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-13}


class Batch(NamedTuple):
    """Arrays of one optimizer batch; ``[P, G, T]`` unless the name says otherwise."""

    new: Any
    old: Any
    ref: Any
    entropy: Any
    weights: Any
    mask: Any
    policy_mask: Any
    selected: Any
    advantages_PG: Any

    def map(self, f: Any) -> Batch:
        """The batch with ``f`` applied to each array."""
        return Batch(*(f(x) for x in self))


def random_batch(
    seed: int, *, P: int = 2, G: int = 4, T: int = 5, spread: float = 0.3, dtype: Any = np.float64
) -> Batch:
    """Ratios on both sides of every bound; completions of all lengths, with holes, one of them all masked out.

    ``spread`` is the size of the log-ratios to the old policy and, nearly, to the reference.
    """
    rng = np.random.default_rng(seed)
    new = -rng.exponential(1.0, (P, G, T))
    lengths = rng.integers(1, T + 1, (P, G))
    lengths.flat[rng.integers(P * G)] = 0
    mask = np.arange(T) < lengths[..., None]
    mask[..., 1:-1] &= rng.random((P, G, T - 2)) < 0.8
    batch = Batch(
        new=new,
        old=new + rng.normal(0, spread, new.shape),
        ref=new + rng.normal(0, 1.5 * spread, new.shape),
        entropy=rng.exponential(1.0, new.shape),
        weights=rng.uniform(0.2, 2.0, new.shape),
        mask=mask,
        policy_mask=rng.random(new.shape) < 0.7,
        selected=rng.random(new.shape) < 0.3,
        advantages_PG=rng.normal(0, 1, (P, G)),
    )
    return batch.map(lambda x: x if x.dtype == bool else x.astype(dtype))


def batches(**options: Any) -> st.SearchStrategy[Batch]:
    """Random batches, some with ratios far beyond where they are clamped."""
    return st.builds(
        lambda seed, spread: random_batch(seed, spread=spread, **options),
        st.integers(0, 2**32 - 1),
        st.sampled_from([0.01, 0.3, 3.0, 300.0]),
    )


def random_rewards(seed: int, *shape: int) -> np.ndarray:
    """Rewards of few distinct values, so equal ones are common, any share of them missing (NaN)."""
    rng = np.random.default_rng(seed)
    rewards = rng.choice(rng.choice([0.0, 0.1, 0.7, 1.0, -2.0, 3.25], rng.integers(1, 5)), shape)
    return np.where(rng.random(shape) < rng.choice([0.0, 0.0, 0.3, 0.6]), np.nan, rewards)


def golden_batch(*, advantages_name: str = "group (eps 1e-4, ddof 1)") -> Batch:
    """The batch of the worked numbers, ``[2, 2, 4]``."""
    inputs = GOLDEN["inputs"]
    shaped = {name: np.array(inputs[name]).reshape(2, 2, 4) for name in ("new", "old", "ref", "mask")}
    ones = np.ones((2, 2, 4))
    return Batch(
        **{name: shaped[name] for name in ("new", "old", "ref")},
        entropy=0 * ones,
        weights=ones,
        mask=shaped["mask"].astype(bool),
        policy_mask=ones.astype(bool),
        selected=~ones.astype(bool),
        advantages_PG=np.array(GOLDEN["advantages"][advantages_name]),
    )


# ----------------------------------------------------------------------------------------- the package's


def loss_of(batch: Batch, *, denominator: Any = None, **options: Any) -> tuple[jax.Array, dict[str, Any]]:
    """``grpo_loss`` of a batch with everything it holds, the options as keywords."""
    return objectives.grpo_loss(
        batch.new,
        batch.advantages_PG,
        batch.mask,
        old_logps_PGT=batch.old,
        ref_logps_PGT=batch.ref,
        entropy_PGT=batch.entropy,
        policy_mask_PGT=batch.policy_mask,
        importance_weights_PGT=batch.weights,
        selected=batch.selected,
        denominator=denominator,
        **{"max_completion_length": MAX_COMPLETION_LENGTH} | options,
    )


def loss_and_gradient(batch: Batch, **options: Any) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """Loss, its gradient for the new log-probabilities, and the metrics."""
    (loss, metrics), gradient = jax.value_and_grad(
        lambda new: loss_of(batch._replace(new=new), **options), has_aux=True
    )(batch.new)
    return loss, gradient, metrics


@jax.jit
def denominators_of(mask: Any) -> dict[str, Any]:
    """Aggregate -> denominator of the whole optimizer batch."""
    return {
        name: objectives.loss_denominator(mask, aggregate=name, max_completion_length=MAX_COMPLETION_LENGTH)
        for name in AGGREGATE_NAMES
    }


class Outcome(NamedTuple):
    """What a combination gives; arrays whose first axis is the aggregate."""

    loss: Any
    gradient: Any
    metrics: Any = None


@functools.partial(jax.jit, static_argnames=("pair", "bare"))
def outcome(batch: Batch, denominators: dict[str, Any], *, pair: tuple[str, str], bare: bool = False) -> Outcome:
    """Loss and gradient of a pair under every aggregate, in one program: compiling is what these tests spend.

    ``bare`` leaves out the KL, the entropy and the metrics, which are most of the program and no pair's own.
    """
    if bare:
        batch = batch._replace(ref=None, entropy=None)
    by_aggregate = [
        loss_and_gradient(batch, aggregate=name, denominator=denominators[name], **pair_options(pair, bare=bare))
        for name in AGGREGATE_NAMES
    ]
    losses, gradients, metrics = jax.tree.map(lambda *x: jnp.stack(x), *by_aggregate)
    return Outcome(losses, gradients, None if bare else metrics)


def outcome_of(batch: Batch, pair: tuple[str, str], *, bare: bool = False, denominators: Any = None) -> Outcome:
    """``outcome`` as NumPy arrays, with the batch's own denominators where none are given."""
    denominators = denominators_of(batch.mask) if denominators is None else denominators
    return jax.tree.map(np.asarray, outcome(batch, denominators, pair=pair, bare=bare))


# --------------------------------------------------------------------------------------- the reference's


def reference_tokens(batch: Batch, *, held: Any = None, kl_estimator: str = "k3", **options: Any) -> np.ndarray:
    """The independent implementation's loss of each token."""
    return reference.token_losses(
        batch.new,
        batch.old,
        batch.advantages_PG,
        batch.mask,
        held_PGT=held,
        ref_PGT=batch.ref,
        entropy_PGT=batch.entropy,
        weights_PGT=batch.weights,
        policy_mask_PGT=batch.policy_mask,
        selected_PGT=batch.selected,
        kl=kl_estimator,
        **options,
    )


def reference_losses(batch: Batch, **options: Any) -> np.ndarray:
    """The independent implementation's loss under every aggregate."""
    values = reference_tokens(batch, **options)
    return np.array(
        [f(values, batch.mask, max_completion_length=MAX_COMPLETION_LENGTH) for f in reference.AGGREGATES.values()]
    )


def reference_gradients(batch: Batch, **options: Any) -> np.ndarray:
    """Its gradient by finite differences under every aggregate, ``[aggregate, P, G, T]``; constants held fixed."""
    return reference.finite_differences(
        lambda new: reference_losses(batch._replace(new=new), held=batch.new, **options), batch.new
    )
