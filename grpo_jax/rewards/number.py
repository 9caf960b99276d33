r"""Rewards for an answer that is a number: found in a text, and compared by value.

``1,234.50``, ``$1234.5``, ``1{,}234.5`` and ``\frac{2469}{2}`` are one number. A percent sign and a unit
after the number are left out of the comparison. Exact arithmetic (fractions), no floating point.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from grpo_jax.rewards.base import Reward

ANSWER_MARK = "####"

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
# A sign counts only where it cannot be a minus between two terms ("10-5") or a hyphen ("type-2").
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}.])-)?(?:\$\s?)?(?:"
    rf"(?P<whole>[0-9]{{1,9}}) (?P<part>[0-9]{{1,9}})/(?P<parts>[0-9]{{1,9}})(?![0-9/])"
    rf"|(?P<top>{_DECIMAL})(?:\s?/\s?(?P<bottom>{_DECIMAL}))?)"
)
_FRACTION = re.compile(r"([0-9]?)\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|([0-9])\s*([0-9]))")
_LATEX_SEPARATOR = re.compile(r"\\[,!]|\{,\}")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")
# Python refuses to turn longer digit strings into numbers, and no answer is that long.
_MAX_DIGITS = 400


def parse_number(text: str) -> Fraction | None:
    """The first number in ``text``, or None if it holds none."""
    numbers = _numbers(text)
    return numbers[0] if numbers else None


def find_answer(text: str) -> Fraction | None:
    r"""The number that a solution gives as its answer, or None.

    That is the number in the last complete ``\boxed{}``; else the one after the last ``####``; else the last
    number of the text. A box or a mark without a number is an answer without a number: None.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return parse_number(boxed.rsplit("=", 1)[-1])
    if ANSWER_MARK in text:
        return parse_number(text.rsplit(ANSWER_MARK, 1)[1].lstrip().split("\n", 1)[0])
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def extract_number(completion: str) -> str | None:
    """:func:`find_answer` as text of one form (``7/2``, ``18``), to be voted on."""
    number = find_answer(completion)
    return None if number is None else str(number)


def same_number(*, gold: str, completion: str) -> bool:
    """Whether the completion's answer has the value of the reference answer.

    Args:
        gold: the reference: a number, or a solution that ends in ``#### number``.
        completion: what the model wrote.

    Raises:
        ValueError: the reference holds no number.
    """
    expected = find_answer(gold)
    if expected is None:
        raise ValueError(f"the reference answer must hold a number, got {gold!r}")
    return find_answer(completion) == expected


def number_match(*, name: str = "correct", weight: float = 1.0) -> Reward:
    """1 where the completion's number equals that of the column ``answer``, else 0."""

    def score(*, completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
        pairs = zip(completions, answer, strict=True)
        return [float(same_number(gold=gold, completion=completion)) for completion, gold in pairs]

    return Reward(name, score, weight)


def last_boxed(text: str) -> str | None:
    r"""What the last complete ``\boxed{...}`` holds, braces within it included; None without one."""
    open_boxes: list[int | None] = []
    found: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            open_boxes.append(None if brace[0] == "{" else brace.end())
        elif open_boxes:
            start = open_boxes.pop()
            if start is not None and (found is None or start > found[0]):
                found = (start, brace.start())
    return None if found is None else text[slice(*found)]


def _numbers(text: str) -> list[Fraction]:
    """All numbers of a text, in order."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("\\$", "$").replace("\\%", "%")
    text = _LATEX_SEPARATOR.sub(lambda separator: "," if separator[0] == "{,}" else "", text)
    text = _FRACTION.sub(_plain_fraction, text)
    return [number for match in _NUMBER.finditer(text) if (number := _value(match)) is not None]


def _plain_fraction(match: re.Match[str]) -> str:
    whole, top, bottom = match[1], match[2] or match[4], match[3] or match[5]
    return f"{whole} {top or ''}/{bottom or ''} " if whole else f"{top or ''}/{bottom or ''} "


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _MAX_DIGITS:
        return None
    if match["whole"] is not None:
        top, bottom = Fraction(match["part"]), Fraction(match["parts"])
        base = Fraction(match["whole"])
    else:
        top = Fraction(match["top"].replace(",", ""))
        bottom = Fraction((match["bottom"] or "1").replace(",", ""))
        base = Fraction(0)
    if bottom == 0:
        return None
    value = base + top / bottom
    return -value if match["sign"] else value
