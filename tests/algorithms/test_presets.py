"""Every recipe is a valid configuration, is printed as what it does, and computes its paper's formula."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.algorithms.advantages import group_advantages
from grpo_jax.algorithms.objectives import grpo_loss
from grpo_jax.algorithms.presets import NOTATION, PRESETS, apply_preset, find_preset
from grpo_jax.cli import main
from grpo_jax.config import (
    Config,
    ObjectiveConfig,
    OptimizerConfig,
    RolloutConfig,
    config_from_dict,
    config_to_dict,
)
from grpo_jax.train.step import surrogate_options

NAMES = sorted(PRESETS)
README = (Path(__file__).parents[2] / "README.md").read_text()

P, G, T = 3, 4, 6
# Longer than every completion of a batch below, so that "constant" differs from the batch's longest.
LIMIT = 8


def test_the_recipes() -> None:
    assert set(PRESETS) == {
        "deepseekmath",
        "r1_zero",
        "dapo",
        "dr_grpo",
        "gspo",
        "cispo",
        "tic_grpo",
        "rloo",
        "reinforce_pp",
        "maxrl",
        "trl",
        "verl",
    }


# A run's configuration


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [16, 512, 20480, 32768])
def test_a_recipe_neither_warns_nor_is_refused(name: str, length: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Built anew: those of PRESETS were built when the module was imported.
        objective = ObjectiveConfig(**dataclasses.asdict(PRESETS[name].objective))
        config = apply_preset(Config(rollout=RolloutConfig(max_completion_length=length)), name)
    assert objective == PRESETS[name].objective
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    assert apply_preset(config, name) == config


@pytest.mark.parametrize("name", NAMES)
def test_what_a_recipe_names_is_replaced_and_nothing_else(name: str) -> None:
    before = Config(
        seed=3,
        objective=ObjectiveConfig(entropy_coef=0.5, beta=0.3, truncated="mask"),
        rollout=RolloutConfig(num_prompts=8, max_prompt_length=11, max_completion_length=20480),
        optimizer=OptimizerConfig(learning_rate=0.5, warmup_steps=7),
    )
    after = apply_preset(before, name)
    assert after.objective == PRESETS[name].objective
    flat = {
        f"{section}.{field}": value
        for section, values in config_to_dict(after).items()
        if isinstance(values, dict)
        for field, value in values.items()
    }
    expected = dict(PRESETS[name].beside)
    assert {field: flat[field] for field in expected} == expected
    changed = {
        f"{section}.{field}"
        for section, values in config_to_dict(before).items()
        if isinstance(values, dict) and section != "objective"
        for field, value in values.items()
        if flat[f"{section}.{field}"] != value
    }
    assert changed <= set(expected)
    assert after.seed == 3


def test_numbers_of_the_papers() -> None:
    def of(name: str, *fields: str) -> tuple[object, ...]:
        return tuple(getattr(PRESETS[name].objective, field) for field in fields)

    assert of("deepseekmath", "advantage", "aggregate", "clip_low", "clip_high", "beta", "kl_estimator") == (
        *("group", "sequence_mean", 0.2, 0.2, 0.04, "k3"),
    )
    assert of("r1_zero", "aggregate", "clip_low", "clip_high", "beta") == ("sequence_mean", 1.0, 10.0, 0.001)
    assert of("dapo", "aggregate", "clip_low", "clip_high", "beta", "overlong_length", "overlong_cache") == (
        *("token_mean", 0.2, 0.28, 0.0, 20480, 4096),
    )
    assert of("dr_grpo", "advantage", "aggregate", "clip_low", "beta") == ("center", "constant", 0.2, 0.0)
    assert of("gspo", "ratio", "aggregate", "clip_low", "clip_high", "beta") == (
        *("sequence", "sequence_mean", 3e-4, 4e-4, 0.0),
    )
    assert of("cispo", "surrogate", "aggregate", "cispo_low", "cispo_high") == ("cispo", "token_mean", 0.0, 5.0)
    assert of("tic_grpo", "ratio", "aggregate") == ("trajectory", "sequence_mean")
    assert of("rloo", "advantage", "surrogate", "kl_in") == ("leave_one_out", "reinforce", "reward")
    assert of("reinforce_pp", "advantage", "kl_in") == ("batch", "reward")
    assert of("maxrl", "advantage") == ("maxrl",)
    assert of("trl", "advantage_ddof", "advantage_eps", "aggregate", "beta") == (1, 1e-4, "token_mean", 0.0)
    assert of("verl", "advantage_ddof", "advantage_eps", "aggregate", "dual_clip", "clip_low", "beta") == (
        *(1, 1e-6, "token_mean", 3.0, 0.2, 0.0),
    )
    sizes = {name: dict(preset.beside).get("rollout.group_size") for name, preset in PRESETS.items()}
    assert (sizes["deepseekmath"], sizes["r1_zero"], sizes["dapo"]) == (64, 16, 16)
    assert dict(PRESETS["dapo"].beside)["rollout.extra_rollouts"] == 9


@pytest.mark.parametrize(
    ("length", "expected"), [(20480, (20480, 4096)), (30000, (20480, 4096)), (512, (None, 102)), (3, (None, 1))]
)
def test_the_overlong_penalty_fits_shorter_runs(length: int, expected: tuple[int | None, int]) -> None:
    objective = apply_preset(Config(rollout=RolloutConfig(max_completion_length=length)), "dapo").objective
    assert (objective.overlong_length, objective.overlong_cache) == expected


def test_an_unknown_recipe_names_its_neighbours() -> None:
    with pytest.raises(ValueError, match="no preset 'gpso'; did you mean 'gspo'"):
        apply_preset(Config(), "gpso")
    with pytest.raises(ValueError, match="no preset 'zzz'; there are deepseekmath, r1_zero, dapo"):
        find_preset("zzz")


def test_a_recipe_that_does_not_fit_the_run_says_so() -> None:
    config = Config(rollout=RolloutConfig(num_prompts=8, group_size=20, num_slots=160))
    with pytest.raises(ValueError, match=r"preset 'dapo' does not fit .*rollout.num_slots"):
        apply_preset(config, "dapo")


# What it computes


def _clip(rho: float, A: float, low: float, high: float) -> float:
    return min(rho * A, min(max(rho, low), high) * A)


def _std(rewards: np.ndarray) -> float:
    return math.sqrt(sum((r - rewards.mean()) ** 2 for r in rewards) / (len(rewards) - 1))


def _normalised(eps: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda rewards: np.array([(r - r.mean()) / (_std(r) + eps) for r in rewards])


def _reinforce_pp(rewards: np.ndarray) -> np.ndarray:
    return (rewards - rewards.mean()) / (_std(rewards.reshape(-1)) + 1e-4)


# Recipe -> advantages of rewards [P, G] (those with the KL already taken off, where it is in the reward).
ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **dict.fromkeys(("deepseekmath", "r1_zero", "gspo", "cispo", "tic_grpo", "trl"), _normalised(1e-4)),
    **dict.fromkeys(("dapo", "verl"), _normalised(1e-6)),
    "dr_grpo": lambda rewards: np.array([r - r.mean() for r in rewards]),
    "rloo": lambda rewards: np.array([[x - (r.sum() - x) / (G - 1) for x in r] for r in rewards]),
    "reinforce_pp": _reinforce_pp,
    "maxrl": lambda rewards: np.array([(r - r.mean()) / r.mean() for r in rewards]),
}


def _tokens(term: Callable[..., float]) -> Callable[..., list[float]]:
    """A term of (new, old, ref, A) a token, over a completion."""
    return lambda new, old, ref, A: [term(*x, A) for x in zip(new, old, ref, strict=True)]


def _k3(new: float, ref: float) -> float:
    return math.exp(ref - new) - (ref - new) - 1


def _gspo(new: np.ndarray, old: np.ndarray, ref: np.ndarray, A: float) -> list[float]:
    return [_clip(math.exp((new - old).mean()), A, 1 - 3e-4, 1 + 4e-4)]


def _tic_grpo(new: np.ndarray, old: np.ndarray, ref: np.ndarray, A: float) -> list[float]:
    return [_clip(math.exp((new - old).sum()), A, 0.8, 1.2)]


def _verl(new: float, old: float, ref: float, A: float) -> float:
    clipped = _clip(math.exp(new - old), A, 0.8, 1.2)
    return max(clipped, 3 * A) if A < 0 else clipped


_PPO = _tokens(lambda new, old, ref, A: _clip(math.exp(new - old), A, 0.8, 1.2))

# Recipe -> (how terms become one number, the terms of a completion), of what is maximised.
OBJECTIVES: dict[str, tuple[str, Callable[..., list[float]]]] = {
    "deepseekmath": (
        "completions",
        _tokens(lambda new, old, ref, A: _clip(math.exp(new - old), A, 0.8, 1.2) - 0.04 * _k3(new, ref)),
    ),
    "r1_zero": (
        "completions",
        _tokens(lambda new, old, ref, A: _clip(math.exp(new - old), A, -9, 11) - 0.001 * _k3(new, ref)),
    ),
    "dapo": ("tokens", _tokens(lambda new, old, ref, A: _clip(math.exp(new - old), A, 0.8, 1.28))),
    "dr_grpo": ("limit", _PPO),
    "gspo": ("completions", _gspo),
    "cispo": ("tokens", _tokens(lambda new, old, ref, A: min(math.exp(new - old), 5) * A * new)),
    "tic_grpo": ("completions", _tic_grpo),
    "rloo": ("sums", _tokens(lambda new, old, ref, A: A * new)),
    "reinforce_pp": ("tokens", _PPO),
    "maxrl": ("tokens", _PPO),
    "trl": ("tokens", _PPO),
    "verl": ("tokens", _tokens(_verl)),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_computes_its_papers_formula(name: str, x64: None) -> None:
    rng = np.random.default_rng(NAMES.index(name))
    lengths = rng.integers(1, T + 1, (P, G))
    mask = np.arange(T) < lengths[..., None]
    new = -rng.exponential(1.0, (P, G, T))
    # Far apart: some ratios lie beyond every bound of a recipe, the 11 of r1_zero included.
    old, ref = new + rng.normal(0, 2.0, new.shape), new + rng.normal(0, 0.5, new.shape)
    rewards = rng.uniform(0.1, 1.0, (P, G))
    objective = PRESETS[name].objective
    if objective.kl_in == "reward":
        rewards = rewards - objective.beta * np.where(mask, old - ref, 0.0).sum(axis=-1)

    advantages = group_advantages(
        jnp.asarray(rewards),
        estimator=objective.advantage,
        eps=objective.advantage_eps,
        ddof=objective.advantage_ddof,
    )
    loss, metrics = grpo_loss(
        jnp.asarray(new),
        advantages,
        jnp.asarray(mask),
        old_logps_PGT=jnp.asarray(old),
        ref_logps_PGT=jnp.asarray(ref) if objective.loss_beta else None,
        beta=objective.loss_beta,
        kl_estimator=objective.kl_estimator,
        kl_unbiased=objective.kl_unbiased,
        aggregate=objective.aggregate,
        max_completion_length=LIMIT,
        **surrogate_options(objective, selected=None),
    )
    assert all(np.isfinite(value) for value in metrics.values())
    assert (metrics["clip_high_fraction"] > 0) == (objective.surrogate != "reinforce")

    A = ADVANTAGES[name](rewards)
    # A float64 sum of a few dozen terms of order 1, in another order.
    np.testing.assert_allclose(advantages, A, rtol=1e-12, atol=1e-13)
    kind, terms = OBJECTIVES[name]
    values = [
        terms(new[p, g, : lengths[p, g]], old[p, g, : lengths[p, g]], ref[p, g, : lengths[p, g]], A[p, g])
        for p, g in np.ndindex(P, G)
    ]
    expected = {
        "completions": sum(math.fsum(v) / len(v) for v in values) / (P * G),
        "tokens": sum(map(math.fsum, values)) / sum(map(len, values)),
        "sums": sum(map(math.fsum, values)) / (P * G),
        "limit": sum(map(math.fsum, values)) / (P * G * LIMIT),
    }[kind]
    np.testing.assert_allclose(loss, -expected, rtol=1e-12)


# What is printed


def test_all_are_printed_with_paper_and_departures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    # Cells are wrapped: compare them without frames and spaces.
    text = re.sub(r"[\s│]", "", output)
    for name, preset in PRESETS.items():
        assert re.search(rf"│ {name} +│ {re.escape(preset.paper)} +│ {re.escape(preset.title)} ", output)
        for line in (preset.title, *preset.formula, *preset.departures):
            assert re.sub(r"\s", "", line) in text, line


@pytest.mark.parametrize("name", NAMES)
def test_one_is_printed_in_full(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", name]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    preset = PRESETS[name]
    assert lines[0] == preset.title and lines[1] == preset.source
    for line in preset.formula:
        assert f"  {line}" in lines
    printed = [line.removesuffix(" \\").strip() for line in lines if line.startswith("    --")]
    assert printed == preset.options()
    text = "".join("".join(lines).split())
    for line in (*preset.departures, NOTATION):
        assert "".join(line.split()) in text


def test_the_readmes_table_is_this_one() -> None:
    table = README.partition("<!-- presets:")[2].partition("-->")[2].partition("<!-- end of presets -->")[0]
    rows = []
    for name, preset in PRESETS.items():
        on_arxiv = preset.source.startswith("arXiv")
        paper = f"[{preset.paper}](https://arxiv.org/abs/{preset.paper})" if on_arxiv else preset.paper
        options = " ".join(f"`{option}`" for option in preset.options())
        rows.append(f"| {paper} | `{name}` | {'; '.join(preset.formula)} | {options} |")
    assert table.strip().splitlines()[2:] == rows
    assert NOTATION in README
