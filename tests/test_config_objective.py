"""The objective's configuration: what is refused and why, what is warned of, and what is neither."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from typing import Any

import pytest

from grpo_jax.config import Config, ObjectiveConfig, ReferenceConfig, RolloutConfig
from grpo_jax.config.combinations import ALLOWED_RATIOS, RATIOS

AGGREGATES = ("sequence_mean", "token_mean", "constant", "sequence_sum")


def messages(make: Any) -> list[str]:
    """The warnings that a configuration gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    assert all(warning.category is UserWarning for warning in caught)
    return [str(warning.message) for warning in caught]


# Refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({name: value}, f"objective.{name} must be at least 0 and finite, got {value}")
            for name in ("advantage_eps", "clip_high", "cispo_low", "kl_cov_coef", "beta", "importance_low")
            for value in (-0.1, math.nan, math.inf)
        ),
        *(
            ({name: value}, f"objective.{name} must be above 0 and finite, got {value}")
            for name in ("tau_pos", "tau_neg", "gmpo_range")
            for value in (0.0, -1.0, math.nan, math.inf)
        ),
        *(
            ({name: value}, f"objective.{name} must be in (0, 1], got {value}")
            for name in ("cov_share", "top_entropy")
            for value in (0.0, 1.5, math.nan)
        ),
        ({"clip_low": 1.5}, "objective.clip_low must be in [0, 1], got 1.5"),
        ({"clip_low": -0.1}, "objective.clip_low must be in [0, 1], got -0.1"),
        ({"cispo_low": 2.0, "cispo_high": 1.0}, "objective.cispo_high must be at least cispo_low (2), got 1.0"),
        ({"cov_high": 0.5}, "objective.cov_high must be at least cov_low (1), got 0.5"),
        ({"entropy_coef": math.inf}, "objective.entropy_coef must be finite, got inf"),
        ({"importance_cap": 0.0}, "objective.importance_cap must be above 0 and above importance_low, got 0.0"),
        (
            {"importance_outside": "drop", "importance_low": 3.0},
            "objective.importance_cap must be above 0 and above importance_low, got 2.0",
        ),
        ({"overlong_cache": -1}, "objective.overlong_cache must be at least 0, got -1"),
        (
            {"overlong_cache": 9, "overlong_length": 8},
            "objective.overlong_length must be None, or at least overlong_cache (9), got 8",
        ),
        ({"overlong_length": 0}, "objective.overlong_length must be None, or at least overlong_cache (0), got 0"),
        # Choices that make no sense together
        ({"surrogate": "ppo"}, "objective.surrogate must be one of ['clip', 'cispo', 'sapo',"),
        (
            {"ratio": "word"},
            "objective.ratio must be one of ['token', 'sequence', 'sequence_token', 'trajectory']",
        ),
        (
            {"surrogate": "reinforce", "ratio": "sequence"},
            "objective.ratio must be one of ['token'] for objective.surrogate='reinforce', got 'sequence': "
            "reinforce has no ratio",
        ),
        (
            {"surrogate": "cispo", "ratio": "sequence_token"},
            "for objective.surrogate='cispo', got 'sequence_token': cispo takes no gradient through the ratio",
        ),
        (
            {"surrogate": "gmpo", "ratio": "sequence"},
            "got 'sequence': gmpo takes the geometric mean of the tokens'",
        ),
        (
            {"surrogate": "clip_cov", "ratio": "sequence"},
            "got 'sequence': a selected token has no gradient to lose",
        ),
        (
            {"surrogate": "kl_cov", "ratio": "trajectory"},
            "got 'trajectory': tokens are selected and penalised one",
        ),
        (
            {"surrogate": "cispo", "delta": 4.0},
            "objective.delta must be None for objective.surrogate='cispo', got 4.0: only 'clip' has it",
        ),
        (
            {"surrogate": "sapo", "dual_clip": 3.0},
            "objective.dual_clip must be None for objective.surrogate='sapo', got 3.0: only 'clip' has it",
        ),
        (
            {"delta": 1.2, "clip_high": 0.2},
            "objective.delta must be above 1 + objective.clip_high (1.2), got 1.2: it bounds the ratio beyond",
        ),
        ({"dual_clip": 1.0}, "objective.dual_clip must be above 1, got 1.0: on-policy losses would be clipped"),
        *(
            (
                {"beta": 0.1, "kl_unbiased": True, "kl_estimator": estimator},
                f"objective.kl_estimator must be 'k1' or 'k3' for objective.kl_unbiased, got '{estimator}'",
            )
            for estimator in ("k2", "k3_straight_through")
        ),
        (
            {"combine": "normalize_then_sum", "advantage": "center"},
            "objective.advantage must be 'group' for objective.combine='normalize_then_sum', which normalises "
            "each reward in its group, got 'center'",
        ),
        (
            {"combine": "normalize_then_sum", "kl_in": "reward", "beta": 0.1},
            "objective.kl_in must be 'loss' for objective.combine='normalize_then_sum': normalised by itself, the "
            "KL would lose its weight beta, got 'reward'",
        ),
    ],
)
def test_refused_with_field_value_and_reason(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ObjectiveConfig(**fields)


def test_the_pairs_that_are_allowed() -> None:
    assert sum(map(len, ALLOWED_RATIOS.values())) == 17
    for surrogate, allowed in ALLOWED_RATIOS.items():
        for ratio in RATIOS:
            if ratio in allowed:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    ObjectiveConfig(surrogate=surrogate, ratio=ratio)  # type: ignore[arg-type]
            else:
                with pytest.raises(ValueError, match=f"got '{ratio}': .{{10}}"):
                    ObjectiveConfig(surrogate=surrogate, ratio=ratio)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "advantage", ["group", "batch_std", "center", "batch_baseline", "leave_one_out", "maxrl", "opo"]
)
def test_a_group_of_one_is_refused_where_groups_are_compared(advantage: Any) -> None:
    objective = ObjectiveConfig(advantage=advantage)
    message = f"rollout.group_size must be at least 2 for objective.advantage='{advantage}', got 1"
    with pytest.raises(ValueError, match=re.escape(message)):
        Config(rollout=RolloutConfig(group_size=1), objective=objective)


