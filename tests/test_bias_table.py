"""The tables of biases: against brute force, finite differences and closed forms, and as they are quoted."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
ROUNDING = 1e-10  # sums of thousands of float64 terms, relative to the true gradient
EXACT_ADVANTAGES = ("center", "leave_one_out")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "experiments")
        yield importlib.import_module("bias_table")


@pytest.fixture(scope="module")
def exact(script: ModuleType) -> ModuleType:
    return importlib.import_module("bias.exact")


@pytest.fixture(scope="module")
def measure(script: ModuleType) -> ModuleType:
    return importlib.import_module("bias.measure")


@pytest.fixture(scope="module")
def run(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What the command writes and prints."""
    path = tmp_path_factory.mktemp("bias") / "new" / "bias.json"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert script.main(["--json", str(path), "--full"]) == 0
    return json.loads(path.read_text()), printed.getvalue()


@pytest.fixture(scope="module")
def policy(run: tuple[dict[str, Any], str]) -> dict[tuple[str, ...], dict[str, Any]]:
    """(reward, situation, advantage, ratio, aggregate) -> row."""
    names = ("reward", "situation", "advantage", "ratio", "aggregate")
    return {tuple(row[name] for name in names): row for row in run[0]["policy"]}


@pytest.fixture(scope="module")
def kl(run: tuple[dict[str, Any], str]) -> dict[tuple[str, ...], dict[str, Any]]:
    """(situation, term, aggregate, target) -> row."""
    names = ("situation", "term", "aggregate", "target")
    return {tuple(row[name] for name in names): row for row in run[0]["kl"]}


def softmax(logits: np.ndarray) -> np.ndarray:
    exp = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def paths(world: Any) -> list[list[tuple[int, int]]]:
    """(state, token) of each token of each completion."""
    tree = world.tree
    return [
        [(int(s), int(v)) for s, v, m in zip(*rows, strict=True) if m]
        for rows in zip(tree.states_CT, tree.tokens_CT, tree.mask_CT, strict=True)
    ]


def chances(world: Any, logits_SV: np.ndarray) -> np.ndarray:
    """Probability of each completion under one prompt's logits."""
    p_SV = softmax(logits_SV)
    return np.array([math.prod(p_SV[step] for step in path) for path in paths(world)])


