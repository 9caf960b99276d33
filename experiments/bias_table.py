"""Exact bias and variance of the estimators of GRPO, on a policy small enough to enumerate.

    python experiments/bias_table.py [--seed 0] [--full] [--json bias.json]

Two prompts (a hard one and an easy one, each with logits of its own), three tokens of which one ends a completion,
at most T = 2 of them, groups of G = 4: 7 completions a prompt, 210 groups, and every expectation is a sum over all
batches instead of a sample. Rewards are binary, and what is right is long; "graded" ones are 0, 1/2 or 1.
Off-policy the batches come from another policy: normal noise of 0.4 on the logits. (The reference has 0.7.) The
estimates are the gradients of ``group_advantages`` and ``grpo_loss``; the true gradients those of the enumerated
objective.

A cell is ``bias (scale, angle)``: ||E g - true|| / ||true||, the c that brings c * true nearest to E g, and the
angle between the two; "0" is a bias below 1e-10. Known factors are divided out: 1 / T of ``constant``, which then
equals ``sequence_sum``, and (G - 1) / G of ``center``, whose mean holds the completion's own reward. Noise is the
trace of the covariance of g / scale, over ||true||². Nothing is clipped but where a column says so (on-policy a
clip does nothing). ``sequence_token`` equals ``sequence`` wherever the tokens of a completion share one advantage,
as here.

"Advantages": with the token ratio, on-policy, and then off-policy with ``trajectory`` x ``sequence_mean``;
"graded" and "noise" belong to ``sequence_sum``. "Ratios": with ``leave_one_out``. "Weight": what multiplies the
gradient of a prompt's own success rate, on-policy. "KL": of one prompt, as a term of the loss or, in the reward,
with ``leave_one_out``. There "value" is the relative error of the expected sum over tokens as an estimate of
KL(policy || reference); "token KL" is the gradient's error against the sum of the tokens' divergences in the
states that were visited, "sequence KL" that against the divergence of whole completions, which also counts what a
token does to later states; variance is over ||true||² of the latter, not rescaled. A reward's ``k1`` is that of
the policy that sampled, unless "current".

Seed 0, 2026-12-01, on 2 CPU cores, about 20 s (JAX 0.12.0 on Python 3.12; JAX 0.10.2 gives the same digits):

Advantages

| advantage | sequence_mean | token_mean | sequence_sum | off-policy, trajectory | graded | noise |
| --- | --- | --- | --- | --- | --- | --- |
| group | 0.25 (1.12, 11.1°) | 0.15 (0.85, 1.0°) | 0.43 (1.42, 0.8°) | 0.44 (1.44, 0.7°) | 9.8° | 1.7 |
| batch_std | 0.33 (1.21, 11.9°) | 0.09 (0.92, 2.4°) | 0.53 (1.53, 1.2°) | 0.51 (1.51, 0.9°) | 0.5° | 1.8 |
| center | 0.26 (0.79, 11.4°) | 0.40 (0.60, 1.4°) | 0 | 0 | 0 | 1.7 |
| batch | 0.45 (1.16, 19.9°) | 0.05 (1.03, 2.1°) | 0.75 (1.75, 0.5°) | 0.72 (1.72, 0.4°) | 1.1° | 2.6 |
| batch_baseline | 0.67 (1.57, 12.7°) | 0.20 (1.18, 3.8°) | 0.98 (1.97, 2.7°) | 1.03 (2.03, 2.2°) | 3.0° | 1.7 |
| leave_one_out | 0.26 (0.79, 11.4°) | 0.40 (0.60, 1.4°) | 0 | 0 | 0 | 1.7 |
| maxrl | 0.29 (1.19, 10.4°) | 0.27 (0.95, 15.7°) | 0.76 (1.57, 17.4°) | 0.73 (1.48, 20.3°) | 15.7° | 2.9 |
| opo | 0.38 (0.66, 14.2°) | 0.52 (0.48, 4.5°) | 0.21 (0.79, 3.1°) | 0.20 (0.80, 3.3°) | 2.4° | 1.5 |

Ratios

| ratio | aggregate | on-policy | off-policy | off-policy, clip 0.2 | noise, off-policy |
| --- | --- | --- | --- | --- | --- |
| token | sequence_mean | 0.26 (0.79, 11.4°) | 0.28 (0.81, 14.2°) | 0.36 (0.77, 20.0°) | 1.4 |
| token | token_mean | 0.40 (0.60, 1.4°) | 0.42 (0.59, 8.1°) | 0.48 (0.54, 16.1°) | 2.0 |
| token | sequence_sum | 0 | 0.14 (0.99, 8.0°) | 0.27 (0.91, 15.7°) | 2.1 |
| sequence | sequence_mean | 0.26 (0.79, 11.4°) | 0.28 (0.81, 14.0°) | 0.27 (0.82, 13.8°) | 1.4 |
| sequence | token_mean | 0.40 (0.60, 1.4°) | 0.42 (0.59, 4.9°) | 0.41 (0.59, 4.5°) | 1.9 |
| sequence | sequence_sum | 0 | 0.06 (0.99, 3.6°) | 0.06 (0.99, 3.3°) | 1.9 |
| trajectory | sequence_mean | 0 | 0 | 0.35 (0.87, 20.3°) | 2.1 |
| trajectory | token_mean | 0.22 (0.85, 11.0°) | 0.27 (0.80, 12.5°) | 0.44 (0.66, 22.6°) | 3.3 |
| trajectory | sequence_sum | 0.53 (1.42, 12.6°) | 0.51 (1.36, 14.4°) | 0.48 (1.10, 23.2°) | 3.4 |

Weight of a prompt solved in 5 % / in 50 % of the samples

| advantage | G = 2 | G = 4 | G = 16 | G = 64 |
| --- | --- | --- | --- | --- |
| group | 0.71 / 0.71 | 1.48 / 1.40 | 3.16 / 1.87 | 4.30 / 1.97 |
| center | 0.50 / 0.50 | 0.75 / 0.75 | 0.94 / 0.94 | 0.98 / 0.98 |
| leave_one_out | 1.00 / 1.00 | 1.00 / 1.00 | 1.00 / 1.00 | 1.00 / 1.00 |
| maxrl | 1.00 / 1.00 | 2.85 / 1.75 | 10.73 / 2.00 | 19.21 / 2.00 |

KL, on-policy

| term | aggregate | value | token KL | sequence KL | variance |
| --- | --- | --- | --- | --- | --- |
| k1 | sequence_mean | +0.00 | 1.22 (-0.08, 98.3°) | 1.29 (-0.16, 105.5°) | 2.1 |
| k1 | sequence_sum | +0.00 | 1.00 (0.00, -) | 1.00 (0.00, -) | 5.4 |
| k2 | sequence_sum | +0.08 | 0 | 0.13 (1.02, 7.4°) | 0.8 |
| k3 | sequence_sum | +0.00 | 0.14 (0.99, 8.2°) | 0.26 (0.99, 14.4°) | 0.6 |
| k3_straight_through | sequence_sum | +0.00 | 0 | 0.13 (1.02, 7.4°) | 0.8 |
| ratio x k1 | sequence_sum | +0.00 | 0 | 0.13 (1.02, 7.4°) | 7.1 |
| ratio x k3 | sequence_sum | +0.00 | 0 | 0.13 (1.02, 7.4°) | 0.8 |
| reward k1, token ratio | sequence_sum | +0.00 | 0.13 (0.97, 7.4°) | 0 | 2.1 |
| reward k1, trajectory ratio | sequence_mean | +0.00 | 0.13 (0.97, 7.4°) | 0 | 2.1 |
| reward current k1, trajectory ratio | sequence_mean | +0.00 | 0.13 (0.97, 7.4°) | 0 | 2.1 |

KL, off-policy

| term | aggregate | value | token KL | sequence KL | variance |
| --- | --- | --- | --- | --- | --- |
| k1 | sequence_mean | +0.84 | 0.89 (0.14, 57.0°) | 0.91 (0.12, 63.0°) | 2.0 |
| k1 | sequence_sum | +0.84 | 0.75 (0.39, 48.3°) | 0.66 (0.47, 39.9°) | 5.6 |
| k2 | sequence_sum | +0.28 | 0.16 (1.09, 7.0°) | 0.22 (1.16, 7.0°) | 0.9 |
| k3 | sequence_sum | +0.15 | 0.11 (1.04, 5.5°) | 0.22 (1.09, 10.4°) | 0.6 |
| k3_straight_through | sequence_sum | +0.15 | 0.16 (1.09, 7.0°) | 0.22 (1.16, 7.0°) | 0.9 |
| ratio x k1 | sequence_sum | +0.05 | 0 | 0.17 (1.05, 8.6°) | 7.1 |
| ratio x k3 | sequence_sum | +0.05 | 0 | 0.17 (1.05, 8.6°) | 0.7 |
| reward k1, token ratio | sequence_sum | +1.14 | 0.73 (1.20, 30.5°) | 0.68 (1.36, 23.0°) | 4.8 |
| reward k1, trajectory ratio | sequence_mean | +1.14 | 0.67 (1.33, 23.6°) | 0.64 (1.50, 15.1°) | 5.5 |
| reward current k1, trajectory ratio | sequence_mean | +0.84 | 0.16 (0.93, 8.6°) | 0 | 2.6 |

What may be claimed (the zeros hold for any policy, and are tested on others; the other numbers are this policy's):

- On-policy the policy gradient is exact for ``leave_one_out``, and for ``center`` up to (G - 1) / G, with
  ``sequence_sum`` or ``constant``, or with ``trajectory`` x ``sequence_mean``; for no other combination.
- Off-policy ``trajectory`` x ``sequence_mean`` alone stays exact (TIC-GRPO, arXiv 2508.02833), for the same two
  advantages and unclipped. ``token`` corrects a token and not what came before and after it; ``sequence`` takes
  the n-th root of the right weight.
- ``sequence_mean`` (with the other ratios) weighs a completion by 1 / n: where right answers have lengths of their
  own, the gradient turns. ``trajectory`` with the other aggregates errs the other way: its ratio stands on each of
  n tokens. ``token_mean`` divides by a random number: mostly a scale, and a small turn.
- With binary rewards, an advantage that depends on the group's rewards alone keeps the direction of a prompt's
  gradient and sets its weight. ``group`` prefers prompts far from 50 %: hardly at G = 4, by a factor of 2 at G =
  64. ``maxrl`` has (1 - (1 - p)^(G - 1)) / p: the gradient of log p, cut off at order G - 1. With graded rewards
  ``group`` turns a prompt's gradient too; ``opo`` does so with any.
- ``k1`` in the loss has no gradient in expectation under ``sequence_sum`` and ``constant``: it is noise. Under
  ``sequence_mean`` it has that of E[1 / n], whatever the reference: it makes completions longer. Nor is it 0 under
  ``token_mean``.
- ``k2`` and ``k3_straight_through`` have, as sums over tokens, the exact token-level gradient on-policy (``k2`` at
  a biased value); ``k3`` has the gradient of KL(reference || policy) instead. Off-policy only the ratio times
  ``k1`` or ``k3`` is exact, with ``k3`` at a tenth of the variance.
- No loss term has the gradient of the sequence KL. ``k1`` in the reward has it on-policy. Off-policy it would take
  the trajectory ratio and the ``k1`` of the current policy; rewards hold that of the policy that sampled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import tyro
from bias.measure import CLIPS, KL_IN_REWARD, WEIGHTED, WEIGHTED_SIZES, Row, kl_rows, policy_rows, weight_rows

from grpo_jax.algorithms.advantages import ESTIMATORS

Results = dict[str, list[Row]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tabulate the exact bias and variance of every estimator on a policy that can be enumerated."""

    seed: int = 0
    """Draws the policy, the one that samples for it, and the reference."""
    full: bool = False
    """Print every combination too."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """Write every combination to this file."""


def measure(seed: int) -> Results:
    """Every combination, in float64.

    Raises:
        ValueError: a negative seed.
    """
    with jax.enable_x64(True):
        return {"policy": list(policy_rows(seed)), "kl": list(kl_rows(seed)), "weights": list(weight_rows())}


def tables(results: Results) -> dict[str, str]:
    """Title -> Markdown of the short tables."""
    policy, kl, weights = results["policy"], results["kl"], results["weights"]
    return {
        "Advantages": advantage_table(policy),
        "Ratios": ratio_table(policy),
        "Weight of a prompt solved in 5 % / in 50 % of the samples": weight_table(weights),
        "KL, on-policy": kl_table(kl, "on-policy"),
        "KL, off-policy": kl_table(kl, "off-policy"),
    }


def find(rows: Iterable[Row], **wanted: object) -> Row:
    """The one row with these values."""
    (row,) = (row for row in rows if wanted.items() <= row.items())
    return row


def markdown(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *lines))


def error(row: Row) -> str:
    """``bias (scale, angle)``; 0 where there's no bias but rounding's."""
    return "0" if row["bias"] < 1e-10 else f"{row['bias']:.2f} ({row['scale']:.2f}, {angle(row)})"


def angle(row: Row) -> str:
    """In degrees; 0 where there's none but rounding's, a dash where the expected gradient is 0."""
    degrees = row["angle"]
    return "-" if degrees is None else "0" if degrees < 1e-6 else f"{degrees:.1f}°"


def advantage_table(rows: Sequence[Row]) -> str:
    """Each advantage with three aggregates on-policy, with the exact ratio off-policy, and with graded rewards."""
    lines = []
    for advantage in ESTIMATORS:
        on_policy = {"situation": "on-policy", "advantage": advantage, "ratio": "token"}
        mean, token_mean, total = (
            find(rows, reward="binary", aggregate=aggregate, **on_policy)
            for aggregate in ("sequence_mean", "token_mean", "sequence_sum")
        )
        exact_ratio = {"ratio": "trajectory", "aggregate": "sequence_mean", "situation": "off-policy"}
        off_policy = find(rows, reward="binary", advantage=advantage, **exact_ratio)
        graded = find(rows, reward="graded", aggregate="sequence_sum", **on_policy)
        errors = map(error, (mean, token_mean, total, off_policy))
        lines.append([advantage, *errors, angle(graded), f"{total['noise']:.1f}"])
    columns = ("sequence_mean", "token_mean", "sequence_sum", "off-policy, trajectory", "graded", "noise")
    return markdown(("advantage", *columns), lines)


def ratio_table(rows: Sequence[Row]) -> str:
    """Each ratio with three aggregates in every situation, by an advantage that is exact on-policy."""
    lines = []
    for ratio in ("token", "sequence", "trajectory"):
        for aggregate in ("sequence_mean", "token_mean", "sequence_sum"):
            wanted = {"reward": "binary", "advantage": "leave_one_out", "ratio": ratio, "aggregate": aggregate}
            found = [find(rows, situation=situation, **wanted) for situation in CLIPS]
            lines.append([ratio, aggregate, *map(error, found), f"{found[1]['noise']:.1f}"])
    return markdown(("ratio", "aggregate", *CLIPS, "noise, off-policy"), lines)


def weight_table(rows: Sequence[Row]) -> str:
    """Each advantage's weight of a hard and of an even prompt, by the size of the group."""
    lines = []
    for advantage in WEIGHTED:
        pairs = (
            [find(rows, advantage=advantage, group_size=size, success=p)["weight"] for p in (0.05, 0.5)]
            for size in WEIGHTED_SIZES
        )
        lines.append([advantage, *(f"{hard:.2f} / {even:.2f}" for hard, even in pairs)])
    return markdown(("advantage", *(f"G = {size}" for size in WEIGHTED_SIZES)), lines)