def test_a_group_of_one_is_allowed_where_they_are_not() -> None:
    Config(rollout=RolloutConfig(group_size=1), objective=ObjectiveConfig(advantage="batch"))


# Warned of: settings without effect

# A setting that does nothing, the reason given, and a change that makes it act.
IDLE: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    *(
        ({"advantage": "center", name: value}, "objective.advantage has no standard deviation", {"advantage": std})
        for (name, value), std in zip(
            [("advantage_eps", 1e-6), ("advantage_ddof", 0)] * 2,
            ["group", "batch_std", "batch", "batch_baseline"],
            strict=True,
        )
    ),
    *(
        ({"surrogate": surrogate, name: 0.3}, "only objective.surrogate='clip' or 'clip_cov' uses it", change)
        for surrogate in ("reinforce", "cispo", "sapo", "kl_cov")
        for name in ("clip_low", "clip_high")
        for change in ({"surrogate": "clip"}, {"surrogate": "clip_cov"})
    ),
    ({"cispo_low": 0.5}, "only objective.surrogate='cispo' uses it", {"surrogate": "cispo"}),
    ({"cispo_high": 4.0}, "only objective.surrogate='cispo' uses it", {"surrogate": "cispo"}),
    ({"tau_pos": 2.0}, "only objective.surrogate='sapo' uses it", {"surrogate": "sapo"}),
    ({"tau_neg": 2.0}, "only objective.surrogate='sapo' uses it", {"surrogate": "sapo"}),
    (
        {"gmpo_range": 0.2},
        "only objective.surrogate='gmpo' uses it",
        {"surrogate": "gmpo", "aggregate": "sequence_mean"},
    ),
    ({"cov_share": 0.1}, "only objective.surrogate='clip_cov' or 'kl_cov' uses it", {"surrogate": "kl_cov"}),
    ({"cov_share": 0.1}, "only objective.surrogate='clip_cov' or 'kl_cov' uses it", {"surrogate": "clip_cov"}),
    ({"cov_low": 0.5}, "only objective.surrogate='clip_cov' uses it", {"surrogate": "clip_cov"}),
    ({"cov_high": 6.0}, "only objective.surrogate='clip_cov' uses it", {"surrogate": "clip_cov"}),
    ({"kl_cov_coef": 0.5}, "only objective.surrogate='kl_cov' uses it", {"surrogate": "kl_cov"}),
    ({"kl_in": "reward"}, "objective.beta is 0", {"beta": 0.1}),
    ({"kl_estimator": "k2"}, "no KL term is in the loss", {"beta": 0.1}),
    ({"kl_unbiased": True}, "no KL term is in the loss", {"beta": 0.1}),
    ({"beta": 0.1, "kl_in": "reward", "kl_estimator": "k1"}, "no KL term is in the loss", {"kl_in": "loss"}),
    (
        {"importance": "none", "importance_outside": "drop"},
        "objective.importance is 'none'",
        {"importance": "token"},
    ),
    ({"importance_low": 0.5}, "weights are dropped with", {"importance_outside": "drop"}),
    ({"importance": "none", "importance_cap": 3.0}, "objective.importance is 'none'", {"importance": "auto"}),
    ({"overlong_length": 64}, "objective.overlong_cache is 0", {"overlong_cache": 8}),
]


