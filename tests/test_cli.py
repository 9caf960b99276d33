from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import grpo_jax
import grpo_jax.config
from grpo_jax.cli import main
from grpo_jax.cli_options import EvalOptions, SampleOptions, TrainOptions
from grpo_jax.config import Config

EXPERIMENT = """
from grpo_jax.config import Config, RolloutConfig

def get_config():
    return Config(experiment="tiny", seed=7, rollout=RolloutConfig(num_prompts=8, group_size=4))
"""


@dataclasses.dataclass
class Trained:
    """What the stub of the loop was called with, and what it answers."""

    calls: list[dict[str, Any]]
    interrupted: bool = False

    @property
    def config(self) -> Config:
        (call,) = self.calls
        return call["config"]


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.write_text(EXPERIMENT)
    return path


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    trained = Trained(calls=[])

    def train(config: Config, **arguments: Any) -> SimpleNamespace:
        trained.calls.append({"config": config, **arguments})
        return SimpleNamespace(interrupted=trained.interrupted)

    _stub(monkeypatch, "grpo_jax.train.loop", train=train)
    return trained


def _stub(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    package, _, attribute = name.rpartition(".")
    if package in sys.modules:
        monkeypatch.setattr(sys.modules[package], attribute, module, raising=False)


def _exit_status(arguments: list[str]) -> int:
    """The status with which the process would end: what main returns, or what the parser exits with."""
    try:
        return main(arguments)
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code


def _words(text: str) -> str:
    """The text in one line, without the frames of the help."""
    return " ".join(re.sub(r"[│╭╮╰╯─]|\x1b\[[0-9;]*m", " ", text).split())


# Overriding fields


@pytest.mark.parametrize(
    ("arguments", "section", "field", "expected"),
    [
        (["--seed", "3"], None, "seed", 3),
        (["--rollout.group-size", "16"], "rollout", "group_size", 16),
        (["--rollout.group-size=16"], "rollout", "group_size", 16),
        (["--rollout.group_size", "16"], "rollout", "group_size", 16),
        (["--optimizer.learning-rate", "3e-4"], "optimizer", "learning_rate", 3e-4),
        (["--optimizer.clip-norm", "None"], "optimizer", "clip_norm", None),
        (["--optimizer.clip-norm", "0.5"], "optimizer", "clip_norm", 0.5),
        (["--task.num-train", "100"], "task", "num_train", 100),
        (["--train.shuffle-rewards"], "train", "shuffle_rewards", True),
        (["--model.no-tie-embeddings"], "model", "tie_embeddings", False),
        (["--task.reward-weights", "1", "0.5"], "task", "reward_weights", (1.0, 0.5)),
        (["--task.reward-weights", "None"], "task", "reward_weights", None),
        (["--objective.advantage-ddof", "0"], "objective", "advantage_ddof", 0),
        (["--optimizer.schedule", "cosine"], "optimizer", "schedule", "cosine"),
        (["--mesh.data", "-1"], "mesh", "data", -1),
    ],
)
def test_override(
    experiment: Path,
    trained: Trained,
    arguments: list[str],
    section: str | None,
    field: str,
    expected: object,
) -> None:
    assert main(["train", str(experiment), *arguments]) == 0
    config = trained.config
    value = getattr(config if section is None else getattr(config, section), field)
    assert value == expected and type(value) is type(expected)


def test_only_what_is_named_changes(experiment: Path, trained: Trained) -> None:
    assert main(["train", str(experiment), "--rollout.top-k", "5"]) == 0
    default = Config(
        experiment="tiny", seed=7, rollout=grpo_jax.config.RolloutConfig(num_prompts=8, group_size=4)
    )
    assert trained.config == dataclasses.replace(
        default, rollout=dataclasses.replace(default.rollout, top_k=5)
    )


def test_what_train_is_called_with(
    experiment: Path, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", "--workdir", str(tmp_path / "run"), "--fresh", str(experiment)]) == 0
    (call,) = trained.calls
    assert call["workdir"] == tmp_path / "run"
    assert call["fresh"] is True
    assert call["task"] is None
    assert call["experiment_file"] == experiment


def test_default_workdir_is_named_after_experiment_and_time(experiment: Path, trained: Trained) -> None:
    assert main(["train", str(experiment)]) == 0
    workdir = trained.calls[0]["workdir"]
    assert workdir.parent == Path("runs")
    assert re.fullmatch(r"tiny-\d{8}-\d{6}", workdir.name)
    assert trained.calls[0]["fresh"] is False


def test_several_processes_need_a_workdir(
    experiment: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRPO_JAX_COORDINATOR", "127.0.0.1:1")
    assert main(["train", str(experiment)]) == 2
    assert "--workdir" in capsys.readouterr().err
    assert not trained.calls


def test_interrupted_run_exits_130(experiment: Path, trained: Trained) -> None:
    trained.interrupted = True
    assert main(["train", str(experiment)]) == 130


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--rollout.groupsize", "4"], ["--rollout.groupsize", "--rollout.group-size INT"]),
        (["--rollout.group-sizes", "4"], ["--rollout.group-sizes", "--rollout.group-size INT"]),
        (["--rolout.group-size", "4"], ["--rolout.group-size", "--rollout.group-size INT"]),
        (["--learning-rate", "4"], ["--learning-rate", "--optimizer.learning-rate FLOAT"]),
        (["--rollout.group-size", "four"], ["--rollout.group-size", "four"]),
        (["--rollout.temperature", "0"], ["rollout.temperature must be above 0", "got 0.0"]),
        (["--rollout.group-size", "1"], ["rollout.group_size must be at least 2", "got 1"]),
        (["--optimizer.schedule", "cosin"], ["cosin", "cosine"]),
    ],
)
def test_wrong_option(
    experiment: Path,
    trained: Trained,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: list[str],
) -> None:
    assert _exit_status(["train", str(experiment), *arguments]) == 2
    error = _words(capsys.readouterr().err)
    for part in expected:
        assert part in error
    assert "Traceback" not in error
    assert not trained.calls


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def get_config(:\n    pass\n", r"broken\.py:1: SyntaxError"),
        ("x = 1\ny = undefined\n", r"broken\.py:2: NameError: name 'undefined' is not defined"),
        ("x = 1\n", r"must define get_config\(\)"),
        ("def get_config():\n    return 5\n", r"must return a grpo_jax\.config\.Config, got 5"),
        ("def get_config():\n    return {}[\n      'a']\n", r"broken\.py:[23]: KeyError: 'a'"),
        (
            "from grpo_jax.config import RolloutConfig\ndef get_config():\n    RolloutConfig(top_p=2)\n",
            r"broken\.py:3: rollout\.top_p must be in \(0, 1\], got 2",
        ),
    ],
)
def test_broken_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, expected: str
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    assert main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert re.search(expected, error)
    assert len(error.splitlines()) == 1