def kl_table(rows: Sequence[Row], situation: str) -> str:
    """Each KL term as a sum over tokens, k1 also as a mean, and KL in the reward."""
    lines = []
    for term, aggregate in dict.fromkeys((row["term"], row["aggregate"]) for row in rows):
        if aggregate == "sequence_sum" or term in KL_IN_REWARD or (term, aggregate) == ("k1", "sequence_mean"):
            wanted = {"situation": situation, "term": term, "aggregate": aggregate}
            token, sequence = (find(rows, target=target, **wanted) for target in ("token", "sequence"))
            value = round(sequence["value_bias"], 2) + 0.0  # no -0.00
            lines.append(
                [term, aggregate, f"{value:+.2f}", error(token), error(sequence), f"{sequence['variance']:.1f}"]
            )
    return markdown(("term", "aggregate", "value", "token KL", "sequence KL", "variance"), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, and write what is asked for; 2 for a mistake in the arguments."""
    options = tyro.cli(Options, args=arguments, prog="bias_table.py")
    try:
        results = measure(options.seed)
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(
                json.dumps({"seed": options.seed, **results}, indent=1, allow_nan=False) + "\n"
            )
    except (ValueError, OSError) as problem:
        print(f"bias_table.py: error: {problem}", file=sys.stderr)
        return 2
    for title, text in tables(results).items():
        print(f"{title}\n\n{text}\n")
    if options.full:
        for rows in (results["policy"], results["kl"]):
            cells = ([f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows)
            print(markdown(list(rows[0]), cells) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
