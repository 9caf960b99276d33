"""A user's own problems: a file of one JSON object a line, with ``prompt`` and ``answer``.

``prompt`` is a text or a list of messages, ``answer`` a text, ``demonstration`` (if there is one) a text;
other fields go to the reward functions as columns. The reward is 1 for the exact answer, else 0.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.config import TaskConfig
from grpo_jax.rewards.exact import exact_match, whole_text
from grpo_jax.tasks.base import Example, Task, hash_share

HELDOUT_SHARE = 0.1
"""Share of the different prompts that are held out where no file of held-out problems is given."""
_OWN_FIELDS = ("prompt", "answer", "demonstration")
_RESERVED = ("prompts", "completions", "completion_ids")


def jsonl(config: TaskConfig, seed: int) -> Task:
    """The problems of ``config.path``, held-out ones from ``config.heldout_path`` or split off by ``seed``.

    A split goes by prompt: lines of equal prompts fall on one side.

    Raises:
        ValueError: no path is given, a line is malformed (named by file and line), or there is nothing to
            split.
        FileNotFoundError: a file is missing.
    """
    if config.path is None:
        raise ValueError(
            "task.path must name a file of JSON objects, one a line, with 'prompt' and 'answer', got None"
        )
    train = read_examples(Path(config.path))
    if config.heldout_path is None:
        train, heldout = _split(train, seed, config.path)
    else:
        heldout = read_examples(Path(config.heldout_path))
        trained_on = {_prompt_key(example) for example in train}
        shared = sum(_prompt_key(example) in trained_on for example in heldout)
        if shared:
            warnings.warn(
                f"{shared} of {len(heldout)} prompts of task.heldout_path ({config.heldout_path}) are in "
                f"task.path ({config.path}) too: evaluation will show what was memorised",
                stacklevel=2,
            )
    return Task(
        name="jsonl",
        train=train,
        heldout=heldout,
        rewards=(exact_match(),),
        extract=whole_text,
        correct=lambda completion, example: whole_text(completion) == example.answer.strip(),
    )


def read_examples(path: Path) -> list[Example]:
    """The examples of a file.

    Raises:
        ValueError: a line is malformed, or the file has none.
        FileNotFoundError: there is no such file.
    """
    return [_example(row, f"{path}, line {number}") for number, row in read_rows(path)]


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """``(line number, object)`` of a file of JSON objects, one a line; blank lines are passed over.

    Raises:
        ValueError: a line is not UTF-8 or not a JSON object, or the file has no line.
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    found = False
    # Split at line feeds alone: JSON strings may hold other characters that Python takes for line ends.
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        found = True
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8 text: {error}") from error
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: must be a JSON object, got {type(row).__name__}")
        yield number, row
    if not found:
        raise ValueError(f"{path} must hold at least one line, got an empty file")


def text_field(row: dict[str, Any], name: str, place: str) -> str:
    """A field that must be a text with something in it.

    Raises:
        ValueError: it is missing, of another type, blank, or no valid Unicode.
    """
    if name not in row:
        raise ValueError(f"{place}: field {name!r} is missing; the line has {sorted(row)}")
    return _text(row[name], f"{place}: field {name!r}")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a text in quotes, got {value!r}")
    if not value.strip():
        raise ValueError(f"{what} must not be blank, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} must be valid Unicode: {error}") from error
    return value


def _example(row: dict[str, Any], place: str) -> Example:
    columns = {name: value for name, value in row.items() if name not in _OWN_FIELDS}
    for name in _RESERVED:
        if name in columns:
            raise ValueError(
                f"{place}: field {name!r} must be renamed: reward functions get an argument of that name"
            )
    prompt = row.get("prompt")
    return Example(
        prompt=_messages(prompt, place) if isinstance(prompt, list) else text_field(row, "prompt", place),
        answer=text_field(row, "answer", place),
        columns=columns,
        demonstration=None if row.get("demonstration") is None else text_field(row, "demonstration", place),
    )


def _messages(messages: list[Any], place: str) -> list[dict[str, str]]:
    if not messages:
        raise ValueError(f"{place}: field 'prompt' must hold at least one message, got []")
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ValueError(
                f"{place}: a message of 'prompt' must have 'role' and 'content' alone, got {message!r}"
            )
        for name, value in message.items():
            _text(value, f"{place}: {name!r} of a message of 'prompt'")
    return messages


def _split(examples: Sequence[Example], seed: int, path: str) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples, apart by prompt; at least one prompt each."""
    prompts = {_prompt_key(example) for example in examples}
    if len(prompts) < 2:
        raise ValueError(
            f"{path} holds {len(prompts)} different prompt, too few to hold any out: "
            "add more, or name a file of held-out problems in task.heldout_path"
        )
    drawn = sorted(prompts, key=lambda prompt: (hash_share(f"{seed}/{prompt}"), prompt))
    held = set(drawn[: max(1, round(HELDOUT_SHARE * len(drawn)))])
    train = [example for example in examples if _prompt_key(example) not in held]
    return train, [example for example in examples if _prompt_key(example) in held]


def _prompt_key(example: Example) -> str:
    return json.dumps(example.prompt)
