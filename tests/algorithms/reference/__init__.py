"""The algorithms once more, to be compared with: NumPy, float64, plain loops, nothing shared with the package.

Each module is written from the papers' definitions and no other source. Every choice that has a name is one
entry of a dict, so that the tests take their parameters from here.
"""

from __future__ import annotations

from tests.algorithms.reference.logprobs import token_logps, token_logps_gradient
from tests.algorithms.reference.objective import (
    AGGREGATES,
    ALLOWED_RATIOS,
    KL,
    RATIOS,
    SURROGATES,
    finite_differences,
    loss,
    token_losses,
)
from tests.algorithms.reference.rewards import (
    ADVANTAGES,
    METHODS,
    advantages,
    combine_rewards,
    soft_overlong,
    weighted_sum,
)
from tests.algorithms.reference.tokens import (
    LEVELS,
    OUTSIDE,
    clip_cov_candidates,
    covariance_count,
    importance_weights,
    kl_cov_tokens,
    raw_importance,
    top_entropy_count,
    top_entropy_tokens,
)

__all__ = [
    "ADVANTAGES",
    "AGGREGATES",
    "ALLOWED_RATIOS",
    "KL",
    "LEVELS",
    "METHODS",
    "OUTSIDE",
    "RATIOS",
    "SURROGATES",
    "advantages",
    "clip_cov_candidates",
    "combine_rewards",
    "covariance_count",
    "finite_differences",
    "importance_weights",
    "kl_cov_tokens",
    "loss",
    "raw_importance",
    "soft_overlong",
    "token_logps",
    "token_logps_gradient",
    "token_losses",
    "top_entropy_count",
    "top_entropy_tokens",
    "weighted_sum",
]
