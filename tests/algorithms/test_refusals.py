"""Choices that make no sense together: refused with the field, its value and the reason."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from grpo_jax.algorithms import objectives
from grpo_jax.algorithms.aggregates import loss_denominator
from grpo_jax.algorithms.ratios import log_ratio
from tests.algorithms import reference

SHAPE = (1, 2, 3)
ZEROS, MASK, ADVANTAGES = jnp.zeros(SHAPE), jnp.ones(SHAPE, bool), jnp.zeros(SHAPE[:2])

NONSENSE = [
    (surrogate, ratio)
    for surrogate in reference.SURROGATES
    for ratio in reference.RATIOS
    if ratio not in reference.ALLOWED_RATIOS[surrogate]
]
# Something that only this surrogate's message says.
REASONS = {
    "cispo": "takes no gradient through the ratio",
    "reinforce": "has no ratio",
    "gmpo": "geometric mean",
    "clip_cov": "selected token",
    "kl_cov": "penalised one by one",
}


def policy_loss(**options: Any) -> None:
    objectives.policy_loss(ZEROS, ZEROS, ADVANTAGES, MASK, **options)


def grpo_loss(**options: Any) -> None:
    objectives.grpo_loss(ZEROS, ADVANTAGES, MASK, **options)


both = pytest.mark.parametrize("loss", [policy_loss, grpo_loss])


def test_what_is_allowed_and_what_is_not_is_everything() -> None:
    assert len(NONSENSE) == len(reference.SURROGATES) * len(reference.RATIOS) - 17 == 11
    assert {surrogate for surrogate, _ in NONSENSE} == set(REASONS)


@both
@pytest.mark.parametrize(("surrogate", "ratio"), NONSENSE, ids="-".join)
def test_a_ratio_that_a_surrogate_cannot_use(loss, surrogate, ratio) -> None:
    with pytest.raises(ValueError, match=rf"ratio .*surrogate='{surrogate}'.*got '{ratio}'.*{REASONS[surrogate]}"):
        loss(surrogate=surrogate, ratio=ratio)


@both
@pytest.mark.parametrize("bound", ["delta", "dual_clip"])
@pytest.mark.parametrize("surrogate", [name for name in reference.SURROGATES if name != "clip"])
def test_bounds_of_the_clip_with_another_surrogate(loss, bound, surrogate) -> None:
    with pytest.raises(ValueError, match=rf"{bound} .*surrogate='{surrogate}'.*got 3\.5.*'clip'"):
        loss(surrogate=surrogate, **{bound: 3.5})


@both
@pytest.mark.parametrize("delta", [-1.0, 0.0, 1.0, 1.28])
def test_a_delta_within_the_clip(loss, delta) -> None:
    with pytest.raises(ValueError, match=rf"delta .*clip_high.*1\.28.*got {delta}.*beyond the clip"):
        loss(delta=delta, clip_high=0.28)
    loss(delta=1.29, clip_high=0.28)


@both
@pytest.mark.parametrize("dual_clip", [-3.0, 0.0, 1.0])
def test_a_dual_clip_of_on_policy_losses(loss, dual_clip) -> None:
    with pytest.raises(ValueError, match=rf"dual_clip .*above 1.*got {dual_clip}.*on-policy"):
        loss(dual_clip=dual_clip)
    loss(dual_clip=1.01)


@both
@pytest.mark.parametrize(
    ("field", "names"),
    [("surrogate", reference.SURROGATES), ("ratio", reference.RATIOS), ("aggregate", reference.AGGREGATES)],
)
def test_unknown_names(loss, field, names) -> None:
    """The message lists those that there are."""
    with pytest.raises(ValueError, match=rf"{field} .*got 'cliip'") as caught:
        loss(**{field: "cliip"})
    assert all(repr(name) in str(caught.value) for name in names)


@both
def test_constant_without_a_length(loss) -> None:
    with pytest.raises(ValueError, match="max_completion_length .*aggregate='constant'.*None"):
        loss(aggregate="constant")
    loss(aggregate="constant", max_completion_length=3)
    loss(aggregate="constant", denominator=jnp.float32(6))


@pytest.mark.parametrize("estimator", ["k2", "k3_straight_through"])
def test_an_unbiased_kl_of_an_estimator_that_the_ratio_would_spoil(estimator) -> None:
    with pytest.raises(ValueError, match=rf"kl_estimator .*kl_unbiased.*got '{estimator}'.*without the ratio"):
        grpo_loss(ref_logps_PGT=ZEROS, beta=0.1, kl_estimator=estimator, kl_unbiased=True)


def test_an_unknown_kl() -> None:
    with pytest.raises(ValueError, match="estimator .*k3_straight_through.*got 'k9'"):
        grpo_loss(ref_logps_PGT=ZEROS, beta=0.1, kl_estimator="k9")


def test_terms_without_their_arrays() -> None:
    with pytest.raises(ValueError, match=r"beta .*0\.1.*ref_logps_PGT"):
        grpo_loss(beta=0.1)
    with pytest.raises(ValueError, match=r"entropy_coef .*0\.1.*entropy_PGT"):
        grpo_loss(entropy_coef=0.1)


def test_the_parts_refuse_for_themselves() -> None:
    with pytest.raises(ValueError, match="ratio .*trajectory.*got 'word'"):
        log_ratio(ZEROS, ZEROS, MASK, ratio="word")
    with pytest.raises(ValueError, match="aggregate .*sequence_sum.*got 'median'"):
        loss_denominator(MASK, aggregate="median")