def test_missing_experiment_names_its_neighbours(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(experiment.with_name("tinny.py"))]) == 2
    error = capsys.readouterr().err
    assert "tinny.py does not exist" in error and "tiny.py" in error
    assert main(["train"]) == 2
    assert "needs an experiment file" in capsys.readouterr().err


def test_traceback_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = str(tmp_path / "missing.py")
    assert main(["train", missing]) == 2
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("GRPO_JAX_TRACEBACK", "1")
    assert main(["train", missing]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_of_the_program_keeps_its_traceback(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(config: Config, **arguments: Any) -> None:
        raise AssertionError("ours")

    _stub(monkeypatch, "grpo_jax.train.loop", train=train)
    with pytest.raises(AssertionError, match="ours"):
        main(["train", str(experiment)])


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err


# Help


def _config_classes() -> list[type]:
    return [
        value
        for value in vars(grpo_jax.config).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
    ]


def _field_docstrings(cls: type) -> dict[str, str]:
    """The string literal under each field of a dataclass."""
    (body,) = [node.body for node in ast.parse(inspect.getsource(cls)).body if isinstance(node, ast.ClassDef)]
    docs = {}
    for field, below in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                docs[field.target.id] = str(below.value.value)
    return docs


@pytest.mark.parametrize("cls", [*_config_classes(), TrainOptions, EvalOptions, SampleOptions])
def test_every_field_has_a_docstring(cls: type) -> None:
    assert cls.__doc__
    docs = _field_docstrings(cls)
    for field in dataclasses.fields(cls):
        if not (field.name.lower() in _section_names() or field.name == "config"):
            assert docs.get(field.name, "").strip(), f"{cls.__name__}.{field.name} has no docstring"


def _section_names() -> set[str]:
    config = Config()
    return {f.name for f in dataclasses.fields(Config) if dataclasses.is_dataclass(getattr(config, f.name))}


def test_train_help_explains_every_field_with_the_experiments_defaults(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_status(["train", str(experiment), "--help"]) == 0
    text = _words(capsys.readouterr().out)
    config = Config()
    seen = 0
    for section in dataclasses.fields(Config):
        value = getattr(config, section.name)
        inside = dataclasses.is_dataclass(value)
        cls = type(value) if inside else Config
        names = [f.name for f in dataclasses.fields(value)] if inside else [section.name]  # type: ignore[arg-type]
        for name in names:
            flag = "--" + (f"{section.name}.{name}" if inside else name).replace("_", "-")
            assert flag in text
            assert _words(_field_docstrings(cls)[name]) in text, f"the help of {flag} is missing"
            seen += 1
    assert seen > 60
    assert "(default: tiny)" in text
    assert "G, completions a prompt. (default: 4)" in text


@pytest.mark.parametrize(("command", "options"), [("eval", EvalOptions), ("sample", SampleOptions)])
def test_help_of_commands(command: str, options: type, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_status([command, "--help"]) == 0
    text = _words(capsys.readouterr().out)
    for docstring in _field_docstrings(options).values():
        assert _words(docstring) in text


def test_help_without_an_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_status(["train", "--help"]) == 0
    assert "--rollout.group-size" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_overview(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for command in ("train", "eval", "sample"):
        assert f"grpo-jax {command} " in text


def test_help_and_version_load_no_jax() -> None:
    program = (
        "import sys, grpo_jax.cli as cli; cli.main([]); cli.main(['--version']); "
        "print(sorted({'jax', 'flax', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *_, version, loaded = result.stdout.splitlines()
    assert version == f"grpo-jax {grpo_jax.__version__}"
    assert loaded == "[]"