def slope(f: Callable[[np.ndarray], float], x: np.ndarray) -> np.ndarray:
    """Gradient by central differences; of smooth functions of size 1, right to about 1e-9."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[index] = 1e-5
        gradient[index] = (f(x + step) - f(x - step)) / 2e-5
    return gradient


def angle(x: np.ndarray, y: np.ndarray) -> float:
    along = float((x * y).sum() / np.linalg.norm(y))
    across = float(np.linalg.norm(x - along * y / np.linalg.norm(y)))
    return math.degrees(math.atan2(across, along))


# ----------------------------------------------------------------------------------------- what is quoted


def test_the_docstring_quotes_what_the_command_prints(script, run) -> None:
    results, printed = run
    tables = script.tables({name: results[name] for name in ("policy", "kl", "weights")})
    for title, text in tables.items():
        assert f"\n{title}\n\n{text}\n" in script.__doc__
        assert f"{title}\n\n{text}\n" in printed
    lines = sum(len(text.splitlines()) for text in tables.values())
    assert sum(line.startswith("|") for line in script.__doc__.splitlines()) == lines


def test_full_prints_every_combination(run, policy, kl) -> None:
    results, printed = run
    assert len(policy) == len(results["policy"]) == 2 * 3 * 8 * 4 * 4
    assert len(kl) == len(results["kl"]) == 2 * (6 * 4 + 3) * 2
    shown = {tuple(line.strip("| ").split(" | ")) for line in printed.splitlines()}
    for key in (*policy, *kl):
        assert any(row[: len(key)] == key for row in shown), key


def test_a_mistake_is_told(script, capsys) -> None:
    assert script.main(["--seed", "-1"]) == 2
    assert "bias_table.py: error:" in capsys.readouterr().err


# --------------------------------------------------------------------------------------- the enumeration


@pytest.mark.parametrize("max_length", [1, 2, 3])
def test_the_tree_has_every_completion_once(exact, max_length) -> None:
    tree = exact.completion_tree(max_length)
    cut = set()
    for tokens in itertools.product(range(3), repeat=max_length):
        end = tokens.index(0) + 1 if 0 in tokens else max_length
        cut.add(tokens[:end])
    found = [tuple(row[mask].tolist()) for row, mask in zip(tree.tokens_CT, tree.mask_CT, strict=True)]
    assert len(found) == len(cut) and set(found) == cut
    states = {}
    for completion, row in zip(found, tree.states_CT, strict=True):
        for t in range(len(completion)):
            assert states.setdefault(completion[:t], row[t]) == row[t]
    assert sorted(states.values()) == list(range(tree.num_states))


@pytest.mark.parametrize("off_policy", [False, True])
def test_true_gradients_by_finite_differences(x64, exact, measure, off_policy) -> None:
    world = measure.make_world(3, measure.REWARDS["graded"], off_policy=off_policy)
    reference, sampler = softmax(world.reference_PSV), softmax(world.sampler_PSV)
    prompts = range(2)

    def reward(logits_PSV: np.ndarray) -> float:
        return float(np.mean([chances(world, logits_PSV[p]) @ world.rewards_PC[p] for p in prompts]))

    def sequence_kl(logits_PSV: np.ndarray) -> float:
        ratios = [np.log(chances(world, logits_PSV[p]) / chances(world, world.reference_PSV[p])) for p in prompts]
        return float(np.mean([chances(world, logits_PSV[p]) @ ratios[p] for p in prompts]))

    def token_kl(logits_PSV: np.ndarray) -> float:
        total, new = 0.0, softmax(logits_PSV)
        for p in prompts:
            for chance, path in zip(chances(world, world.sampler_PSV[p]), paths(world), strict=True):
                total += chance * sum(new[p, s] @ np.log(new[p, s] / reference[p, s]) for s, _ in path)
        return total / 2

    assert sampler.shape == reference.shape
    for name, plain in (("expected_reward", reward), ("sequence_kl", sequence_kl), ("token_kl", token_kl)):
        value, gradient = jax.value_and_grad(getattr(world, name))(world.policy_PSV)
        np.testing.assert_allclose(value, plain(world.policy_PSV), rtol=1e-12)
        np.testing.assert_allclose(gradient, slope(plain, world.policy_PSV), rtol=0, atol=1e-9)


def brute_force(world: Any, advantage: str, ratio: str, aggregate: str) -> tuple[np.ndarray, float]:
    """Mean and variance of minus the gradient over every ordered batch of two groups of two: one at a time."""
    steps, shape = paths(world), world.policy_PSV.shape
    new, old = softmax(world.policy_PSV), softmax(world.sampler_PSV)
    chance = [chances(world, world.sampler_PSV[p]) for p in (0, 1)]
    mean, square = np.zeros(shape), 0.0
    for batch in itertools.product(range(len(steps)), repeat=4):
        owner = (0, 0, 1, 1)
        r = np.array([world.rewards_PC[p, c] for p, c in zip(owner, batch, strict=True)])
        if advantage == "leave_one_out":
            A = r - r[[1, 0, 3, 2]]
        else:
            A = (r - r.mean()) / (r.std(ddof=1) + 1e-4)
        gradient = np.zeros(shape)
        for p, c, a in zip(owner, batch, A, strict=True):
            rho = [new[p][step] / old[p][step] for step in steps[c]]
            n = len(steps[c])
            for t, (s, v) in enumerate(steps[c]):
                # d of the sum over tokens of the ratio, in this token's log-probability.
                weight = rho[t] if ratio == "token" else n * math.prod(rho)
                weight /= 4 * n if aggregate == "sequence_mean" else sum(len(steps[x]) for x in batch)
                gradient[p, s] += a * weight * (np.eye(3)[v] - new[p, s])
        likely = math.prod(chance[p][c] for p, c in zip(owner, batch, strict=True))
        mean += likely * gradient
        square += likely * (gradient**2).sum()
    return mean, square - float((mean**2).sum())


@pytest.mark.parametrize(
    ("advantage", "ratio", "aggregate"),
    [("leave_one_out", "token", "sequence_mean"), ("batch", "trajectory", "token_mean")],
)
def test_moments_equal_brute_force(x64, exact, measure, advantage, ratio, aggregate) -> None:
    world = measure.make_world(4, measure.REWARDS["graded"], off_policy=True)
    batches = [exact.Batches(world, prompt, group_size=2) for prompt in (0, 1)]
    for one in batches:
        assert abs(one.weights_B.sum() - 1) < 1e-12
    found = exact.moments(batches, [one.advantages(advantage) for one in batches], ratio=ratio)[aggregate]
    mean, variance = brute_force(world, advantage, ratio, aggregate)
    np.testing.assert_allclose(-found.mean_PK, mean.reshape(2, -1), rtol=0, atol=1e-13)
    np.testing.assert_allclose(found.variance, variance, rtol=1e-11)


# ------------------------------------------------------------------------------------- the policy gradient


def test_exactly_these_policy_gradients_are_exact(policy) -> None:
    expected = set()
    for reward, advantage in itertools.product(("binary", "graded"), EXACT_ADVANTAGES):
        for situation in ("on-policy", "off-policy"):
            expected.add((reward, situation, advantage, "trajectory", "sequence_mean"))
        for ratio in ("token", "sequence", "sequence_token"):
            for aggregate in ("sequence_sum", "constant"):
                expected.add((reward, "on-policy", advantage, ratio, aggregate))
    assert {key for key, row in policy.items() if row["bias"] < ROUNDING} == expected
    # And the others aren't nearly so.
    assert min(row["bias"] for key, row in policy.items() if key not in expected) > 0.02


def test_known_factors(policy) -> None:
    for key, row in policy.items():
        own = 3 / 4 if "center" in key else 1
        assert row["known_factor"] == pytest.approx(own / 2 if "constant" in key else own)


def test_twins(policy) -> None:
    """The constant denominator is a scale, and one advantage a completion hides what sequence_token is for."""
    for (*names, ratio, aggregate), row in policy.items():
        for twin in (
            (*names, ratio, "sequence_sum" if aggregate == "constant" else aggregate),
            (*names, "sequence" if ratio == "sequence_token" else ratio, aggregate),
        ):
            for number in ("bias", "scale", "variance"):
                np.testing.assert_allclose(policy[twin][number], row[number], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("key", "least_bias", "least_angle"),
    [
        (("on-policy", "leave_one_out", "token", "sequence_mean"), 0.2, 10),  # length
        (("on-policy", "leave_one_out", "token", "token_mean"), 0.3, 1),  # a random denominator
        (("on-policy", "leave_one_out", "trajectory", "sequence_sum"), 0.4, 10),  # length, the other way
        (("on-policy", "group", "token", "sequence_sum"), 0.4, 0.5),  # weights of prompts
        (("on-policy", "maxrl", "token", "sequence_sum"), 0.7, 15),
        (("on-policy", "opo", "token", "sequence_sum"), 0.2, 2),  # lengths in the baseline
        (("off-policy", "leave_one_out", "token", "sequence_sum"), 0.1, 5),
        (("off-policy", "leave_one_out", "sequence", "sequence_sum"), 0.05, 2),
        (("off-policy, clip 0.2", "leave_one_out", "trajectory", "sequence_mean"), 0.3, 15),
    ],
)
def test_biased_rows(policy, key, least_bias, least_angle) -> None:
    """Bounds a little below the quoted values."""
    row = policy[("binary", *key)]
    assert row["bias"] > least_bias and row["angle"] > least_angle
    across = row["scale"] * math.tan(math.radians(row["angle"]))
    assert row["bias"] == pytest.approx(math.hypot(row["scale"] - 1, across))
    assert row["cosine"] == pytest.approx(math.cos(math.radians(row["angle"])))
    assert row["noise"] == pytest.approx(row["variance"] / row["scale"] ** 2)


def test_what_is_exact_is_so_for_another_policy_of_three_steps(x64, exact, measure) -> None:
    rewards = np.random.default_rng(5).normal(size=(1, 15))
    for off_policy, ratio, aggregate in ((True, "trajectory", "sequence_mean"), (False, "token", "sequence_sum")):
        world = measure.make_world(6, rewards, off_policy=off_policy, max_length=3)
        batches = [exact.Batches(world, 0, group_size=3)]
        true = slope(lambda x, w=world: float(chances(w, x[0]) @ w.rewards_PC[0]), world.policy_PSV).reshape(1, -1)
        for advantage, factor in (("leave_one_out", 1), ("center", 2 / 3)):
            found = exact.moments(batches, [batches[0].advantages(advantage)], ratio=ratio)
            np.testing.assert_allclose(-found[aggregate].mean_PK / factor, true, rtol=0, atol=1e-9)
            wrong = "sequence_sum" if aggregate == "sequence_mean" else "sequence_mean"
            assert np.abs(-found[wrong].mean_PK / factor - true).max() > 0.1 * np.abs(true).max()


def test_weights_of_prompts(run) -> None:
    """Closed forms, and for ``group`` the sum over the number of successes."""
    for row in run[0]["weights"]:
        p, size = row["success"], row["group_size"]
        if row["advantage"] == "group":
            expected = 0.0
            for k in range(1, size):
                spread = math.sqrt(k * (size - k) / size / (size - 1)) + 1e-4
                chance = math.comb(size, k) * p**k * (1 - p) ** (size - k)
                expected += chance * k * (size - k) / size**2 / spread / (p * (1 - p))
        else:
            maxrl = (1 - (1 - p) ** (size - 1)) / p
            expected = {"center": (size - 1) / size, "leave_one_out": 1.0, "maxrl": maxrl}[row["advantage"]]
        assert row["weight"] == pytest.approx(expected, rel=1e-9), row


def test_rewards_of_two_values_keep_the_direction_of_a_prompt(x64, exact, measure) -> None:
    """And weigh it by a number that depends on its success rate alone."""
    for reward, advantage, turned in (
        ("binary", "group", False),
        ("binary", "batch", False),
        ("binary", "maxrl", False),
        ("binary", "opo", True),
        ("graded", "group", True),
        ("graded", "leave_one_out", False),
    ):
        world = measure.make_world(0, measure.REWARDS[reward], off_policy=False)
        batches = [exact.Batches(world, p, group_size=4) for p in (0, 1)]
        advantages = [one.advantages(advantage) for one in batches]
        mean = -exact.moments(batches, advantages, ratio="token")["sequence_sum"].mean_PK
        for p in (0, 1):
            true = slope(lambda x, w=world, p=p: float(chances(w, x) @ w.rewards_PC[p]), world.policy_PSV[p]) / 2
            degrees = angle(mean[p], true.reshape(-1))
            assert degrees > 0.3 if turned else degrees < 1e-5, (reward, advantage, degrees)
            if advantage == "maxrl":
                success = float(chances(world, world.policy_PSV[p]) @ world.rewards_PC[p])
                weight = (1 - (1 - success) ** 3) / success
                np.testing.assert_allclose(mean[p], weight * true.reshape(-1), rtol=0, atol=1e-9)


# ----------------------------------------------------------------------------------------------- the KL


@pytest.mark.parametrize("off_policy", [False, True])
def test_expected_kl_gradients_on_a_vocabulary_of_three(x64, exact, measure, off_policy) -> None:
    """One token: the expectation of each estimator's gradient, and whether it's that of the divergence."""
    world = measure.make_world(7, [[0.0] * 3], off_policy=off_policy, max_length=1)
    batches = exact.Batches(world, 0, group_size=2)
    new, old, ref = (softmax(x[0, 0]) for x in (world.policy_PSV, world.sampler_PSV, world.reference_PSV))
    d, rho, score = np.log(new / ref), new / old, np.eye(3) - new
    k3, k3_slope = np.exp(-d) + d - 1, 1 - np.exp(-d)
    slopes = {
        ("k1", False): np.ones(3),
        ("k2", False): d,
        ("k3", False): k3_slope,
        ("k3_straight_through", False): d,
        ("k1", True): rho * (d + 1),
        ("k3", True): rho * (k3 + k3_slope),
    }
    assert set(slopes) == set(measure.KL_TERMS)

    def divergence(logits: np.ndarray) -> float:
        return float(softmax(logits) @ np.log(softmax(logits) / ref))

    def reverse(logits: np.ndarray) -> float:
        return float(ref @ np.log(ref / softmax(logits)))

    true, backward = slope(divergence, world.policy_PSV[0, 0]), slope(reverse, world.policy_PSV[0, 0])
    right = {("k1", True), ("k3", True)}
    if not off_policy:
        right |= {("k2", False), ("k3_straight_through", False)}
    for (estimator, unbiased), by_token in slopes.items():
        options = {"beta": 1.0, "kl_estimator": estimator, "kl_unbiased": unbiased, "ratio": "token"}
        found = exact.moments([batches], [np.zeros_like(batches.rewards_BPG)], **options)
        for one in found.values():  # with one token every aggregate is the same
            np.testing.assert_allclose(one.mean_PK[0], (old * by_token) @ score, rtol=0, atol=1e-13)
        gradient = found["sequence_sum"].mean_PK[0]
        error = np.linalg.norm(gradient - true) / np.linalg.norm(true)
        assert error < 1e-8 if (estimator, unbiased) in right else error > 0.02, (estimator, unbiased, error)
        if not off_policy and (estimator, unbiased) == ("k1", False):
            np.testing.assert_allclose(gradient, 0, atol=1e-15)
        if not off_policy and (estimator, unbiased) == ("k3", False):
            np.testing.assert_allclose(gradient, backward, rtol=0, atol=1e-9)


def test_exactly_these_kl_gradients_are_exact(kl) -> None:
    sums = [
        ("on-policy", term, aggregate, "token")
        for term in ("k2", "k3_straight_through", "ratio x k1", "ratio x k3")
        for aggregate in ("sequence_sum", "constant")
    ]
    off = [("off-policy", *key[1:]) for key in sums if key[1].startswith("ratio")]
    rewards = [
        ("on-policy", "reward k1, token ratio", "sequence_sum", "sequence"),
        ("on-policy", "reward k1, trajectory ratio", "sequence_mean", "sequence"),
        ("on-policy", "reward current k1, trajectory ratio", "sequence_mean", "sequence"),
        ("off-policy", "reward current k1, trajectory ratio", "sequence_mean", "sequence"),
    ]
    expected = {*sums, *off, *rewards}
    assert {key for key, row in kl.items() if row["bias"] < ROUNDING} == expected
    assert min(row["bias"] for key, row in kl.items() if key not in expected) > 0.1


@pytest.mark.parametrize("off_policy", [False, True])
def test_exact_kl_gradients_are_so_for_another_policy_of_three_steps(x64, exact, measure, off_policy) -> None:
    world = measure.make_world(8, [[0.0] * 15], off_policy=off_policy, max_length=3)
    batches = exact.Batches(world, 0, group_size=2)
    new, ref = world.policy_PSV, world.reference_PSV
    visits, steps = chances(world, world.sampler_PSV[0]), paths(world)

    def token_kl(logits_SV: np.ndarray) -> float:
        p_SV = softmax(logits_SV)
        kl_S = (p_SV * np.log(p_SV / softmax(ref[0]))).sum(axis=-1)
        return sum(chance * sum(kl_S[s] for s, _ in path) for chance, path in zip(visits, steps, strict=True))

    def sequence_kl(logits_SV: np.ndarray) -> float:
        p_C = chances(world, logits_SV)
        return float(p_C @ np.log(p_C / chances(world, ref[0])))

    options = {"beta": 1.0, "kl_estimator": "k3", "kl_unbiased": True, "ratio": "token"}
    in_loss = exact.moments([batches], [np.zeros_like(batches.rewards_BPG)], **options)["sequence_sum"].mean_PK
    k1_BPG = (batches.logps_B1GT - batches.ref_B1GT).sum(axis=-1)
    advantages = [batches.advantages("leave_one_out", -k1_BPG)]
    in_reward = exact.moments([batches], advantages, ratio="trajectory")["sequence_mean"].mean_PK
    np.testing.assert_allclose(in_loss, slope(token_kl, new[0]).reshape(1, -1), rtol=0, atol=1e-9)
    np.testing.assert_allclose(in_reward, slope(sequence_kl, new[0]).reshape(1, -1), rtol=0, atol=1e-9)
    assert np.abs(in_loss - in_reward).max() > 0.01


def test_values_of_kl_terms(kl) -> None:
    def error(situation: str, term: str, target: str) -> float:
        return kl[situation, term, "sequence_sum", target]["value_bias"]

    for term in ("k1", "k3", "k3_straight_through", "ratio x k1", "ratio x k3"):
        assert abs(error("on-policy", term, "sequence")) < ROUNDING
        off_policy = abs(error("off-policy", term, "token"))
        assert off_policy < ROUNDING if term.startswith("ratio") else off_policy > 0.05, term
        assert abs(error("off-policy", term, "sequence")) > 0.02
    assert error("on-policy", "k2", "sequence") > 0.05
    assert (
        kl["off-policy", "ratio x k3", "sequence_sum", "token"]["variance"]
        < 0.15 * (kl["off-policy", "ratio x k1", "sequence_sum", "token"]["variance"])
    )


def test_k1_as_a_loss_is_noise_or_lengthens_completions(x64, exact, measure, kl) -> None:
    for aggregate in ("sequence_sum", "constant"):
        row = kl["on-policy", "k1", aggregate, "token"]
        assert row["cosine"] is None and row["scale"] == 0 and row["variance"] > 1
    assert kl["on-policy", "k1", "token_mean", "token"]["cosine"] is not None

    world = measure.make_world(0, [[0.0] * 7], off_policy=False)
    batches = exact.Batches(world, 0, group_size=4)
    options = {"beta": 1.0, "kl_estimator": "k1", "kl_unbiased": False, "ratio": "token"}
    found = exact.moments([batches], [np.zeros_like(batches.rewards_BPG)], **options)["sequence_mean"]
    lengths = np.array([len(path) for path in paths(world)])
    true = slope(lambda x: float(chances(world, x) @ (1 / lengths)), world.policy_PSV[0])
    np.testing.assert_allclose(found.mean_PK[0], true.reshape(-1), rtol=0, atol=1e-9)
    shorter = slope(lambda x: float(chances(world, x) @ lengths), world.policy_PSV[0])
    assert (found.mean_PK[0] * shorter.reshape(-1)).sum() < -0.01  # a step against the gradient lengthens
