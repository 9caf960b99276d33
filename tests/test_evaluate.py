from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.evaluate import bootstrap_interval, evaluate, maj_at_k, pass_at_k, wilson_interval
from grpo_jax.rewards.exact import exact_match, whole_text
from grpo_jax.tasks.base import Completion, Example, Task

# ---------------------------------------------------------------------------------------- pass@k


@given(n=st.integers(1, 9), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n, data) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    # Products of at most nine factors in float64.
    np.testing.assert_allclose(pass_at_k([c], n, k), [expected], rtol=0, atol=1e-14)


def test_pass_at_k_of_large_samples() -> None:
    # 1 - C(n-c, k) / C(n, k) with integers that float64 does not hold.
    expected = [1 - math.comb(1000 - c, 100) / math.comb(1000, 100) for c in (0, 1, 10, 900, 901, 1000)]
    got = pass_at_k(np.array([0, 1, 10, 900, 901, 1000]), 1000, 100)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
    assert got[0] == 0.0 and got[-1] == 1.0


def test_pass_at_k_refuses_what_cannot_be() -> None:
    for k in (0, 5):
        with pytest.raises(ValueError, match=rf"k must be between 1 and the number of samples \(4\), got {k}"):
            pass_at_k([1], 4, k)
    with pytest.raises(ValueError, match=r"num_correct must be between 0 and num_samples \(4\)"):
        pass_at_k([5], 4, 1)


# ----------------------------------------------------------------------------------------- maj@k


def majority_by_hand(answers: Sequence[str | None], correct_answers: str, k: int) -> Fraction:
    """The vote of every subset, counted out."""
    total, subsets = Fraction(0), list(itertools.combinations(answers, k))
    for subset in subsets:
        votes = Counter(answer for answer in subset if answer is not None)
        if votes:
            winners = [answer for answer, count in votes.items() if count == max(votes.values())]
            total += Fraction(sum(winner in correct_answers for winner in winners), len(winners))
    return total / len(subsets)


@given(answers=st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=9), data=st.data())
def test_maj_at_k_is_the_mean_over_subsets(answers, data) -> None:
    k = data.draw(st.integers(1, len(answers)))
    for right in ("a", "ab", ""):
        correct = [answer is not None and answer in right for answer in answers]
        # One division of exact integers, and sums of a few dozen terms.
        assert maj_at_k(answers, correct, k) == pytest.approx(
            float(majority_by_hand(answers, right, k)), abs=1e-12
        )


@pytest.mark.parametrize(
    ("answers", "k", "expected"),
    [
        ("aab", 3, 1.0),
        ("abb", 3, 0.0),
        ("ab", 2, 1 / 2),
        ("abc", 3, 1 / 3),
        ("aabbc", 5, 1 / 2),
        # Of the pairs aa, ab, ab: one whole vote and two halves.
        ("aab", 2, 2 / 3),
    ],
)
def test_maj_at_k_by_hand(answers, k, expected) -> None:
    assert maj_at_k(list(answers), [answer == "a" for answer in answers], k) == pytest.approx(expected, abs=1e-12)


def test_maj_at_k_without_votes_is_wrong() -> None:
    assert maj_at_k([None, None], [False, False], 2) == 0.0
    # Silent samples don't outvote one that speaks.
    assert maj_at_k(["a", None, None], [True, False, False], 3) == 1.0


def test_maj_at_k_of_many_samples_takes_no_long() -> None:
    # 64 samples of 32 answers, two each: 2**60 subsets or so of 32.
    answers = [str(i // 2) for i in range(64)]
    chance = maj_at_k(answers, [answer == "0" for answer in answers], 32)
    # All answers are alike, and somebody always wins.
    assert chance == pytest.approx(1 / 32, abs=1e-12)


def test_maj_at_k_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="k must be between 1"):
        maj_at_k(["a"], [True], 2)
    with pytest.raises(ValueError, match="got 1 for 2"):
        maj_at_k(["a", "b"], [True], 1)


# ------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize(
    ("successes", "trials"), [(0, 10), (1, 10), (5, 10), (10, 10), (81, 263), (1, 1), (500, 1319)]
)
def test_wilson_interval_solves_its_equation(successes, trials) -> None:
    # The limits are where the score test turns: |share - p| = z sqrt(p (1 - p) / trials).
    for limit in wilson_interval(successes, trials):
        distance = abs(successes / trials - limit)
        assert distance == pytest.approx(1.959963984540054 * math.sqrt(limit * (1 - limit) / trials), abs=1e-8)


def test_wilson_interval_of_a_published_example() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_wilson_interval_refuses_no_trials() -> None:
    for successes, trials in ((0, 0), (2, 1), (-1, 1)):
        with pytest.raises(ValueError, match="successes must be between 0 and trials"):
            wilson_interval(successes, trials)


