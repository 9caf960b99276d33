from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import pytest

from grpo_jax.config import Config, TaskConfig
from grpo_jax.rewards import RewardRunner
from grpo_jax.tasks import TASKS, make_task
from grpo_jax.tasks.addition import addition
from grpo_jax.tasks.base import Example, Task, reward_columns
from grpo_jax.tasks.gsm8k import gsm8k
from grpo_jax.tasks.sort import NUM_HELDOUT, NUM_TRAIN, WRONG_DEMONSTRATIONS, sort_digits

DATA = Path(os.environ.get("GRPO_JAX_DATA", Path(__file__).parents[2] / ".." / "shared" / "data")) / "gsm8k"


def rewards_of(task: Task, example: Example, *completions: str) -> list[list[float]]:
    """The task's rewards of some completions of one example, one list a completion."""
    result = RewardRunner(task.rewards)(
        prompts=[str(example.prompt)],
        completions=[completions],
        completion_ids=[[[0]] * len(completions)],
        columns=reward_columns([example]),
    )
    assert not any(result.failures.values())
    return result.rewards_PGK[0].tolist()


# ------------------------------------------------------------------------------------------ sort


def test_sort_problems_fit_their_tokenizer_and_answers() -> None:
    task = sort_digits(TaskConfig(), 0)
    assert (len(task.train), len(task.heldout)) == (NUM_TRAIN, NUM_HELDOUT)
    for example in [*task.train, *task.heldout]:
        assert re.fullmatch("[0-9]{6}>", example.prompt)
        assert list(example.answer) == sorted(example.prompt[:6])
        assert example.demonstration in (example.answer, example.answer[::-1])
    text = task.train[0].prompt + task.train[0].answer
    assert task.tokenizer.decode(task.tokenizer.encode(text)) == text


def test_sort_held_out_problems_are_no_permutations_of_training_problems() -> None:
    tasks = [sort_digits(TaskConfig(), seed) for seed in (0, 1)]
    train = [example for task in tasks for example in task.train]
    heldout = [example for task in tasks for example in task.heldout]
    # Answers are the sorted digits; the split is the same for all seeds.
    assert not {example.answer for example in train} & {example.answer for example in heldout}
    for task in tasks:
        prompts = [example.prompt for example in [*task.train, *task.heldout]]
        assert len(set(prompts)) == len(prompts)
    assert {e.prompt for e in tasks[0].train} != {e.prompt for e in tasks[1].train}


def test_sort_demonstrations_are_mostly_wrong() -> None:
    task = sort_digits(TaskConfig(), 0)
    # Six digits that read the same in both orders are all equal; as good as never drawn.
    wrong = sum(example.demonstration != example.answer for example in task.train) / NUM_TRAIN
    # Five standard deviations of 8192 draws: 5 * sqrt(0.75 * 0.25 / 8192) = 0.024.
    assert wrong == pytest.approx(WRONG_DEMONSTRATIONS, abs=0.025)


def test_sort_is_the_same_for_the_same_seed() -> None:
    assert sort_digits(TaskConfig(), 3).train == sort_digits(TaskConfig(), 3).train


def test_sort_rewards_the_exact_answer_alone() -> None:
    task = sort_digits(TaskConfig(), 0)
    example = Example(prompt="385102>", answer="012358")
    completions = ["012358", "853210", "01235", "0123588", ""]
    assert rewards_of(task, example, *completions) == [[1], [0], [0], [0], [0]]
    assert [task.correct(text, example) for text in completions] == [True] + [False] * 4
    assert [task.extract(text) for text in completions] == [*completions[:4], None]


# -------------------------------------------------------------------------------------- addition


def terms(line: str) -> tuple[int, int]:
    a, b = re.match(r"(\d+) \+ (\d+) =", line).groups()
    return int(a), int(b)


