from __future__ import annotations

import pytest

from grpo_jax.tasks.base import Example, hash_share, plain_prompt, reward_columns


def test_plain_prompt_ends_where_the_answer_begins() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2?"},
    ]
    expected = "Be brief.\n\nUser: 1 + 1?\n\nAssistant: 2\n\nUser: 2 + 2?\n\nAssistant:"
    assert plain_prompt(messages) == expected
    assert plain_prompt([{"role": "tool", "content": "x"}]) == "Tool: x\n\nAssistant:"


def test_reward_columns_fill_what_an_example_lacks() -> None:
    examples = [
        Example(prompt="a", answer="1", columns={"level": 3}),
        Example(prompt="b", answer="2", columns={"kind": "x"}),
    ]
    assert reward_columns(examples) == {"answer": ["1", "2"], "level": [3, None], "kind": [None, "x"]}


def test_the_column_answer_is_taken() -> None:
    with pytest.raises(ValueError, match="must not hold 'answer'"):
        Example(prompt="a", answer="1", columns={"answer": "2"})


def test_hash_share_is_fixed_and_uniform() -> None:
    # sha256("a") = ca978112ca1b...: 0xca978112ca1b / 2**48.
    assert hash_share("a") == 0xCA978112CA1B / 2**48
    shares = [hash_share(str(number)) for number in range(1000)]
    # Six standard deviations of the share of 1000 fair draws below 0.1: 6 * sqrt(0.09 / 1000) = 0.057.
    assert sum(share < 0.1 for share in shares) / 1000 == pytest.approx(0.1, abs=0.057)
