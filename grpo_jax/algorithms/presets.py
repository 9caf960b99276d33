"""Published recipes as configurations: one can print, compare and override them.

``grpo-jax presets`` prints all of them, ``--preset NAME`` trains with one, and an experiment file writes
``apply_preset(config, "dapo")``. A preset is the whole objective and whatever else its paper states of the method.
Models, prompts a step, lengths and schedules stay the experiment's.

``departures`` says of each where it differs from its paper or its released code, and which numbers the paper
leaves open. Of all of them: a paper that splits a batch of rollouts into minibatches makes one pass over them,
but each of ``train.updates_per_batch`` updates here sees the whole batch. With one update a batch every ratio is
1, and a clip of the ratio never acts. The formulas are written in the letters of ``NOTATION``.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass

from grpo_jax.config import Config, ObjectiveConfig

NOTATION = (
    "r reward, A advantage, J what is maximised; π the policy, π_old the one that the batch began with, π_ref the "
    "reference; ρ = π/π_old of a token, clip(ρ; a, b) is ρ bounded to [a, b], sg stops the gradient, n counts a "
    "completion's tokens; mean_g and std_g are over a group, mean_o over completions, mean_t over the tokens of "
    "one, mean_ot over all tokens of the batch"
)
"""The letters of the presets' formulas."""

# Chosen by name on every command line, so that it states the method even where it is the default.
_ALWAYS_SHOWN = ("advantage", "surrogate", "ratio", "aggregate", "beta")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A recipe: an objective and what its paper fixes beside it."""

    title: str
    """What it is called."""
    paper: str
    """The paper's arXiv id; of a program's defaults, the program and version."""
    formula: tuple[str, ...]
    """Advantage and objective, in lines; :data:`NOTATION` explains the letters."""
    objective: ObjectiveConfig
    """Replaces the run's objective."""
    beside: tuple[tuple[str, int | float | str], ...] = ()
    """Other fields of the run and their values: ("rollout.group_size", 64)."""
    departures: tuple[str, ...]
    """Where it differs from the paper or the released code, and what these leave open."""

    @property
    def source(self) -> str:
        """The paper as one cites it."""
        return f"arXiv {self.paper}" if self.paper[0].isdecimal() else self.paper

    def options(self) -> list[str]:
        """The preset as options of ``grpo-jax train``; what is left out is the default."""
        values: list[tuple[str, object]] = [
            (f"objective.{field.name}", value)
            for field in dataclasses.fields(self.objective)
            if (value := getattr(self.objective, field.name)) != field.default or field.name in _ALWAYS_SHOWN
        ]
        return [f"--{name.replace('_', '-')} {value}" for name, value in (*values, *self.beside)]


def apply_preset(config: Config, name: str) -> Config:
    """``config`` with the preset's objective and the other fields that it names.

    An overlong penalty made for longer completions than ``config`` allows is scaled down: it then grows over the
    same share of ``rollout.max_completion_length``, and is whole at its end.

    Raises:
        ValueError: an unknown name, or values that do not fit the rest of ``config``.
    """
    preset = find_preset(name)
    sections: dict[str, object] = {"objective": _fitted(preset.objective, config.rollout.max_completion_length)}
    try:
        for field, value in preset.beside:
            section, _, key = field.partition(".")
            before = sections.get(section, getattr(config, section))
            sections[section] = dataclasses.replace(before, **{key: value})  # type: ignore[type-var]
        return dataclasses.replace(config, **sections)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"preset {name!r} does not fit this configuration: {error}") from error


