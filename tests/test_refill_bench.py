"""The bench of refill: its policy's lengths, its count of steps, and that both ways decode the same."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.bench.forced_lengths import lognormal_lengths
from experiments.bench.refill import Options, measure, refill_steps, waiting_steps


def test_lengths_are_quantiles_of_a_lognormal_distribution() -> None:
    length_V = lognormal_lengths(512, median=48, sigma=1, cap=512, seed=0)
    assert 2 <= length_V.min() and length_V.max() == 512
    assert abs(np.median(length_V) - 48) <= 1
    # A tenth lies above the median times exp(1.2816 sigma).
    assert abs((length_V > 48 * np.exp(1.2816)).mean() - 0.1) < 0.01


def test_steps_of_a_schedule_worked_out_by_hand() -> None:
    length_PG = np.array([[5, 1, 2, 2], [3, 3, 1, 1], [4, 4, 4, 4]])
    assert waiting_steps(length_PG, 1) == 5 + 3 + 4
    # Rows of two slots. The first prompt: 5 beside 1 + 2 + 2; the second: 3 + 1 beside 3 + 1; then the third.
    assert refill_steps(length_PG, 2, 2) == 4 + 8
    assert refill_steps(length_PG, 1, 4) == waiting_steps(length_PG, 1)


def test_refill_and_waiting_decode_the_same_completions() -> None:
    options = Options(prompts=8, group=4, prompt=5, completion=24, slots=8, median=6.0, repeats=1, seed=1)
    result = measure(options)
    assert result["differing_not_at_near_ties"] == 0 and result["differing"] <= 2
    assert result["logps_apart"] < 1e-5
    assert result["refill"]["steps"] < result["waiting"]["steps"]
    assert result["tokens"] == pytest.approx(result["refill"]["busy"] * result["refill"]["steps"] * 8)