@pytest.mark.parametrize("digits", [1, 2, 4])
def test_addition_problems(digits) -> None:
    task = addition(TaskConfig(), 0, digits=digits)
    held = {frozenset(terms(example.prompt.split("\n")[-1])) for example in task.heldout}
    examples = random.Random(0).sample([*task.train, *task.heldout], 100)
    assert len(task.train) > 64 and len(task.heldout) > 15
    for example in examples:
        *worked, problem = example.prompt.split("\n")
        assert len(worked) == 3
        for line in worked:
            a, b = terms(line)
            assert line == f"{a} + {b} = {a + b}"
        # No worked example is the problem, held out, or another one, in either order of the terms.
        pairs = [frozenset(terms(line)) for line in [*worked, problem]]
        assert len(set(pairs)) == 4
        assert not held & set(pairs[:3])
        a, b = terms(problem)
        assert problem == f"{a} + {b} =" and example.answer == str(a + b)
        assert task.correct(f"{example.demonstration}\n", example)
        if digits > 1:
            assert len(str(a)) == len(str(b)) == digits


@pytest.mark.parametrize("digits", [1, 2, 4])
def test_addition_holds_sums_out_in_both_orders(digits) -> None:
    tasks = [addition(TaskConfig(), seed, digits=digits) for seed in (0, 1)]
    train, heldout = (
        {frozenset(terms(e.prompt.split("\n")[-1])) for task in tasks for e in getattr(task, split)}
        for split in ("train", "heldout")
    )
    assert not train & heldout


def test_addition_of_two_digits_covers_all_pairs() -> None:
    task = addition(TaskConfig(), 0)
    pairs = [terms(example.prompt.split("\n")[-1]) for example in [*task.train, *task.heldout]]
    assert len(pairs) == len(set(pairs)) == 90 * 90
    assert len(task.heldout) / len(pairs) == pytest.approx(0.2, abs=0.03)


def test_addition_reads_the_first_line() -> None:
    task = TASKS["addition"](TaskConfig(), 0)
    assert task.stop == ("\n",)
    example = Example(prompt="57 + 38 =", answer="95")
    completions = [" 95\n", "95", " 95\n1 + 1 = 2", " 96\n95", "\n95", ""]
    assert rewards_of(task, example, *completions) == [[1], [1], [1], [0], [0], [0]]
    assert [task.correct(text, example) for text in completions] == [True] * 3 + [False] * 3
    assert [task.extract(text) for text in completions] == ["95", "95", "95", "96", None, None]


def test_addition_refuses_odd_numbers_of_digits() -> None:
    with pytest.raises(ValueError, match="digits must be between 1 and 9, got 0"):
        addition(TaskConfig(), 0, digits=0)


# ----------------------------------------------------------------------------------------- gsm8k


def write_gsm8k(folder: Path, train: list[dict], test: list[dict]) -> TaskConfig:
    folder.mkdir(exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TaskConfig(name="gsm8k", path=str(folder))


def problem(question: str, answer: str) -> dict[str, str]:
    return {"question": question, "answer": answer}


def test_gsm8k_reads_a_folder(tmp_path, monkeypatch) -> None:
    config = write_gsm8k(
        tmp_path / "gsm8k",
        [problem("How many?", "6 * 3 = <<6*3=18>>18\n#### 1,018")],
        [problem("And now?", "#### -3")],
    )
    task = gsm8k(config, 0)
    (example,) = task.train
    assert example.prompt[0]["role"] == "user" and example.prompt[0]["content"].startswith("How many?\n\n")
    assert (example.answer, example.demonstration) == ("1,018", "6 * 3 = 18\n#### 1,018")
    assert task.heldout[0].answer == "-3"
    monkeypatch.setenv("GRPO_JAX_DATA", str(tmp_path))
    assert gsm8k(TaskConfig(name="gsm8k"), 0).train == task.train


def test_gsm8k_rewards_the_number_and_the_form(tmp_path) -> None:
    config = write_gsm8k(tmp_path, [problem("q", "#### 1,018")], [problem("r", "#### 2")])
    task = gsm8k(config, 0)
    assert [(reward.name, reward.weight) for reward in task.rewards] == [("correct", 1.0), ("format", 0.1)]
    completions = ["So:\n#### 1018", "#### $1,018.00", "It is 1018.", "#### 1017", "#### 1018 or so", ""]
    expected = [[1, 1], [1, 1], [1, 0], [0, 1], [1, 0], [0, 0]]
    assert rewards_of(task, task.train[0], *completions) == expected
    assert [task.correct(text, task.train[0]) for text in completions] == [bool(row[0]) for row in expected]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([problem("r", "#### 1")], r"1 questions of .*train.jsonl are in .*test.jsonl too, such as 'r'"),
        ([problem("  R\n", "#### 1")], "1 questions of"),
        ([problem("q", "18")], r"train.jsonl, line 1: field 'answer' must end in '#### number', got '18'"),
        ([problem("q", "#### x")], "line 1: field 'answer' must end in"),
        ([problem("q", "#### 1"), {"question": "p"}], r"train.jsonl, line 2: field 'answer' is missing"),
        ([], "train.jsonl must hold at least one line"),
    ],
)
def test_gsm8k_refuses_bad_data(tmp_path, train, message) -> None:
    config = write_gsm8k(tmp_path, train, [problem("r", "#### 2")])
    with pytest.raises(ValueError, match=message):
        gsm8k(config, 0)


