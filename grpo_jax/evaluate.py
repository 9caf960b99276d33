"""Evaluation on problems: greedy accuracy, success rate, pass@k and maj@k with confidence intervals.

N problems, n samples a problem, of which c are correct.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from grpo_jax.tasks.base import Completion, Example, Task, verdict

Interval = tuple[float, float]

_Z_95 = 1.959963984540054


class Generate(Protocol):
    """Samples ``num_samples`` completions of each example; temperature 0 is greedy."""

    def __call__(
        self, examples: Sequence[Example], *, num_samples: int, temperature: float, seed: int
    ) -> list[list[Completion]]:
        """One list of completions an example."""
        ...


@dataclass(frozen=True)
class Estimate:
    """A measured share and the interval that holds the true one with 95 % confidence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """What an evaluation found."""

    num_problems: int
    samples: int
    """Samples a problem."""
    temperature: float
    """Of the samples."""
    greedy_accuracy: Estimate
    """Share of problems whose greedy completion is correct; Wilson interval."""
    success_rate: Estimate
    """Share of correct samples; bootstrap over problems, as those below."""
    pass_at: Mapping[int, Estimate]
    """k -> pass@k: the chance that one of k samples is correct."""
    maj_at: Mapping[int, Estimate]
    """k -> maj@k, for k above 1: the chance that the most frequent answer of k samples is correct."""
    mean_length: float
    """Tokens a sample."""
    truncated_share: float
    """Share of samples cut off at the length limit."""

    def to_json(self) -> dict[str, Any]:
        """Plain values: ``pass@4`` and ``maj@4`` beside the fields, each interval under ``..._ci``."""
        estimates = {
            "greedy_accuracy": self.greedy_accuracy,
            "success_rate": self.success_rate,
            **{f"pass@{k}": estimate for k, estimate in self.pass_at.items()},
            **{f"maj@{k}": estimate for k, estimate in self.maj_at.items()},
        }
        values: dict[str, Any] = {}
        for name, estimate in estimates.items():
            values |= {name: estimate.value, f"{name}_ci": [estimate.low, estimate.high]}
        for name in ("num_problems", "samples", "temperature", "mean_length", "truncated_share"):
            values[name] = getattr(self, name)
        return values


