"""What the README says is so: its commands, options, paths, names, example and table of metrics."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from experiments.bench import peers, step
from grpo_jax.cli.experiment import load_experiment
from grpo_jax.cli.options import EvalOptions, ExportOptions, SampleOptions, TrainOptions
from grpo_jax.config import Config
from grpo_jax.metrics import METRICS
from grpo_jax.rewards import RewardRunner

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "tpu_setup/README.md")
FOLDERS = (".ci", "experiments", "grpo_jax", "tests", "tpu_setup")
COMMANDS = ("uv run grpo-jax train experiments/quickstart.py", "uv run pytest")
# Options of pip, uv and tensorboard.
OTHERS_OPTIONS = {"no-deps", "extra", "logdir", "group"}


def fields_of(cls: type) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(cls)}


def sections() -> dict[str, set[str]]:
    """Section -> its fields, as a default Config has them."""
    config = Config()
    parts = {name: getattr(config, name) for name in fields_of(Config)}
    return {name: set(fields_of(type(part))) for name, part in parts.items() if dataclasses.is_dataclass(part)}


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def plot_curves(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    return importlib.import_module("plot_curves")


def test_the_two_commands_are_what_ci_runs() -> None:
    first_block = code_blocks("bash")[0].splitlines()
    assert first_block == [f"pip install uv && {COMMANDS[0]}", COMMANDS[1]]
    ci = (ROOT / ".ci" / "run").read_text()
    lines = [line for line in ci.splitlines() if not line.lstrip().startswith("#")]
    for command in COMMANDS:
        assert any(re.search(rf"^step .* {re.escape(command)}( |$)", line) for line in lines), command


def test_the_table_of_metrics_is_the_packages() -> None:
    _, _, rest = README.partition("<!-- metrics:")
    table = rest.partition("-->")[2].partition("<!-- end of metrics -->")[0].strip().splitlines()
    assert table[:2] == ["| metric | meaning |", "|---|---|"]
    assert table[2:] == [f"| `{name}` | {meaning} |" for name, meaning in METRICS.items()]


def test_metrics_named_in_the_text_exist() -> None:
    named = set(re.findall(r"`((?:Policy|Training|Performance)/[\w/<>]+)`", README))
    assert named == METRICS.keys()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    # Anything below a folder of the repository, and whatever else looks like a source file in a folder.
    words = re.findall(r"(?<![\w./-])[\w.-]+/[\w./-]*", text)
    paths = {
        word.rstrip(".")
        for word in words
        if word.split("/")[0] in FOLDERS or re.search(r"\.(py|md|sh|toml|png)$", word)
    }
    paths |= {link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link}
    bases = (ROOT, (ROOT / document).parent)
    missing = sorted(path for path in paths if not any((base / path).exists() for base in bases))
    assert paths and not missing, missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_options_exist(document: str, plot_curves: ModuleType) -> None:
    text = (ROOT / document).read_text()
    known = sections()
    dotted = re.findall(r"--(\w+)\.([\w-]+)", text)
    # train.jsonl is a file.
    dotted += re.findall(rf"`({'|'.join(known)})\.(?!jsonl)(\w+)`", text)
    wrong = [name for name in dotted if name[1].replace("-", "_") not in known.get(name[0], set())]
    assert not wrong, wrong
    if document == "README.md":
        assert len(dotted) > 20
        commands = (Config, TrainOptions, EvalOptions, SampleOptions, ExportOptions)
        scripts = (plot_curves.Options, peers.Options, step.Options)
        plain = {"help", *OTHERS_OPTIONS}.union(*(fields_of(command) for command in (*commands, *scripts)))
        options = {name.replace("-", "_") for name in re.findall(r"(?<![\w-])--([a-z][a-z-]*)(?![\w.-])", text)}
        assert options <= {name.replace("-", "_") for name in plain}


def test_dotted_names_exist() -> None:
    names = set(re.findall(r"grpo_jax(?:\.\w+)+", README))
    assert names
    for name in names:
        module, _, attribute = name.rpartition(".")
        if not hasattr(importlib.import_module(module), attribute):
            importlib.import_module(name)


def test_the_path_of_calls_exists() -> None:
    calls = re.findall(r"^\| (?:-> )?`\w+` \| `([\w.]+)` in `([\w/.]+)\.py`", README, flags=re.MULTILINE)
    assert len(calls) == 6
    for name, path in calls:
        found: object = importlib.import_module(path.replace("/", ".").removesuffix(".__init__"))
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found)


def test_the_example_makes_a_task_whose_reward_works(tmp_path: Path) -> None:
    (source,) = code_blocks("python")
    path = tmp_path / "my_experiment.py"
    path.write_text(source)
    experiment = load_experiment(path)
    task = experiment.make_task(experiment.config)
    assert task is not None and task.tokenizer is not None and experiment.config.experiment == "my_experiment"
    prompts = {split: {example.prompt for example in getattr(task, split)} for split in ("train", "heldout")}
    assert not prompts["train"] & prompts["heldout"]
    example = task.train[0]
    limits = experiment.config.rollout
    assert len(task.tokenizer.encode(str(example.prompt))) == limits.max_prompt_length
    # Room for the end-of-sequence token.
    assert len(task.tokenizer.encode(example.answer)) < limits.max_completion_length
    # Right; half right; right, but two letters too long; empty.
    half = example.answer[:2] + "".join("a" if letter != "a" else "b" for letter in example.answer[2:])
    completions = [example.answer, half, example.answer + "ab", ""]
    result = RewardRunner(task.rewards)(
        prompts=[str(example.prompt)],
        completions=[completions],
        completion_ids=[[task.tokenizer.encode(text) for text in completions]],
        columns={"answer": [example.answer]},
    )
    np.testing.assert_allclose(result.rewards_PGK[0, :, 0], [1, 0.5, 4 / 6, 0])
    assert [task.correct(text, example) for text in completions] == [True, False, False, False]


def test_curves_are_drawn(tmp_path: Path, plot_curves: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for name, first in (("a", 0.25), ("b", 0.5)):
        records = [
            {"step": 1, "Performance/SuccessRate": first, "Policy/KL": None},
            {"step": 2, "Performance/SuccessRate": 0.75, "Policy/KL": 0.1},
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    runs = plot_curves.read_runs([tmp_path / "a", tmp_path / "b"], [])
    figure = plot_curves.draw(runs, plot_curves.choose_metrics(runs, []))
    success, kl = figure.axes
    assert [list(line.get_ydata()) for line in success.get_lines()] == [[0.25, 0.75], [0.5, 0.75]]
    assert np.isnan(kl.get_lines()[0].get_ydata()[0])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]

    picture = tmp_path / "new" / "curves.png"
    assert plot_curves.main([str(tmp_path / "a"), "--metric", "Policy/KL", "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert plot_curves.main([str(tmp_path / "a"), "--metric", "Policy/KLL", "--out", str(picture)]) == 2
    assert "Policy/KL" in capsys.readouterr().err
    assert plot_curves.main([str(tmp_path / "a"), "--labels", "x", "y"]) == 2
