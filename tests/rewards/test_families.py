from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.rewards.exact import exact_match, first_line, whole_text
from grpo_jax.rewards.format import format_match
from grpo_jax.rewards.number import (
    extract_number,
    find_answer,
    last_boxed,
    number_match,
    parse_number,
    same_number,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", "18"),
        ("-18", "-18"),
        ("\N{MINUS SIGN}7", "-7"),
        ("$1,234.50", "2469/2"),
        (r"\$1,234.50", "2469/2"),
        ("-$7", "-7"),
        ("$-3.50", "-7/2"),
        ("$ 12", "12"),
        ("1,000,000", "1000000"),
        ("1{,}234", "1234"),
        (r"1\,234", "1234"),
        ("50%", "50"),
        (r"50\%", "50"),
        ("18.", "18"),
        ("18.00", "18"),
        (".5", "1/2"),
        ("18 dollars per 3 days", "18"),
        ("12 km", "12"),
        ("5km", "5"),
        ("3/4", "3/4"),
        ("3 / 4", "3/4"),
        (r"\frac{3}{4}", "3/4"),
        (r"\dfrac{3}{4}", "3/4"),
        (r"\frac34", "3/4"),
        (r"-\frac{3}{4}", "-3/4"),
        ("1 1/2", "3/2"),
        (r"1\frac{1}{2}", "3/2"),
        (r"\text{about }1,200\text{ miles}", "1200"),
        ("1/0", None),
        ("", None),
        ("none", None),
        ("9" * 5000, None),
    ],
)
def test_parse_number(text, value) -> None:
    assert parse_number(text) == (None if value is None else Fraction(value))


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        # The last complete box, whatever follows it.
        (r"\boxed{3} and \boxed{4}, so 5", 4),
        (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"\boxed{{2} + 1 = 3} 7", 3),
        (r"\boxed{x = \boxed{3}}", 3),
        (r"\boxed{4} or \boxed{5", 4),
        (r"\boxed {6} 7", 6),
        (r"#### 8 \boxed{9}", 9),
        (r"\boxed{x}, that is 5", None),
        # The last mark.
        ("1 + 1 = 2\n#### 2", 2),
        ("#### 1\n#### $1,200.00 dollars.\n3", 1200),
        ("####", None),
        ("#### no idea\n5", None),
        # The last number.
        ("First 12, then 18.", 18),
        ("10-5", 5),
        ("x = -5", -5),
        ("- 3 apples", 3),
        ("type-2", 2),
        ("it is...5", 5),
        ("12,34", 34),
        ("1,2345", 2345),
        ("", None),
    ],
)
def test_find_answer(completion, value) -> None:
    assert find_answer(completion) == value


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{a}", "a"),
        (r"\boxed{a{b{c}}d}", "a{b{c}}d"),
        (r"{}}}{\boxed{a}", "a"),
        (r"\fbox{a}", "a"),
        (r"\boxed{}", ""),
        (r"\boxed{a", None),
        ("a}", None),
    ],
)
def test_last_boxed(text, content) -> None:
    assert last_boxed(text) == content


@given(st.integers(-(10**12), 10**12))
def test_a_number_is_found_however_it_is_written(number) -> None:
    for form in (
        f"{number}",
        f"{number:,}",
        f"so it is {number:,}.",
        f"#### {number} km",
        rf"\boxed{{{number:,}\%}}",
    ):
        assert find_answer(form) == number, form
        assert same_number(gold=f"a solution with 77 in it\n#### {number:,}", completion=form)
        assert not same_number(gold=f"#### {number + 1}", completion=form)


@given(st.text(alphabet="0123456789,./ -$%#\\{}boxedfrac\n", max_size=60))
def test_any_text_is_taken(text) -> None:
    number = find_answer(text)
    assert number is None or extract_number(text) == str(number)


def test_the_reference_is_never_taken_for_the_completion() -> None:
    # Swapped, the reference would be read by its last number and the completion would need one.
    assert same_number(gold="6 * 3 = 18 #### 18", completion="18, or in words eighteen")
    assert not same_number(gold="18", completion="")
    with pytest.raises(ValueError, match="reference answer must hold a number, got 'eighteen'"):
        same_number(gold="eighteen", completion="18")
    fn = number_match().fn
    assert fn(completions=["#### 1", "2", "x"], answer=["1", "3", "4"], prompts=["5", "6", "7"]) == [
        1.0,
        0.0,
        0.0,
    ]


def test_votes_for_one_number_are_of_one_form() -> None:
    forms = ["#### 1,200", "1200.0", r"\boxed{\frac{2400}{2}}", "$1200."]
    assert {extract_number(form) for form in forms} == {"1200"}
    assert extract_number("no number") is None


@pytest.mark.parametrize("piece", [r"\boxed{", r"\boxed ", "1,", r"\frac{", ",234", "#", "1 ", "1 1/", "1/", "-$"])
def test_degenerate_completions_take_no_long(piece) -> None:
    # 60,000 characters: steps quadratic in that would take minutes, linear ones take half a second at most.
    began = time.monotonic()
    find_answer("1" + piece * (60_000 // len(piece)))
    assert time.monotonic() - began < 5


def test_exact_match() -> None:
    reward = exact_match()
    assert (reward.name, reward.weight) == ("exact", 1.0)
    completions = ["012", " 012\n", "0123", "", "12"]
    assert reward.fn(completions=completions, answer=["012"] * 4 + [" 12 "]) == [1.0, 1.0, 0.0, 0.0, 1.0]
    lines = exact_match(first_line, name="sum", weight=2.0)
    assert lines.fn(completions=[" 95\n1 + 1 = 2", "\n95", "95"], answer=["95"] * 3) == [1.0, 0.0, 1.0]
    # A completion without an answer is wrong, also where the reference is blank.
    assert reward.fn(completions=[""], answer=[""]) == [0.0]


def test_extractors() -> None:
    assert (whole_text(" a b\n"), whole_text(" \n")) == ("a b", None)
    assert (first_line(" a \nb"), first_line("\nb"), first_line("")) == ("a", None, None)


def test_format_match() -> None:
    reward = format_match(r"<think>.*</think>\s*<answer>[^<]*</answer>")
    good, bad = "<think>a\nb</think>\n<answer>5</answer>\n", "so: <think>a</think><answer>5</answer>"
    assert reward.fn(completions=[good, bad, ""], answer=["1"] * 3) == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"pattern must be a regular expression, got '\('"):
        format_match("(")