def evaluate(
    generate: Generate,
    task: Task,
    examples: Sequence[Example],
    *,
    samples: int,
    temperature: float,
    seed: int,
    batch_size: int,
    ks: Sequence[int] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> EvalReport:
    """Judge a policy on problems, by one greedy completion and ``samples`` samples of each.

    Args:
        generate: the policy.
        task: extracts answers and tells whether a completion is correct.
        examples: the N problems.
        samples: n. With temperature 0 the greedy completion is the only sample, whatever is asked here.
        temperature: of the samples.
        seed: of the samples and of the bootstrap.
        batch_size: problems handed to ``generate`` at a time, each batch with a seed of its own.
        ks: the k of pass@k and maj@k; None: 1 and n.
        on_progress: called after each batch with the number of problems done.

    Raises:
        ValueError: there is no example, or a number is out of range.
    """
    n = 1 if temperature == 0 else samples
    ks = _checked_ks(examples, n, temperature, batch_size, ks)
    greedy: list[Completion] = []
    sampled: list[list[Completion]] = []
    for start in range(0, len(examples), batch_size):
        batch = examples[start : start + batch_size]
        # Batches of one seed would repeat each other's draws.
        batch_seed = int(np.random.SeedSequence([seed, start]).generate_state(1)[0] >> 1)
        alone = generate(batch, num_samples=1, temperature=0.0, seed=batch_seed)
        groups = alone
        if temperature > 0:
            groups = generate(batch, num_samples=n, temperature=temperature, seed=batch_seed)
        assert [len(group) for group in alone] == [1] * len(batch), "one greedy completion an example"
        assert [len(group) for group in groups] == [n] * len(batch), "a group of samples an example"
        greedy += [group[0] for group in alone]
        sampled += groups
        if on_progress is not None:
            on_progress(len(sampled))
    return _report(task, examples, greedy, sampled, temperature=temperature, seed=seed, ks=ks)


def pass_at_k(num_correct_N: Sequence[int] | np.ndarray, num_samples: int, k: int) -> np.ndarray:
    """Unbiased estimates of pass@k, one a problem: ``1 - C(n-c, k) / C(n, k)`` (arXiv 2107.03374).

    Args:
        num_correct_N: c, correct samples a problem.
        num_samples: n.
        k: at most n.

    Returns:
        float64 ``[N]``.

    Raises:
        ValueError: k is not between 1 and n, or a c is not between 0 and n.
    """
    correct_N = np.asarray(num_correct_N)
    _check_k(k, num_samples)
    if ((correct_N < 0) | (correct_N > num_samples)).any():
        raise ValueError(f"num_correct must be between 0 and num_samples ({num_samples}), got {correct_N}")
    fail_N = np.ones(correct_N.shape)
    for drawn in range(k):
        fail_N *= np.maximum(num_samples - correct_N - drawn, 0) / (num_samples - drawn)
    return 1.0 - fail_N


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """The chance that a majority vote among k of a problem's n samples is correct.

    Exact, over all subsets of k samples. Answers that tie win in equal parts; a sample without an answer
    (None) has no vote; where nobody votes the vote is wrong. An answer is correct if the first sample that
    gave it is.

    Args:
        answers: the n extracted answers.
        correct: the n verdicts.
        k: size of the vote, at most n.

    Raises:
        ValueError: k is not between 1 and n, or there are not as many verdicts as answers.
    """
    if len(answers) != len(correct):
        raise ValueError(f"there must be a verdict an answer, got {len(correct)} for {len(answers)}")
    _check_k(k, len(answers))
    votes = Counter(answer for answer in answers if answer is not None)
    verdicts: dict[str, bool] = {}
    for answer, right in zip(answers, correct, strict=True):
        if answer is not None:
            verdicts.setdefault(answer, bool(right))
    silent = len(answers) - votes.total()
    total = 0.0
    for answer, count in votes.items():
        if not verdicts[answer]:
            continue
        others = [votes[other] for other in votes if other != answer]
        for won in range(1, min(count, k) + 1):
            rest = _ways(others, silent, drawn=k - won, most=won)
            total += math.comb(count, won) * sum(ways / (ties + 1) for ties, ways in enumerate(rest))
    return total / math.comb(len(answers), k)


def _ways(others: Sequence[int], silent: int, *, drawn: int, most: int) -> list[int]:
    """Ways to draw ``drawn`` other samples, no answer above ``most`` votes, by how many answers reach it."""
    # table[ties][size]: ways to take `size` samples of the answers seen so far.
    table = [[math.comb(silent, size) for size in range(drawn + 1)]]
    for count in others:
        following = [[0] * (drawn + 1) for _ in range(len(table) + 1)]
        for ties, row in enumerate(table):
            for size, ways in enumerate(row):
                if not ways:
                    continue
                for taken in range(min(count, most, drawn - size) + 1):
                    following[ties + (taken == most)][size + taken] += ways * math.comb(count, taken)
        # No more answers can reach `most` than there are samples for.
        table = following[: drawn // most + 1]
    return [row[drawn] for row in table]


def wilson_interval(successes: int, trials: int, *, z: float = _Z_95) -> Interval:
    """Wilson's score interval of a share; ``z`` 1.96 gives 95 %.

    Raises:
        ValueError: there are no trials, or more successes than trials.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"successes must be between 0 and trials (at least 1), got {successes} of {trials}")
    share, spread = successes / trials, z * z / trials
    center = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return max(0.0, center - half), min(1.0, center + half)


def bootstrap_interval(values_N: np.ndarray, *, seed: int, resamples: int = 1000) -> Interval:
    """95 % percentile interval of a mean over problems, which are drawn again with replacement.

    It has no width where all values are equal, as where nothing was ever solved.

    Raises:
        ValueError: there are no values.
    """
    if len(values_N) < 1:
        raise ValueError("a bootstrap needs at least one value, got none")
    rng = np.random.default_rng(seed)
    means = [values_N[rng.integers(len(values_N), size=len(values_N))].mean() for _ in range(resamples)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def _report(
    task: Task,
    examples: Sequence[Example],
    greedy: list[Completion],
    sampled: list[list[Completion]],
    *,
    temperature: float,
    seed: int,
    ks: Sequence[int],
) -> EvalReport:
    hits = sum(verdict(task, one.text, example) for one, example in zip(greedy, examples, strict=True))
    correct_Nn = np.array(
        [
            [verdict(task, sample.text, example) for sample in group]
            for group, example in zip(sampled, examples, strict=True)
        ]
    )
    answers = [[task.extract(sample.text) for sample in group] for group in sampled]
    verdicts = correct_Nn.tolist()

    def over_problems(values_N: np.ndarray) -> Estimate:
        return Estimate(float(values_N.mean()), *bootstrap_interval(values_N, seed=seed))

    def majority(k: int) -> np.ndarray:
        return np.array([maj_at_k(*votes, k) for votes in zip(answers, verdicts, strict=True)])

    samples = [sample for group in sampled for sample in group]
    num_samples = correct_Nn.shape[1]
    return EvalReport(
        num_problems=len(examples),
        samples=num_samples,
        temperature=temperature,
        greedy_accuracy=Estimate(hits / len(examples), *wilson_interval(hits, len(examples))),
        success_rate=over_problems(correct_Nn.mean(axis=1)),
        pass_at={k: over_problems(pass_at_k(correct_Nn.sum(axis=1), num_samples, k)) for k in ks},
        maj_at={k: over_problems(majority(k)) for k in ks if k > 1},
        mean_length=float(np.mean([sample.num_tokens for sample in samples])),
        truncated_share=float(np.mean([not sample.finished for sample in samples])),
    )


def _checked_ks(
    examples: Sequence[Example], n: int, temperature: float, batch_size: int, ks: Sequence[int] | None
) -> list[int]:
    if not examples:
        raise ValueError("examples must hold at least one problem, got none")
    if not temperature >= 0:
        raise ValueError(f"temperature must be at least 0 (0 is greedy), got {temperature}")
    for name, value in (("samples", n), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    wanted = sorted({1, n} if ks is None else set(ks))
    for k in wanted:
        _check_k(k, n)
    return wanted


def _check_k(k: int, num_samples: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be between 1 and the number of samples ({num_samples}), got {k}")