def test_gsm8k_says_where_to_get_it(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("GRPO_JAX_DATA", raising=False)
    with pytest.raises(ValueError, match=r"task.path must name the folder .*openai/grade-school-math"):
        gsm8k(TaskConfig(name="gsm8k"), 0)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*train.jsonl"):
        gsm8k(TaskConfig(name="gsm8k", path=str(tmp_path)), 0)


@pytest.mark.skipif(not (DATA / "train.jsonl").is_file(), reason="GSM8K is not here: set GRPO_JAX_DATA")
def test_gsm8k_as_published() -> None:
    task = gsm8k(TaskConfig(name="gsm8k", path=str(DATA)), 0)
    assert (len(task.train), len(task.heldout)) == (7473, 1319)
    # Every reference solution is right by its own standard, and in the form that is asked for.
    for example in [*task.train[:300], *task.heldout[:300]]:
        assert "<<" not in example.demonstration
        assert rewards_of(task, example, example.demonstration) == [[1, 1]]


# ------------------------------------------------------------------------------------- make_task


def test_make_task_applies_limits_and_weights(tmp_path) -> None:
    folder = write_gsm8k(tmp_path, [problem(f"q{i}", "#### 1") for i in range(5)], [problem("r", "#### 2")]).path
    whole = make_task(Config(task=TaskConfig(name="gsm8k", path=folder)))
    config = TaskConfig(name="gsm8k", path=folder, num_train=3, num_heldout=1, reward_weights=(0.5, 0.0))
    task = make_task(Config(task=config))
    assert task.train == whole.train[:3]
    assert task.heldout == whole.heldout
    assert [reward.weight for reward in task.rewards] == [0.5, 0.0]
    assert [reward.name for reward in task.rewards] == [reward.name for reward in whole.rewards]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"name": "sorted"},
            r"task.name must be one of \['addition', .*\], got 'sorted'; did you mean 'sort'\?",
        ),
        ({"name": "xyz"}, "got 'xyz'$"),
        ({"name": "custom"}, r"needs an experiment file that defines get_task"),
        ({"num_train": 9000}, "task.num_train must be between 1 and the 8192 that task 'sort' has, got 9000"),
        ({"num_heldout": 0}, "task.num_heldout must be between 1 and the 1024 that task 'sort' has, got 0"),
        (
            {"reward_weights": (1.0, 2.0)},
            r"task.reward_weights must hold 1 weights, one for each of \['exact'\], got 2: \(1.0, 2.0\)",
        ),
    ],
)
def test_make_task_refuses(config, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_task(Config(task=TaskConfig(**config)))


@pytest.mark.parametrize("name", ["sort", "addition", "addition1"])
def test_tasks_go_by_the_seed_of_the_config(name) -> None:
    first, again, other = (make_task(Config(seed=seed, task=TaskConfig(name=name))) for seed in (1, 1, 2))
    assert first.name == name
    assert first.train == again.train and first.heldout == again.heldout
    assert first.train != other.train
