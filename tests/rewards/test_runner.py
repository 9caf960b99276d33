from __future__ import annotations

import logging
import math
import threading
from typing import Any

import numpy as np
import pytest

from grpo_jax.rewards import Reward, RewardResult, RewardRunner

LOGGER = "grpo_jax.rewards.runner"


def run(*rewards: Reward, prompts=("a", "b"), group_size=2, **columns: list[Any]) -> RewardResult:
    completions = [[f"{prompt}{i}" for i in range(group_size)] for prompt in prompts]
    return RewardRunner(rewards)(
        prompts=list(prompts),
        completions=completions,
        completion_ids=[[[ord(c) for c in text] for text in group] for group in completions],
        columns=columns,
    )


def test_functions_see_prompt_major_lists_with_columns_repeated() -> None:
    seen: dict[str, Any] = {}

    def fn(**arguments: Any) -> list[float]:
        seen.update(arguments)
        return [0.0, 1.0, 2.0, 3.0]

    result = run(Reward("f", fn), answer=["x", "y"])
    assert seen == {
        "prompts": ["a", "a", "b", "b"],
        "completions": ["a0", "a1", "b0", "b1"],
        "completion_ids": [[97, 48], [97, 49], [98, 48], [98, 49]],
        "answer": ["x", "x", "y", "y"],
    }
    # Row p, column g of the result is what the function gave for completion g of prompt p.
    np.testing.assert_array_equal(result.rewards_PGK, np.array([[[0.0], [1.0]], [[2.0], [3.0]]], np.float32))
    assert result.rewards_PGK.dtype == np.float32
    assert result.failures == {"f": 0}


def test_none_and_nan_are_missing_and_no_failures() -> None:
    result = run(Reward("f", lambda **_: [None, math.nan, 0, True]))
    np.testing.assert_array_equal(result.rewards_PGK[..., 0], [[np.nan, np.nan], [0, 1]])
    assert result.failures == {"f": 0}


def test_a_bad_sample_does_not_lose_the_batch_and_is_logged_once(caplog) -> None:
    def fragile(*, completions: list[str], **_: Any) -> list[float]:
        if any(text.startswith("b") for text in completions):
            raise KeyError("fragile on b")
        return [1.0] * len(completions)

    runner = RewardRunner(
        [Reward("fragile", fragile), Reward("fine", lambda *, prompts, **_: [0.5] * len(prompts))]
    )
    with caplog.at_level(logging.WARNING, LOGGER):
        for _ in range(2):
            result = runner(
                prompts=["p", "q"],
                completions=[["a", "b1"], ["a", "b2"]],
                completion_ids=[[[1], [2]], [[3], [4]]],
                columns={},
            )
            expected = [[[1, 0.5], [np.nan, 0.5]], [[1, 0.5], [np.nan, 0.5]]]
            np.testing.assert_array_equal(result.rewards_PGK, expected)
            assert result.failures == {"fragile": 2, "fine": 0}
    (record,) = caplog.records
    assert "'fragile'" in record.getMessage()
    assert record.exc_info is not None and "fragile on b" in str(record.exc_info[1])


def test_a_function_that_raises_on_the_whole_batch_alone_loses_nothing(caplog) -> None:
    def one_at_a_time(*, completions: list[str], **_: Any) -> list[float]:
        (text,) = completions
        return [float(text[-1])]

    with caplog.at_level(logging.CRITICAL, LOGGER):
        result = run(Reward("f", one_at_a_time))
    np.testing.assert_array_equal(result.rewards_PGK[..., 0], [[0, 1], [0, 1]])
    assert result.failures == {"f": 0}


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e39, -(10**400)])
def test_a_reward_that_float32_cannot_hold_is_a_failure(caplog, value) -> None:
    with caplog.at_level(logging.WARNING, LOGGER):
        result = run(Reward("f", lambda **_: [1.0, value, 2.0, 3.0]))
    np.testing.assert_array_equal(result.rewards_PGK[..., 0], [[1, np.nan], [2, 3]])
    assert result.failures == {"f": 1}
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], r"'f' must return one reward a completion: expected 4, got 1"),
        (None, r"'f' must return a list, got NoneType"),
        (1.0, r"'f' must return a list, got float"),
        ([1.0, "1", 0.0, 0.0], r"'f' must return numbers and None, got '1' for completion 1"),
        (np.zeros((4, 1)), r"'f' must return numbers and None, got array"),
    ],
)
def test_a_wrong_result_stops_at_once(returned, message) -> None:
    with pytest.raises(ValueError, match=message):
        run(Reward("f", lambda **_: returned))


def test_a_wrong_result_of_a_retry_stops_too(caplog) -> None:
    def fn(*, completions: list[str], **_: Any) -> list[float]:
        if len(completions) > 1:
            raise RuntimeError
        return [1.0, 1.0]

    with caplog.at_level(logging.CRITICAL, LOGGER), pytest.raises(ValueError, match="expected 1, got 2"):
        run(Reward("f", fn))


def test_arrays_are_taken_as_results() -> None:
    result = run(Reward("f", lambda *, prompts, **_: np.array(prompts) == "a"))
    np.testing.assert_array_equal(result.rewards_PGK[..., 0], [[1, 1], [0, 0]])


def test_bad_arguments_are_named() -> None:
    reward = Reward("f", lambda **_: [])
    with pytest.raises(ValueError, match="at least one reward function"):
        RewardRunner([])
    with pytest.raises(ValueError, match=r"\['f'\] more than once"):
        RewardRunner([reward, reward])
    with pytest.raises(ValueError, match="column 'answer' must hold 2 values, one a prompt, got 1"):
        run(reward, answer=["x"])
    with pytest.raises(ValueError, match="must not be named 'completions'"):
        RewardRunner([reward])(
            prompts=["a"], completions=[["b"]], completion_ids=[[[1]]], columns={"completions": ["x"]}
        )
    with pytest.raises(ValueError, match=r"completions must hold 2 groups of 1, got 2 of sizes \[1, 2\]"):
        RewardRunner([reward])(
            prompts=["a", "b"], completions=[["b"], ["c", "d"]], completion_ids=[[[1]], [[1]]], columns={}
        )


def test_it_works_from_other_threads(caplog) -> None:
    def fn(*, completions: list[str], **_: Any) -> list[float]:
        if completions[0] == "a0":
            raise RuntimeError
        return [float(len(completions))] * len(completions)

    results: list[RewardResult] = []
    runner = RewardRunner([Reward("f", fn)])

    def work() -> None:
        results.append(runner(prompts=["a"], completions=[["a0", "a1"]], completion_ids=[[[1], [2]]], columns={}))

    with caplog.at_level(logging.WARNING, LOGGER):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 4
    for result in results:
        np.testing.assert_array_equal(result.rewards_PGK[..., 0], [[np.nan, 1]])
    assert len(caplog.records) == 1