def test_bootstrap_interval_is_seeded_and_near_the_normal_one() -> None:
    values = np.random.default_rng(0).random(400)
    low, high = bootstrap_interval(values, seed=0)
    assert (low, high) == bootstrap_interval(values, seed=0) != bootstrap_interval(values, seed=1)
    half = 1.96 * values.std() / math.sqrt(400)
    # A limit of 1000 resamples is itself drawn: its standard error is about 0.08 standard errors of the mean
    # (sqrt(.025 * .975 / 1000) / phi(1.96)), hence 0.4 half-widths are ten of them.
    assert low == pytest.approx(values.mean() - half, abs=0.4 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.4 * half)
    assert bootstrap_interval(np.ones(5), seed=0) == (1.0, 1.0)
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap_interval(np.ones(0), seed=0)


# -------------------------------------------------------------------------------------- evaluate

EXAMPLES = [Example(prompt=f"p{i}", answer=str(i)) for i in range(5)]
TASK = Task(
    name="test",
    train=[],
    heldout=EXAMPLES,
    rewards=(exact_match(),),
    extract=whole_text,
    correct=lambda completion, example: completion == example.answer,
)


class Policy:
    """Greedy: right on p0 and p1. Samples of p<i>: the first i of the group are right, the others say "x"."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, float, int]] = []

    def __call__(
        self, examples: Sequence[Example], *, num_samples: int, temperature: float, seed: int
    ) -> list[list[Completion]]:
        self.calls.append((len(examples), num_samples, temperature, seed))
        groups = []
        for example in examples:
            number = int(example.answer)
            right = [number < 2] if temperature == 0 else [g < number for g in range(num_samples)]
            groups.append(
                [Completion(text=str(number) if r else "x", num_tokens=2 + r, finished=r) for r in right]
            )
        return groups


def run(policy: Policy, **changes):
    settings = {"samples": 4, "temperature": 1.0, "seed": 0, "batch_size": 2, **changes}
    return evaluate(policy, TASK, EXAMPLES, **settings)


def test_a_report_of_known_samples() -> None:
    policy, progress = Policy(), []
    report = run(policy, ks=(1, 2, 4), on_progress=progress.append)
    # c = 0, 1, 2, 3, 4 of n = 4.
    assert report.greedy_accuracy.value == 0.4
    assert (report.greedy_accuracy.low, report.greedy_accuracy.high) == wilson_interval(2, 5)
    assert report.success_rate.value == 0.5
    # pass@2 = 1 - C(4-c, 2)/6: 0, 1/2, 5/6, 1, 1; pass@4: 0, 1, 1, 1, 1.
    assert report.pass_at[1].value == pytest.approx(0.5, abs=1e-12)
    assert report.pass_at[2].value == pytest.approx((0 + 1 / 2 + 5 / 6 + 1 + 1) / 5, abs=1e-12)
    assert report.pass_at[4].value == pytest.approx(0.8, abs=1e-12)
    # maj@4: 0, 0, a tie, 1, 1. maj@2 equals pass@1: a pair that disagrees is half right.
    assert report.maj_at[4].value == pytest.approx(0.5, abs=1e-12)
    assert report.maj_at[2].value == pytest.approx(0.5, abs=1e-12)
    assert 1 not in report.maj_at
    assert (report.num_problems, report.samples, report.mean_length, report.truncated_share) == (
        5,
        4,
        2.5,
        0.5,
    )
    assert progress == [2, 4, 5]
    for estimate in (report.success_rate, *report.pass_at.values(), *report.maj_at.values()):
        assert estimate.low <= estimate.value <= estimate.high


def test_batches_have_seeds_of_their_own() -> None:
    policy = Policy()
    run(policy)
    assert [call[:3] for call in policy.calls] == [
        (2, 1, 0.0), (2, 4, 1.0), (2, 1, 0.0), (2, 4, 1.0), (1, 1, 0.0), (1, 4, 1.0),
    ]  # fmt: skip
    seeds = {call[3] for call in policy.calls}
    assert len(seeds) == 3 and all(0 <= seed < 2**31 for seed in seeds)
    again, other = Policy(), Policy()
    run(again)
    run(other, seed=1)
    assert again.calls == policy.calls
    assert not seeds & {call[3] for call in other.calls}


def test_temperature_0_takes_the_greedy_completion_as_the_sample() -> None:
    policy = Policy()
    report = run(policy, temperature=0.0)
    assert {call[1:3] for call in policy.calls} == {(1, 0.0)}
    assert len(policy.calls) == 3
    assert report.samples == 1
    assert report.success_rate.value == report.pass_at[1].value == report.greedy_accuracy.value == 0.4
    assert report.maj_at == {}


def test_the_report_as_json() -> None:
    values = run(Policy()).to_json()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    names = ["greedy_accuracy", "success_rate", "pass@1", "pass@4", "maj@4"]
    assert set(values) == {*names, *(f"{name}_ci" for name in names)} | {
        "num_problems", "samples", "temperature", "mean_length", "truncated_share",
    }  # fmt: skip
    assert values["success_rate"] == 0.5
    low, high = values["success_rate_ci"]
    assert low < 0.5 < high


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"temperature": math.nan}, "temperature must be at least 0"),
        ({"ks": (1, 5)}, r"number of samples \(4\), got 5"),
        ({"ks": (2,), "temperature": 0.0}, r"number of samples \(1\), got 2"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        run(Policy(), **changes)
    with pytest.raises(ValueError, match="at least one problem"):
        evaluate(Policy(), TASK, [], samples=1, temperature=1.0, seed=0, batch_size=1)