def find_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ValueError: there is none; names the nearest.
    """
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=2)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(PRESETS)}"
    raise ValueError(f"no preset {name!r}; {hint}")


def _fitted(objective: ObjectiveConfig, max_completion_length: int) -> ObjectiveConfig:
    length, cache = objective.overlong_length, objective.overlong_cache
    if cache == 0 or length is None or length <= max_completion_length:
        return objective
    cache = max(1, max_completion_length * cache // length)
    return dataclasses.replace(objective, overlong_length=None, overlong_cache=cache)


PRESETS: dict[str, Preset] = {
    "deepseekmath": Preset(
        title="GRPO, as DeepSeekMath introduced it",
        paper="2402.03300",
        formula=(
            "A = (r - mean_g) / std_g",
            "J = mean_o mean_t [min(ρ A, clip(ρ; 0.8, 1.2) A) - 0.04 k3]",
        ),
        objective=ObjectiveConfig(advantage="group", aggregate="sequence_mean", beta=0.04),
        beside=(
            ("rollout.group_size", 64),
            ("optimizer.learning_rate", 1e-6),
            ("train.updates_per_batch", 1),
        ),
        departures=(
            "The paper gives no clip range: 0.2, PPO's.",
            "It leaves open which standard deviation it takes and what is added to it: ddof 1, and 1e-4.",
            "Outcome rewards alone; neither process supervision nor an iterated reward model.",
        ),
    ),
    "r1_zero": Preset(
        title="GRPO of DeepSeek-R1-Zero",
        paper="2501.12948",
        formula=(
            "A = (r - mean_g) / std_g",
            "J = mean_o mean_t [min(ρ A, clip(ρ; 0, 11) A) - 0.001 k3]",
        ),
        objective=ObjectiveConfig(
            advantage="group", aggregate="sequence_mean", beta=0.001, clip_low=1.0, clip_high=10.0
        ),
        beside=(
            ("rollout.group_size", 16),
            ("rollout.temperature", 1.0),
            ("optimizer.learning_rate", 3e-6),
            ("reference.update", "sync"),
            ("reference.sync_every", 400),
        ),
        departures=(
            "The paper states the clip range, 10, of the first reinforcement stage of R1, and none of R1-Zero.",
            "1 - 10 lies below every ratio: clip_low is 1, which clips as little.",
            "It writes ratio and KL of whole outputs; here they are of tokens, as in DeepSeekMath.",
            "It splits rollouts of 8,192 outputs into 16 minibatches, passed over once.",
        ),
    ),
    "dapo": Preset(
        title="DAPO: decoupled clip and dynamic sampling",
        paper="2503.14476",
        formula=(
            "A = (r + overlong - mean_g) / (std_g + 1e-6)",
            "J = mean_ot min(ρ A, clip(ρ; 0.8, 1.28) A)",
        ),
        objective=ObjectiveConfig(
            advantage="group",
            advantage_eps=1e-6,
            aggregate="token_mean",
            clip_low=0.2,
            clip_high=0.28,
            overlong_cache=4096,
            overlong_length=20480,
            zero_spread="mask",
        ),
        beside=(
            ("rollout.group_size", 16),
            ("rollout.temperature", 1.0),
            ("rollout.extra_rollouts", 9),
            ("optimizer.learning_rate", 1e-6),
        ),
        departures=(
            "The paper samples until the batch is full. Here at most 9 rollouts are added, as many as its script "
            "allows; that one then stops, here groups still without spread are masked out.",
            "Where completions are limited to fewer than 20,480 tokens, the overlong penalty covers the last "
            "fifth of that limit.",
            "Its equation averages over the tokens of each group; its code, and this, over those of the batch.",
            "The 1e-6 is its code's; the dual clip of that code is left out.",
            "16 minibatches a batch and a warm-up over 20 batches are left to the experiment.",
        ),
    ),
    "dr_grpo": Preset(
        title="Dr. GRPO: GRPO done right",
        paper="2503.20783",
        formula=(
            "A = r - mean_g",
            "J = mean_o 1/T Σ_t min(ρ A, clip(ρ; 0.8, 1.2) A), T = max_completion_length",
        ),
        objective=ObjectiveConfig(advantage="center", aggregate="constant"),
        beside=(
            ("rollout.group_size", 8),
            ("rollout.temperature", 1.0),
            ("optimizer.learning_rate", 1e-6),
        ),
        departures=(
            "The paper's equation sums over a completion's tokens; its released code, and this, divide the sum by "
            "the largest length, a constant.",
        ),
    ),
    "gspo": Preset(
        title="GSPO: group sequence policy optimization",
        paper="2507.18071",
        formula=(
            "A = (r - mean_g) / std_g",
            "s = exp(1/n Σ_t log ρ)",
            "J = mean_o min(s A, clip(s; 1 - 3e-4, 1 + 4e-4) A)",
        ),
        objective=ObjectiveConfig(
            advantage="group", ratio="sequence", aggregate="sequence_mean", clip_low=3e-4, clip_high=4e-4
        ),
        departures=(
            "The paper makes 4 minibatches of a batch, passed over once; for the clip to act, set "
            "train.updates_per_batch.",
            "It states neither group size nor learning rate, which stay the experiment's, nor a KL term: none.",
            "Its GSPO-token, which verl runs, is objective.ratio sequence_token; value and gradient are the same "
            "as long as a completion's tokens share one advantage.",
        ),
    ),
    "cispo": Preset(
        title="CISPO of MiniMax-M1: clipped importance weights",
        paper="2506.13585",
        formula=(
            "A = (r - mean_g) / std_g",
            "J = mean_ot sg[clip(ρ; 0, 5)] A log π",
        ),
        objective=ObjectiveConfig(
            advantage="group", surrogate="cispo", aggregate="token_mean", cispo_low=0.0, cispo_high=5.0
        ),
        departures=(
            "The paper has no lower bound and no number for the upper one: 5, of ScaleRL (arXiv 2510.13786).",
            "It also samples dynamically and penalises length as DAPO does, without its numbers: set "
            "rollout.extra_rollouts and objective.overlong_cache.",
            "Its equation averages over the tokens of each group; here over those of the batch.",
            "It states neither group size nor learning rate, which stay the experiment's.",
        ),
    ),
    "tic_grpo": Preset(
        title="TIC-GRPO: trajectory-level importance correction",
        paper="2508.02833",
        formula=(
            "A = (r - mean_g) / std_g",
            "w = exp(Σ_t log ρ)",
            "J = mean_o min(w A, clip(w; 0.8, 1.2) A)",
        ),
        objective=ObjectiveConfig(advantage="group", ratio="trajectory", aggregate="sequence_mean"),
        departures=(
            "No released code was found, and accounts of the paper differ: a clip on both sides or from above "
            "alone, rewards divided by length or not. Here GRPO's clip of 0.2 on both sides, and plain rewards.",
            "The logarithm of the ratio is bounded to 20 on either side.",
            "Group size and learning rate stay the experiment's.",
        ),
    ),
    "rloo": Preset(
        title="RLOO: REINFORCE leave-one-out",
        paper="2402.14740",
        formula=(
            "R = r - 0.03 Σ_t log(π_old/π_ref)",
            "A = R - mean of the group's others",
            "J = mean_o A Σ_t log π",
        ),
        objective=ObjectiveConfig(
            advantage="leave_one_out", surrogate="reinforce", aggregate="sequence_sum", beta=0.03, kl_in="reward"
        ),
        beside=(("rollout.group_size", 4), ("train.updates_per_batch", 1)),
        departures=(
            "The paper compares groups of 2 and 4: here 4. Its weight of the KL differs by dataset: here 0.03.",
            "TRL's RLOO clips the ratio of whole completions; at one update a batch its gradient is the same.",
            "The learning rate stays the experiment's.",
        ),
    ),
    "reinforce_pp": Preset(
        title="REINFORCE++",
        paper="2501.03262",
        formula=(
            "R = r - 0.01 Σ_t log(π_old/π_ref)",
            "A = (R - mean) / std over the batch",
            "J = mean_ot min(ρ A, clip(ρ; 0.8, 1.2) A)",
        ),
        objective=ObjectiveConfig(advantage="batch", aggregate="token_mean", beta=0.01, kl_in="reward"),
        beside=(("optimizer.learning_rate", 5e-7),),
        departures=(
            "The paper charges each token the KL from itself on; here every token has the whole completion's.",
            "It normalises over the batch's tokens; here over its completions, each counted once.",
            "Its equation averages within completions; its code (OpenRLHF), and this, over all tokens.",
            "0.01 and 5e-7 are the released script's. That one samples one completion a prompt; here the group "
            "size stays the experiment's, and 1 is allowed.",
            "Its form with the group's mean as baseline is objective.advantage batch_baseline.",
        ),
    ),
    "maxrl": Preset(
        title="MaxRL: maximum likelihood reinforcement learning",
        paper="2602.02710",
        formula=(
            "A = (r - mean_g) / mean_g, 0 where mean_g <= 0",
            "J = mean_ot min(ρ A, clip(ρ; 0.8, 1.2) A)",
        ),
        objective=ObjectiveConfig(advantage="maxrl", aggregate="token_mean"),
        beside=(
            ("rollout.group_size", 16),
            ("optimizer.learning_rate", 1e-6),
            ("optimizer.clip_norm", 0.3),
            ("train.updates_per_batch", 1),
        ),
        departures=(
            "Clip, mean over tokens and all numbers are those of the released script for Qwen3. The paper's "
            "estimator is of whole completions: objective.aggregate sequence_sum.",
            "The released code adds 1e-6 to the mean, and a dual clip that cannot act at one update a batch.",
        ),
    ),
    "trl": Preset(
        title="GRPO with the defaults of TRL",
        paper="TRL 1.16",
        formula=(
            "A = (r - mean_g) / (std_g + 1e-4)",
            "J = mean_ot min(ρ A, clip(ρ; 0.8, 1.2) A)",
        ),
        objective=ObjectiveConfig(advantage="group", advantage_ddof=1, advantage_eps=1e-4, aggregate="token_mean"),
        departures=(
            "The objective alone (loss_type dapo); group size, lengths and optimizer stay the experiment's.",
            "Where beta is set, TRL multiplies the KL by the ratio: objective.kl_unbiased.",
            "TRL's weights for samples of vLLM are objective.importance sequence, importance_outside drop and "
            "importance_cap 3; here samples are the policy's own.",
        ),
    ),
    "verl": Preset(
        title="GRPO with the defaults of verl",
        paper="verl, 2026",
        formula=(
            "A = (r - mean_g) / (std_g + 1e-6)",
            "J = mean_ot m, m = min(ρ A, clip(ρ; 0.8, 1.2) A), and at least 3 A where A < 0",
        ),
        objective=ObjectiveConfig(
            advantage="group", advantage_ddof=1, advantage_eps=1e-6, aggregate="token_mean", dual_clip=3.0
        ),
        departures=(
            "The objective alone (adv_estimator grpo, the rest as it comes); all else stays the experiment's.",
            "Groups of one completion, whose advantage verl takes to be their reward, are refused here.",
            "Where beta is set, verl bounds k3 to 10; here its log-ratio is bounded to 20.",
        ),
    ),
}
"""Name -> preset."""
