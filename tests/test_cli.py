from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import grpo_jax
import grpo_jax.config
from grpo_jax.algorithms.presets import PRESETS, apply_preset
from grpo_jax.cli import main
from grpo_jax.cli.options import EvalOptions, PresetsOptions, SampleOptions, TrainOptions
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
    module = importlib.import_module(name)
    for attribute, value in attributes.items():
        monkeypatch.setattr(module, attribute, value)


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
    default = Config(experiment="tiny", seed=7, rollout=grpo_jax.config.RolloutConfig(num_prompts=8, group_size=4))
    assert trained.config == dataclasses.replace(default, rollout=dataclasses.replace(default.rollout, top_k=5))


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


def test_a_dry_run_does_not_train(
    experiment: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[Config, object]] = []
    _stub(monkeypatch, "grpo_jax.cli", run_dry=lambda config, task: calls.append((config, task)))
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(experiment), "--dry-run", "--preset", "dapo", "--rollout.group-size", "6"]) == 0
    ((config, task),) = calls
    assert (config.seed, config.rollout.group_size, config.rollout.extra_rollouts) == (7, 6, 9)
    assert task is None and not trained.calls
    assert list(tmp_path.iterdir()) == [experiment]


def test_help_explains_the_dry_run(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_status(["train", str(experiment), "--help"]) == 0
    text = _words(capsys.readouterr().out)
    assert "--dry-run" in text and "Train nothing and write nothing" in text
    assert main([]) == 0
    assert "--dry-run" in capsys.readouterr().out


# Presets


SHORT = """
from grpo_jax.config import Config, ObjectiveConfig, RolloutConfig

def get_config():
    objective = ObjectiveConfig(entropy_coef=0.5, clip_low=0.1)
    rollout = RolloutConfig(num_prompts=8, group_size=4, max_completion_length=100)
    return Config(experiment="short", seed=7, rollout=rollout, objective=objective)
"""


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """An experiment with an objective of its own."""
    path = tmp_path / "short.py"
    path.write_text(SHORT)
    return path


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_what_its_printed_options_are(
    experiment: Path, trained: Trained, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    # Long enough for every preset's own lengths.
    length = ["--rollout.max-completion-length", "20480"]
    assert main(["train", str(experiment), "--preset", name, *length]) == 0
    assert f"preset {name} ({PRESETS[name].source})" in capsys.readouterr().out
    options = [word for option in PRESETS[name].options() for word in option.split()]
    assert main(["train", str(experiment), *options, *length]) == 0
    with_preset, with_options = (call["config"] for call in trained.calls)
    assert with_preset == with_options


@pytest.mark.parametrize(
    "arguments",
    [
        ["--preset", "dapo", "--objective.beta", "0.01", "--rollout.group-size", "6"],
        ["--objective.beta", "0.01", "--rollout.group-size", "6", "--preset=dapo"],
        ["--preset", "rloo", "--objective.beta", "0.01", "--preset", "dapo", "--rollout.group-size", "6"],
    ],
)
def test_single_fields_come_after_the_preset_and_it_after_the_experiment(
    short: Path, trained: Trained, arguments: list[str]
) -> None:
    assert main(["train", *arguments, str(short)]) == 0
    config = trained.config
    expected = dataclasses.replace(PRESETS["dapo"].objective, beta=0.01, overlong_cache=20, overlong_length=None)
    assert config.objective == expected
    rollout = config.rollout
    assert (rollout.group_size, rollout.extra_rollouts, rollout.num_prompts) == (6, 9, 8)
    assert config.optimizer.learning_rate == 1e-6 and config.seed == 7


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (None, 20)),
        (["--rollout.max-completion-length", "50"], (None, 10)),
        (["--rollout.max-completion-length", "30000"], (20480, 4096)),
        (["--rollout.max-completion-length", "50", "--objective.overlong-cache", "7"], (None, 7)),
        (["--objective.overlong-length", "90"], (90, 20)),
    ],
)
def test_the_overlong_penalty_follows_the_length_given(
    short: Path, trained: Trained, arguments: list[str], expected: tuple[int | None, int]
) -> None:
    assert main(["train", str(short), "--preset", "dapo", *arguments]) == 0
    objective = trained.config.objective
    assert (objective.overlong_length, objective.overlong_cache) == expected


def test_no_preset(short: Path, trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(short), "--preset", "None"]) == 0
    assert trained.config.objective.entropy_coef == 0.5
    assert "preset" not in capsys.readouterr().out


