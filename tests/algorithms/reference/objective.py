"""The objective once more: NumPy, float64, one token at a time, nothing shared with the package.

Written from the papers' definitions to be compared with; slow and plain on purpose. Every choice that
has a name is one entry of a dict, so the tests take their parameters from here.

What an objective holds constant (a stop-gradient) is evaluated at the log-probabilities ``held``: leave them
at the point of interest, move ``new``, and finite differences give the gradient that is meant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Rows = np.ndarray
MAX_LOG_RATIO = 20.0


def _clamp(x: float, low: float = -MAX_LOG_RATIO, high: float = MAX_LOG_RATIO) -> float:
    return min(max(x, low), high)


# ------------------------------------------------------------------------------------------- ratios


class Tokens(NamedTuple):
    """The tokens of one completion that the mask keeps, one number a token."""

    new: list[float]
    old: list[float]
    held: list[float]
    selected: list[bool]

    def frozen(self) -> Tokens:
        """The same with nothing left to vary."""
        return self._replace(new=self.held)


def _token_ratio(c: Tokens) -> list[float]:
    return [_clamp(new - old) for new, old in zip(c.new, c.old, strict=True)]


def _total(c: Tokens) -> float:
    return math.fsum(new - old for new, old in zip(c.new, c.old, strict=True))


def _sequence_ratio(c: Tokens) -> list[float]:
    return [_clamp(_total(c) / len(c.new))] * len(c.new)


def _sequence_token_ratio(c: Tokens) -> list[float]:
    value = _total(c.frozen()) / len(c.new)
    return [_clamp(value + new - held) for new, held in zip(c.new, c.held, strict=True)]


def _trajectory_ratio(c: Tokens) -> list[float]:
    return [_clamp(_total(c))] * len(c.new)


# The log of the ratio, one a token.
RATIOS: dict[str, Callable[[Tokens], list[float]]] = {
    "token": _token_ratio,
    "sequence": _sequence_ratio,
    "sequence_token": _sequence_token_ratio,
    "trajectory": _trajectory_ratio,
}


# --------------------------------------------------------------------------------------- surrogates


def _ratios(c: Tokens, ratio: str) -> list[float]:
    return [math.exp(x) for x in RATIOS[ratio](c)]


def _clip(
    c: Tokens,
    A: float,
    *,
    ratio: str,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float | None = None,
    dual_clip: float | None = None,
    **_: float,
) -> list[float]:
    out = []
    for rho in _ratios(c, ratio):
        free = rho if delta is None else min(rho, delta)
        value = -min(free * A, _clamp(rho, 1 - clip_low, 1 + clip_high) * A)
        out.append(min(value, -dual_clip * A) if dual_clip is not None and A < 0 else value)
    return out


def _cispo(
    c: Tokens, A: float, *, ratio: str, cispo_low: float = 0.0, cispo_high: float = 5.0, **_: float
) -> list[float]:
    weights = [_clamp(rho, cispo_low, cispo_high) for rho in _ratios(c.frozen(), ratio)]
    return [-w * A * new for w, new in zip(weights, c.new, strict=True)]


def _sapo(
    c: Tokens, A: float, *, ratio: str, tau_pos: float = 1.0, tau_neg: float = 1.05, **_: float
) -> list[float]:
    tau = tau_pos if A > 0 else tau_neg
    # sigmoid(x) = (1 + tanh(x / 2)) / 2, which can't overflow.
    return [-(1 + math.tanh(tau * (rho - 1) / 2)) / 2 * 4 / tau * A for rho in _ratios(c, ratio)]


def _reinforce(c: Tokens, A: float, *, ratio: str, **_: float) -> list[float]:
    return [-A * new for new in c.new]


def _gmpo(c: Tokens, A: float, *, ratio: str, gmpo_range: float = 0.4, **_: float) -> list[float]:
    assert ratio == "token"
    bounded = []
    for new, old in zip(c.new, c.old, strict=True):
        bounded.append(min(new - old, gmpo_range) if A > 0 else max(new - old, -gmpo_range))
    return [-A * math.exp(_clamp(math.fsum(bounded) / len(bounded)))] * len(bounded)


def _clip_cov(c: Tokens, A: float, *, ratio: str, **options: float) -> list[float]:
    values = _clip(c, A, ratio=ratio, **options)
    return [0.0 if chosen else value for chosen, value in zip(c.selected, values, strict=True)]


def _kl_cov(c: Tokens, A: float, *, ratio: str, kl_cov_coef: float = 1.0, **_: float) -> list[float]:
    far = [abs(new - old) for new, old in zip(c.new, c.old, strict=True)]
    rhos = _ratios(c, ratio)
    return [-rho * A + kl_cov_coef * d * s for rho, d, s in zip(rhos, far, c.selected, strict=True)]


# One loss a token, of one completion and its advantage.
SURROGATES: dict[str, Callable[..., list[float]]] = {
    "clip": _clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "reinforce": _reinforce,
    "gmpo": _gmpo,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
}

# The ratios that make sense with each.
ALLOWED_RATIOS: dict[str, tuple[str, ...]] = {
    "clip": ("token", "sequence", "sequence_token", "trajectory"),
    "cispo": ("token", "sequence", "trajectory"),
    "sapo": ("token", "sequence", "sequence_token", "trajectory"),
    "reinforce": ("token",),
    "gmpo": ("token",),
    "clip_cov": ("token", "sequence_token"),
    "kl_cov": ("token", "sequence_token"),
}


# ----------------------------------------------------------------------------------------------- KL


def _k2(new: float, ref: float) -> float:
    return (new - ref) ** 2 / 2


def _k3(new: float, ref: float) -> float:
    d = min(ref - new, MAX_LOG_RATIO)  # the only side on which it overflows
    return math.exp(d) - d - 1


# Of the new log-probability, the reference's, and the one at which constants are taken.
KL: dict[str, Callable[[float, float, float], float]] = {
    "k1": lambda new, ref, held: new - ref,
    "k2": lambda new, ref, held: _k2(new, ref),
    "k3": lambda new, ref, held: _k3(new, ref),
    "k3_straight_through": lambda new, ref, held: _k3(held, ref) + _k2(new, ref) - _k2(held, ref),
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


def _sequence_sum(values: Rows, mask: Rows, *, max_completion_length: int | None) -> float:
    return math.fsum(values[mask]) / _completions(mask)


AGGREGATES: dict[str, Callable[..., float]] = {
    "sequence_mean": _sequence_mean,
    "token_mean": _token_mean,
    "constant": _constant,
    "sequence_sum": _sequence_sum,
}


# --------------------------------------------------------------------------------------------- loss


def token_losses(
    new_PGT: Rows,
    old_PGT: Rows | None,
    advantages_PG: Rows,
    mask_PGT: Rows,
    *,
    held_PGT: Rows | None = None,
    ref_PGT: Rows | None = None,
    entropy_PGT: Rows | None = None,
    weights_PGT: Rows | None = None,
    policy_mask_PGT: Rows | None = None,
    selected_PGT: Rows | None = None,
    surrogate: str = "clip",
    ratio: str = "token",
    kl: str = "k3",
    kl_unbiased: bool = False,
    beta: float = 0.0,
    entropy_coef: float = 0.0,
    **surrogate_options: float,
) -> Rows:
    """Surrogate + beta * KL - entropy_coef * entropy of each token; 0 where masked out.

    Without old log-probabilities the held ones are old.
    """
    mask = np.asarray(mask_PGT).astype(bool)
    held_PGT = new_PGT if held_PGT is None else held_PGT
    old_PGT = held_PGT if old_PGT is None else old_PGT
    selected_PGT = np.zeros(mask.shape, bool) if selected_PGT is None else selected_PGT
    values = np.zeros(mask.shape)
    for p, g in np.ndindex(*mask.shape[:2]):
        kept = np.flatnonzero(mask[p, g])
        if not len(kept):
            continue
        c = Tokens(*([x[p, g, t].item() for t in kept] for x in (new_PGT, old_PGT, held_PGT, selected_PGT)))
        losses = SURROGATES[surrogate](c, float(advantages_PG[p, g]), ratio=ratio, **surrogate_options)
        for t, token, new, held, log_rho in zip(kept, losses, c.new, c.held, _token_ratio(c), strict=True):
            if weights_PGT is not None:
                token *= weights_PGT[p, g, t]
            if policy_mask_PGT is not None and not policy_mask_PGT[p, g, t]:
                token = 0.0
            if beta:
                assert ref_PGT is not None
                divergence = KL[kl](new, float(ref_PGT[p, g, t]), held)
                token += beta * divergence * (math.exp(log_rho) if kl_unbiased else 1)
            if entropy_coef:
                assert entropy_PGT is not None
                token -= entropy_coef * entropy_PGT[p, g, t]
            values[p, g, t] = token
    return values


def loss(
    new_PGT: Rows,
    old_PGT: Rows | None,
    advantages_PG: Rows,
    mask_PGT: Rows,
    *,
    aggregate: str = "token_mean",
    max_completion_length: int | None = None,
    **options: Any,
) -> float:
    """The losses of the tokens, aggregated; options as in ``token_losses``."""
    values = token_losses(new_PGT, old_PGT, advantages_PG, mask_PGT, **options)
    mask = np.asarray(mask_PGT).astype(bool)
    return AGGREGATES[aggregate](values, mask, max_completion_length=max_completion_length)


def finite_differences(f: Callable[[Rows], Rows | float], x: Rows, *, step: float = 1e-6) -> Rows:
    """Central differences of ``f`` at ``x``, ``[*f's shape, *x's shape]``.

    The error is about step**2, the noise 1e-16 / step.
    """
    columns = []
    for index in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        columns.append((np.asarray(f(up)) - np.asarray(f(down))) / (2 * step))
    return np.stack(columns, axis=-1).reshape(*columns[0].shape, *x.shape)
