"""GSM8K: grade-school word problems whose answer is a number (arXiv 2110.14168)."""

from __future__ import annotations

import os
import re
from pathlib import Path

from grpo_jax.config import TaskConfig
from grpo_jax.rewards.format import format_match
from grpo_jax.rewards.number import ANSWER_MARK, extract_number, number_match, parse_number, same_number
from grpo_jax.tasks.base import Example, Task
from grpo_jax.tasks.jsonl import read_rows, text_field

DATA_VARIABLE = "GRPO_JAX_DATA"
"""Environment variable: the folder that holds ``gsm8k/`` where task.path is not set."""
INSTRUCTION = f'Reason step by step, then give the answer as a number on a last line: "{ANSWER_MARK} number".'
FORMAT = rf".*{ANSWER_MARK} *-?\$?[0-9][0-9,]*(?:\.[0-9]+)?\.?"
FORMAT_WEIGHT = 0.1
# The reference solutions mark each calculation for a calculator: <<16-3-4=9>>.
_CALCULATOR = re.compile(r"<<[^<>]*>>")


def gsm8k(config: TaskConfig, seed: int) -> Task:
    """Training problems from ``train.jsonl``, held-out ones from ``test.jsonl`` of a folder.

    The folder is ``config.path``, else ``gsm8k`` in the folder that GRPO_JAX_DATA names;
    ``config.heldout_path`` replaces ``test.jsonl``. Rewards: the right number (1), and an end of the form
    ``#### number`` (0.1).

    Raises:
        ValueError: no folder is named, a line is malformed, or a training question is a held-out one.
        FileNotFoundError: a file is missing.
    """
    del seed  # the published order and split
    folder = _folder(config)
    train_path = folder / "train.jsonl"
    heldout_path = folder / "test.jsonl" if config.heldout_path is None else Path(config.heldout_path)
    train, heldout = _read(train_path), _read(heldout_path)
    leaked = train.keys() & heldout.keys()
    if leaked:
        raise ValueError(
            f"{len(leaked)} questions of {train_path} are in {heldout_path} too, such as "
            f"{min(leaked)[:80]!r}: "
            "take them out of the training file (some copies of GSM8K hold the test set)"
        )
    return Task(
        name="gsm8k",
        train=list(train.values()),
        heldout=list(heldout.values()),
        rewards=(number_match(), format_match(FORMAT, weight=FORMAT_WEIGHT)),
        extract=extract_number,
        correct=lambda completion, example: same_number(gold=example.answer, completion=completion),
    )


def _folder(config: TaskConfig) -> Path:
    if config.path is not None:
        return Path(config.path)
    data = os.environ.get(DATA_VARIABLE)
    if not data:
        raise ValueError(
            "task.path must name the folder with GSM8K's train.jsonl and test.jsonl, got None: get both from "
            "https://github.com/openai/grade-school-math (grade_school_math/data), and set task.path, or put "
            f"them into gsm8k/ of a folder that the environment variable {DATA_VARIABLE} names"
        )
    return Path(data) / "gsm8k"


def _read(path: Path) -> dict[str, Example]:
    """The examples of a file by question (white space and case made equal); of equal questions the first."""
    examples: dict[str, Example] = {}
    for number, row in read_rows(path):
        place = f"{path}, line {number}"
        question, solution = text_field(row, "question", place), text_field(row, "answer", place)
        _, mark, answer = solution.rpartition(ANSWER_MARK)
        if not mark or parse_number(answer) is None:
            raise ValueError(f"{place}: field 'answer' must end in '{ANSWER_MARK} number', got {solution[-80:]!r}")
        example = Example(
            prompt=[{"role": "user", "content": f"{question.strip()}\n\n{INSTRUCTION}"}],
            answer=answer.strip(),
            demonstration=_CALCULATOR.sub("", solution),
        )
        examples.setdefault(" ".join(question.split()).casefold(), example)
    return examples