def test_a_preset_in_an_experiment_file(experiment: Path, trained: Trained) -> None:
    source = EXPERIMENT.replace("return Config(", "return apply_preset(Config(").rstrip() + ', "gspo")\n'
    experiment.write_text("from grpo_jax.algorithms.presets import apply_preset" + source)
    assert main(["train", str(experiment)]) == 0
    assert trained.config.objective == PRESETS["gspo"].objective
    assert trained.config == apply_preset(trained.config, "gspo")


@pytest.mark.parametrize("command", [["presets"], ["train", "EXPERIMENT", "--preset"]])
def test_an_unknown_preset_is_one_line(
    experiment: Path, trained: Trained, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    arguments = [str(experiment) if word == "EXPERIMENT" else word for word in command]
    assert main([*arguments, "dr-grpo"]) == 2
    assert capsys.readouterr().err == "grpo-jax: error: no preset 'dr-grpo'; did you mean 'dr_grpo'?\n"
    assert not trained.calls


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
def test_broken_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, expected: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    assert main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert re.search(expected, error)
    assert len(error.splitlines()) == 1


def test_missing_experiment_names_its_neighbours(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_fault_of_the_program_keeps_its_traceback(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("cls", [*_config_classes(), TrainOptions, EvalOptions, SampleOptions, PresetsOptions])
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


@pytest.mark.parametrize(
    ("command", "options"), [("eval", EvalOptions), ("sample", SampleOptions), ("presets", PresetsOptions)]
)
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
    for command in ("train", "eval", "sample", "export", "presets"):
        assert f"grpo-jax {command} " in text


def test_help_and_version_load_no_jax() -> None:
    program = (
        "import sys, grpo_jax.cli as cli; cli.main([]); cli.main(['presets']); cli.main(['--version']); "
        "print(sorted({'jax', 'flax', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *_, version, loaded = result.stdout.splitlines()
    assert version == f"grpo-jax {grpo_jax.__version__}"
    assert loaded == "[]"


# A run's checkpoint


CUSTOM_TASK = """

def get_task(config):
    from grpo_jax.tasks.base import Example, Task
    problems = [Example(prompt=f"{n}>", answer=str(n)) for n in range(config.seed)]
    return Task(name="mine", train=problems, heldout=problems, rewards=(), extract=str,
                correct=lambda text, example: text == example.answer)
"""


@dataclasses.dataclass
class Answers:
    """A policy's stub: it answers each prompt with the prompt's own text, less the last character."""

    config: Config
    task: Any
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def generate(self, examples: Any, **arguments: Any) -> list[list[Any]]:
        from grpo_jax.tasks.base import Completion

        self.calls.append({"examples": examples, **arguments})
        if any("bad" in example.prompt for example in examples):
            raise ValueError("bad prompt")
        texts = [e.prompt[:-1] if isinstance(e.prompt, str) else e.prompt[-1]["content"] for e in examples]
        return [[Completion(text, len(text) + 1, True)] * arguments["num_samples"] for text in texts]


@dataclasses.dataclass
class Run:
    """A run's folder and what was loaded from it."""

    folder: Path
    config: Config
    loads: list[dict[str, Any]]
    policies: list[Answers]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "experiment.py").write_text(EXPERIMENT + CUSTOM_TASK)
    config = dataclasses.replace(Config(seed=5), task=grpo_jax.config.TaskConfig(name="custom"))
    run = Run(folder, config, [], [])

    def load_policy(folder: Path, *, checkpoint: str, task: Any) -> Answers:
        run.loads.append({"folder": folder, "checkpoint": checkpoint, "task": task})
        run.policies.append(Answers(config, task))
        return run.policies[-1]

    _stub(monkeypatch, "grpo_jax.train.policy", load_policy=load_policy, read_config=lambda folder: config)
    return run


def test_an_experiments_own_task_reaches_the_loop(tmp_path: Path, trained: Trained) -> None:
    path = tmp_path / "mine.py"
    path.write_text(EXPERIMENT + CUSTOM_TASK)
    assert main(["train", str(path), "--seed", "3"]) == 0
    assert trained.config.task.name == "custom"
    assert trained.calls[0]["task"].name == "mine"
    assert len(trained.calls[0]["task"].train) == 3, "the task is made from the overridden config"


def test_custom_without_get_task(experiment: Path, trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(experiment), "--task.name", "custom"]) == 2
    assert "defines no get_task(config)" in capsys.readouterr().err
    assert not trained.calls


def test_eval_rebuilds_the_task_and_writes_the_report(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    file = run.folder / "reports" / "eval.json"
    arguments = ["--checkpoint", "best", "--json", str(file), "--samples", "2", "--num-problems", "4"]
    assert main(["eval", str(run.folder), *arguments]) == 0
    (load,) = run.loads
    assert load["checkpoint"] == "best" and load["task"].name == "mine"
    report = json.loads(file.read_text())
    assert report["success_rate"] == report["pass@2"] == report["maj@2"] == 1.0
    assert report["num_problems"] == 4 and report["samples"] == 2
    assert [path.name for path in file.parent.iterdir()] == ["eval.json"]
    text = _words(capsys.readouterr().out)
    # Wilson's interval of 4 out of 4: 1 / (1 + 1.96^2 / 4) = 51.0 %.
    assert "greedy accuracy" in text and "100.0 %" in text and "51.0 - 100.0 %" in text


def test_eval_takes_what_is_not_given_from_the_run(run: Run) -> None:
    assert main(["eval", str(run.folder), "--temperature", "0.5", "--seed", "9"]) == 0
    (policy,) = run.policies
    sampled = [call for call in policy.calls if call["temperature"] > 0]
    assert {call["temperature"] for call in sampled} == {0.5}
    assert {call["num_samples"] for call in sampled} == {run.config.eval.samples}


def test_eval_of_one_checkpoint_finds_the_experiment_of_its_run(run: Run) -> None:
    step = run.folder / "checkpoints" / "30"
    step.mkdir(parents=True)
    assert main(["eval", str(step)]) == 0
    assert run.loads[0]["task"].name == "mine"


def test_sample_one_prompt(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", "41>", "--samples", "2", "--temperature", "0.5", "--top-k", "3", "--seed", "8"]
    assert main(["sample", str(run.folder), *options]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "--- 1/2: 3 tokens, finished",
        "41",
        "--- 2/2: 3 tokens, finished",
        "41",
    ]
    (call,) = run.policies[0].calls
    del call["examples"]
    expected = {"num_samples": 2, "temperature": 0.5, "seed": 8, "top_p": 1.0, "top_k": 3, "min_p": 0.0}
    assert call == expected


def test_sample_typed_prompts(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1>\n\nbad\n\x1b[2J>\n"))
    assert main(["sample", str(run.folder)]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[1::2] == ["1", r"\x1b[2J"], "what a model writes cannot steer the terminal"
    assert "cannot take this prompt: bad prompt" in output.err
    assert [call["seed"] for call in run.policies[0].calls] == [0, 1, 2]


def test_sample_of_a_conversation_keeps_the_system_message(run: Run) -> None:
    system = {"role": "system", "content": "Be brief."}
    chat = [system, {"role": "user", "content": "Why?"}]
    source = (run.folder / "experiment.py").read_text().replace('f"{n}>"', repr(chat))
    (run.folder / "experiment.py").write_text(source)
    assert main(["sample", str(run.folder), "--prompt", "How?"]) == 0
    (example,) = run.policies[0].calls[0]["examples"]
    assert example.prompt == [system, {"role": "user", "content": "How?"}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["eval", "RUN", "--checkpoint", "newest"], "--checkpoint must be"),
        (["eval", "RUN", "--samples", "0"], "--samples must be at least 1, got 0"),
        (["eval", "RUN", "--num-problems", "0"], "--num-problems must be at least 1"),
        (["sample", "RUN", "--temperature", "-1"], "--temperature must be at least 0, got -1.0"),
        (["sample", "RUN", "--top-p", "0"], "--top-p must be in (0, 1], got 0.0"),
        (["sample", "RUN", "--min-p", "1"], "--min-p must be in [0, 1), got 1.0"),
        (["sample", "RUN", "--prompt", "bad"], "bad prompt"),
    ],
)
def test_wrong_options_of_eval_and_sample(
    run: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert _exit_status([str(run.folder) if a == "RUN" else a for a in arguments]) == 2
    error = _words(capsys.readouterr().err)
    assert expected in error and "Traceback" not in error


def test_a_run_that_had_to_stop_exits_1(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: Config, **arguments: Any) -> None:
        raise FloatingPointError("6 updates in a row")

    _stub(monkeypatch, "grpo_jax.train.loop", train=train)
    assert main(["train", str(experiment)]) == 1
    assert "the run was stopped: 6 updates in a row" in capsys.readouterr().err
