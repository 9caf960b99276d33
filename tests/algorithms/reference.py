"""The objective once more: NumPy, float64, one token at a time, nothing shared with the package.

Written from the papers' definitions to be compared with; slow and plain on purpose. Every choice that
has a name is one entry of a dict, so the tests take their parameters from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Rows = np.ndarray
MAX_LOG_RATIO = 20.0


# --------------------------------------------------------------------------------------- advantages


def _group(rewards: Rows, present: Rows, *, eps: float, ddof: int) -> Rows:
    out = np.zeros_like(rewards)
    for p, row in enumerate(rewards):
        mine = [float(r) for r, here in zip(row, present[p], strict=True) if here]
        if len(mine) < 2:
            continue
        mean = math.fsum(mine) / len(mine)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in mine) / (len(mine) - ddof))
        for g, r in enumerate(row):
            if present[p, g] and max(mine) > min(mine):
                out[p, g] = (r - mean) / (std + eps)
    return out


def _center(rewards: Rows, present: Rows, *, eps: float, ddof: int) -> Rows:
    out = np.zeros_like(rewards)
    for p, row in enumerate(rewards):
        mine = row[present[p]]
        if len(mine) >= 2:
            out[p, present[p]] = mine - math.fsum(mine) / len(mine)
    return out


def _leave_one_out(rewards: Rows, present: Rows, *, eps: float, ddof: int) -> Rows:
    out = np.zeros_like(rewards)
    for p, row in enumerate(rewards):
        for g, r in enumerate(row):
            others = [row[j] for j in range(len(row)) if j != g and present[p, j]]
            if present[p, g] and others:
                out[p, g] = r - math.fsum(others) / len(others)
    return out


ADVANTAGES: dict[str, Callable[..., Rows]] = {
    "group": _group,
    "center": _center,
    "leave_one_out": _leave_one_out,
}


def advantages(rewards_PG: Rows, *, estimator: str = "group", eps: float = 1e-4, ddof: int = 1) -> Rows:
    """Advantages ``[P, G]``; a NaN reward is missing."""
    rewards = np.asarray(rewards_PG, np.float64)
    return ADVANTAGES[estimator](rewards, ~np.isnan(rewards), eps=eps, ddof=ddof)


# -------------------------------------------------------------------------- ratios, surrogates, KL


def _token_ratio(new_T: Rows, old_T: Rows, mask_T: Rows) -> list[float]:
    return [
        math.exp(min(max(new - old, -MAX_LOG_RATIO), MAX_LOG_RATIO)) if m else 1.0
        for new, old, m in zip(new_T, old_T, mask_T, strict=True)
    ]


RATIOS: dict[str, Callable[..., list[float]]] = {"token": _token_ratio}


def _clip(rho: float, advantage: float, *, clip_low: float = 0.2, clip_high: float = 0.2) -> float:
    clipped = min(max(rho, 1 - clip_low), 1 + clip_high)
    return -min(rho * advantage, clipped * advantage)


SURROGATES: dict[str, Callable[..., float]] = {"clip": _clip}

KL: dict[str, Callable[[float, float], float]] = {
    "k1": lambda new, ref: new - ref,
    "k2": lambda new, ref: (new - ref) ** 2 / 2,
    "k3": lambda new, ref: math.exp(ref - new) - (ref - new) - 1,
}


# -------------------------------------------------------------------------------------- aggregation


def _completions(mask_PGT: Rows) -> int:
    """Completions that take part in the loss: those with a token left."""
    return sum(1 for mask_GT in mask_PGT for mask_T in mask_GT if any(mask_T))


def _sequence_mean(values: Rows, mask: Rows, *, max_completion_length: int | None) -> float:
    total = 0.0
    for p, g in np.ndindex(*mask.shape[:2]):
        length = int(mask[p, g].sum())
        if length:
            total += math.fsum(values[p, g][mask[p, g]]) / length
    return total / _completions(mask)


def _token_mean(values: Rows, mask: Rows, *, max_completion_length: int | None) -> float:
    return math.fsum(values[mask]) / int(mask.sum())


def _constant(values: Rows, mask: Rows, *, max_completion_length: int | None) -> float:
    assert max_completion_length is not None
    return math.fsum(values[mask]) / (_completions(mask) * max_completion_length)


AGGREGATES: dict[str, Callable[..., float]] = {
    "sequence_mean": _sequence_mean,
    "token_mean": _token_mean,
    "constant": _constant,
}


# --------------------------------------------------------------------------------------------- loss


def loss(
    new_PGT: Rows,
    old_PGT: Rows,
    advantages_PG: Rows,
    mask_PGT: Rows,
    *,
    ref_PGT: Rows | None = None,
    entropy_PGT: Rows | None = None,
    weights_PGT: Rows | None = None,
    surrogate: str = "clip",
    ratio: str = "token",
    aggregate: str = "token_mean",
    kl: str = "k3",
    beta: float = 0.0,
    entropy_coef: float = 0.0,
    max_completion_length: int | None = None,
    **surrogate_options: float,
) -> float:
    """Surrogate + beta * KL - entropy_coef * entropy, aggregated."""
    mask = np.asarray(mask_PGT).astype(bool)
    values = np.zeros(mask.shape)
    for p, g in np.ndindex(*mask.shape[:2]):
        rhos = RATIOS[ratio](new_PGT[p, g], old_PGT[p, g], mask[p, g])
        for t in np.flatnonzero(mask[p, g]):
            token = SURROGATES[surrogate](rhos[t], float(advantages_PG[p, g]), **surrogate_options)
            if weights_PGT is not None:
                token *= weights_PGT[p, g, t]
            if beta:
                assert ref_PGT is not None
                token += beta * KL[kl](float(new_PGT[p, g, t]), float(ref_PGT[p, g, t]))
            if entropy_coef:
                assert entropy_PGT is not None
                token -= entropy_coef * entropy_PGT[p, g, t]
            values[p, g, t] = token
    return AGGREGATES[aggregate](values, mask, max_completion_length=max_completion_length)


def finite_differences(f: Callable[[Rows], float], x: Rows, *, step: float = 1e-6) -> Rows:
    """Central differences of ``f`` at ``x``; the error is about step**2, the noise 1e-16 / step."""
    out = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        out[index] = (f(up) - f(down)) / (2 * step)
    return out


# -------------------------------------------------------------------------------- log-probabilities


def token_logps(
    hidden_ND: Rows, head_VD: Rows, targets_N: Rows, *, temperature: float, vocab_size: int
) -> tuple[Rows, Rows]:
    """Log-probability of each target and the entropy, from all logits at once."""
    hidden, head = np.asarray(hidden_ND, np.float64), np.asarray(head_VD, np.float64)
    logits = hidden @ head[:vocab_size].T / temperature
    top = logits.max(axis=1, keepdims=True)
    logps = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    return logps[np.arange(len(hidden)), targets_N], -(np.exp(logps) * logps).sum(axis=1)


def token_logps_gradient(
    hidden_ND: Rows,
    head_VD: Rows,
    targets_N: Rows,
    logps_weight_N: Rows,
    entropy_weight_N: Rows,
    *,
    temperature: float,
    vocab_size: int,
) -> tuple[Rows, Rows]:
    """Gradient of ``sum(w * logps + u * entropy)`` for hidden and head.

    With p the probabilities, z the logits and H the entropy: d logp_y / dz = 1_y - p and
    dH / dz = -p (log p + H).
    """
    hidden, head = np.asarray(hidden_ND, np.float64), np.asarray(head_VD, np.float64)
    logits = hidden @ head[:vocab_size].T / temperature
    top = logits.max(axis=1, keepdims=True)
    logps = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    p = np.exp(logps)
    entropy = -(p * logps).sum(axis=1, keepdims=True)
    one_hot = np.eye(vocab_size)[targets_N]
    d_logits = logps_weight_N[:, None] * (one_hot - p) - entropy_weight_N[:, None] * p * (logps + entropy)
    d_logits /= temperature
    d_head = np.zeros_like(head)
    d_head[:vocab_size] = d_logits.T @ hidden
    return d_logits @ head[:vocab_size], d_head
