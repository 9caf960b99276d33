"""What is optimized: independent choices that are composed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from grpo_jax.config.checks import require
from grpo_jax.config.combinations import COVARIANCE_SURROGATES, check_kl, check_surrogate


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The loss: independent choices that are composed (definitions: grpo_jax.algorithms)."""

    advantage: Literal[
        "group", "batch_std", "center", "batch", "batch_baseline", "leave_one_out", "maxrl", "opo"
    ] = "group"
    """How rewards become advantages."""
    advantage_eps: float = 1e-4
    """Added to the standard deviation, in advantages that have one."""
    advantage_ddof: Literal[0, 1] = 1
    """Degrees of freedom taken off in that standard deviation."""
    combine: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Several reward functions: normalise their sum, or sum what is normalised one by one (GDPO)."""
    surrogate: Literal["clip", "cispo", "sapo", "reinforce", "gmpo", "clip_cov", "kl_cov"] = "clip"
    """The surrogate a token."""
    ratio: Literal["token", "sequence", "sequence_token", "trajectory"] = "token"
    """The importance ratio: a token's, or its completion's mean (GSPO) or product (TIC-GRPO)."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high."""
    delta: float | None = None
    """Bound of the ratio in the unclipped branch, for negative advantages (surrogate "clip"). None: none."""
    dual_clip: float | None = None
    """Bound of a negative advantage's loss, as a ratio (surrogate "clip"). None: none."""
    cispo_low: float = 0.0
    """Least weight (surrogate "cispo")."""
    cispo_high: float = 5.0
    """Largest weight (surrogate "cispo")."""
    tau_pos: float = 1.0
    """Sharpness of the gate for positive advantages (surrogate "sapo")."""
    tau_neg: float = 1.05
    """Sharpness of the gate for the others (surrogate "sapo")."""
    gmpo_range: float = 0.4
    """Bound of the logarithm of a token's ratio (surrogate "gmpo")."""
    cov_share: float = 2e-4
    """Share of the batch's tokens that is selected (surrogates "clip_cov" and "kl_cov")."""
    cov_low: float = 1.0
    """Least covariance of a candidate (surrogate "clip_cov")."""
    cov_high: float = 5.0
    """Largest covariance of a candidate (surrogate "clip_cov")."""
    kl_cov_coef: float = 1.0
    """Weight of the selected tokens' penalty (surrogate "kl_cov")."""
    top_entropy: float = 1.0
    """Share of the batch's tokens, those of largest entropy, whose surrogate counts; 1 for all."""
    aggregate: Literal["sequence_mean", "token_mean", "constant", "sequence_sum"] = "token_mean"
    """How token losses become one number."""
    beta: float = 0.0
    """Weight of the KL divergence to the reference; 0 loads no reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """The KL as a term of the loss, or taken off the reward: beta times the completion's sum of k1."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_straight_through"] = "k3"
    """Estimator of the divergence in the loss."""
    kl_unbiased: bool = False
    """Multiply the estimate by the token ratio, whose gradient completes it off-policy (k1 and k3)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    importance: Literal["auto", "none", "token", "sequence"] = "auto"
    """Weights exp(old - sampler) that correct for a sampler that differs from the policy, of a token or of a
    whole completion. "auto": of a token, where top-p, top-k or min-p truncate the distribution, and with
    rollout.steps_ahead."""
    importance_outside: Literal["truncate", "drop"] = "truncate"
    """What becomes of a weight above importance_cap: the cap, or 0 (as then below importance_low)."""
    importance_low: float = 0.0
    """Least importance weight that is kept (importance_outside "drop")."""
    importance_cap: float = 2.0
    """Largest importance weight."""
    truncated: Literal["keep", "mask"] = "keep"
    """Completions cut off at the length limit: train on them, or mask them out of the whole loss."""
    overlong_cache: int = 0
    """Soft overlong penalty: tokens over which it grows from 0 to -1 at overlong_length; 0 for none."""
    overlong_length: int | None = None
    """Length at which the penalty is whole. None: rollout.max_completion_length."""
    zero_spread: Literal["keep", "mask"] = "keep"
    """Groups of equal rewards, whose advantages are 0: keep their KL term, or mask them out."""

    def __post_init__(self) -> None:
        self._check_numbers()
        check_surrogate(
            self.surrogate,
            self.ratio,
            clip_high=self.clip_high,
            delta=self.delta,
            dual_clip=self.dual_clip,
            where="objective.",
        )
        check_kl(self.kl_estimator, self.kl_unbiased, where="objective.")
        if self.combine == "normalize_then_sum":
            require(
                self.advantage == "group",
                "objective.advantage",
                self.advantage,
                "'group' for objective.combine='normalize_then_sum', which normalises each reward in its group",
            )
            require(
                self.kl_in == "loss",
                "objective.kl_in",
                self.kl_in,
                "'loss' for objective.combine='normalize_then_sum': normalised by itself, the KL would lose its "
                "weight beta",
            )
        for message in (*self._without_effect(), *self._misleading()):
            # At the caller of the dataclass's generated __init__.
            warnings.warn(message, stacklevel=3)

    @property
    def needs_group(self) -> bool:
        """Whether advantages compare the completions of one prompt."""
        return self.advantage != "batch"

    @property
    def selects_tokens(self) -> bool:
        """Whether a rule picks tokens out of the whole batch, which takes a forward pass of its own."""
        return self.surrogate in COVARIANCE_SURROGATES or self.top_entropy < 1

    @property
    def loss_beta(self) -> float:
        """Weight of the KL term in the loss."""
        return self.beta if self.kl_in == "loss" else 0.0

    def _check_numbers(self) -> None:
        def check(ok: bool, name: str, remedy: str) -> None:
            require(ok, f"objective.{name}", getattr(self, name), remedy)

        for name in ("advantage_eps", "clip_high", "cispo_low", "kl_cov_coef", "beta", "importance_low"):
            check(0 <= getattr(self, name) < math.inf, name, "at least 0 and finite")
        for name in ("tau_pos", "tau_neg", "gmpo_range"):
            check(0 < getattr(self, name) < math.inf, name, "above 0 and finite")
        for name in ("cov_share", "top_entropy"):
            check(0 < getattr(self, name) <= 1, name, "in (0, 1]")
        check(0 <= self.clip_low <= 1, "clip_low", "in [0, 1]")
        check(self.cispo_high >= self.cispo_low, "cispo_high", f"at least cispo_low ({self.cispo_low:g})")
        check(self.cov_high >= self.cov_low, "cov_high", f"at least cov_low ({self.cov_low:g})")
        check(math.isfinite(self.entropy_coef), "entropy_coef", "finite")
        check(self.importance_cap > self.importance_low, "importance_cap", "above 0 and above importance_low")
        check(self.overlong_cache >= 0, "overlong_cache", "at least 0")
        check(
            self.overlong_length is None or self.overlong_length >= max(self.overlong_cache, 1),
            "overlong_length",
            f"None, or at least overlong_cache ({self.overlong_cache})",
        )

    def _without_effect(self) -> list[str]:
        """A sentence for each setting that was changed and does nothing."""
        idle = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _USED_IF and value != field.default and not _USED_IF[field.name][0](self):
                idle.append(f"objective.{field.name}={value!r} has no effect: {_USED_IF[field.name][1]}")
        return idle

    def _misleading(self) -> list[str]:
        """A sentence for each combination that computes what nobody would expect of it."""
        whole = self.ratio != "token" or self.surrogate == "gmpo"
        name = self.surrogate if self.surrogate == "gmpo" else self.ratio
        if whole and self.aggregate == "token_mean":
            return [
                f"objective.aggregate='token_mean' with {name!r}: one value a completion, counted once a token, "
                "so that long completions weigh more; its paper uses 'sequence_mean'"
            ]
        if self.ratio == "trajectory" and self.aggregate != "sequence_mean":
            return [
                f"objective.aggregate={self.aggregate!r} with ratio 'trajectory': its gradient is multiplied by "
                "each completion's length; 'sequence_mean' counts it once"
            ]
        return []


def _surrogate_is(*names: str) -> tuple[Callable[[ObjectiveConfig], bool], str]:
    return lambda c: c.surrogate in names, f"only objective.surrogate={' or '.join(map(repr, names))} uses it"


_HAS_STD = (
    lambda c: c.advantage in ("group", "batch_std", "batch", "batch_baseline"),
    "objective.advantage has no standard deviation",
)
_HAS_KL_LOSS = (lambda c: c.loss_beta > 0, "no KL term is in the loss (objective.beta, objective.kl_in)")
_HAS_WEIGHTS = (lambda c: c.importance != "none", "objective.importance is 'none'")

# Field -> (is it used?, why not).
_USED_IF: dict[str, tuple[Callable[[ObjectiveConfig], bool], str]] = {
    "advantage_eps": _HAS_STD,
    "advantage_ddof": _HAS_STD,
    "clip_low": _surrogate_is("clip", "clip_cov"),
    "clip_high": _surrogate_is("clip", "clip_cov"),
    "cispo_low": _surrogate_is("cispo"),
    "cispo_high": _surrogate_is("cispo"),
    "tau_pos": _surrogate_is("sapo"),
    "tau_neg": _surrogate_is("sapo"),
    "gmpo_range": _surrogate_is("gmpo"),
    "cov_share": _surrogate_is("clip_cov", "kl_cov"),
    "cov_low": _surrogate_is("clip_cov"),
    "cov_high": _surrogate_is("clip_cov"),
    "kl_cov_coef": _surrogate_is("kl_cov"),
    "kl_in": (lambda c: c.beta > 0, "objective.beta is 0"),
    "kl_estimator": _HAS_KL_LOSS,
    "kl_unbiased": _HAS_KL_LOSS,
    "importance_outside": _HAS_WEIGHTS,
    "importance_low": (
        lambda c: c.importance != "none" and c.importance_outside == "drop",
        "weights are dropped with objective.importance_outside='drop' alone",
    ),
    "importance_cap": _HAS_WEIGHTS,
    "overlong_length": (lambda c: c.overlong_cache > 0, "objective.overlong_cache is 0"),
}