@pytest.mark.parametrize(("fields", "reason", "change"), IDLE)
def test_a_setting_without_effect_is_warned_of(
    fields: dict[str, Any], reason: str, change: dict[str, Any]
) -> None:
    (message,) = messages(lambda: ObjectiveConfig(**fields))
    field = list(fields)[-1]
    assert message.startswith(f"objective.{field}={fields[field]!r} has no effect: ") and reason in message
    assert messages(lambda: ObjectiveConfig(**(fields | change))) == []


def test_every_field_that_can_be_idle_is_tested() -> None:
    # Those left out are read whatever the other fields are.
    always = {
        *("advantage", "combine", "surrogate", "ratio", "aggregate", "beta", "entropy_coef", "importance"),
        *("truncated", "overlong_cache", "zero_spread", "top_entropy"),
    }
    # Refused, not warned of, where they would be idle.
    refused = {"delta", "dual_clip"}
    tested = {list(fields)[-1] for fields, _, _ in IDLE}
    assert tested | always | refused == {field.name for field in dataclasses.fields(ObjectiveConfig)}


def test_several_idle_settings_are_each_named() -> None:
    found = messages(lambda: ObjectiveConfig(surrogate="reinforce", clip_low=0.3, clip_high=0.3, tau_pos=2.0))
    assert [message.split("=")[0] for message in found] == [
        "objective.clip_low",
        "objective.clip_high",
        "objective.tau_pos",
    ]


def test_idle_settings_over_several_sections() -> None:
    sync = ReferenceConfig(update="sync")
    (message,) = messages(lambda: Config(reference=sync))
    assert message.startswith("reference.update='sync' has no effect: objective.beta is 0")
    assert messages(lambda: Config(reference=sync, objective=ObjectiveConfig(beta=0.1, kl_in="reward"))) == []

    (message,) = messages(lambda: Config(rollout=RolloutConfig(spread_of="rewards")))
    assert message == "rollout.spread_of='rewards' has no effect: rollout.extra_rollouts is 0"
    assert messages(lambda: Config(rollout=RolloutConfig(spread_of="rewards", extra_rollouts=1))) == []
    (message,) = messages(lambda: Config(rollout=RolloutConfig(overlap_parts=2)))
    assert message == "rollout.overlap_parts=2 has no effect: rollout.overlap is False"
    assert messages(lambda: Config(rollout=RolloutConfig(overlap_parts=2, overlap=True))) == []

    long = ObjectiveConfig(overlong_cache=16, overlong_length=80)
    (message,) = messages(lambda: Config(rollout=RolloutConfig(max_completion_length=64), objective=long))
    assert message.startswith("objective.overlong_cache=16 has no effect: lengths up to 64")
    assert messages(lambda: Config(rollout=RolloutConfig(max_completion_length=65), objective=long)) == []


# Warned of: what nobody would expect


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("ratio", RATIOS)
def test_ratios_of_whole_completions_and_the_mean_over_tokens(ratio: Any, aggregate: Any) -> None:
    found = messages(lambda: ObjectiveConfig(ratio=ratio, aggregate=aggregate))
    if ratio != "token" and aggregate == "token_mean":
        (message,) = found
        assert message.startswith(f"objective.aggregate='token_mean' with '{ratio}': one value a completion")
        assert "'sequence_mean'" in message
    elif ratio == "trajectory" and aggregate != "sequence_mean":
        (message,) = found
        assert message.startswith(f"objective.aggregate='{aggregate}' with ratio 'trajectory'")
    else:
        assert found == []


def test_gmpo_and_the_mean_over_tokens() -> None:
    (message,) = messages(lambda: ObjectiveConfig(surrogate="gmpo"))
    assert message.startswith("objective.aggregate='token_mean' with 'gmpo'")


def test_defaults_warn_of_nothing() -> None:
    assert messages(ObjectiveConfig) == [] and messages(Config) == []


def test_a_warning_points_at_whoever_made_the_config() -> None:
    with pytest.warns(UserWarning) as caught:
        ObjectiveConfig(tau_pos=2.0)
    assert caught[0].filename == __file__


# What follows from the choices


def test_what_the_choices_need() -> None:
    assert ObjectiveConfig().needs_group and not ObjectiveConfig(advantage="batch").needs_group
    assert ObjectiveConfig(top_entropy=0.2).selects_tokens and ObjectiveConfig(surrogate="kl_cov").selects_tokens
    assert not ObjectiveConfig().selects_tokens
    assert ObjectiveConfig(beta=0.1).loss_beta == 0.1
    assert ObjectiveConfig(beta=0.1, kl_in="reward").loss_beta == 0.0
