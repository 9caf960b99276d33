"""Which tokens count, and how much: NumPy, float64, one token at a time, nothing shared with the package."""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np

from tests.algorithms.reference.objective import MAX_LOG_RATIO, Rows

Token = tuple[int, ...]


def _tokens(mask_PGT: Rows) -> list[Token]:
    return [tuple(map(int, index)) for index in np.argwhere(np.asarray(mask_PGT))]


def _as_mask(tokens: list[Token], shape: tuple[int, ...]) -> Rows:
    out = np.zeros(shape, bool)
    for token in tokens:
        out[token] = True
    return out


def top_entropy_count(tokens: int, *, share: float) -> int:
    """``ceil(share * tokens)`` of the share as it's written: 0.07 of 100 tokens are 7."""
    return math.ceil(Decimal(str(share)) * tokens)


def top_entropy_tokens(entropy_PGT: Rows, mask_PGT: Rows, *, share: float) -> Rows:
    """The tokens of largest entropy (no two alike, or the choice isn't defined)."""
    tokens = sorted(_tokens(mask_PGT), key=lambda token: -entropy_PGT[token])
    return _as_mask(tokens[: top_entropy_count(len(tokens), share=share)], mask_PGT.shape)


def covariance_count(tokens: int, *, share: float) -> int:
    """``floor(share * tokens)``, but at least one."""
    return max(math.floor(Decimal(str(share)) * tokens), 1)


def covariances(logps_PGT: Rows, advantages_PG: Rows, mask_PGT: Rows) -> dict[Token, float]:
    """Each token's ``(log p - its mean) (A - its mean)``, the means over all tokens."""
    tokens = _tokens(mask_PGT)
    if not tokens:
        return {}
    mean_logp = math.fsum(logps_PGT[token] for token in tokens) / len(tokens)
    mean_advantage = math.fsum(advantages_PG[token[:2]] for token in tokens) / len(tokens)
    return {t: (logps_PGT[t] - mean_logp) * (advantages_PG[t[:2]] - mean_advantage) for t in tokens}


def clip_cov_candidates(logps_PGT: Rows, advantages_PG: Rows, mask_PGT: Rows, *, low: float, high: float) -> Rows:
    """The tokens that may be drawn: those with a covariance between the bounds."""
    cov = covariances(logps_PGT, advantages_PG, mask_PGT)
    return _as_mask([token for token, c in cov.items() if low <= c <= high], mask_PGT.shape)


def kl_cov_tokens(logps_PGT: Rows, advantages_PG: Rows, mask_PGT: Rows, *, share: float) -> Rows:
    """The tokens of largest covariance (no two alike, or the choice isn't defined)."""
    cov = covariances(logps_PGT, advantages_PG, mask_PGT)
    tokens = sorted(cov, key=lambda token: -cov[token])
    return _as_mask(tokens[: covariance_count(len(tokens), share=share)], mask_PGT.shape)


# -------------------------------------------------------------------------------- importance weights

LEVELS = ("token", "sequence")


def _truncate(weight: float, *, low: float, cap: float) -> float:
    return min(weight, cap)


def _drop(weight: float, *, low: float, cap: float) -> float:
    return weight if low <= weight <= cap else 0.0


OUTSIDE = {"truncate": _truncate, "drop": _drop}


def raw_importance(old_PGT: Rows, sampler_PGT: Rows, mask_PGT: Rows, *, level: str) -> dict[Token, float]:
    """``exp(old - sampler)`` of each token, or of the whole completion on each of its tokens."""
    out = {}
    for token in _tokens(mask_PGT):
        mine = [token] if level == "token" else [t for t in _tokens(mask_PGT) if t[:2] == token[:2]]
        log_weight = math.fsum(old_PGT[t] - sampler_PGT[t] for t in mine)
        out[token] = math.exp(min(max(log_weight, -MAX_LOG_RATIO), MAX_LOG_RATIO))
    return out


def importance_weights(
    old_PGT: Rows,
    sampler_PGT: Rows,
    mask_PGT: Rows,
    *,
    level: str = "token",
    outside: str = "truncate",
    low: float = 0.0,
    cap: float = 2.0,
) -> Rows:
    """The weight of each token; NaN where there is no token."""
    out = np.full(mask_PGT.shape, np.nan)
    for token, weight in raw_importance(old_PGT, sampler_PGT, mask_PGT, level=level).items():
        out[token] = OUTSIDE[outside](weight, low=low, cap=cap)
    return out
