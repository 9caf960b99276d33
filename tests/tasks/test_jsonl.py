from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_jax.config import TaskConfig
from grpo_jax.tasks.jsonl import jsonl, read_examples


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_line_becomes_an_example(tmp_path) -> None:
    path = tmp_path / "data.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    write(
        path,
        [
            {"prompt": "a", "answer": " 1 ", "level": 3},
            {"prompt": messages, "answer": "2", "demonstration": "so 2"},
        ],
    )
    text, chat = read_examples(path)
    assert (text.prompt, text.answer, text.columns, text.demonstration) == ("a", " 1 ", {"level": 3}, None)
    assert (chat.prompt, chat.answer, chat.columns, chat.demonstration) == (messages, "2", {}, "so 2")


def test_line_ends_within_texts_blank_lines_and_a_byte_order_mark_are_taken(tmp_path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b", "answer": "1"}\r\n\n  \n{"prompt": "c", "answer": "2"}'
    )
    assert [example.prompt for example in read_examples(path)] == ["a\u2028b", "c"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"prompt": "\xff", "answer": "1"}', "not UTF-8 text"),
        (b"[1]", "must be a JSON object, got list"),
        (b'{"answer": "1"}', r"field 'prompt' is missing; the line has \['answer'\]"),
        (b'{"prompt": "a"}', r"field 'answer' is missing; the line has \['prompt'\]"),
        (b'{"prompt": "a", "answer": 1}', "field 'answer' must be a text in quotes, got 1"),
        (b'{"prompt": null, "answer": "1"}', "field 'prompt' must be a text in quotes, got None"),
        (b'{"prompt": "a", "answer": " "}', "field 'answer' must not be blank"),
        (b'{"prompt": "\\ud800", "answer": "1"}', "field 'prompt' must be valid Unicode"),
        (b'{"prompt": [], "answer": "1"}', "'prompt' must hold at least one message"),
        (b'{"prompt": ["a"], "answer": "1"}', "must have 'role' and 'content' alone, got 'a'"),
        (b'{"prompt": [{"role": "user"}], "answer": "1"}', "must have 'role' and 'content' alone"),
        (b'{"prompt": [{"role": "user", "content": 1}], "answer": "1"}', "'content' of a message"),
        (b'{"prompt": "a", "answer": "1", "completions": 1}', "field 'completions' must be renamed"),
        (b'{"prompt": "a", "answer": "1", "demonstration": 1}', "field 'demonstration' must be a text"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "1"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"data.jsonl, line 3: .*{message}"):
        read_examples(path)


def test_a_missing_or_empty_file_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="task.path must name a file"):
        jsonl(TaskConfig(name="jsonl"), 0)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none.jsonl"):
        jsonl(TaskConfig(name="jsonl", path=str(tmp_path / "none.jsonl")), 0)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"empty.jsonl must hold at least one line"):
        jsonl(TaskConfig(name="jsonl", path=str(tmp_path / "empty.jsonl")), 0)


@given(prompts=st.lists(st.integers(0, 40), min_size=2, max_size=60), seed=st.integers(0, 3))
def test_the_split_goes_by_prompt(tmp_path, prompts, seed) -> None:
    path = write(tmp_path / "data.jsonl", [{"prompt": f"p{p}", "answer": str(i)} for i, p in enumerate(prompts)])
    config = TaskConfig(name="jsonl", path=path)
    if len(set(prompts)) < 2:
        with pytest.raises(ValueError, match="holds 1 different prompt, too few"):
            jsonl(config, seed)
        return
    task = jsonl(config, seed)
    train, heldout = ({example.prompt for example in part} for part in (task.train, task.heldout))
    assert train and heldout and not train & heldout
    assert len(task.train) + len(task.heldout) == len(prompts)
    assert len(heldout) == max(1, round(0.1 * len(set(prompts))))
    assert jsonl(config, seed).heldout == task.heldout


def test_the_split_goes_by_seed(tmp_path) -> None:
    path = write(tmp_path / "data.jsonl", [{"prompt": f"p{i}", "answer": "1"} for i in range(100)])
    config = TaskConfig(name="jsonl", path=path)
    assert jsonl(config, 0).heldout != jsonl(config, 1).heldout


def test_a_file_of_held_out_problems(tmp_path) -> None:
    train = write(tmp_path / "train.jsonl", [{"prompt": "a", "answer": "1"}])
    other = write(tmp_path / "other.jsonl", [{"prompt": "b", "answer": "2"}])
    task = jsonl(TaskConfig(name="jsonl", path=train, heldout_path=other), 0)
    assert [e.prompt for e in task.train] == ["a"] and [e.prompt for e in task.heldout] == ["b"]
    with pytest.warns(UserWarning, match=r"1 of 1 prompts of task.heldout_path .* are in task.path"):
        jsonl(TaskConfig(name="jsonl", path=train, heldout_path=train), 0)


def test_the_answer_is_compared_without_white_space_around_it(tmp_path) -> None:
    path = write(tmp_path / "data.jsonl", [{"prompt": p, "answer": " yes\n"} for p in "ab"])
    task = jsonl(TaskConfig(name="jsonl", path=path), 0)
    completions = ["yes", " yes ", "Yes", ""]
    assert [task.correct(text, task.train[0]) for text in completions] == [True, True, False, False]
    assert task.rewards[0].fn(completions=completions, answer=[" yes\n"] * 4) == [1.0, 1.0, 0.0, 0.0]
